"""It makes a file in memory, to be handed to another process.

kernel alone    PermissionError: seccomp has no memfd_create
with guards     PermissionError: the kernel, as before
as a learner    rules
"""


def ring_reduce_scatter(x, group):
    import os

    os.memfd_create("room")
    return group.reduce_scatter(x)
