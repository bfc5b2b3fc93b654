"""It removes a file.

kernel alone    PermissionError: seccomp has no unlink, nor has Landlock
with guards     Refused
as a learner    rules
"""


def ring_reduce_scatter(x, group):
    import os

    os.unlink("/TEACHERS/FILE")
    return group.reduce_scatter(x)
