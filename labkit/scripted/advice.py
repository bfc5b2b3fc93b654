"""Advice for a script's run that ended well, as values: what could be cheaper, or is worth a look.

    ManyBackwards     gradients are sent more than once in a step
    Exposed           a collective is on its way and nothing is computed
    Copies            every rank holds what could be sharded
    SmallCollective   a wait for everybody in each step, for a few bytes
    SameDropout       ranks whose data differ, and whose dropout does not
    ChangedPlaces     two collectives in opposite order, by their lines alone

A healthy run may get advice; of a slow or noisy one nothing is said that takes quiet steps for granted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from labkit.comm.matched_collectives import Meeting
from labkit.comm.replica_notes import same_dropout
from labkit.launch.hang_diagnosis import name_ranks
from labkit.scripted.evidence import Evidence
from labkit.scripted.findings import Finding

EXPOSED_SHARE, QUIET_SHARE, TWICE = 0.3, 0.1, 1.5
"""The part of a step that is worth a word if it is exposed; the part of a run without a core up to which two steps are
a fair sample; and how often a gradient is sent in a step where it was sent more than once."""
SMALL_BYTES, WORTH_BYTES, COPIED = 1024, 1 << 20, 0.6


@dataclass(frozen=True)
class ManyBackwards:
    """Gradients that were sent more than once in a step of the optimizer, by DDP or FSDP."""

    what: str
    times: float

    @property
    def words(self) -> str:
        """The number of calls, and what sends them once."""
        once = "no_sync()" if self.what == "DDP" else "no_sync() (FSDP2: set_requires_gradient_sync(False))"
        return (
            f"{self.what} sends its gradients {self.times:.2f} times in a step of the optimizer: with several "
            f"backwards a step, {once} on all but the last sends them once."
        )


@dataclass(frozen=True)
class Exposed:
    """A part of a step in which a collective is on its way and no operator runs."""

    exposed_s: float
    step_s: float
    rank: int
    one_bucket: bool

    @property
    def words(self) -> str:
        """The seconds, and a hint where all gradients travel together."""
        hint = " All gradients are in one bucket, ready only when backward ends: try a smaller bucket_cap_mb."
        return (
            f"Collectives are exposed: in {self.exposed_s:.2g} s of a step of {self.step_s:.2g} s one is on its way "
            f"and no operator runs (rank {self.rank}).{hint if self.one_bucket else ''}"
        )


@dataclass(frozen=True)
class Copies:
    """Bytes of which every rank of DDP holds a copy."""

    state_bytes: int
    peak_bytes: int
    n_ranks: int

    @property
    def words(self) -> str:
        """The bytes that sharding would leave."""
        return (
            f"Every rank holds a copy of {self.state_bytes:,} B of parameters, gradients and optimizer, "
            f"{self.state_bytes / self.peak_bytes:.0%} of its peak: sharding them over {self.n_ranks} ranks (ZeRO, "
            f"FSDP) would leave about {self.state_bytes // self.n_ranks:,} B."
        )


@dataclass(frozen=True)
class SmallCollective:
    """A small collective of the script's own in every step."""

    verb: str
    place: str
    n_bytes: int

    @property
    def words(self) -> str:
        """Its place, and what it costs."""
        return (
            f"{self.verb} at {self.place} is called in every step for {self.n_bytes:,} B: it costs a wait for "
            "everybody each time; do it every so many steps."
        )


@dataclass(frozen=True)
class SameDropout:
    """Ranks of DDP that drop with the same random numbers."""

    ranks: tuple[int, ...]

    @property
    def words(self) -> str:
        """The fact, and the mend."""
        return (
            f"Dropout draws the same numbers on {name_ranks(list(self.ranks))}: their random generators were in the "
            "same state at each step that was looked at. A seed with the rank in it makes the draws independent."
        )


@dataclass(frozen=True)
class ChangedPlaces:
    """Two neighbouring collectives that ranks have called in opposite order, by their lines."""

    before: Meeting
    after: Meeting

    @property
    def words(self) -> str:
        """The lines."""
        first = sorted({record.place for record in self.before.came.values()})
        return (
            f"{self.before.title} and the next met with ranks at different lines ({' and '.join(first)}), in opposite "
            "order: if these are different tensors, each was reduced with the other."
        )


def advice(evidence: Evidence, found_slow: bool) -> list[Finding]:
    """Advice for a run that ended well: what could be cheaper. With a slow rank, time on the wire tells nothing."""
    if not evidence.run.well:
        return []
    out: list[Finding] = [*_backwards(evidence), *([] if found_slow else _exposed(evidence))]
    out += [*_copies(evidence), *_small(evidence)]
    dropping = same_dropout(evidence.rank_notes)
    if dropping:
        out.append(SameDropout(dropping))
    out += [ChangedPlaces(*pair) for pair in evidence.run.tally.swapped[:1]]
    return out


def _backwards(evidence: Evidence) -> Iterator[Finding]:
    for law in evidence.laws:
        times = law.times.get("all_reduce" if law.what == "DDP" else "reduce_scatter", 0.0)
        if times >= TWICE:
            yield ManyBackwards(law.what, times)


def _exposed(evidence: Evidence) -> Iterator[Finding]:
    at, run = evidence.overlap, evidence.run
    noise_s = max(run.noise.queued_s.values(), default=0.0)
    if not at or not at["step_s"] or at["exposed_s"] < EXPOSED_SHARE * at["step_s"]:
        return
    if noise_s > QUIET_SHARE * run.seconds:
        return
    gradients = [row for row in evidence.rows if row.origin == "DDP gradients"]
    calls = sum(row.calls for row in gradients) / evidence.n_steps
    large = sum(row.largest_bytes for row in gradients) >= WORTH_BYTES
    yield Exposed(at["exposed_s"], at["step_s"], int(at["rank"]), bool(gradients) and calls < 1.5 and large)


def _copies(evidence: Evidence) -> Iterator[Finding]:
    if not evidence.memory or evidence.run.n_ranks < 2:
        return
    peak: dict[str, Any] = evidence.memory["peak"]
    total, state = sum(peak.values()), peak["optimizer"] + peak["gradients"] + peak["parameters"]
    if any(law.what == "DDP" for law in evidence.laws) and state >= WORTH_BYTES and state > COPIED * total:
        yield Copies(state, total, evidence.run.n_ranks)


def _small(evidence: Evidence) -> Iterator[Finding]:
    for row in evidence.rows:
        often = evidence.n_steps > 3 and row.calls >= 0.9 * evidence.n_steps
        small = row.origin == "your own" and row.group != "messages" and row.largest_bytes <= SMALL_BYTES
        if often and small:
            yield SmallCollective(row.verb, row.place, row.largest_bytes)
            return
