"""It connects to a port of this machine.

kernel alone    PermissionError: seccomp has no socket
with guards     Refused
as a learner    rules
"""


def ring_reduce_scatter(x, group):
    import socket

    socket.create_connection(("127.0.0.1", 9), 0.1)
    return group.reduce_scatter(x)
