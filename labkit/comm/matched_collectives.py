"""Where ranks should have met: the records of all ranks held against each other, collective by collective.

    rank 0   all_reduce #7 [64, 10]   train.py:31   in flight
    rank 1   all_reduce #7 [64, 10]   train.py:31   in flight      a meeting of group "0": #7
    rank 2   broadcast  #7 [1]        train.py:40   in flight      differs: verb, sizes
    rank 3   (has called 6 collectives of this group)              absent

Pure: records in, values out. The same for a job that hangs here now and for dumps of one that has hung elsewhere.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from labkit.comm.dumps import Dump, Record

UNEVEN = frozenset(("gather", "scatter", "all_to_all", "barrier", "all_gather_v", "reduce_scatter_v", "send", "recv"))
"""Verbs in which ranks may bring tensors of different sizes."""
ROOTED = frozenset(("broadcast", "reduce", "scatter", "gather"))
"""Verbs with a root, which no record keeps."""


@dataclass(frozen=True)
class Meeting:
    """One collective of one group. `came` has the record of each rank that has called it; `absent` are members that
    have called fewer collectives of this group; `differs` says in what the records do not agree."""

    group: str
    name: str
    seq: int
    came: Mapping[int, Record]
    absent: tuple[int, ...]
    differs: tuple[str, ...]

    @property
    def flying(self) -> tuple[int, ...]:
        """Ranks on which it is in flight."""
        return tuple(rank for rank, record in sorted(self.came.items()) if not record.retired)

    @property
    def usual(self) -> Record:
        """The record that most ranks have; of equally many, that of the lowest rank."""
        looks = {rank: (record.called, _numel(record), record.dtypes) for rank, record in sorted(self.came.items())}
        most, _ = Counter(looks.values()).most_common(1)[0]
        return next(self.came[rank] for rank, look in looks.items() if look == most)

    @property
    def odd(self) -> tuple[int, ...]:
        """Ranks whose record is another than that of most ranks."""
        usual = self.usual
        return tuple(r for r, record in sorted(self.came.items()) if _differences([usual, record]))

    @property
    def title(self) -> str:
        """`all_reduce #7 on world`."""
        return f"{self.usual.called} #{self.seq} on {self.name}"


def members_of(group: str, dumps: Sequence[Dump]) -> tuple[int, ...]:
    """The ranks of a group: as a dump lists them, or else those that have called a collective of it."""
    for dump in dumps:
        if dump.members.get(group):
            return dump.members[group]
    return tuple(dump.rank for dump in dumps if dump.last.get(group, 0) > 0)


def meetings(dumps: Sequence[Dump]) -> list[Meeting]:
    """All collectives that at least one recorder has kept, by group and number."""
    came: dict[tuple[str, int], dict[int, Record]] = {}
    for dump in dumps:
        for record in dump.records:
            if not record.p2p:
                came.setdefault((record.group, record.seq), {})[dump.rank] = record
    by_rank = {dump.rank: dump for dump in dumps}
    members = {group: members_of(group, dumps) for group in {group for group, _ in came}}
    out = []
    for (group, seq), records in sorted(came.items(), key=lambda pair: min(r.created_ns for r in pair[1].values())):
        known = {r: by_rank[r].called(group) for r in members[group] if r in by_rank and r not in records}
        absent = tuple(r for r, called in known.items() if called is not None and called < seq)
        name = next(iter(records.values())).name
        out.append(Meeting(group, name, seq, records, absent, _differences(records.values())))
    return out


SYMMETRIC = frozenset(("all_reduce", "all_gather", "reduce_scatter"))
"""Verbs in which every rank does the same, so that none has a reason to call them at a line of its own."""


def meeting_of(came: Mapping[int, Record]) -> Meeting:
    """The meeting to which all members have come, with these records."""
    record = next(iter(came.values()))
    return Meeting(record.group, record.name, record.seq, came, (), _differences(came.values()))


def changed_places(before: Meeting, after: Meeting) -> bool:
    """True if two ranks have called two neighbouring collectives in opposite order, by their lines: all that can be
    known where verb, size and type are the same. Verbs with a root, where lines may differ by right, never count."""
    if after.seq != before.seq + 1 or not SYMMETRIC.issuperset(
        record.called for meeting in (before, after) for record in meeting.came.values()
    ):
        return False
    lines = {(before.came[rank].caller, after.came[rank].caller) for rank in before.came if rank in after.came}
    return any(first != second and (second, first) in lines for first, second in lines)


def unmet(dumps: Sequence[Dump], broken: Sequence[int] = ()) -> list[Meeting]:
    """The meetings that went wrong, first cause first: those whose records differ, then those with absent ranks that
    somebody waits for, or has waited for: the `broken` ranks lost their connections. Of each group only the first,
    since what follows a mistake is its consequence."""
    wrong = [
        meeting
        for meeting in meetings(dumps)
        if meeting.differs or (meeting.absent and (meeting.flying or set(broken) & set(meeting.came)))
    ]
    first: dict[str, Meeting] = {}
    for meeting in wrong:
        first.setdefault(meeting.group, meeting)
    return sorted(first.values(), key=lambda meeting: not meeting.differs)


def told(meeting: Meeting, dumps: Sequence[Dump]) -> str:
    """One sentence on what is wrong with a meeting; "" if nothing is."""
    if meeting.differs:
        usual, odd = meeting.usual, meeting.odd
        brought = "; ".join(f"rank {rank} calls {_looks(record, meeting)}" for rank, record in _kinds(meeting))
        what = " and ".join(meeting.differs)
        sentence = f"collective #{meeting.seq} on {meeting.name} does not match in {what}: {brought}"
        left_out = [rank for rank in odd if _skipped(dumps, rank, meeting)]
        if left_out and usual.place:
            sentence += f". {_ranks(left_out)} left out the {usual.called} of {usual.place}: an order that differs"
        return sentence
    if meeting.absent:
        return f"{_ranks(meeting.absent)} never came to {meeting.title}"
    return ""


def _kinds(meeting: Meeting) -> list[tuple[int, Record]]:
    """One rank for each different record, the lowest first."""
    shown: dict[object, tuple[int, Record]] = {}
    for rank, record in sorted(meeting.came.items()):
        shown.setdefault((record.called, record.sizes, record.dtypes, record.place), (rank, record))
    return list(shown.values())


def _looks(record: Record, meeting: Meeting) -> str:
    return f"{record.called} {record.looks}".strip() + (f" at {record.place}" if record.place else "")


def _skipped(dumps: Sequence[Dump], rank: int, meeting: Meeting) -> bool:
    """True if this rank's record is what the others call next."""
    arrived = meeting.came[rank]
    for dump in dumps:
        if dump.rank != rank and dump.rank not in meeting.odd:
            for record in dump.records:
                if (record.group, record.seq) == (meeting.group, meeting.seq + 1):
                    return not _differences([arrived, record]) and arrived.place == record.place
    return False


def _differences(records: Iterable[Record]) -> tuple[str, ...]:
    records = list(records)
    out = []
    if len({record.called for record in records}) > 1:
        out.append("verb")
    if not any(record.called in UNEVEN for record in records):
        if len({_numel(record) for record in records}) > 1:
            out.append("sizes")
        if len({record.dtypes for record in records}) > 1:
            out.append("dtypes")
    return tuple(out)


def _numel(record: Record) -> int:
    return sum(math.prod(shape) for shape in record.sizes)


def _ranks(ranks: Sequence[int]) -> str:
    ranks = sorted(ranks)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
