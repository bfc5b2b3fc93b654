"""Broken programs, one per file: each with the same program repaired, and a reference that runs in one process."""
