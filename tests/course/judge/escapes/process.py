"""It forks a process that would live on after the check.

kernel alone    PermissionError: seccomp has no fork, vfork or clone of a process
with guards     Refused
as a learner    rules
"""


def ring_reduce_scatter(x, group):
    import os
    import time

    if os.fork() == 0:
        time.sleep(60)
    return group.reduce_scatter(x)
