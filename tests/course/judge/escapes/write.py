"""It writes into a file of whoever runs the judge.

kernel alone    PermissionError: Landlock and seccomp open nothing to write
with guards     NameError: an attempt has no open
as a learner    rules
"""


def ring_reduce_scatter(x, group):
    with open("/TEACHERS/FILE", "a") as file:
        file.write("x")
    return group.reduce_scatter(x)
