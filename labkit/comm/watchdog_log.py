"""Logs of ranks beside their dumps: collectives that NCCL's watchdog gave up, and exceptions of Python.

    [rank3]:[E1128 10:02:11 ProcessGroupNCCL.cpp:632] [PG ID 0 PG GUID 0(default_pg) Rank 3] Watchdog caught collective
        operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=1048576, NumelOut=1048576,
        Timeout(ms)=600000) ran for 600041 milliseconds before timing out.                        -> TimedOut

    [rank1]: Traceback (most recent call last):
    [rank1]:   File "finetune.py", line 41, in step
    [rank1]: ValueError: batch is empty                                                            -> Raised

Such a text is all that torch leaves of either, so it is read by its words, which stand here as patterns. Whose a line
is, say its prefix (torch's, or torchrun's), the words "Rank 3]", the name of the file (`rank_3.log`) or its folder
(torchrun writes `3/stderr.log`).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from labkit.plan.words import printable

_PREFIX = re.compile(r"^\s*\[(?:rank|default|r)\s?(\d+)\]:\s?")
_RANK = re.compile(r"\bRank (\d+)\]")
_GROUP = re.compile(r"PG GUID ([^\s(\]]+)")
_TIMED_OUT = re.compile(
    r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d+), OpType=(\w+),.*?Timeout\(ms\)=(\d+)\) "
    r"ran for (\d+) milliseconds"
)
_FILE = re.compile(r"rank[_-]?(\d+)(?:\D|$)")
_RAISED = re.compile(r"^([A-Za-z_][\w.]*)(?:: (.*))?$")
_TRACEBACK = "Traceback (most recent call last):"
LONGEST = 200


class TimedOut(NamedTuple):
    """A collective that a rank's watchdog gave up: number, NCCL's name for it, the seconds that it had waited and the
    seconds that it was to wait. `group` is the name of the process group, "" where the log does not tell."""

    rank: int
    group: str
    seq: int
    verb: str
    seconds: float
    limit_s: float


class Raised(NamedTuple):
    """An exception at the end of a traceback: of which rank (None if nothing says so), its text, and where it stands
    in the logs, as `node1/rank_1.log:12`."""

    rank: int | None
    text: str
    place: str


def read_log(path: Path, name: str) -> list[TimedOut | Raised]:
    """The events of a log, in the order of its lines; `name` is how the file is called in places. OSError if it cannot
    be read; a byte that is no text is left out."""
    of_file = _rank_of(path)
    events: list[TimedOut | Raised] = []
    open_tracebacks: set[int | None] = set()
    with path.open(encoding="utf-8", errors="ignore") as lines:
        for number, raw in enumerate(lines, 1):
            line = printable(raw).rstrip()
            prefix = _PREFIX.match(line)
            rank = int(prefix[1]) if prefix else of_file
            text = line[prefix.end() :] if prefix else line
            timed_out = _TIMED_OUT.search(text)
            if timed_out is not None:
                in_words, group = _RANK.search(text), _GROUP.search(text)
                owner = int(in_words[1]) if in_words else rank
                if owner is not None:
                    seq, verb, limit_ms, ran_ms = timed_out.groups()
                    event = TimedOut(
                        owner, group[1] if group else "", int(seq), verb, int(ran_ms) / 1e3, int(limit_ms) / 1e3
                    )
                    events.append(event)
            elif text.strip() == _TRACEBACK:
                open_tracebacks.add(rank)
            elif rank in open_tracebacks and (raised := _RAISED.match(text)):
                open_tracebacks.discard(rank)
                events.append(Raised(rank, raised[0][:LONGEST], f"{name}:{number}"))
    return events


def _rank_of(path: Path) -> int | None:
    in_name = _FILE.search(path.name)
    if in_name is not None:
        return int(in_name[1])
    return int(path.parent.name) if path.parent.name.isdigit() else None
