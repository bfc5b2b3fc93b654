"""The exercises: problems, the notebooks made from them, and what a learner calls: check, hint, solution."""
