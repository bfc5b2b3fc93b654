"""The court: attempts are run in fresh processes on a wire that the judge carries, and judged by five verdicts."""
