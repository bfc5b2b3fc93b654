"""From records to whereabouts: where each rank of a script stands, while it runs here.

    records in flight, messages under way, the line of the main thread   -> Whereabouts -> diagnose

A rank waits for the members of its oldest collective in flight that have called fewer collectives of that group, or
another collective under that number. Of a job that has left nothing but its records, launch/dump_verdict.py speaks.
"""

from __future__ import annotations

import linecache
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from labkit.comm.dumps import Dump, GroupMade, Message, Record
from labkit.comm.matched_collectives import ROOTED, Meeting, meetings, members_of, told, unmet
from labkit.launch.blackbox import CodePosition
from labkit.launch.hang_diagnosis import Whereabouts, name_ranks

MEETING_CALLS = ("init_process_group", "new_group", "monitored_barrier", "split_group")
"""Calls of torch that all ranks must make, and that the flight recorder does not keep."""


class Stand(NamedTuple):
    """What is known of a rank of a script that runs: `state` as in Whereabouts, `still` if its main thread sleeps;
    `made` are its calls of new_group."""

    rank: int
    state: str
    detail: str = ""
    still: bool = False
    position: CodePosition | None = None
    messages: tuple[Message, ...] = ()
    dump: Dump | None = None
    made: tuple[GroupMade, ...] = ()


def whereabouts(stands: Sequence[Stand], dumps: Sequence[Dump], now_ns: int, now: float) -> list[Whereabouts]:
    """The whereabouts of every rank. `dumps` has the last records of all; times are of the ranks' clock and ours."""
    met = {(meeting.group, meeting.seq): meeting for meeting in meetings(dumps)}
    together: dict[tuple[Any, ...], set[int]] = {}
    for stand in stands:
        if stand.position is not None and stand.position.torch_call in MEETING_CALLS:
            together.setdefault(_meeting_call(stand, len(stands))[0], set()).add(stand.rank)
    out = []
    for stand in stands:
        place: dict[str, Any] = {}
        if stand.position is not None:
            place = {"file": stand.position.file, "line": stand.position.line, "source": stand.position.source}
        flying = [record for record in (stand.dump.flying if stand.dump else ()) if not record.p2p]
        if stand.state != "running":
            out.append(Whereabouts(stand.rank, stand.state, detail=stand.detail))
        elif stand.still and flying:
            waited_s = max(0.0, (now_ns - flying[0].created_ns) / 1e9)
            out.append(in_collective(stand.rank, flying[0], met, dumps, waited_s, place))
        elif stand.still and stand.messages:
            out.append(_in_message(stand, now, place))
        elif stand.position is not None and stand.position.torch_call in MEETING_CALLS and stand.still:
            call = stand.position.torch_call
            key, members, began = _meeting_call(stand, len(stands))
            others = tuple(sorted(members - together[key]))
            seconds = None if began is None else max(0.0, now - began)
            out.append(
                Whereabouts(
                    stand.rank, "waiting", call, seconds=seconds, verb=call, axis=call, waits_for=others, **place
                )
            )
        else:
            out.append(Whereabouts(stand.rank, "running", **place))
    return out


def stalled(stances: Sequence[Whereabouts]) -> str:
    """A sentence for ranks that are all in one collective and wait for nobody; "" for any others."""
    calls = {(stance.call, stance.verb) for stance in stances if stance.state == "waiting" and not stance.waits_for}
    if len(calls) != 1 or any(stance.state != "waiting" or stance.waits_for for stance in stances):
        return ""
    ((call, verb),) = calls
    places = ", ".join(sorted({stance.place for stance in stances if stance.place}))
    root = f" No record keeps the root of a {verb}: see that all ranks name the same." if verb in ROOTED else ""
    return f"All ranks have come to {call}{f' ({places})' if places else ''}, and it is over on none.{root}"


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


def in_collective(
    rank: int,
    record: Record,
    met: Mapping[tuple[str, int], Meeting],
    dumps: Sequence[Dump],
    seconds: float | None,
    place: dict[str, Any],
    behind: Sequence[int] = (),
) -> Whereabouts:
    """The whereabouts of a rank in a collective, for `seconds` if that is known: it waits for members that have not
    called it, for those that called something else under its number, and for those `behind`."""
    meeting = met.get((record.group, record.seq))
    absent = set(meeting.absent) if meeting else set()
    known = {dump.rank for dump in dumps}
    members = set(members_of(record.group, dumps))
    absent |= members - known  # nothing is known of them: they have not even made the group
    if meeting is not None and meeting.differs:
        call = (record.called, record.sizes, record.dtypes)
        absent |= {r for r, other in meeting.came.items() if (other.called, other.sizes, other.dtypes) != call}
    return Whereabouts(
        rank, "waiting", call_of(record), record.looks, seconds=seconds,
        waits_for=tuple(sorted({*absent, *behind} - {rank})), verb=record.called, axis=record.name, seq=record.seq,
        **(place or place_of(record)),
    )  # fmt: skip


def _meeting_call(stand: Stand, n_ranks: int) -> tuple[tuple[Any, ...], set[int], float | None]:
    """The call of MEETING_CALLS in which a rank stands: what ranks that meet in it have in common, who has to come,
    and when it began. Calls of new_group meet under their number: a rank that has called it once more meets nobody."""
    assert stand.position is not None
    call, everybody = stand.position.torch_call, set(range(n_ranks))
    if call == "new_group" and stand.made and not stand.made[-1].over:
        making = stand.made[-1]
        members = set(making.ranks) or everybody
        return (call, len(stand.made), *sorted(members)), members, making.began
    return (call,), everybody, None


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


def call_of(record: Record) -> str:
    """`all_reduce #7 on world`."""
    return f"{record.called} #{record.seq} on {record.name}"


def place_of(record: Record | None) -> dict[str, Any]:
    """File, line and source of the call, as fields of a `Whereabouts`; {} where no frame was kept."""
    caller = record.caller if record else None
    if caller is None:
        return {}
    source = linecache.getline(caller.file, caller.line).strip() if Path(caller.file).is_file() else ""
    return {"file": caller.file, "line": caller.line, "source": source}
