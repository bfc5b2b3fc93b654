"""What a job sends, by collective and by the line that calls it, from the records of its ranks.

Bytes are those that a rank sends by the law of a ring, whatever the backend does inside; N is the whole tensor:

    all_reduce                                  2(n-1)/n N
    reduce_scatter, all_gather, all_to_all       (n-1)/n N
    broadcast, reduce                            (n-1)/n N    a mean over the ranks: no record names the root
    gather                                       N/n of a rank that is not the root, straight to it
    scatter                                      (n-1)/n N of the root, straight to the others

A record is counted once, in whatever dump it comes; those that were overwritten before they were fetched are estimated
from the counters of their rank. Of each collective whose records came from all members, it is noted who came last.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from labkit.comm.dumps import Dump, Frame, Record
from labkit.comm.matched_collectives import members_of
from labkit.comm.slow_rank import Arrivals

ORIGINS = MappingProxyType(
    {
        "torch/distributed/fsdp/": "FSDP",
        "torch/distributed/tensor/": "tensor parallel",
        "torch/distributed/pipelining/": "pipeline",
        "torch/distributed/optim/": "sharded optimizer",
        "torch/distributed/checkpoint/": "checkpoint",
        "torch/nn/parallel/distributed.py": "DDP",
        "torch/distributed/algorithms/join.py": "DDP of uneven inputs",
    }
)
"""Beginnings of paths inside of torch, and whose call it is if such a file is on the stack."""
CALLING = (
    "torch/distributed/_functional_collectives", "torch/distributed/distributed_c10d.py",
    "torch/distributed/c10d_logger.py",
)  # fmt: skip
"""Files through which every part of torch calls a collective."""
RECENT = 200


ROOTLESS = ("broadcast", "reduce")
"""Collectives whose bytes are a mean over the ranks, for no record names the root."""


class Share(NamedTuple):
    """What one rank did of a row: its calls, and the bytes that it sent."""

    calls: float
    sent_bytes: float


class Span(NamedTuple):
    """The least and the most that a rank did."""

    least: float
    most: float


class LineTraffic(NamedTuple):
    """One collective at one line, of groups of `n_ranks`. `shares` has every rank of which records have come, also one
    that never calls it."""

    verb: str
    origin: str
    caller: Frame | None
    group: str
    n_ranks: int
    shares: Mapping[int, Share]
    largest_bytes: int

    @property
    def calls(self) -> float:
        """The calls of a rank, as a mean over the ranks."""
        return sum(share.calls for share in self.shares.values()) / len(self.shares)

    @property
    def sent_bytes(self) -> float:
        """The bytes that a rank sends, as a mean over the ranks."""
        return sum(share.sent_bytes for share in self.shares.values()) / len(self.shares)

    @property
    def calls_span(self) -> Span:
        """The calls of the rank that calls it least often, and of the one that calls it most often."""
        calls = [share.calls for share in self.shares.values()]
        return Span(min(calls), max(calls))

    @property
    def bytes_span(self) -> Span:
        """The bytes of the rank that sends least, and of the one that sends most."""
        sent = [share.sent_bytes for share in self.shares.values()]
        return Span(min(sent), max(sent))

    @property
    def place(self) -> str:
        """`train.py:31`, "" where it is not known."""
        return str(self.caller) if self.caller else ""


def origin_of(record: Record) -> str:
    """Whose call a collective is: "DDP gradients", "FSDP", ..., or "your own" where the script calls it itself."""
    first = True
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
        self._open: dict[tuple[str, int], dict[int, int]] = {}
        self.arrivals = Arrivals()

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
            rows.append(LineTraffic(*key, shares, self._largest[key]))
        return sorted(rows, key=lambda row: (-row.sent_bytes, -row.calls))

    @property
    def share(self) -> float:
        """The part of all collectives whose record was seen; 1.0 if none was overwritten."""
        called = sum(n for groups in self.called.values() for n in groups.values())
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
        if len(members) > 1:
            self._meet(record, dump.rank, len(members))

    def _share(self, rank: int) -> float:
        called = sum(self.called[rank].values())
        return min(1.0, self.seen[rank] / called) if called and self.seen[rank] else 1.0

    def _meet(self, record: Record, rank: int, n_members: int) -> None:
        came = self._open.setdefault((record.group, record.seq), {})
        came[rank] = record.created_ns
        if len(came) == n_members:
            del self._open[record.group, record.seq]
            self.arrivals.add(came)
