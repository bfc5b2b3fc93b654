"""What a job sends, by collective and by the line that calls it, from the records of its ranks.

Bytes are those that a rank sends by the law of a ring, whatever the backend does inside; N is the whole tensor:

    all_reduce                                  2(n-1)/n N
    reduce_scatter, all_gather, all_to_all       (n-1)/n N
    broadcast, reduce                            (n-1)/n N    a mean over the ranks: no record names the root
    gather                                       N/n of a rank that is not the root, straight to it
    scatter                                      (n-1)/n N of the root, straight to the others

A record is counted once, in whatever dump it comes; those that were overwritten before they were fetched are estimated
from the counters of their rank. Of each collective whose records came from all members, it is noted who came last,
and whether all records agree.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from labkit.comm.dumps import Dump, Frame, Record
from labkit.comm.matched_collectives import Meeting, changed_places, meeting_of, members_of
from labkit.comm.slow_rank import CollectiveArrivals

ORIGINS = MappingProxyType(
    {
        "torch/distributed/fsdp/": "FSDP",
        "torch/distributed/tensor/": "tensor parallel",
        "torch/distributed/pipelining/": "pipeline",
        "torch/distributed/optim/": "sharded optimizer",
        "torch/distributed/checkpoint/": "checkpoint",
        "torch/nn/parallel/distributed.py": "DDP",
        "torch/distributed/algorithms/join.py": "DDP of uneven inputs",
        "torch/distributed/algorithms/ddp_comm_hooks/": "DDP gradients",
    }
)
"""Beginnings of paths inside of torch, and whose call it is if such a file is on the stack."""
OUTER = MappingProxyType(
    {
        "torch/nn/utils/clip_grad.py": "clipping",
        "torch/distributed/checkpoint/": "checkpoint",
        "torch/distributed/fsdp/_state_dict_utils.py": "checkpoint",
        "torch/optim/": "optimizer",
    }
)
"""The same for callers further out, who let DTensor or FSDP send for them: a norm, a state dict, an optimizer."""
CALLING = (
    "torch/distributed/_functional_collectives", "torch/distributed/distributed_c10d.py",
    "torch/distributed/c10d_logger.py",
)  # fmt: skip
"""Files through which every part of torch calls a collective."""
RECENT, KEPT = 200, 8
"""Records of a rank, and meetings that went wrong, that are kept."""
PIECES = ("all_gather", "reduce_scatter")
"""Collectives of which a backend that completes them with pieces of several sizes has meant to."""
OPEN = 1 << 12
"""Collectives that wait for records of other ranks; where records were overwritten, those never come."""

ROOTLESS = ("broadcast", "reduce")
"""Collectives whose bytes are a mean over the ranks, for no record names the root."""


class Share(NamedTuple):
    """What one rank did of a row: its calls, and the bytes that it sent."""

    calls: float
    sent_bytes: float


class LeastAndMost(NamedTuple):
    """The least and the most that a rank did."""

    least: float
    most: float


class LineTraffic(NamedTuple):
    """One collective at one line, of groups of `n_ranks`. `shares` has every rank of which records have come, also one
    that never calls it. `wholes` has the calls of a rank, as a mean, by type and bytes of the whole tensor."""

    verb: str
    origin: str
    caller: Frame | None
    group: str
    n_ranks: int
    shares: Mapping[int, Share]
    largest_bytes: int
    wholes: Mapping[tuple[str, int], float] = MappingProxyType({})

    @property
    def calls(self) -> float:
        """The calls of a rank, as a mean over the ranks."""
        return sum(share.calls for share in self.shares.values()) / len(self.shares)

    @property
    def sent_bytes(self) -> float:
        """The bytes that a rank sends, as a mean over the ranks."""
        return sum(share.sent_bytes for share in self.shares.values()) / len(self.shares)

    @property
    def calls_span(self) -> LeastAndMost:
        """The calls of the rank that calls it least often, and of the one that calls it most often."""
        calls = [share.calls for share in self.shares.values()]
        return LeastAndMost(min(calls), max(calls))

    @property
    def bytes_span(self) -> LeastAndMost:
        """The bytes of the rank that sends least, and of the one that sends most."""
        sent = [share.sent_bytes for share in self.shares.values()]
        return LeastAndMost(min(sent), max(sent))

    @property
    def place(self) -> str:
        """`train.py:31`, "" where it is not known."""
        return str(self.caller) if self.caller else ""


def origin_of(record: Record) -> str:
    """Whose call a collective is: "DDP gradients", "FSDP", ..., or "your own" where the script calls it itself."""
    first, outer = True, list[str]()
    for frame in itertools.takewhile(lambda frame: frame.library, record.frames):
        file = frame.library
        if file.startswith("torch/distributed/tensor/") and frame.function == "full_tensor":
            outer.append("your own")
        if frame.function == "clip_grad_norm_":  # FSDP1 has one of its own
            outer.append("clipping")
        outer += [origin for part, origin in OUTER.items() if file.startswith(part)]
    if outer:
        return outer[-1]
    for frame in record.frames:
        file = frame.library
        if first and not file:
            return "your own"
        if first and file == "torch/autograd/graph.py":
            return "DDP gradients" if record.called == "all_reduce" else "backward"
        if file.startswith(CALLING):
            first = False
            continue
        for part, origin in ORIGINS.items():
            if file.startswith(part):
                return f"{origin} set-up" if origin == "DDP" and frame.function == "__init__" else origin
        if file == "torch/distributed/utils.py":
            return "DDP set-up" if any(f.function == "__init__" for f in record.frames) else "DDP"
        first = False
    return "your own"


def sent_bytes(record: Record, n_ranks: int) -> float:
    """Bytes that the rank of this record sends in a group of `n_ranks`, by the laws at the head of this file."""
    if n_ranks < 2 or record.called == "barrier":
        return 0.0
    if record.called == "gather":
        return 0.0 if record.out_bytes else record.n_bytes
    if record.called in ("scatter", "all_to_all"):
        return (n_ranks - 1) / n_ranks * record.n_bytes
    if record.called == "all_reduce":
        return 2 * (n_ranks - 1) / n_ranks * record.n_bytes
    return (n_ranks - 1) / n_ranks * max(record.n_bytes, record.out_bytes)


class Tally:
    """Adds up the records of all ranks, dump by dump."""

    def __init__(self, n_ranks: int) -> None:
        self.n_ranks = n_ranks
        self.seen: Counter[int] = Counter()
        self.called: dict[int, dict[str, int]] = {}
        self.members: dict[str, tuple[int, ...]] = {}
        self.recent: dict[int, deque[Record]] = {rank: deque(maxlen=RECENT) for rank in range(n_ranks)}
        self.newest: dict[int, int] = dict.fromkeys(range(n_ranks), -1)
        self._rows: dict[tuple[str, str, Frame | None, str, int], dict[int, Share]] = {}
        self._largest: Counter[tuple[str, str, Frame | None, str, int]] = Counter()
        self._wholes: dict[tuple[str, str, Frame | None, str, int], Counter[tuple[str, int]]] = {}
        self._open: dict[tuple[str, int], dict[int, Record]] = {}
        self._before: dict[str, Meeting] = {}
        self.odd: list[Meeting] = []
        self.swapped: list[tuple[Meeting, Meeting]] = []
        self.arrivals = CollectiveArrivals()

    def add(self, dump: Dump) -> None:
        """Count the records of a dump that were not counted before (`newest` says up to which they were)."""
        self.members.update({name: ranks for name, ranks in dump.members.items() if ranks})
        self.called[dump.rank] = {**self.called.get(dump.rank, {}), **dump.last}
        for record in dump.records:
            if record.number <= self.newest[dump.rank]:
                continue
            self.newest[dump.rank] = record.number
            self.recent[dump.rank].append(record)
            if not record.p2p:
                self._count(dump, record)

    def rows(self) -> list[LineTraffic]:
        """A row for each collective at each line, most bytes first."""
        parts = {rank: self._share(rank) for rank in sorted(self.called)}
        rows = list[LineTraffic]()
        for key, seen in self._rows.items():
            shares = dict.fromkeys(parts, Share(0.0, 0.0))
            shares |= {rank: Share(calls / parts[rank], sent / parts[rank]) for rank, (calls, sent) in seen.items()}
            wholes = self._wholes[key]
            mean = sum(share.calls for share in shares.values()) / len(shares) / wholes.total()
            rows.append(LineTraffic(*key, shares, self._largest[key], {whole: n * mean for whole, n in wholes.items()}))
        return sorted(rows, key=lambda row: (-row.sent_bytes, -row.calls))

    @property
    def share(self) -> float:
        """The part of all collectives whose record was seen; 1.0 if none was overwritten."""
        called = sum(map(self._called, self.called))
        return min(1.0, sum(self.seen.values()) / called) if called else 1.0

    @property
    def silent(self) -> tuple[int, ...]:
        """The ranks of which no record has come."""
        return tuple(rank for rank in range(self.n_ranks) if rank not in self.called)

    def dumps(self, flying: Iterable[Dump] = ()) -> list[Dump]:
        """The last records of every rank as dumps, with newer ones of `flying` added, to be held against each other."""
        newer = {dump.rank: dump for dump in flying}
        out = []
        for rank in range(self.n_ranks):
            records, last = list(self.recent[rank]), dict(self.called.get(rank, {}))
            addition = newer.get(rank)
            if addition is not None:
                known = {record.number for record in addition.records}
                records = [r for r in records if r.number not in known] + list(addition.records)
                last |= addition.last
            if addition is not None or last:
                out.append(Dump(rank, tuple(records), {**self.members, **(addition.members if addition else {})}, last))
        return out

    def _count(self, dump: Dump, record: Record) -> None:
        self.seen[dump.rank] += 1
        world = tuple(range(self.n_ranks)) if record.name == "world" else ()
        members = self.members.get(record.group) or world or members_of(record.group, [dump])
        key = (record.called, origin_of(record), record.caller, record.name, len(members))
        row = self._rows.setdefault(key, {})
        calls, sent = row.get(dump.rank, Share(0.0, 0.0))
        row[dump.rank] = Share(calls + 1, sent + sent_bytes(record, len(members)))
        self._largest[key] = max(self._largest[key], record.n_bytes, record.out_bytes)
        whole = record.dtypes[0] if record.dtypes else "", max(record.n_bytes, record.out_bytes)
        self._wholes.setdefault(key, Counter())[whole] += 1
        if len(members) > 1 and dump.rank in members:
            self._meet(record, dump.rank, len(members))

    def _called(self, rank: int) -> int:
        """The collectives that a rank has called. gloo counts also in groups of which the rank is no member."""
        return sum(n for group, n in self.called[rank].items() if rank in self.members.get(group, (rank,)))

    def _share(self, rank: int) -> float:
        called = self._called(rank)
        return min(1.0, self.seen[rank] / called) if called and self.seen[rank] else 1.0

    def _meet(self, record: Record, rank: int, n_members: int) -> None:
        came = self._open.setdefault((record.group, record.seq), {})
        if len(self._open) > OPEN:
            del self._open[next(iter(self._open))]
        came[rank] = record
        if len(came) == n_members:
            del self._open[record.group, record.seq]
            self.arrivals.add({member: arrived.created_ns for member, arrived in came.items()})
            self._compare(meeting_of(came))

    def _compare(self, meeting: Meeting) -> None:
        """Keep the meetings whose records do not agree, and those at which ranks have changed places."""
        before = self._before.get(meeting.group)
        by_right = meeting.differs == ("sizes",) and meeting.usual.called in PIECES
        if meeting.differs and not by_right:
            self.odd.append(meeting)
        elif before is not None and changed_places(before, meeting):
            self.swapped.append((before, meeting))
        self._before[meeting.group] = meeting
        del self.odd[KEPT:], self.swapped[KEPT:]
