"""Hang autopsy: from what every rank is doing to one paragraph that says who waits for whom, and why for ever.

The reasoning is pure: `diagnose` takes the whereabouts of all ranks and finds those that can never go on.

    a rank that runs Python can go on
    a rank that waits can go on if everybody it waits for can
    a rank that has finished, raised or died will not come any more
    all ranks that are left wait for ever
"""

from __future__ import annotations

import linecache
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from labkit.launch.blackbox import BlackBox, CodePosition, Reading

FEW = 3
"""From so many ranks on, those that stand at the same place share a line."""
STATES = ("waiting", "running", "finished", "raised", "dead", "idle")


@dataclass(frozen=True)
class Whereabouts:
    """One rank at a moment. `state` is one of STATES; `waits_for` are the ranks that have not come yet; `seconds` is
    how long it has waited, None where nothing measures that; `detail` are words for states that need more."""

    rank: int
    state: str
    call: str = ""
    shape: str = ""
    file: str = ""
    line: int = 0
    source: str = ""
    seconds: float | None = None
    waits_for: tuple[int, ...] = ()
    verb: str = ""
    axis: str = ""
    seq: int = 0
    detail: str = ""

    @property
    def place(self) -> str:
        """`line 3 of the cell` for a notebook cell, `train.py:3` for a file."""
        if not self.file:
            return ""
        name = os.path.basename(self.file)
        return f"line {self.line} of the cell" if is_cell(self.file) else f"{name}:{self.line}"

    def __str__(self) -> str:
        return self.told((self.rank,))

    def told(self, ranks: Sequence[int]) -> str:
        """The line for this rank, or for several that stand at the same place."""
        where = f", {self.place}" + (f": {self.source}" if self.source else "") if self.file else ""
        has, stands = ("has", "is") if len(ranks) == 1 else ("have", "are")
        if self.state == "waiting":
            awaited = f", waiting for {name_ranks(self.waits_for)}" if self.waits_for else ", everybody has come"
            activity = f"{self.call} {self.shape}".rstrip()
            if self.seconds is None:
                return f"{name_ranks(ranks)} {stands} in {activity}{awaited}{where}"
            return f"{name_ranks(ranks)} {has} been in {activity} for {self.seconds:.1f} s{awaited}{where}"
        words = {
            "running": self.detail or f"{stands} running Python",
            "finished": f"{has} finished",
            "raised": self.detail,
            "dead": self.detail,
            "idle": self.detail or f"{stands} not part of this call",
        }
        about_one = self.state in ("raised", "dead", "idle") and self.detail
        prefix = "each of " if len(ranks) > 1 and about_one else ""
        return f"{prefix}{name_ranks(ranks)} {words[self.state]}{where}"


@dataclass(frozen=True)
class Autopsy:
    """The whereabouts of every rank when a call was given up.

    headline   one sentence
    ranks      `Whereabouts`, by rank
    stuck      ranks that could never have gone on
    waits      (a, b): rank a waits for rank b
    """

    headline: str
    ranks: tuple[Whereabouts, ...]
    stuck: tuple[int, ...] = ()

    @property
    def waits(self) -> tuple[tuple[int, int], ...]:
        """(a, b) for each rank a that waits for a rank b."""
        return tuple((stance.rank, awaited) for stance in self.ranks for awaited in stance.waits_for)

    def words(self) -> str:
        """The paragraph: headline, then a line for each rank."""
        return "\n".join([self.headline, *(f"  {line}" for line in lines(self.ranks))])

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre>{escape(self.words())}</pre>"


def lines(ranks: Iterable[Whereabouts]) -> list[str]:
    """A line for each rank; one line for three and more of them that stand at the same place."""
    places: dict[Whereabouts, list[Whereabouts]] = {}
    for stance in ranks:
        places.setdefault(replace(stance, rank=0, seconds=None), []).append(stance)
    rows = []
    for stances in places.values():
        if len(stances) < FEW:
            rows += [(stance.rank, str(stance)) for stance in stances]
        else:  # the one that came last: the others have been there for longer
            last = min(stances, key=lambda stance: stance.seconds or 0.0)
            rows.append((stances[0].rank, last.told([stance.rank for stance in stances])))
    return [line for _, line in sorted(rows)]


def is_cell(file: str) -> bool:
    """True if a file name stands for a notebook cell."""
    return file.startswith("<") or "ipykernel_" in file or file.startswith("cell ")


def name_ranks(ranks: Sequence[int]) -> str:
    """`rank 2`, `ranks 0, 1 and 3`, `ranks 0 to 62`."""
    ranks = sorted(ranks)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 4 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def observe(
    box: BlackBox,
    rank: int,
    state: str,
    position: CodePosition | None,
    now: float,
    detail: str = "",
    call_id: int | None = None,
) -> Whereabouts:
    """One rank's whereabouts from its black box (a verb of a Group) or from its stack (a call of torch itself).

    With `call_id`, a rank whose page is still of an earlier call has not begun this one, and waits for nobody."""
    if state != "running":
        return Whereabouts(rank, state, detail=detail)
    read = box.read(rank)
    if call_id not in (None, read.call_id):
        return Whereabouts(rank, "running")
    if read.entry is not None:
        return _in_verb(box, rank, read, position, now)
    if position is None:
        return Whereabouts(rank, "running")
    at: dict[str, Any] = {"file": position.file, "line": position.line, "source": position.source}
    if position.torch_call:
        return _in_torch(rank, position, max(0.0, now - read.entered), at)
    return Whereabouts(rank, "running", seconds=max(0.0, now - read.entered), **at)


def _in_verb(box: BlackBox, rank: int, read: Reading, position: CodePosition | None, now: float) -> Whereabouts:
    entry = read.entry
    assert entry is not None
    if entry.peer is not None:
        missing: tuple[int, ...] = (entry.peer,)
    else:
        come = (r for r in entry.ranks if box.posted(r, read.call_id, entry.axis, entry.ranks, entry.seq) is not None)
        missing = tuple(sorted(set(entry.ranks) - set(come) - {rank}))
    source = linecache.getline(entry.file, entry.line).strip()
    if not source and position is not None and position.line == entry.line:
        source = position.source
    shape = f"{tuple(entry.shape)} {entry.dtype}" if entry.dtype else ""
    return Whereabouts(
        rank, "waiting", str(entry), shape, entry.file, entry.line, source, max(0.0, now - read.entered),
        missing, entry.verb, entry.axis, entry.seq,
    )  # fmt: skip


def _in_torch(rank: int, position: CodePosition, seconds: float, at: dict[str, Any]) -> Whereabouts:
    if position.torch_peer is not None:
        call = f"torch.distributed.{position.torch_call} with rank {position.torch_peer}"
        return Whereabouts(
            rank, "waiting", call, "", seconds=seconds, waits_for=(position.torch_peer,), verb=position.torch_call, **at
        )
    flight = position.flight[-1] if position.flight else {}
    name, seq = flight.get("verb", position.torch_call), int(flight.get("seq", 0))
    shape = f"{flight['shapes']} {flight.get('dtypes', '')}" if flight.get("shapes") else ""
    call = f"torch.distributed {name}" + (f" #{seq}" if seq else "")
    axis = str(flight.get("group", "world"))
    members = tuple(flight.get("ranks", ()))
    return Whereabouts(
        rank, "waiting", call, shape, seconds=seconds, verb=name, axis="torch " + axis, seq=seq, waits_for=members, **at
    )


def join_torch(seen: Sequence[Whereabouts]) -> list[Whereabouts]:
    """In collectives of torch itself, leave in `waits_for` only the members that are not in the same collective."""
    taking_part = {stance.rank for stance in seen if stance.state != "idle"}
    out = []
    for stance in seen:
        if stance.state == "waiting" and stance.axis.startswith("torch "):
            members = set(stance.waits_for or taking_part)
            present = {
                o.rank
                for o in seen
                if o.state == "waiting" and (o.axis, o.seq, o.verb) == (stance.axis, stance.seq, stance.verb)
            }
            stance = replace(stance, waits_for=tuple(sorted(members - present - {stance.rank})))
        out.append(stance)
    return out


def diagnose(seen: Sequence[Whereabouts]) -> Autopsy | None:
    """The ranks that wait for ever, or None if everybody may still go on."""
    by_rank = {stance.rank: stance for stance in seen}
    free = {stance.rank for stance in seen if stance.state == "running"}
    free |= {
        stance.rank for stance in seen if stance.state == "waiting" and (not stance.waits_for or _meet(stance, by_rank))
    }
    while True:
        freed = {
            stance.rank
            for stance in seen
            if stance.state == "waiting"
            and stance.rank not in free
            and all(awaited in free for awaited in stance.waits_for)
        }
        if not freed:
            break
        free |= freed
    stuck = tuple(stance.rank for stance in seen if stance.state == "waiting" and stance.rank not in free)
    return Autopsy(_headline(stuck, by_rank), tuple(seen), stuck) if stuck else None


def _meet(stance: Whereabouts, by_rank: Mapping[int, Whereabouts]) -> bool:
    """True if a send and its receive have both been called: then the message is on its way."""
    if len(stance.waits_for) != 1 or stance.verb not in ("send", "recv"):
        return False
    peer = by_rank.get(stance.waits_for[0])
    return (
        peer is not None
        and peer.waits_for == (stance.rank,)
        and {stance.verb, peer.verb} == {"send", "recv"}
        and stance.axis == peer.axis
        and stance.seq == peer.seq
    )


def _headline(stuck: Sequence[int], by_rank: Mapping[int, Whereabouts]) -> str:
    first = by_rank[stuck[0]]
    together = [r for r in stuck if (by_rank[r].axis, by_rank[r].call) == (first.axis, first.call)]
    gone = sorted({o for r in stuck for o in by_rank[r].waits_for if by_rank[o].state not in ("waiting", "running")})
    if gone:
        wait = "wait" if len(together) > 1 else "waits"
        awaited = "" if first.verb in ("send", "recv") else f" for {name_ranks(gone)}"
        return f"Hang: {name_ranks(together)} {wait} in {first.call}{awaited}, {_absence(gone, by_rank)}."
    collectives = all(by_rank[r].verb not in ("send", "recv") for r in stuck)
    if (
        collectives
        and len({by_rank[r].call for r in stuck}) > 1
        and len({(by_rank[r].axis, by_rank[r].seq) for r in stuck}) == 1
    ):
        where = "; ".join(f"rank {r} in {by_rank[r].call}" for r in stuck)
        return f"Hang: the ranks are in different collectives: {where}."
    circle = "; ".join(_wait(by_rank[r]) for r in stuck)
    return f"Deadlock: {circle}: everybody waits for somebody who waits."


def _wait(stance: Whereabouts) -> str:
    if stance.verb in ("send", "recv"):  # the call names the other rank already
        return f"rank {stance.rank} waits in {stance.call}"
    return f"rank {stance.rank} in {stance.call} waits for {name_ranks(stance.waits_for)}"


def _absence(gone: Sequence[int], by_rank: Mapping[int, Whereabouts]) -> str:
    single = len(gone) == 1
    state, detail = by_rank[gone[0]].state, by_rank[gone[0]].detail
    if state == "finished":
        return "which has finished without it" if single else "which have finished without it"
    if state == "idle" and not detail:
        return "which is not part of this call" if single else "which are not part of this call"
    return f"which {detail}"
