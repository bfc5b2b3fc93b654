"""A table of a cluster's ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

import psutil

from labkit.launch.ranks import Ranks
from labkit.launch.table import html_table
from labkit.plan.text_columns import in_columns


@dataclass(frozen=True)
class RankStatus:
    """One rank: `signal` names what killed it, `doing` is the verb it waits in; `private_bytes` is its own memory.

    Under a memory cap `held_bytes` are its live bytes, counted as the cap counts them; without one both are None."""

    rank: int
    pid: int
    alive: bool
    doing: str
    device: str
    private_bytes: int
    signal: str | None = None
    held_bytes: int | None = None
    cap_bytes: int | None = None


@dataclass(frozen=True)
class Status:
    """All ranks; a sequence of `RankStatus` that shows itself as a table."""

    sentence: str
    generation: int
    ranks: tuple[RankStatus, ...]

    def __getitem__(self, rank: int) -> RankStatus:
        return self.ranks[rank]

    def __iter__(self) -> Iterator[RankStatus]:
        return iter(self.ranks)

    def __len__(self) -> int:
        return len(self.ranks)

    @property
    def alive(self) -> bool:
        """True if every rank is alive."""
        return all(rank.alive for rank in self.ranks)

    def _table(self) -> list[tuple[str, ...]]:
        """The head, then a row for each rank; what is held only if there is a cap that it can be compared with."""
        capped = any(r.cap_bytes is not None for r in self.ranks)
        rows: list[tuple[str, ...]] = [("rank", "process", "device", "private", *(("held",) * capped), "doing")]
        for r in self.ranks:
            private = f"{r.private_bytes / 1e6:.1f} MB" if r.alive and r.private_bytes else "-"
            held = f"{r.held_bytes:,} of {r.cap_bytes:,} B" if r.alive and r.cap_bytes is not None else "-"
            rows.append((str(r.rank), str(r.pid or "-"), r.device, private, *((held,) * capped), r.doing))
        return rows

    def __repr__(self) -> str:
        rows = self._table()
        lines = in_columns(rows, left=range(len(rows[0])))
        return "\n".join([f"{self.sentence}; generation {self.generation}", *lines])

    def _repr_html_(self) -> str:
        return f"<p>{escape(self.sentence)}; generation {self.generation}</p>{html_table(self._table())}"


def status_of(processes: Ranks, sentence: str) -> Status:
    """Read every rank's black box and memory; asks no rank anything."""
    rows = []
    for rank in range(processes.n_ranks):
        pid = processes.pids.get(rank, 0)
        ended = processes.ended.get(rank)
        entry = processes.box.read(rank).entry
        doing = str(ended) if ended and not pid else f"waiting in {entry}" if entry else "ready"
        signal = ended.signal if ended and not pid else None
        held_bytes, cap_bytes = processes.box.held(rank)
        place = processes.devices[rank] + processes.where(rank)
        private_bytes = 0 if processes.nodes else _private(pid)  # a process id of another machine says nothing here
        memory = (held_bytes, cap_bytes) if cap_bytes else ()
        rows.append(RankStatus(rank, pid, bool(pid), doing, place, private_bytes, signal, *memory))
    return Status(sentence, processes.generation, tuple(rows))


def _private(pid: int) -> int:
    try:
        return _of(psutil.Process(pid)) if pid else 0
    except psutil.Error:
        return 0


def _of(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().uss)
    except psutil.AccessDenied:  # macOS tells it of no other process; what a rank there shares are pages of libraries
        return int(process.memory_info().rss)
