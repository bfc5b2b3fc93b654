"""pdb in a rank: `breakpoint()` stops there, and its lines are typed in the cell or terminal that started the ranks.

    rank      breakpoint() -> pdb -> Keyboard.readline     ("prompt", number, text, file, line, source)  --->
    parent    DebugSession (debug_session.py)              <---  (number, "line", text) | "quit" | "no keyboard", why

`install` puts a debugger of this kind in the place of pdb's own, so that breakpoint(), pdb.set_trace() and
pdb.post_mortem() all open it. A rank has no terminal: it stands in `readline` until a line comes, while the other ranks
wait for it in their collectives.
"""

from __future__ import annotations

import io
import linecache
import os
import pdb
import pickle
import sys
import threading
from collections.abc import Iterable
from types import FrameType, MethodType, TracebackType
from typing import Any

import zmq

from labkit.comm.libraries import within

LOOK_MS = 500
"""A thread that waits for a line looks this often whether its call is over."""
OUR_MODULES = "labkit.launch.*"
"""Modules in which the debugger does not stop: behind the end of the user's function the launcher goes on."""
_FILES = ("python/pdb.py", "python/bdb.py", "python/cmd.py", "labkit/launch/rank_debugger.py")


class DebuggerQuit(BaseException):
    """The debugger of a rank was left by `q` or by the stop button: raised in the rank, at the line where it stood.

    It is no Exception, so that no `except Exception` of the user's goes on with the work."""


class Keyboard(io.StringIO):
    """Standard input and output of a rank's debugger. What is written is kept, and sent when a line is asked for; it
    ends with the prompt. Any thread of the rank may ask, one at a time, while `is_open`: during a call."""

    def __init__(self, context: zmq.Context, address: str, rank: int):
        super().__init__()
        self.context, self.address, self.rank, self.pid = context, address, rank, os.getpid()
        self.channel: zmq.Socket | None = None
        self.in_turn = threading.Lock()
        self.place = ("", 0, "")
        self.is_open, self.asked = True, 0

    def readline(self, size: int | None = -1, /) -> str:  # type: ignore[override]  # as StringIO's own
        """The next line. DebuggerQuit on the stop button, RuntimeError where nobody can type."""
        if os.getpid() != self.pid:
            raise RuntimeError(
                f"breakpoint() in process {os.getpid()}, a child of rank {self.rank}: only the rank itself has a "
                "debugger. For a DataLoader, num_workers=0 does the work in the rank"
            )
        if not self.is_open:
            raise RuntimeError(
                f"breakpoint() in a thread of rank {self.rank} when no call is under way: let the function wait for "
                "its threads (thread.join())"
            )
        sys.stdout.flush()
        with self.in_turn:
            text = self.getvalue()
            self.seek(0)
            self.truncate()
            try:
                kind, *rest = self._answer(text)
            except KeyboardInterrupt:  # pdb itself would take it for the end of a command, and ask for the next one
                raise DebuggerQuit("the debugger was left by the stop button") from None
        if kind == "quit":
            raise DebuggerQuit("the debugger was left by the stop button")
        if kind == "no keyboard":
            raise RuntimeError(
                f"the debugger of rank {self.rank} wants a keyboard, and there is none where the ranks were started "
                f"({rest[0]}): run this in JupyterLab or in a terminal. PYTHONBREAKPOINT=0 passes over breakpoint()"
            )
        return str(rest[0])

    def _answer(self, text: str) -> tuple[Any, ...]:
        self.asked += 1
        self._send("prompt", self.asked, text, *self.place)
        while True:
            if self._connected().poll(LOOK_MS):
                number, *answer = pickle.loads(self._connected().recv())
                if number == self.asked:  # else a signal came before the answer, and nobody waited for it any more
                    return tuple(answer)
            elif not self.is_open:
                return ("quit",)

    def leave(self) -> None:
        """Tell the parent that all ranks are to stop, and stop this one: DebuggerQuit."""
        with self.in_turn:
            self._send("quit")
        raise DebuggerQuit("the debugger was left by q")

    def _send(self, *message: Any) -> None:
        self._connected().send(pickle.dumps(message))

    def _connected(self) -> zmq.Socket:
        if self.channel is None:
            self.channel = self.context.socket(zmq.DEALER)
            self.channel.linger = 500
            self.channel.identity = f"d{self.rank}.{self.pid}".encode()
            self.channel.connect(self.address)
        return self.channel


class RankPdb(pdb.Pdb):
    """pdb on the rank's keyboard. `q` stops all ranks; after an exception, when nothing runs any more, it ends pdb."""

    keyboard: Keyboard

    def __init__(
        self, completekey: str = "tab", stdin: Any = None, stdout: Any = None, skip: Iterable[str] | None = None,
        nosigint: bool = False, readrc: bool = True, **options: Any,
    ):  # fmt: skip
        # nosigint: SIGINT is the stop button here, and `c` would take it for pdb
        stdin, stdout, modules = stdin or self.keyboard, stdout or self.keyboard, [*(skip or ()), OUR_MODULES]
        super().__init__(completekey, stdin, stdout, modules, nosigint=True, readrc=readrc, **options)
        self.prompt = f"(Pdb rank {self.keyboard.rank}) "
        self.is_over = False

    def interaction(self, frame: Any, *raised: Any) -> None:
        """Ask for commands until one goes on. Without a frame, where an exception was raised."""
        self.is_over = frame is None
        if frame is not None:
            code, line = frame.f_code, frame.f_lineno
        else:
            tip: Any = raised[0].__traceback__ if isinstance(raised[0], BaseException) else raised[0]
            while tip.tb_next is not None:
                tip = tip.tb_next
            code, line = tip.tb_frame.f_code, tip.tb_lineno
        source = linecache.getline(code.co_filename, line).strip()
        self.keyboard.place = code.co_filename, line, source
        super().interaction(frame, *raised)

    def user_return(self, frame: FrameType, return_value: Any) -> None:
        """Stop where a function returns. Behind the user's last one no step leads further: the launcher goes on, and
        what it calls of other libraries."""
        super().user_return(frame, return_value)
        caller = frame.f_back
        if caller is not None and self.is_skipped_module(str(caller.f_globals.get("__name__"))):
            self.set_continue()

    def do_quit(self, arg: str) -> bool | None:
        """q(uit) | exit | end of file

        Stop all ranks: the function that runs is given up. After an exception: leave the debugger."""
        if not self.is_over:
            self.keyboard.leave()
        self.set_quit()
        return True

    do_q = do_exit = do_EOF = do_quit

    def do_run(self, arg: str) -> None:
        """run | restart

        Not for a rank: call the function anew."""
        self.error("a rank cannot be started anew from here: q, and then call the function again")

    do_restart = do_run


def install(keyboard: Keyboard) -> None:
    """Let breakpoint(), pdb.set_trace() and pdb.post_mortem() of this process ask `keyboard`."""
    vars(pdb)["Pdb"] = type("Pdb", (RankPdb,), {"keyboard": keyboard})


def look_at(error: Exception) -> None:
    """Open the debugger where `error` was raised, until it is left. Says so where nobody can type."""
    try:
        pdb.post_mortem(error.__traceback__)
    except (RuntimeError, DebuggerQuit) as other:
        print(f"{type(other).__name__}: {other}", file=sys.stderr)


def stop_tracing() -> None:
    """The call is over: whoever left it by steps does not stop in the next one."""
    trace = sys.gettrace()
    if isinstance(trace, MethodType) and isinstance(trace.__self__, RankPdb):
        sys.settrace(None)


def at_the_line(error: BaseException) -> None:
    """Cut the debugger's own frames from the traceback of an error that it raised: it ends at the user's line."""
    frames: list[TracebackType] = []
    frame = error.__traceback__
    while frame is not None:
        frames.append(frame)
        frame = frame.tb_next
    if not frames or within(frames[-1].tb_frame.f_code.co_filename) not in _FILES:
        return
    while len(frames) > 1 and within(frames[-1].tb_frame.f_code.co_filename) in _FILES:
        frames.pop()
    frames[-1].tb_next = None
