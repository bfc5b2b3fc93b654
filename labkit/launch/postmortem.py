"""From records to an autopsy: where each rank of a script stands, here and now or in the dumps of a job that has hung.

    running    records in flight, messages under way, the line of the main thread   -> Whereabouts -> diagnose
    dumped     records alone: a rank with nothing in flight has not come            -> Autopsy

A rank waits for the members of its oldest collective in flight that have called fewer collectives of that group, or
another collective under that number.
"""

from __future__ import annotations

import linecache
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from labkit.comm.dumps import Dump, Message, Record
from labkit.comm.matched_collectives import Meeting, meetings, members_of, told, unmet
from labkit.launch.blackbox import CodePosition
from labkit.launch.hang_diagnosis import Autopsy, Whereabouts, name_ranks

MEETING_CALLS = ("init_process_group", "new_group", "monitored_barrier", "split_group")
"""Calls of torch that all ranks must make, and that the flight recorder does not keep."""


class Stand(NamedTuple):
    """What is known of a rank of a script that runs: `state` as in Whereabouts, `still` if its main thread sleeps."""

    rank: int
    state: str
    detail: str = ""
    still: bool = False
    position: CodePosition | None = None
    messages: tuple[Message, ...] = ()
    dump: Dump | None = None


def whereabouts(stands: Sequence[Stand], dumps: Sequence[Dump], now_ns: int, now: float) -> list[Whereabouts]:
    """The whereabouts of every rank. `dumps` has the last records of all; times are of the ranks' clock and ours."""
    met = {(meeting.group, meeting.seq): meeting for meeting in meetings(dumps)}
    together: dict[str, set[int]] = {}
    for stand in stands:
        if stand.position is not None and stand.position.torch_call in MEETING_CALLS:
            together.setdefault(stand.position.torch_call, set()).add(stand.rank)
    out = []
    for stand in stands:
        place: dict[str, Any] = {}
        if stand.position is not None:
            place = {"file": stand.position.file, "line": stand.position.line, "source": stand.position.source}
        flying = [record for record in (stand.dump.flying if stand.dump else ()) if not record.p2p]
        if stand.state != "running":
            out.append(Whereabouts(stand.rank, stand.state, detail=stand.detail))
        elif stand.still and flying:
            out.append(_in_collective(stand.rank, flying[0], met, dumps, now_ns, place))
        elif stand.still and stand.messages:
            out.append(_in_message(stand, now, place))
        elif stand.position is not None and stand.position.torch_call in MEETING_CALLS and stand.still:
            call = stand.position.torch_call
            others = tuple(sorted({s.rank for s in stands} - together[call]))
            out.append(Whereabouts(stand.rank, "waiting", call, verb=call, axis=call, waits_for=others, **place))
        else:
            out.append(Whereabouts(stand.rank, "running", **place))
    return out


def autopsy_of(dumps: Sequence[Dump], n_ranks: int | None = None) -> Autopsy:
    """The autopsy of a job of which nothing is left but dumps. A rank without a dump is told as such."""
    wrong = unmet(dumps)
    met = {(meeting.group, meeting.seq): meeting for meeting in meetings(dumps)}
    now_ns = max((record.created_ns for dump in dumps for record in dump.records), default=0)
    by_rank = {dump.rank: dump for dump in dumps}
    size = max([n_ranks or 0, *(rank + 1 for rank in by_rank), *_members(dumps)])
    stances = []
    for rank in range(size):
        dump = by_rank.get(rank)
        flying = dump.flying if dump else ()
        if dump is None:
            stances.append(Whereabouts(rank, "idle", detail="left no dump"))
        elif flying:
            stances.append(_in_collective(rank, flying[0], met, dumps, now_ns, {}))
        else:
            last = dump.records[-1] if dump.records else None
            stances.append(Whereabouts(rank, "finished", detail="", **_place(last)))
    lines = [_sentence(meeting, dumps) for meeting in wrong]
    if not wrong:
        flying_ranks = [stance.rank for stance in stances if stance.state == "waiting"]
        lines = ["Nothing is wrong in these dumps: every collective was called by all ranks of its group, and alike."]
        if flying_ranks:
            lines = [f"{name_ranks(flying_ranks)} had a collective in flight, and all have come to it: it was moving."]
    stuck = tuple(stance.rank for stance in stances if stance.state == "waiting" and stance.waits_for)
    return Autopsy("\n".join(lines), tuple(stances), stuck)


def words(autopsy: Autopsy, dumps: Sequence[Dump]) -> str:
    """The paragraph for people: what is wrong, then a line for each rank with the last that is known of it."""
    last = {dump.rank: dump.records[-1] if dump.records else None for dump in dumps}
    lines = [autopsy.headline]
    for stance in autopsy.ranks:
        if stance.state == "waiting" or stance.rank not in last:
            lines.append(f"  {stance if stance.rank in last else f'rank {stance.rank} left no dump'}")
            continue
        record = last[stance.rank]
        was = f"; its last was {_call(record)}{f', {record.place}' if record.place else ''}" if record else ""
        lines.append(f"  rank {stance.rank} was in no collective{was}")
    return "\n".join(lines)


def reasons(dumps: Sequence[Dump]) -> list[str]:
    """A sentence for each collective that does not match between ranks, first cause first."""
    return [told(meeting, dumps) for meeting in unmet(dumps) if meeting.differs]


def missed(dumps: Sequence[Dump], broken: Sequence[int]) -> tuple[int, str] | None:
    """The rank that left others waiting whose connections then broke, and a sentence on what it did not come to."""
    for meeting in unmet(dumps, broken):
        if meeting.absent:
            waited = sorted(meeting.came)
            usual = meeting.usual
            place = f" at {usual.place}" if usual.place else ""
            return meeting.absent[0], f"without {meeting.title}, in which {name_ranks(waited)} waited{place}"
    return None


def _sentence(meeting: Meeting, dumps: Sequence[Dump]) -> str:
    if meeting.differs:
        return f"Mismatch: {told(meeting, dumps)}."
    wait = "waits" if len(meeting.flying) == 1 else "wait"
    place = f" at {meeting.usual.place}" if meeting.usual.place else ""
    return (
        f"Hang: {name_ranks(meeting.flying)} {wait} in {meeting.title}{place} for {name_ranks(meeting.absent)}, "
        f"which never came."
    )


def _members(dumps: Sequence[Dump]) -> list[int]:
    return [rank + 1 for dump in dumps for ranks in dump.members.values() for rank in ranks]


def _in_collective(
    rank: int,
    record: Record,
    met: Mapping[tuple[str, int], Meeting],
    dumps: Sequence[Dump],
    now_ns: int,
    place: dict[str, Any],
) -> Whereabouts:
    meeting = met.get((record.group, record.seq))
    absent = set(meeting.absent) if meeting else set()
    known = {dump.rank for dump in dumps}
    members = set(members_of(record.group, dumps))
    absent |= members - known  # nothing is known of them: they have not even made the group
    if meeting is not None and meeting.differs:
        call = (record.called, record.sizes, record.dtypes)
        absent |= {r for r, other in meeting.came.items() if (other.called, other.sizes, other.dtypes) != call}
    return Whereabouts(
        rank, "waiting", _call(record), record.looks, seconds=max(0.0, (now_ns - record.created_ns) / 1e9),
        waits_for=tuple(sorted(absent - {rank})), verb=record.called, axis=record.name, seq=record.seq,
        **(place or _place(record)),
    )  # fmt: skip


def _in_message(stand: Stand, now: float, place: dict[str, Any]) -> Whereabouts:
    message = stand.messages[0]
    other = "any rank" if message.peer is None else f"rank {message.peer}"
    call = f"{message.verb} {'from' if message.verb == 'recv' else 'to'} {other}"
    where = place or {"file": message.caller.file, "line": message.caller.line}
    return Whereabouts(
        stand.rank, "waiting", call, f"{list(message.shape)} {message.dtype}", seconds=max(0.0, now - message.began),
        waits_for=() if message.peer is None else (message.peer,), verb=message.verb, axis="messages",
        seq=message.tag, **where,
    )  # fmt: skip


def _call(record: Record) -> str:
    return f"{record.called} #{record.seq} on {record.name}"


def _place(record: Record | None) -> dict[str, Any]:
    caller = record.caller if record else None
    if caller is None:
        return {}
    source = linecache.getline(caller.file, caller.line).strip() if Path(caller.file).is_file() else ""
    return {"file": caller.file, "line": caller.line, "source": source}
