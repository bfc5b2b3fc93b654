"""Sandboxed ranks where nothing may be forked (launch/system.py): each is a new Python, which imports what a fork has.

judge ──exec──> rank: torch, the part of the exercise ──"here"──> judge: hands out the inputs, its clock begins
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection

from labkit.course.judge import late_imports
from labkit.course.judge.nursery import end_all, exit_code
from labkit.course.judge.sandbox import fingerprint
from labkit.course.judge.sandboxed_rank import Part, Program, become_rank, player_of
from labkit.launch import executed


class ExecutedRanks:
    """Ranks that are the judge's own children. `ends` has two descriptors for each, as for a nursery."""

    def __init__(self, part: Part, program: Program, ends: Sequence[tuple[int, int]]):
        compiler = late_imports.here()
        self.pids = [
            executed.child(
                __name__, "main", pipe, dump, os.getpid(), keep=(pipe, dump),
                known=(part, program, rank, len(ends), compiler),
            )
            for rank, (pipe, dump) in enumerate(ends)
        ]  # fmt: skip
        self.codes: dict[int, int | None] = dict.fromkeys(self.pids)

    def how(self, rank: int) -> int | None:
        """The exit code of a rank whose pipe is closed, minus the number of a signal; None if it has not ended."""
        return exit_code(self.codes, self.pids[rank])

    def stack(self, rank: int) -> None:
        """Ask a rank for its stack."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pids[rank], signal.SIGUSR1)

    def end(self) -> None:
        """End all of them, and return when they are gone."""
        end_all(self.codes)


def main(line: int, dump: int, parent: int) -> None:
    """Become a rank of the judge whose process id is `parent`, and never return. `line` and `dump` are descriptors: of
    the pipe to the judge, and of the one for the stack."""
    part, program, rank, n_ranks, compiler = executed.known_here()
    connection = Connection(line)
    if compiler:
        late_imports.fetch()
    play, known = player_of(part), fingerprint()
    connection.send_bytes(b"here")
    become_rank(connection, part, play, program, rank, n_ranks, parent, dump, known)
