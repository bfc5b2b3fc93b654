"""The course: labs, exercises and their judge, cards, claims, the clinic, the capstone; one folder per feature."""
