"""A sandboxed rank where the judge may not be forked (launch/system.py): a new Python, which imports what a fork has.

    judge ──exec──> rank: torch, the judge's own parts ──"here"──> judge: hands out the inputs, and its clock begins

It knows its exercise by the key, and takes the library's fingerprint itself, before the attempt is there.
"""

from __future__ import annotations

from multiprocessing.connection import Connection

from labkit.course.exercises.catalogue import problem
from labkit.course.judge import late_imports
from labkit.course.judge.sandbox import fingerprint
from labkit.course.judge.sandboxed_rank import Program, become_rank
from labkit.launch.executed import known_here


def main(line: int, dump: int, parent: int) -> None:
    """Become a rank of the judge whose process id is `parent`, and never return. `line` and `dump` are descriptors: of
    the pipe to the judge, and of the one for the stack."""
    key, program, rank, n_ranks, compiler = known_here()
    connection, it = Connection(line), problem(key)
    if compiler:
        late_imports.fetch()
    known = fingerprint()
    connection.send_bytes(b"here")
    become_rank(connection, it, Program(*program), rank, n_ranks, parent, dump, known)
