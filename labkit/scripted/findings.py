"""The findings in a script's run, and the checks that were made for them, as values. The words are made of the values,
never the other way round.

    finding    EndedEarly, Starved, ReplicasDiffer, NoGradients, NormsDiffer, CountsDiffer, Mismatched, SlowRank
    check      what was held against what, and how often; what could not be, and why

A healthy run has no finding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from labkit.comm.matched_collectives import Meeting, told
from labkit.comm.replica_notes import (
    WEIGHT,
    CountDifference,
    Difference,
    NormDifference,
    compared,
    count_difference,
    difference,
    names_of,
    norm_difference,
)  # fmt: skip
from labkit.comm.slow_rank import SlowRank
from labkit.scripted.evidence import Evidence


class Finding(Protocol):
    """One thing that stands out."""

    @property
    def words(self) -> str:
        """It as a sentence or two."""
        ...


@dataclass(frozen=True)
class EndedEarly:
    """The run did not end well, for this reason."""

    reason: str

    @property
    def words(self) -> str:
        """The reason."""
        return self.reason


@dataclass(frozen=True)
class Starved:
    """A rank whose memory ran out: what it held by kind, and what it wanted."""

    rank: int
    held: dict[str, int]
    wanted: str

    @property
    def words(self) -> str:
        """The largest of what it held."""
        most = max(self.held, key=lambda kind: self.held[kind])
        total, wanted = sum(self.held.values()), f", wanted {self.wanted} more" if self.wanted else ""
        return f"Rank {self.rank} held {total:,} B in tensors, most of it {most} ({self.held[most]:,} B){wanted}."


@dataclass(frozen=True)
class ReplicasDiffer:
    """Ranks that ought to hold the same weights and do not."""

    difference: Difference

    @property
    def words(self) -> str:
        """The first tensor, when, both values, and the cause if something shows it."""
        d = self.difference
        when = "at the end, after step" if d.at_end else "after step" if d.step else "before step"
        of = "in an element of it" if d.index is not None else "in the sum of its bit patterns"
        values = " and ".join(f"{value:.6g} on rank {rank}" for rank, value in d.values.items())
        also = f", and so do {d.also} other{'s' if d.also > 1 else ''}" if d.also else ""
        why = "parameters of DDP" if d.why == "DDP" else "DTensors placed Replicate"
        cause = f" Cause: {d.cause.value}." if d.cause is not None else ""
        return (
            f"Replicas are not replicas: {d.what} {d.name} differs {when} {d.step or 1}, {of} {values}{also}; as "
            f"{why if d.what == WEIGHT else 'buffers of DDP that no forward changes'} they ought to be the same."
            f"{cause}"
        )


@dataclass(frozen=True)
class NoGradients:
    """DDP was built and steps were taken, and no gradient was sent; parameters that had none at the first step."""

    n_steps: int
    without_gradient: tuple[str, ...]

    @property
    def words(self) -> str:
        """The fact, and the names, which are the cause if they share a bucket with all others."""
        steps = f"{self.n_steps} step{'s were' if self.n_steps > 1 else ' was'} taken"
        names = (
            f" No gradient at the first step had {names_of(self.without_gradient)}: DDP sends a bucket when all of its "
            "gradients have come (find_unused_parameters=True sends without them)."
            if self.without_gradient
            else ""
        )
        return f"DDP was built and {steps}, and it sent 0 B of gradients.{names}"


@dataclass(frozen=True)
class NormsDiffer:
    """Each rank clipped the pieces that it holds by a norm of its own."""

    difference: NormDifference

    @property
    def words(self) -> str:
        """Both norms, and the mend."""
        d = self.difference
        norms = " and ".join(f"{norm:.6g} on rank {rank}" for rank, norm in d.norms.items())
        at = f" at {d.place}" if d.place else ""
        return (
            f"Clipping returned another norm on each rank in step {d.step}{at}: {norms}. It was given the pieces of "
            "FSDP that a rank holds; model.clip_grad_norm_() takes the norm over all ranks."
        )


@dataclass(frozen=True)
class CountsDiffer:
    """Ranks of one DDP that have counted different numbers of steps."""

    difference: CountDifference

    @property
    def words(self) -> str:
        """The counts."""
        counts = ", ".join(f"{count:,} on rank {rank}" for rank, count in self.difference.counts.items())
        if self.difference.taken:
            return f"Ranks of one DDP have taken different numbers of steps: {counts}."
        return f"The optimizer's own count of steps differs between ranks of one DDP: {counts}."


@dataclass(frozen=True)
class Mismatched:
    """A collective that was completed by ranks which brought different things."""

    meeting: Meeting

    @property
    def words(self) -> str:
        """The call of each rank."""
        return f"It was completed, but the {told(self.meeting, ())}. What came out is not what either rank meant."


@dataclass(frozen=True)
class Slow:
    """A rank that the others wait for."""

    rank: SlowRank
    run_s: float

    @property
    def words(self) -> str:
        """The number of times, the seconds of one, and those of all."""
        slow = self.rank
        without = "" if slow.queued_s is None else f"; for {slow.queued_s:.2g} s of it at most it had no core"
        return (
            f"Rank {slow.rank} is slow: of {slow.of} collectives to which a rank came late it was the last to "
            f"{slow.times}, by {slow.median_s:.2g} s in the middle, and the others waited {slow.seconds:.2g} s for it "
            f"alone, {slow.seconds / self.run_s:.0%} of the run{without}."
        )


@dataclass(frozen=True)
class Check:
    """Things that were held against each other: `how_many` of `what`; for 0 of them `why_not` has the reason."""

    what: str
    how_many: int
    why_not: str = ""


def findings(evidence: Evidence) -> list[Finding]:
    """The findings in a run, the most important first."""
    run, out = evidence.run, list[Finding]()
    if run.error is not None:
        out.append(EndedEarly(run.error.reason))
    for rank, at in evidence.starved.items():
        out.append(Starved(rank, at["held"], at["wanted"]))
    out += _wrong(evidence)
    slow = run.tally.arrivals.slow(run.n_ranks, run.seconds, run.noise)
    if slow is not None:
        out.append(Slow(slow, run.seconds))
    return out


def checks(evidence: Evidence) -> list[Check]:
    """The checks of this run: what was held against what, and what was not."""
    run, notes = evidence.run, evidence.rank_notes
    looked = compared(notes)
    unseen = next((seen["unseen"] for seen in run.seen.values() if "unseen" in seen), "")
    not_watched = unseen or ("no step of an optimizer was seen" if not evidence.n_steps else "it was not reached")
    no_memory = next((seen["memory_unseen"] for seen in run.seen.values() if "memory_unseen" in seen), not_watched)
    n_laws = sum(1 for law in evidence.laws if law.times)
    omitted = sorted({reason for note in notes.values() for reason in note.omitted})
    no_replicas = "; ".join(omitted) or (
        "no step of an optimizer was seen" if not evidence.n_steps else "none were recognised"
    )
    steps = f" (before the first step and after {_listed(looked.steps[1:])})" if looked.steps[1:] else ""
    met = len(run.tally.arrivals)
    return [
        Check("collectives of two ranks or more, in verb, size and type", met, "none was recorded on all its ranks"),
        Check(f"tensors that are replicas, bit by bit{steps}", looked.weights + looked.buffers, no_replicas),
        Check("laws of bytes", n_laws, "no gradient of DDP and no gather of FSDP was seen"),
        Check("arrivals at collectives, for a slow rank", met, "none was recorded on all its ranks"),
        Check("steps whose overlap was measured", 2 if evidence.overlap else 0, not_watched),
        Check("steps whose memory was measured", 1 if evidence.memory else 0, no_memory),
    ]


def _listed(steps: tuple[int, ...]) -> str:
    return "step " + ", ".join(map(str, steps))


def _wrong(evidence: Evidence) -> Iterator[Finding]:
    run, notes = evidence.run, evidence.rank_notes
    different = difference(notes, evidence.gradients_were_sent)
    trains_ddp = evidence.ddp_was_built and any(note.ddp_ranks for note in notes.values())
    equal = bool(compared(notes).steps[1:]) and different is None  # however gradients came to the others
    if run.well and trains_ddp and evidence.n_steps and not evidence.gradients_were_sent and not equal:
        without = next((note.without_gradient for note in notes.values() if note.without_gradient), ())
        yield NoGradients(evidence.n_steps, without)
    if different is not None and not different.healed:
        yield ReplicasDiffer(different)
    norms = norm_difference(notes)
    if norms is not None:
        yield NormsDiffer(norms)
    uneven = any(row.origin == "DDP of uneven inputs" for row in evidence.rows)
    counts = count_difference(notes) if run.well and not uneven else None
    if counts is not None:
        yield CountsDiffer(counts)
    yield from (Mismatched(meeting) for meeting in run.tally.odd[:1] if run.well)
