"""The folder with what a stopped job has left: dumps of torch's flight recorder, by node or not, and logs beside them.

    job/node0/nccl_trace_rank_0       dumps; the number at the end is the rank in the whole job
    job/node0/nccl_trace_rank_1
    job/node1/nccl_trace_rank_3.json
    job/node1/rank_2.log              a log: rank 2 has left no dump, and this may say why

Folders in the folder are read too, however deep. A rank that is missing is one that a dump lists as a member of a
group, or one below the highest number that is there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from labkit.comm.dumps import Dump, load, read
from labkit.comm.watchdog_log import Raised, TimedOut, read_log

_DUMP = re.compile(r"rank_?(\d+)(?:\.(?:json|pkl|pickle))?$|_(\d+)(?:\.(?:json|pkl|pickle))?$")
_LOGS = ("", ".log", ".txt", ".out", ".err")
MOST_RANKS = 1 << 20
"""No job has so many ranks: a number above is no rank, and would be counted up to."""


@dataclass(frozen=True)
class DumpFolder:
    """All that was found in a folder.

    dumps      by rank
    logs       file names of the logs, as they stand below the folder
    timed_out  collectives that a watchdog has given up, with the seconds that it had waited
    raised     exceptions of Python in the logs, in the order of the files and their lines
    """

    dumps: tuple[Dump, ...]
    logs: tuple[str, ...] = ()
    timed_out: tuple[TimedOut, ...] = ()
    raised: tuple[Raised, ...] = ()

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that are known to belong to the job and have left no dump."""
        there = {dump.rank for dump in self.dumps}
        members = (rank for dump in self.dumps for ranks in dump.members.values() for rank in ranks)
        return tuple(rank for rank in range(max([*there, *members]) + 1) if rank not in there)


def read_folder(folder: Path) -> DumpFolder:
    """Read all dumps and logs below a folder. A dump is a file whose name ends in `rank_3`, `rank3` or `_3`, with or
    without .json or .pkl; logs end in .log, .txt, .out, .err or in nothing.

    ValueError if there is no dump, if two are of one rank, or if one cannot be read, naming the files."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: name the one with the flight-recorder dumps, a file for each rank")
    dumps: dict[int, tuple[str, Dump]] = {}
    logs, timed_out, raised = list[str](), list[TimedOut](), list[Raised]()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(path.relative_to(folder))
        number = _DUMP.search(path.name)
        if number is not None:
            rank = int(number[1] or number[2])
            if rank in dumps:
                raise ValueError(
                    f"{name} and {dumps[rank][0]} are both of rank {rank}: keep one of them, or, where each node has "
                    "counted its own ranks, rename them by the rank in the whole job"
                )
            dumps[rank] = name, _read_dump(path, name, rank)
        elif path.suffix in _LOGS:
            events = read_log(path, name)
            logs.append(name)
            timed_out += [event for event in events if isinstance(event, TimedOut)]
            raised += [event for event in events if isinstance(event, Raised)]
    if not dumps:
        raise ValueError(
            f"no dump in {folder}: torch writes one for each rank, named like nccl_trace_rank_0, where "
            "TORCH_NCCL_DEBUG_INFO_TEMP_FILE says"
        )
    in_order = tuple(dumps[rank][1] for rank in sorted(dumps))
    return DumpFolder(in_order, tuple(logs), tuple(timed_out), tuple(raised))


def _read_dump(path: Path, name: str, rank: int) -> Dump:
    try:
        dump = read(load(path.read_bytes()), rank)
        highest = max([rank, *(member for ranks in dump.members.values() for member in ranks)])
        if highest >= MOST_RANKS:
            raise ValueError(f"{highest} is no rank: a job has fewer than {MOST_RANKS:,}")
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{name}: {error}") from None
    return dump
