"""It starts another program in its place.

kernel alone    PermissionError: seccomp has no execve
with guards     Refused
as a learner    rules
"""


def ring_reduce_scatter(x, group):
    import os

    os.execv("/bin/true", ["true"])
