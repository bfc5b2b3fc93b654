"""The verdict on the dumps of a job that has stopped: who waits for whom, and where those chains of waiting end.

    mismatch     ranks met in one collective and brought different things
    circle       ranks wait for each other, over one group or several
    absent       a chain ends at a rank that is in nothing and has not come
    missing      a chain ends at a rank that has left no dump
    unfinished   a chain ends at a collective to which all have come, and which is over on none
    moving       ... and which is over on some: it was on its way
    quiet        nobody waits

A dump shows a moment, and has no clock of the wait: its seconds are those that a watchdog's log has, or are not told.
The first state of this list that fits is the verdict; the sentences below it tell what is a fact of that state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from labkit.comm.dump_folder import DumpFolder
from labkit.comm.dumps import Dump, Record
from labkit.comm.matched_collectives import ROOTED, Meeting, meetings, members_of, told, unmet
from labkit.launch.hang_diagnosis import Autopsy, Whereabouts, diagnose, lines, name_ranks
from labkit.launch.postmortem import call_of, in_collective, place_of

MISMATCH, CIRCLE, ABSENT, MISSING, UNFINISHED, MOVING, QUIET = (
    "mismatch", "circle", "absent", "missing", "unfinished", "moving", "quiet",
)  # fmt: skip
STATES = (MISMATCH, CIRCLE, ABSENT, MISSING, UNFINISHED, MOVING, QUIET)
LISTED = 4
"""So many collectives of one kind are told one by one."""


@dataclass(frozen=True)
class DumpVerdict:
    """What dumps show. `state` is one of STATES; `sentences` say it, the first cause first; `ranks` has the
    whereabouts of every rank of the job, also of those without a dump; `stuck` are ranks that wait."""

    state: str
    sentences: tuple[str, ...]
    ranks: tuple[Whereabouts, ...]
    stuck: tuple[int, ...]

    @property
    def well(self) -> bool:
        """True if nothing is wrong as far as these dumps show."""
        return self.state in (MOVING, QUIET)

    @property
    def headline(self) -> str:
        """The sentences, a line for each."""
        return "\n".join(self.sentences)

    @property
    def autopsy(self) -> Autopsy:
        """The same for the picture."""
        return Autopsy(self.headline, self.ranks, self.stuck)

    def words(self) -> str:
        """The paragraph for people: the sentences, then a line for each rank with the last that is known of it."""
        return "\n".join([self.headline, *(f"  {line}" for line in lines(self.ranks))])


def verdict_of(folder: DumpFolder) -> DumpVerdict:
    """The verdict on all dumps and logs of a folder."""
    return _Evidence(folder).verdict()


class _Evidence:
    """The records of all ranks, held against each other."""

    def __init__(self, folder: DumpFolder) -> None:
        self.folder, self.dumps = folder, folder.dumps
        self.by_rank = {dump.rank: dump for dump in folder.dumps}
        self.met = {(meeting.group, meeting.seq): meeting for meeting in meetings(folder.dumps)}
        # NCCL tells when the device begins a collective; in a job where no record was ever begun, nobody tells
        self.begins = any(record.state in ("started", "completed") for dump in folder.dumps for record in dump.records)
        self.stances = tuple(
            Whereabouts(rank, "idle", detail="left no dump") if rank in folder.missing else self._stance(rank)
            for rank in sorted([*self.by_rank, *folder.missing])
        )
        self.by_stance = {stance.rank: stance for stance in self.stances}

    def verdict(self) -> DumpVerdict:
        """The first state that fits, with its sentences."""
        wrong = unmet(self.dumps)
        waiting = [stance for stance in self.stances if stance.state == "waiting"]
        come, going = self._complete(waiting)
        sentences = {
            MISMATCH: [f"Mismatch: {told(meeting, self.dumps)}." for meeting in wrong if meeting.differs],
            CIRCLE: self._circle(waiting),
            ABSENT: self._absent(wrong),
            MISSING: self._missing(waiting),
            UNFINISHED: self._unfinished(come),
            MOVING: [*(self._moving(meeting) for meeting in going[:LISTED]), *self._met(waiting)],
            QUIET: [
                "Nothing is wrong in these dumps: every collective was called by all ranks of its group, and alike."
            ],
        }
        state = next(state for state in STATES if sentences[state])
        out = list(sentences[state])
        if state in (MISMATCH, CIRCLE, ABSENT) and self.folder.missing:
            out.append(self._left_none())
        stuck = tuple(stance.rank for stance in waiting if state not in (MOVING, QUIET))
        return DumpVerdict(state, tuple(out), self.stances, stuck)

    # -- where each rank stands --------------------------------------------------------------------------------------

    def _stance(self, rank: int) -> Whereabouts:
        dump = self.by_rank[rank]
        if not dump.flying:
            last = dump.records[-1] if dump.records else None
            was = f"; its last was {call_of(last)}" if last else ""
            return Whereabouts(rank, "idle", detail=f"was in no collective{was}", **place_of(last))
        record = dump.flying[0]
        if record.p2p:
            return self._in_message(dump, record)
        behind = self._queued_behind(rank, record) if self.begins else ()
        return in_collective(rank, record, self.met, self.dumps, self._seconds(rank, record), {}, behind)

    def _queued_behind(self, rank: int, record: Record) -> tuple[int, ...]:
        """Ranks that have called this collective, but whose device has not begun it and is in an older call."""
        meeting = self.met[record.group, record.seq]
        return tuple(
            other
            for other, came in meeting.came.items()
            if other != rank and not came.retired and came.state != "started"
            and self.by_rank[other].flying[0].number < came.number
        )  # fmt: skip

    def _in_message(self, dump: Dump, record: Record) -> Whereabouts:
        members = dump.members.get(record.group, ())
        peer = record.peer
        other = members[peer] if peer is not None and peer < len(members) else peer
        towards = "from" if record.called == "recv" else "to"
        call = f"{record.called} {towards} {'a rank that is not named' if other is None else f'rank {other}'}"
        awaited = () if other is None or self._answers(dump.rank, other, record) else (other,)
        return Whereabouts(
            dump.rank, "waiting", call, record.looks, waits_for=awaited, verb=record.called, axis="messages",
            seq=0, **place_of(record),
        )  # fmt: skip

    def _answers(self, rank: int, other: int, record: Record) -> bool:
        """True if the other rank's device is in the opposite message now."""
        dump = self.by_rank.get(other)
        flying = dump.flying[0] if dump and dump.flying else None
        if dump is None or flying is None or not flying.p2p or flying.group != record.group:
            return False
        members = dump.members.get(record.group, ())
        peer = members[flying.peer] if flying.peer is not None and flying.peer < len(members) else flying.peer
        return peer == rank and flying.called != record.called

    def _seconds(self, rank: int, record: Record) -> float | None:
        for event in self.folder.timed_out:
            if event.rank == rank and event.seq == record.seq and event.group in ("", record.group):
                return event.seconds
        return None

    # -- where the chains end ----------------------------------------------------------------------------------------

    def _complete(self, waiting: Sequence[Whereabouts]) -> tuple[list[Meeting], list[Meeting]]:
        """The oldest collectives in flight to which all have come: those that are over on no rank, or that a watchdog
        has given up, and the others."""
        ends: dict[tuple[str, int], Meeting] = {}
        for stance in waiting:
            record = self.by_rank[stance.rank].flying[0]
            if not stance.waits_for and not record.p2p:
                ends.setdefault((record.group, record.seq), self.met[record.group, record.seq])
        given_up = {(event.rank, event.seq) for event in self.folder.timed_out}
        come, going = list[Meeting](), list[Meeting]()
        for meeting in ends.values():
            members = members_of(meeting.group, self.dumps)
            on_none = len(members) > 1 and set(meeting.flying) == set(members)
            named = any((rank, meeting.seq) in given_up for rank in meeting.flying)
            (come if on_none or named else going).append(meeting)
        return come, going

    def _circle(self, waiting: Sequence[Whereabouts]) -> list[str]:
        # who waits for somebody outside is no part of a circle, but of a chain that may lead to one
        inside = {stance.rank: stance for stance in waiting}
        while True:
            leaving = [r for r, stance in inside.items() if not set(stance.waits_for) & set(inside)]
            if not leaving:
                break
            for rank in leaving:
                del inside[rank]
        while inside:  # and who is waited for by nobody in it only waits for the circle
            awaited = {rank for stance in inside.values() for rank in stance.waits_for}
            if awaited >= set(inside):
                break
            inside = {rank: stance for rank, stance in inside.items() if rank in awaited}
        autopsy = diagnose(_only_among(inside))
        return [autopsy.headline] if autopsy else []

    def _absent(self, wrong: Sequence[Meeting]) -> list[str]:
        out = []
        for meeting in wrong:
            gone = [rank for rank in meeting.absent if self.by_stance[rank].state == "idle"]
            if gone and not meeting.differs:
                wait = "waits" if len(meeting.flying) == 1 else "wait"
                place = f" at {meeting.usual.place}" if meeting.usual.place else ""
                out.append(
                    f"Hang: {name_ranks(meeting.flying)} {wait} in {meeting.title}{place} for {name_ranks(gone)}, "
                    "which never came."
                )
        for stance in self.stances:  # messages are in no meeting
            gone = [rank for rank in stance.waits_for if rank in self.by_rank and self.by_stance[rank].state == "idle"]
            if stance.axis == "messages" and gone:
                out.append(f"Hang: rank {stance.rank} waits in {stance.call}, which is in no call.")
        return out

    def _missing(self, waiting: Sequence[Whereabouts]) -> list[str]:
        missing = self.folder.missing
        if not missing:
            return []
        out = [self._left_none()]
        by_call: dict[tuple[str, str, tuple[int, ...]], list[int]] = {}
        for stance in waiting:
            without = tuple(rank for rank in stance.waits_for if rank in missing)
            if without:
                by_call.setdefault((stance.call, stance.place, without), []).append(stance.rank)
        for (call, place, without), ranks in list(by_call.items())[:LISTED]:
            wait, at = "waits" if len(ranks) == 1 else "wait", f" at {place}" if place else ""
            out.append(
                f"{name_ranks(ranks).capitalize()} {wait} in {call}{at}, for {name_ranks(without)} as far as can be "
                f"known: whether {'it' if len(without) == 1 else 'they'} called it is in no record."
            )
        return out

    def _left_none(self) -> str:
        missing = self.folder.missing
        its = "its log" if len(missing) == 1 else "their logs"
        raised = [event for event in self.folder.raised if event.rank in missing]
        if raised:
            first = raised[0]
            return (
                f"{name_ranks(missing).capitalize()} left no dump, and the log says of rank {first.rank}: {first.text} "
                f"({first.place}). Repair that first."
            )
        return (
            f"{name_ranks(missing).capitalize()} left no dump: look at {its} first, for the first exception. Who fails "
            "first often answers no request for a dump."
        )

    def _unfinished(self, come: Sequence[Meeting]) -> list[str]:
        out = []
        for meeting in come[:LISTED]:
            ranks, place = sorted(meeting.came), f" at {meeting.usual.place}" if meeting.usual.place else ""
            over = [rank for rank in ranks if rank not in meeting.flying]
            end = f"over on {name_ranks(over)} alone" if over else "over on none of them"
            out.append(
                f"All {len(ranks)} ranks of {meeting.name} ({name_ranks(ranks)}) have come to {meeting.title}{place}, "
                f"alike, and it is {end}: nobody is missing, no order of calls explains it, so look below the program."
            )
            begun = [rank for rank in meeting.flying if meeting.came[rank].state == "started"]
            late = [rank for rank in meeting.flying if rank not in begun]
            if begun and late:
                out.append(
                    f"On {name_ranks(late)} the device has not begun it: what was queued before it there, a kernel "
                    "that does not end or another stream, holds it."
                )
        if len(come) > LISTED:
            out.append(f"So it is in {len(come) - LISTED} groups more.")
        if come:
            out.append(what_is_below(come[0].usual.backend, come[0].usual.called))
        if come and not self.folder.timed_out:
            out.append("In dumps that were asked for while the job ran, it may have been on its way.")
        return out

    def _moving(self, meeting: Meeting) -> str:
        over = [rank for rank in sorted(meeting.came) if rank not in meeting.flying]
        if not over:
            return (
                f"{name_ranks(meeting.flying).capitalize()} had {meeting.title} in flight, and all have come to it: it "
                "was moving."
            )
        return (
            f"{meeting.title} is over on {name_ranks(over)} and in flight on {name_ranks(meeting.flying)}: it was "
            "moving."
        )

    def _met(self, waiting: Sequence[Whereabouts]) -> list[str]:
        ranks = [stance.rank for stance in waiting if stance.axis == "messages" and not stance.waits_for]
        return [f"{name_ranks(ranks).capitalize()} had messages in flight whose other sides had come."] if ranks else []


def what_is_below(backend: str, verb: str) -> str:
    """The places to look at when all ranks are in a collective of this backend, and it does not end."""
    root = (
        f" Besides, no record keeps the root of a {verb}: see that all ranks name the same." if verb in ROOTED else ""
    )
    if backend == "nccl":
        return (
            "Look at the network card and its links (ibstat, ethtool), the driver's log (dmesg, Xid), NCCL's own "
            f"(NCCL_DEBUG=INFO), and kernels on the same GPU that do not end.{root}"
        )
    user = backend or "the backend"
    return f"Look at the network card that {user} uses, the firewall and the kernel's log (dmesg).{root}"


def _only_among(inside: Mapping[int, Whereabouts]) -> list[Whereabouts]:
    return [
        replace(stance, waits_for=tuple(rank for rank in stance.waits_for if rank in inside))
        for stance in inside.values()
    ]
