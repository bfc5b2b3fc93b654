"""gloo's loop thread: asleep while nothing happens, and awake at once when a group is closed.

Each process group of gloo has a thread that waits for its sockets, and looks 100 times a second whether it is to end
(`epoll_wait(..., 10)` in gloo/transport/tcp/loop.cc). For 3 idle ranks these looks take 0.3 to 1.2% of a core. They
cannot be switched off, but Linux may be told that a thread's timed waits need not be punctual, and a thread inherits
that from the one that begins it:

    asleep()     groups made in this block have a loop thread that ends a timed wait up to SLACK_S late. What comes
                 on a socket wakes it at once, as before: nothing but the looks becomes rarer. (Where gloo closes
                 connections by itself, after a time-out, it waits for a look at each of them. So SLACK_S is short.)
    hurried()    while this block runs, the threads are woken every few milliseconds, by a signal that does nothing:
                 to close a connection or a group, gloo waits for such a look

The thread that makes a group waits itself, for the other ranks, and must do so punctually. So `asleep` makes the
device, whose thread it is, before the group; torch's own `init_process_group` makes both in one go and has no option
for it, hence the class that stands in its place meanwhile. On another system, with another torch, and outside the main
thread (which alone may say what a signal does) both do nothing.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed.distributed_c10d as c10d

from labkit.comm.private import have, private

SLACK_S, HURRY_S = 0.1, 0.002
_PR_SET_TIMERSLACK, _PR_GET_TIMERSLACK = 29, 30
_NAME = "gloo_tcp_loop"
_GLOO = "torch.distributed.distributed_c10d.ProcessGroupGloo"
_OPTIONS = ("_devices", "_timeout", "_threads")


@contextmanager
def asleep(interface: str) -> Iterator[None]:
    """Let the loop threads of gloo's groups that are made in this block sleep; `interface` is that of their sockets,
    such as "lo", and "" changes nothing."""
    names = ("create_device", "_Options", *(f"_Options.{name}" for name in _OPTIONS))
    if not interface or not _possible() or not all(have(f"{_GLOO}.{name}") for name in names):
        yield
        return
    gloo = c10d.ProcessGroupGloo
    vars(c10d)["ProcessGroupGloo"] = _quiet(gloo, interface)
    try:
        yield
    finally:
        vars(c10d)["ProcessGroupGloo"] = gloo


def _quiet(gloo: Any, interface: str) -> Any:
    class Quiet(gloo):
        """A process group of gloo whose loop thread is patient."""

        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **others: Any) -> None:
            options = private(f"{_GLOO}._Options")()
            if not all(hasattr(options, name) for name in others):  # arguments of a later torch
                super().__init__(store, rank, size, timeout, **others)
                return
            for name, value in others.items():
                setattr(options, name, value)
            libc = ctypes.CDLL(None)
            before = libc.prctl(_PR_GET_TIMERSLACK, 0, 0, 0, 0)
            libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(int(SLACK_S * 1e9)), 0, 0, 0)
            try:
                devices = [private(f"{_GLOO}.create_device")(interface=interface)]
            finally:
                libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(max(1, before)), 0, 0, 0)
            # two threads, as torch has it for one device
            for name, value in zip(_OPTIONS, (devices, timeout, 2), strict=True):
                setattr(options, name, value)
            super().__init__(store, rank, size, options)

    return Quiet


@contextmanager
def hurried() -> Iterator[None]:
    """Wake gloo's loop threads every few milliseconds while this block runs."""
    if not _possible():
        yield
        return
    signal.signal(signal.SIGRTMAX, lambda *_: None)  # a learner may have changed it
    over = threading.Event()
    waker = threading.Thread(target=_wake, args=(over,), daemon=True)
    waker.start()
    try:
        yield
    finally:
        over.set()
        waker.join()


def _wake(over: threading.Event) -> None:
    libc = ctypes.CDLL(None)
    while not over.wait(HURRY_S):
        for thread in _threads():
            libc.tgkill(os.getpid(), thread, signal.SIGRTMAX)  # nobody is there any more: an error that does no harm


def _threads() -> list[int]:
    threads = []
    for task in Path("/proc/self/task").iterdir():
        try:
            if (task / "comm").read_text().strip() == _NAME:
                threads.append(int(task.name))
        except OSError:  # it has ended
            continue
    return threads


def _possible() -> bool:
    return sys.platform == "linux" and threading.current_thread() is threading.main_thread()
