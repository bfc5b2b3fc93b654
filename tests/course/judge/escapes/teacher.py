"""It reads a file of whoever runs the judge, and hands it in as its answer.

kernel alone    PermissionError: Landlock leaves Python's own folders to be read
with guards     Refused
as a learner    rules
"""


def ring_reduce_scatter(x, group):
    import os

    fd = os.open("/TEACHERS/FILE", os.O_RDONLY)
    raise ValueError(os.read(fd, 1000).decode())
