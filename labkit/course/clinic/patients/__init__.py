"""Broken programs, one a file: each with the same program repaired, and a reference that knows nothing of ranks."""
