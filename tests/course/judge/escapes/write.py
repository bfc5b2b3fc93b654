"""It leaves a file behind.

kernel alone    PermissionError: Landlock and seccomp open nothing to write
with guards     NameError: an attempt has no open
as a learner    rules
"""


def ring_reduce_scatter(x, group):
    with open("/tmp/left_behind_by_an_attempt", "w") as file:
        file.write("x")
    return group.reduce_scatter(x)
