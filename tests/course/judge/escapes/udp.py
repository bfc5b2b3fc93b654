"""It sends a datagram, which needs no one at the other end.

kernel alone    PermissionError: seccomp has no socket
with guards     Refused
as a learner    rules
"""


def ring_reduce_scatter(x, group):
    import socket

    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", 9))
    return group.reduce_scatter(x)
