"""Exercises in a classroom: a course for nbgrader, and grades without it. No notebook is ever run."""
