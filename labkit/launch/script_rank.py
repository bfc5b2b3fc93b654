"""The life of a rank that runs a script: a clean `__main__`, as `python train.py` would give it, and a control thread.

    main thread       environment of torchrun -> the script, from its first line to sys.exit -> its result -> exit
    control thread    sends what the flight recorder has kept, before it is overwritten; answers "where are you?" also
                      while the main thread is stuck

Nothing of the script is changed: it calls init_process_group itself, and this process has no group before.
"""

from __future__ import annotations

import atexit
import importlib
import os
import pickle
import random
import sys
import threading
import time
import traceback
import types
from typing import Any

import zmq

from labkit.comm import flight, rendezvous_store
from labkit.comm.script_messages import Overheard
from labkit.launch import rank_debugger, unblock
from labkit.launch.last_words import leave_last_words
from labkit.launch.observer import Observer
from labkit.launch.rank_setup import set_up_rank
from labkit.launch.rank_spec import RankSpec
from labkit.launch.reply import Failure, failure_of

KEPT = 1000
"""Records that the flight recorder keeps; once FULL of them are new, they are fetched."""
FULL = 500
LOOK_S, LEAST_S = 0.25, 0.02
ACKNOWLEDGED_S = 20.0
SHARE = 50
"""Fetching takes at most one part in so many of a rank's time."""


def main(spec: RankSpec) -> None:
    """Become rank `spec.rank` of the script, or the keeper of its store; never returns."""
    script = spec.script
    assert script is not None
    set_up_rank(spec)
    if script.keeper == spec.rank:
        keep_store(spec)
    os.environ.update(script.torchrun, ROLE_RANK=str(spec.rank))
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(KEPT))
    words = leave_last_words(script.last_words + str(spec.rank))
    context = zmq.Context()
    overheard = Overheard()
    overheard.hear()
    rank_debugger.install(rank_debugger.Keyboard(context, spec.address, spec.rank))
    observer: Observer | None = None
    if script.observer:
        module, _, name = script.observer.rpartition(".")
        observer = getattr(importlib.import_module(module), name)()
    main_thread = threading.main_thread().ident or 0
    control = Control(context, spec, script.record, main_thread, overheard, observer)
    threading.Thread(target=control.serve, daemon=True, name="labkit-control").start()
    code, failure = become_script(script.path, script.arguments, observer, script.break_on_error == spec.rank)
    rank_debugger.stop_tracing()
    channel = _connect(context, "m", spec)
    seen = None
    try:
        seen = observer.result() if observer is not None else None
    except Exception as error:
        seen = {"unseen": f"{type(error).__name__}: {error}"}
    messages = [(verb, frame, n, overheard.bytes[verb, frame]) for (verb, frame), n in overheard.calls.items()]
    dump = flight.raw()
    end = ("over", code, failure, seen, messages, overheard.members(), overheard.made)
    channel.send_multipart([pickle.dumps(end), dump])
    channel.poll(int(ACKNOWLEDGED_S * 1e3))  # who leaves before this has arrived is taken for dead
    channel.close(linger=0)
    _leave(code)
    del words


def become_script(
    path: str, arguments: tuple[str, ...], observer: Observer | None, break_on_error: bool = False
) -> tuple[int, Failure | None]:
    """Run the script as `__main__`; its exit code, and the exception with which it ended if it did not exit. With
    `break_on_error` a debugger opens where an exception was raised."""
    for module in ("random", "numpy"):
        if module in sys.modules:
            sys.modules[module].random.seed() if module == "numpy" else random.seed()
    sys.modules["torch"].seed()  # the ranks are forks of one process; a script that sets no seed expects its own
    sys.argv[:] = [path, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    script = types.ModuleType("__main__")
    script.__dict__.update(__file__=path, __builtins__=__builtins__, __cached__=None, __spec__=None)
    sys.modules["__main__"] = script
    try:
        with open(path, "rb") as file:
            program = compile(file.read(), path, "exec", dont_inherit=True)
        if observer is not None:
            observer.begin()
        exec(program, script.__dict__)
        return 0, None
    except SystemExit as error:
        return _exit_code(error), None
    except BaseException as error:
        if observer is not None:
            observer.failed(error)
        if error.__traceback__ is not None:
            error.__traceback__ = error.__traceback__.tb_next  # without our own line
        rank_debugger.at_the_line(error)
        if not isinstance(error, rank_debugger.DebuggerQuit):
            sys.excepthook(type(error), error, error.__traceback__)
        if break_on_error and isinstance(error, Exception):
            rank_debugger.look_at(error)
        failure = failure_of(error, "")
        return 130 if isinstance(error, KeyboardInterrupt) else 1, failure


def keep_store(spec: RankSpec) -> None:
    """Serve the store until this process is ended."""
    channel = _connect(zmq.Context(), "m", spec)
    store, port = rendezvous_store.open_store(spec.n_ranks)
    channel.send_multipart([pickle.dumps(("store", port))])
    threading.Event().wait()
    del store


class Control:
    """The thread beside the script: `serve` runs for ever."""

    def __init__(
        self, context: zmq.Context, spec: RankSpec, record: bool, main_thread: int, overheard: Overheard,
        observer: Observer | None,
    ):  # fmt: skip
        self.context, self.spec, self.record = context, spec, record
        self.main_thread, self.overheard, self.observer = main_thread, overheard, observer
        self.fetched = 0

    def serve(self) -> None:
        """Fetch records in time, and answer questions."""
        channel = _connect(self.context, "c", self.spec)
        channel.linger = 0
        wait_s = LOOK_S
        while True:
            if channel.poll(int(wait_s * 1e3)):
                _, whole = pickle.loads(channel.recv())
                channel.send_multipart(self._where(whole))
            wait_s = self._fetch(channel) if self.record else LOOK_S

    def _where(self, whole: bool) -> list[bytes]:
        try:
            stands = unblock.position(self.main_thread)
        except Exception:  # frames change while they are looked at; the next question will do
            stands = None
        overheard, news = self.overheard, self._news()
        facts = overheard.under_way(), overheard.members(), overheard.made, whole, news
        head = pickle.dumps(("where", stands, *facts))
        return [head, flight.raw(active=not whole)]

    def _news(self) -> dict[str, Any]:
        try:
            return self.observer.news() if self.observer is not None else {}
        except Exception:  # things change while they are looked at; the next question will do
            return {}

    def _fetch(self, channel: zmq.Socket) -> float:
        """Send the records if enough of them are new; the seconds until this must be looked at again."""
        began = time.perf_counter()
        new = flight.enqueued() - self.fetched
        if new >= FULL:
            channel.send_multipart([pickle.dumps(("fetched", self.overheard.members())), flight.raw()])
            self.fetched += new
            return max(LEAST_S, SHARE * (time.perf_counter() - began))
        return LOOK_S if new < FULL // 4 else LEAST_S * 2


def _connect(context: zmq.Context, kind: str, spec: RankSpec) -> zmq.Socket:
    channel = context.socket(zmq.DEALER)
    channel.identity = f"{kind}{spec.rank}.{os.getpid()}".encode()
    channel.connect(spec.address)
    return channel


def _exit_code(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def _leave(code: int) -> None:
    """End as Python ends: what was registered for the end runs, threads that are no daemons are waited for."""
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()
    try:
        atexit._run_exitfuncs()
    except Exception:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (ValueError, OSError, AttributeError):
            continue
    os._exit(code & 0xFF)
