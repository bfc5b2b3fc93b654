"""The judge: runs attempts in fresh processes, on a wire that it carries itself, and gives five verdicts."""
