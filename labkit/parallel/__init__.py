"""Strategies: one file each, over a Group, and nothing else."""
