"""Exercises in a classroom: a course for nbgrader (course.py), grades without it (grade.py). No notebook is run."""
