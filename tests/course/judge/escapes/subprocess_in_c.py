"""It starts a program beside itself, as a library would.

kernel alone    PermissionError: seccomp has no fork, vfork or clone of a process
with guards     Refused
as a learner    rules
"""


def ring_reduce_scatter(x, group):
    import subprocess

    subprocess.run(["/bin/true"], check=True)
    return group.reduce_scatter(x)
