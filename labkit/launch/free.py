"""The control thread of a rank: where is the main thread, and how to get it out of a collective.

Nothing in torch frees a rank that waits in a gloo collective: neither a signal nor abort nor shutdown, only a peer's
death or the time-out. Cutting the TCP connections between ranks does: the collective raises within milliseconds,
and the process, its models and its names live on. The rendezvous is a file, so no store hangs on these sockets.
"""

from __future__ import annotations

import linecache
import os
import pickle
import socket
import stat
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import zmq

from labkit.comm import flight, native
from labkit.launch.blackbox import Position

_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
_TORCH = os.sep + "torch" + os.sep
_POINT_TO_POINT = ("send", "recv", "isend", "irecv", "batch_isend_irecv")


def control(context: zmq.Context, address: str, rank: int, main_thread: int) -> None:
    """Answer the kernel's questions for ever. Runs in a thread of its own: waiting in gloo releases the GIL."""
    channel = context.socket(zmq.DEALER)
    channel.linger = 0
    channel.identity = f"c{rank}.{os.getpid()}".encode()
    channel.connect(address)
    while True:
        question, ticket = pickle.loads(channel.recv())
        if question == "where":
            answer: Any = position(main_thread)
        elif question == "cut":
            answer = cut()
        else:
            return channel.close()
        channel.send(pickle.dumps((question, ticket, answer)))


def position(main_thread: int) -> Position | None:
    """The learner's innermost line, and the call to torch.distributed under it if there is one."""
    frame: FrameType | None = sys._current_frames().get(main_thread)
    call, peer = "", None
    while frame is not None:
        name = frame.f_code.co_filename
        if name.endswith("distributed_c10d.py"):
            call = frame.f_code.co_name
            if call in _POINT_TO_POINT:
                found = frame.f_locals.get("dst", frame.f_locals.get("src"))
                peer = found if isinstance(found, int) else None
        elif not name.startswith(_PACKAGE) and _TORCH not in name and "importlib" not in name:
            break
        frame = frame.f_back
    if frame is None:
        return None
    file, line = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(file, line).strip()
    return Position(file, line, frame.f_code.co_name, text, call, peer, tuple(flight.in_flight()))


def cut() -> int:
    """Shut down every TCP connection between ranks of this machine that this process holds. Returns how many."""
    native.abort()
    count = 0
    for fd in sockets():
        try:
            with socket.socket(fileno=os.dup(fd)) as one:
                if (
                    one.type == socket.SOCK_STREAM
                    and _is_loopback(one.getpeername()[0])
                    and _is_loopback(one.getsockname()[0])
                ):
                    one.shutdown(socket.SHUT_RDWR)
                    count += 1
        except OSError:  # a listening or closed socket: nobody waits on it
            continue
    return count


def sockets() -> list[int]:
    """File descriptors of this process that are internet sockets."""
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    found = []
    for name in os.listdir(folder):
        try:
            fd = int(name)
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                with socket.socket(fileno=os.dup(fd)) as one:
                    if one.family in (socket.AF_INET, socket.AF_INET6):
                        found.append(fd)
        except OSError:  # gone in the meantime
            continue
    return found


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address in ("::1", "::ffff:127.0.0.1")
