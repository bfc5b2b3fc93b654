"""The debuggers of ranks, from the cell or terminal that started the ranks: one after the other gets its lines.

    rank 1    breakpoint() --- prompt --->  its turn: the line is read, and sent
    rank 3    breakpoint() --- prompt --->  waits until rank 1 goes on and stays away, and a line says so

A rank that was answered has TURN_S to ask again: so a rank keeps the turn while it steps, and one that steps into a
collective for which the next in the queue is awaited hands the turn on. While a line is awaited, a thread hears what
the ranks say, so that the end of this rank breaks off the reading.
"""

from __future__ import annotations

import contextlib
import importlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from labkit.launch import hang_diagnosis
from labkit.launch.hang_diagnosis import Whereabouts
from labkit.launch.ranks import RankMessage, Ranks

TURN_S = 0.5
HELP = "c: go on, n: next line, q: stop all ranks, others: where the other ranks are, h: all commands"
OTHERS = "others"
ReadLine = Callable[[str], str]
"""Shows a prompt and returns a line, as `input` does; EOFError where nobody types."""


class Parked(Protocol):
    """The ranks among which one is debugged (watch.py)."""

    @property
    def pending(self) -> list[int]:
        """Ranks that are still under way."""

    def hear(self) -> None:
        """Take in what the ranks tell; wait a moment for it."""

    def ask_all(self) -> Sequence[Whereabouts]:
        """Ask all ranks where they are, and wait a moment for the answers."""


class DebuggerPrompt(NamedTuple):
    """A debugger waits for a line: the number of its question, the text that it has printed since the last one, and the
    place where it stands."""

    number: int
    text: str
    file: str
    line: int
    source: str


class NoKeyboard(NamedTuple):
    """The reason why no line can be read."""

    why: str


class DebugSession:
    """The debuggers of one call or script.

    prompts   the ranks whose debuggers wait for a line, first come, first served
    rank      whose turn it is, None before the first debugger has opened
    left      the rank whose debugger was left by `q`: all ranks are to stop
    """

    def __init__(self, processes: Ranks, read_line: ReadLine | None):
        self.processes, self.read_line = processes, read_line or _typed
        self.prompts: dict[int, DebuggerPrompt] = {}
        self.rank: int | None = None
        self.left: int | None = None
        self.answered_at = 0.0
        self.announced: set[int] = set()

    def take(self, event: RankMessage) -> None:
        """Take in what the debugger of a rank says, or the end of a rank."""
        if event.kind == "prompt":
            self.prompts[event.rank] = DebuggerPrompt(*event.what)
        elif event.kind == "quit":
            self.left = event.rank
        elif event.kind == "ended":
            self.prompts.pop(event.rank, None)

    def check(self) -> None:
        """KeyboardInterrupt, as on the stop button, if a debugger was left by `q`."""
        if self.left is not None:
            raise KeyboardInterrupt

    def serve(self, ranks: Parked) -> None:
        """Read a line for the rank whose turn it is, if it waits for one. KeyboardInterrupt on the stop button."""
        if self.rank not in self.prompts:
            if self.rank in ranks.pending and time.monotonic() - self.answered_at < TURN_S:
                return
            self._open(next(iter(self.prompts)), ranks)
        assert self.rank is not None
        rank, asked = self.rank, self.prompts.get(self.rank)
        if asked is None:  # it has ended in the meantime
            return
        self._announce(ranks)
        above, _, prompt = asked.text.rpartition("\n")
        if above:
            print(above, flush=True)
        line = self._read(prompt, ranks)
        while isinstance(line, str) and line.strip() == OTHERS:
            print("\n".join(hang_diagnosis.lines(s for s in ranks.ask_all() if s.rank != rank)), flush=True)
            line = self._read(prompt, ranks)
        if line is None or self.prompts.pop(rank, None) is None:
            return
        answer = ("line", line) if isinstance(line, str) else ("no keyboard", line.why)
        self.answered_at = time.monotonic()
        self.processes.answer(rank, asked.number, *answer)

    def end(self) -> None:
        """Let every debugger that still waits for a line raise DebuggerQuit in its rank."""
        for rank, asked in self.prompts.items():
            self.processes.answer(rank, asked.number, "quit")
        self.prompts.clear()

    def _open(self, rank: int, ranks: Parked) -> None:
        first = self.rank is None
        ranks.hear()  # the others are on their way to where they will wait, or to breakpoints of their own
        ranks.hear()
        self.rank = rank
        self.announced.discard(rank)
        stances = ranks.ask_all()
        own = next(stance for stance in stances if stance.rank == rank)
        others = [stance for stance in stances if stance.rank != rank and stance.rank not in self.prompts]
        shown = [f"  {line}" for line in hang_diagnosis.lines(others)]
        print("\n".join([str(own), *shown, HELP] if first else [str(own)]), flush=True)

    def _announce(self, ranks: Parked) -> None:
        for rank in self.prompts:
            if rank != self.rank and rank not in self.announced:
                self.announced.add(rank)
                print(f"  rank {rank} has stopped, too: its debugger waits until rank {self.rank} goes on", flush=True)

    def _read(self, prompt: str, ranks: Parked) -> str | NoKeyboard | None:
        """A line with its end, "" for the end of file at a terminal, None if the rank has ended meanwhile."""
        over, stop = threading.Event(), threading.Event()
        reader = threading.current_thread()

        def broken_off() -> bool:
            return self.rank not in ranks.pending or self.left is not None

        def listen() -> None:
            while not over.is_set() and not stop.is_set() and not broken_off():
                try:
                    ranks.hear()
                except (KeyboardInterrupt, OSError, RuntimeError):  # Cluster.interrupt in another thread; all is gone
                    stop.set()
            # a line can only be broken off by a signal, and Python runs what a signal calls in its main thread
            if not over.is_set() and reader is threading.main_thread() and reader.ident is not None:
                signal.pthread_kill(reader.ident, signal.SIGINT)

        listener = threading.Thread(target=listen, name="labkit-debugger", daemon=True)
        listener.start()
        try:
            try:
                return f"{self.read_line(prompt)}\n"
            except EOFError as error:
                print(flush=True)
                return "" if _at_a_terminal() else NoKeyboard(str(error) or "end of file")
            except (OSError, RuntimeError, ValueError) as error:  # no stdin, or a front end that cannot ask
                return NoKeyboard(str(error).rstrip("."))
            finally:
                over.set()
                _join(listener)
        except KeyboardInterrupt:
            if _at_a_terminal():
                print(flush=True)  # the prompt stands alone on its line
            if stop.is_set() or not broken_off():
                raise
            return None


def checked(read_line: ReadLine | None) -> ReadLine | None:
    """The same. ValueError if it is no function."""
    if read_line is not None and not callable(read_line):
        raise ValueError(f"read_line must be a function like input, or None for input itself, got {read_line!r}")
    return read_line


def _typed(prompt: str) -> str:
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # with it, `input` knows arrows and the lines before
    return input(prompt)


def _at_a_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _join(thread: threading.Thread) -> None:
    """Wait for its end, also if the stop button is pressed meanwhile: two threads must not hear at once."""
    stop: KeyboardInterrupt | None = None
    while thread.is_alive():
        try:
            thread.join()
        except KeyboardInterrupt as pressed:
            stop = pressed
    if stop is not None:
        raise stop
