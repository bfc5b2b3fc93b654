"""What ranks print. Each rank's file descriptors 1 and 2 are one file; the kernel reads it as it grows.

A file and not a pipe, since nobody has to empty it: a rank can never block on a print, whoever holds its GIL, text
from C and from child processes arrives in order, and when a reply comes everything printed before it is there. The file
is in memory and has no name: what is printed fills no disk, and a full disk stops no print.
"""

from __future__ import annotations

import codecs
import os
import re
import sys

from labkit.comm.libraries import within
from labkit.launch import system

COLOURS = ("38;5;32", "38;5;208", "38;5;36", "38;5;162", "38;5;178", "38;5;74", "38;5;166", "38;5;245")
"""ANSI colours of the Okabe-Ito palette: told apart by people who cannot tell red from green."""

_NOISE = ('  File "<string>", line 1 in <module>', "Extension modules: ")
"""Beginnings of lines of a stack dump that never say where the mistake is."""
_DUMPED = re.compile(r'  File "(.*)", line \d+ in ')
_ESCAPED = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")

FILE_BYTES = 4 << 20
"""A file grown past this is emptied: what a runaway rank prints must not fill the memory. A call that has printed so
much is past its budget, and nothing more of it would be shown."""


class Tail:
    """The output of one rank: reads what is new, cuts it into lines, stops showing when the budget is spent.

    The rank writes to `path`: a file in memory as this process holds it, or one in `folder` where there is none."""

    def __init__(self, folder: str, rank: int, budget_bytes: int = 256 << 10):
        self.rank, self.budget_bytes = rank, budget_bytes
        self.fd, self.path = system.memory_file(f"labkit-output{rank}", folder)
        self.at = 0
        self.start_call()

    def start_call(self) -> int:
        """Forget the previous call; returns how many bytes came after it had ended (they belong to no cell)."""
        size = os.fstat(self.fd).st_size
        late = max(0, size - self.at)
        if size > FILE_BYTES // 4:
            os.ftruncate(self.fd, 0)
            size = 0
        self.at = size
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.kept: list[str] = []
        self.partial, self.kept_bytes, self.hidden_bytes = "", 0, 0
        self.redrawn = False
        return late

    def lines(self, end: bool = False) -> list[str]:
        """New whole lines; at the `end` of the call also the last, unfinished one and a note on what was held back."""
        out = []
        text = self._new_text()
        if end:
            text += self.decoder.decode(b"", final=True)
        if text or end:
            *whole, self.partial = (self.partial + text).split("\n")
            self.redrawn &= not whole
            if "\r" in self.partial:  # a progress bar redraws its line: only the last state counts
                self.redrawn = True
                self.partial = self.partial[self.partial.rfind("\r", 0, -1) + 1 :]
            if end and self.partial:
                whole.append(self.partial)
                self.partial = ""
            out = [_collapse(line) for line in whole if not _noise(line)]
        self.kept += out
        if end and self.hidden_bytes:
            out.append(
                f"... {self.hidden_bytes:,} more bytes not shown (a call may print {self.budget_bytes:,} a rank)"
            )
            self.kept.append(out[-1])
        return out

    @property
    def bar(self) -> str:
        """The line that the rank draws again and again, as progress bars do, as it stands now; "" if there is none.
        It is among `lines` once it has ended."""
        return _collapse(self.partial) if self.redrawn else ""

    @property
    def text(self) -> str:
        """Everything shown of this call."""
        return "".join(line + "\n" for line in self.kept)

    def _new_text(self) -> str:
        size = os.fstat(self.fd).st_size
        left = self.budget_bytes - self.kept_bytes
        fresh = b""
        if size > self.at and left > 0:
            fresh = os.pread(self.fd, min(size - self.at, left), self.at)
            self.at += len(fresh)
            self.kept_bytes += len(fresh)
        if size > self.at and self.kept_bytes >= self.budget_bytes:
            self.hidden_bytes += size - self.at
            self.at = size
        if size > FILE_BYTES:
            os.ftruncate(self.fd, 0)
            self.at = 0
        return self.decoder.decode(fresh)

    def close(self) -> None:
        """Stop reading."""
        system.close_memory_file(self.fd, self.path)


def show(lines: list[tuple[int, str]]) -> None:
    """Print (rank, line) pairs with their prefix, in one write, so that no line is torn."""
    if not lines:
        return
    colour = _in_notebook() or sys.stdout.isatty()
    sys.stdout.write("".join(f"{prefix(rank, colour)} {line}\n" for rank, line in lines))
    sys.stdout.flush()


def prefix(rank: int, colour: bool) -> str:
    """`[rank 2]`, coloured where the screen can."""
    return f"\x1b[{COLOURS[rank % len(COLOURS)]}m[rank {rank}]\x1b[0m" if colour else f"[rank {rank}]"


def _noise(line: str) -> bool:
    """True for lines of a stack dump that say nothing, as those of the launcher's own frames."""
    frame = _DUMPED.match(line)
    if frame is None:
        return line.startswith(_NOISE)
    # who writes the dump is in a process that dies, and can write no letter but those of ASCII
    file = _ESCAPED.sub(lambda letter: chr(int(next(filter(None, letter.groups())), 16)), frame[1])
    return line.startswith(_NOISE) or within(file).startswith("labkit/launch/")


def _in_notebook() -> bool:
    return "ipykernel" in sys.modules and type(sys.stdout).__module__.startswith("ipykernel")


def _collapse(line: str) -> str:
    line = line.removesuffix("\r")
    return line[line.rfind("\r") + 1 :]
