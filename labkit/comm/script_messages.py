"""Calls of a script that nobody has changed and that no record has: send, recv, isend, irecv, and new_group.

torch's flight recorder keeps no messages on gloo. So the four functions are replaced, before the script runs, by ones
that note what they do and then do it; `batch_isend_irecv` and torch's pipelines call the same four. torch's own send
calls isend, and recv may call irecv: what one of them calls inside of another is the same message, and is noted once.

    recv from 2, tag 0, train.py:31     noted when it begins, struck out when it is done
    new_group of [0, 1], train.py:12    noted when it begins, and kept: all ranks must call it for the same groups

A group that only its members make (`use_local_synchronization`) is not noted, since the others need not call it.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from labkit.comm import flight
from labkit.comm.dumps import Frame, GroupMade, Message

POINT_TO_POINT = ("send", "recv", "isend", "irecv")


class Overheard:
    """The messages of this process: those under way, and the calls and bytes of each line since the beginning; and
    `made`, its calls of new_group in their order."""

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), threading.local()
        self._under_way: dict[int, tuple[Message, Any]] = {}
        self._last = 0
        self._groups: list[Any] = []
        self._members: dict[str, tuple[int, ...]] = {}
        self.calls: Counter[tuple[str, Frame]] = Counter()
        self.bytes: Counter[tuple[str, Frame]] = Counter()
        self.made: list[GroupMade] = []

    def hear(self) -> None:
        """Replace torch's functions in this process, for good."""
        where: Any = dist.distributed_c10d
        for name in POINT_TO_POINT:
            heard = self._heard(name, getattr(where, name))
            setattr(where, name, heard)
            setattr(dist, name, heard)
        new_group = self._noting_groups(where.new_group)
        modules: tuple[Any, ...] = (where, dist, dist.device_mesh)  # the last has imported it by its name
        for module in modules:
            if hasattr(module, "new_group"):
                module.new_group = new_group
        destroy = where.destroy_process_group

        @functools.wraps(destroy)
        def remember(*args: Any, **kwargs: Any) -> Any:
            self.members()  # torch forgets them now, and the records of these groups are still to be read
            # DDP's reducer may be the last to hold a group. Where it ends, it holds the GIL and waits for threads of
            # gloo's; one of them may wait for the GIL, to let go of a tensor: for ever. So groups end with the process.
            self._groups += flight.groups()
            return destroy(*args, **kwargs)

        where.destroy_process_group = dist.destroy_process_group = remember

    def members(self) -> dict[str, tuple[int, ...]]:
        """The ranks of every group that there is or was, by the name that the flight recorder uses."""
        self._members.update(flight.members())
        return self._members

    def under_way(self) -> list[Message]:
        """Messages that are not through, oldest first. Safe from any thread."""
        with self._lock:
            over = [key for key, (_, work) in self._under_way.items() if work is not None and work.is_completed()]
            for key in over:
                del self._under_way[key]
            return [message for message, _ in self._under_way.values()]

    def _noting_groups(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind_partial(*args, **kwargs).arguments
            if arguments.get("use_local_synchronization"):
                return original(*args, **kwargs)
            ranks = arguments.get("ranks")
            made = GroupMade(() if ranks is None else tuple(ranks), time.monotonic(), False, _caller(2))
            self.made.append(made)
            place = len(self.made) - 1
            group = original(*args, **kwargs)
            self.made[place] = made._replace(over=True)
            return group

        return call

    def _heard(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        verb = name.removeprefix("i")

        @functools.wraps(original)
        def call(tensor: Any, peer: Any = None, group: Any = None, tag: int = 0, *args: Any, **kwargs: Any) -> Any:
            other = kwargs.pop("dst" if verb == "send" else "src", peer)
            if getattr(self._inside, "call", False):
                return original(tensor, other, group, tag, *args, **kwargs)
            in_group = args[0] if args else kwargs.get(f"group_{'dst' if verb == 'send' else 'src'}")
            key = self._begin(verb, _global(other, in_group, group), tag, tensor)
            work, self._inside.call = None, True
            try:
                work = original(tensor, other, group, tag, *args, **kwargs)
            finally:
                self._inside.call = False
                with self._lock:
                    if name == verb or work is None:
                        self._under_way.pop(key, None)
                    elif key in self._under_way:
                        self._under_way[key] = self._under_way[key][0], work
            return work

        return call

    def _begin(self, verb: str, peer: int | None, tag: int, tensor: Any) -> int:
        caller = _caller()
        with self._lock:
            self._last += 1
            self.calls[verb, caller] += 1
            self.bytes[verb, caller] += tensor.nbytes
            dtype = str(tensor.dtype).removeprefix("torch.")
            message = Message(verb, peer, tag, tuple(tensor.shape), dtype, time.monotonic(), caller)
            self._under_way[self._last] = message, None
            return self._last


def _global(peer: Any, in_group: Any, group: Any) -> int | None:
    if peer is None and in_group is not None:
        among: Any = group or dist.group.WORLD
        return dist.get_global_rank(among, in_group)
    return peer if isinstance(peer, int) else None


def _caller(depth: int = 3) -> Frame:
    frame = sys._getframe(depth)
    first = Frame.of(frame)
    while frame is not None:
        at = Frame.of(frame)
        if not at.library:
            return at
        frame = frame.f_back  # type: ignore[assignment]
    return first
