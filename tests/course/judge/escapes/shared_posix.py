"""It opens shared memory in /dev/shm, for the same end.

kernel alone    PermissionError: Landlock and seccomp open nothing to write
with guards     PermissionError: the kernel, as before
as a learner    rules
"""


def ring_reduce_scatter(x, group):
    from multiprocessing import shared_memory

    shared_memory.SharedMemory("labkit_escape", create=True, size=4096)
    return group.reduce_scatter(x)
