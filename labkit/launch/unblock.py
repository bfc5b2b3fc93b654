"""The control thread of a rank: it tells where the main thread is, and gets it out of a collective.

Nothing in torch frees a rank that waits in a gloo collective: neither a signal nor abort nor shutdown, only a peer's
death or the time-out. Cutting the TCP connections between ranks does: the collective raises within milliseconds,
and the process, its models and its names live on. The rendezvous is a file, so no store hangs on these sockets.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import pickle
import socket
import stat
import sys
from collections.abc import Callable
from typing import Any

import zmq

from labkit.comm import flight
from labkit.comm.libraries import within
from labkit.launch.blackbox import CodePosition

_POINT_TO_POINT = ("send", "recv", "isend", "irecv", "batch_isend_irecv")


def control(
    context: zmq.Context, address: str, rank: int, main_thread: int,
    release: Callable[[int, frozenset[tuple[str, int]]], int],
) -> None:  # fmt: skip
    """Answer the kernel's questions for ever. Runs in a thread of its own: waiting in gloo releases the GIL.

    `release(generation, endpoints)` frees this rank from whatever it waits for in that generation."""
    channel = context.socket(zmq.DEALER)
    channel.linger = 0
    channel.identity = f"c{rank}.{os.getpid()}".encode()
    channel.connect(address)
    while True:
        question, detail = pickle.loads(channel.recv())
        if question not in ("where", "cut"):
            return channel.close()
        try:
            answer: Any = position(main_thread) if question == "where" else release(*detail)
        except Exception:  # frames and sockets change while they are looked at; the kernel asks again
            answer = None
        channel.send(pickle.dumps((question, answer)))


def position(main_thread: int) -> CodePosition | None:
    """The learner's innermost line, and the call to torch.distributed under it if there is one."""
    innermost = frame = sys._current_frames().get(main_thread)
    call, peer = "", None
    while frame is not None and (library := within(frame.f_code.co_filename)):
        if library == "torch/distributed/distributed_c10d.py":
            call = frame.f_code.co_name
            if call in _POINT_TO_POINT:
                member = frame.f_locals.get("dst", frame.f_locals.get("src"))
                peer = member if isinstance(member, int) else None
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return None
    file, line, name = frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name  # None between two lines
    # A frame keeps its tensors alive: the main thread may return from it while a file is read below, and its
    # memory would be counted as still in use.
    del frame, innermost
    text = linecache.getline(file, line).strip()
    return CodePosition(file, line, name, text, call, peer, tuple(flight.in_flight()))


def cut(endpoints: frozenset[tuple[str, int]]) -> int:
    """Shut down this process's TCP connections to other ranks, whose sockets have `endpoints`. Returns how many.

    A connection of the learner's, to somewhere else or within this process, is left alone."""
    # gloo owns these sockets and tells nobody their file descriptors. So all sockets of the process are looked at, and
    # a connection is gloo's if its far end is a socket of another rank: `endpoints` are those of all ranks, seen from
    # outside, and `own` are taken out, since a connection with both ends in this process is the learner's.
    own = frozenset(address for fd in sockets() for address in _ends(fd)[:1])
    count = 0
    for fd in sockets():
        ends = _ends(fd)
        if len(ends) == 2 and ends[1] in endpoints - own:
            # shutdown() ends the connection for every copy of the descriptor; closing our copy would end nothing.
            # gloo then sees the connection closed, and the collective that waits for it raises.
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def sockets() -> list[int]:
    """File descriptors of this process that are internet sockets."""
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    descriptors = []
    for name in os.listdir(folder):
        try:
            fd = int(name)
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                with socket.socket(fileno=os.dup(fd)) as candidate:
                    if candidate.family in (socket.AF_INET, socket.AF_INET6):
                        descriptors.append(fd)
        except OSError:  # gone in the meantime
            continue
    return descriptors


def _ends(fd: int) -> tuple[tuple[str, int], ...]:
    """Own and peer address of a connected TCP socket; () for any other."""
    try:
        with socket.socket(fileno=os.dup(fd)) as connection:
            if connection.type != socket.SOCK_STREAM:
                return ()
            return connection.getsockname()[:2], connection.getpeername()[:2]
    except OSError:  # listening, or closed in the meantime
        return ()
