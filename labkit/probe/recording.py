"""A Recording: what one Clock saw, or what the clocks of all ranks saw on one time axis, and the shares of the time.

    recording = Recording.of([reply.value for reply in cluster.run(step)])       # each rank returns clock.recording
    recording.shares()        Shares(compute=0.71, exposed=0.06, bubble=0.23): they add up to 1
    recording.overlap         0.84: so much of the communication is hidden behind compute
    recording.mfu(flops, peak_flops)
    recording.to_perfetto("step.json")

The head of `rows.py` defines compute, exposed, bubble and wire. A recording of one rank cannot tell whether another
rank came late, so it counts all waiting as exposed. Merged recordings can tell.

    overlap   share of the time on the wire during which the main thread computes: |wire & compute| / |wire|
    bubble    share of the ranks' time in which they wait for a rank that has not come yet, and not for the wire.
              plan.schedule's `bubble` of measured or simulated spans counts the wire, too: compare 1 - compute
    mfu       flops of the model / (seconds x ranks x peak flop/s of a rank)
              Chowdhery et al., arXiv:2204.02311, appendix B: model flops, without those of recomputing

The end of an asynchronous verb is known only when the program asks, in `wait` or `done`. Until then a collective counts
as on the wire; a message counts from when its receiver waits for it. So exposed time is exact, while `overlap` is an
upper bound where nobody asked for long, and leaves out messages that had arrived before anybody asked.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from labkit.probe import trace
from labkit.probe.intervals import common, seconds
from labkit.probe.rows import MatchedMessage, Parts, RankTimeline, messages, parts


class Shares(NamedTuple):
    """Shares of the time, each 0 to 1; together 1."""

    compute: float
    exposed: float
    bubble: float


@dataclass(frozen=True)
class Recording:
    """A `RankTimeline` for each rank, by rank. `merged`: all times are on one axis from 0, else on a rank's own."""

    rows: tuple[RankTimeline, ...]
    merged: bool = False

    @classmethod
    def of(cls, recordings: Iterable[Recording]) -> Recording:
        """The recordings of several ranks on one time axis, their clocks' offsets taken out; 0 is the first begin.

        ValueError for none at all, two of one rank, one that is merged already, clocks that were not compared with the
        same rank's clock, and two ranks of one collective of which one had ended before the other began."""
        recorded = list(recordings)
        rows = sorted((row for recording in recorded for row in recording.rows), key=lambda row: row.rank)
        ranks = [row.rank for row in rows]
        if not rows or len(set(ranks)) < len(ranks) or any(recording.merged for recording in recorded):
            raise ValueError(
                f"give the recording of each rank once, as its clock made it; got ranks {ranks}"
                + ", merged already" * any(recording.merged for recording in recorded)
            )
        if len(references := {row.reference for row in rows}) > 1:
            raise ValueError(
                f"clocks were compared with those of ranks {sorted(references)}: give Clock a group of all the ranks"
            )
        origin = min(row.begin - row.offset_s for row in rows)
        shifted = tuple(row.shifted(-row.offset_s - origin) for row in rows)
        first, last = min(shifted, key=lambda row: row.end), max(shifted, key=lambda row: row.begin)
        apart_s = last.begin - first.end - first.error_s - last.error_s
        if apart_s > 0 and any(entry.peer is None and last.rank in entry.ranks for entry in first.entries):
            raise ValueError(
                f"rank {first.rank}'s recording ends {apart_s:.3f} s before that of rank {last.rank} begins, and has "
                "collectives of both: they are not of one step; let every rank return its recording of the same step"
            )
        return cls(shifted, True)

    def during(self, name: str) -> Recording:
        """The same, cut to one span: on every rank from the first begin to the last end of its spans of this name.

        ValueError, with the names there are, if a rank has none."""
        rows = []
        for row in self.rows:
            named = [span for span in row.spans if span.name == name]
            if not named:
                names = ", ".join(sorted({repr(span.name) for span in row.spans})) or "none"
                raise ValueError(f"rank {row.rank} has no span {name!r}; it has {names}")
            rows.append(row._replace(begin=min(s.t0 for s in named), end=max(s.t1 for s in named)))
        return Recording(tuple(rows), self.merged)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that are in it."""
        return tuple(row.rank for row in self.rows)

    @property
    def seconds(self) -> float:
        """From the first rank's begin to the last one's end."""
        return max(row.end for row in self.rows) - min(row.begin for row in self.rows)

    @cached_property
    def messages(self) -> tuple[MatchedMessage, ...]:
        """Every message of which both ends are in the recording."""
        return tuple(messages(self.rows))

    @cached_property
    def parts(self) -> Mapping[int, Parts]:
        """rank -> its compute, exposed, bubble and wire, as intervals in seconds."""
        return parts(self.rows, self.messages)

    def shares(self, rank: int | None = None) -> Shares:
        """The shares of the time of one rank, or of all. ValueError for a rank that is not there, and for no time."""
        chosen, whole = self._chosen(rank), self.seconds
        if whole <= 0:
            raise ValueError(f"a recording of {whole} seconds has no shares: do something while the clock runs")
        compute, exposed, bubble = (sum(seconds(part[k]) for part in chosen) for k in range(3))
        total = compute + exposed + bubble  # whole times ranks, but for rounding
        return Shares(compute / total, exposed / total, bubble / total)

    def wire_s(self, rank: int | None = None) -> float:
        """Seconds during which something was on its way from or to this rank; of all ranks: their sum."""
        return sum(seconds(part.wire) for part in self._chosen(rank))

    def hidden_s(self, rank: int | None = None) -> float:
        """Seconds of `wire_s` during which the rank computed."""
        return sum(seconds(common(part.wire, part.compute)) for part in self._chosen(rank))

    def exposed_s(self, rank: int | None = None) -> float:
        """Seconds during which this rank had nothing to do but wait for the wire; of all ranks: their sum."""
        return sum(seconds(part.exposed) for part in self._chosen(rank))

    @property
    def overlap(self) -> float:
        """`overlap_share` of all ranks."""
        return overlap_share(self)

    @property
    def bubble(self) -> float:
        """`bubble_share` of all ranks."""
        return bubble_share(self)

    def mfu(self, flops: float, peak_flops: float) -> float:
        """Model flops utilisation: `flops` of the model in this time, on all ranks together, over what the devices
        could have done, `peak_flops` a second each. ValueError for a peak or a time that is not above 0."""
        if not (peak_flops > 0 and self.seconds > 0 and 0 <= flops < math.inf):
            raise ValueError(
                f"mfu needs flops of 0 or more, a peak and a time above 0; got {flops:g} flops, {peak_flops:g} flop/s, "
                f"{self.seconds:g} s"
            )
        return flops / (self.seconds * len(self.rows) * peak_flops)

    def to_perfetto(self, path: str | Path) -> Path:
        """Write a trace that ui.perfetto.dev opens (see `trace.py`), and return its path."""
        return trace.write(path, self.rows, self.parts, self.messages)

    def _chosen(self, rank: int | None) -> list[Parts]:
        if rank is not None and rank not in self.parts:
            raise ValueError(f"rank {rank} is not in this recording; it has {', '.join(map(str, self.ranks))}")
        return list(self.parts.values()) if rank is None else [self.parts[rank]]

    def __getstate__(self) -> dict[str, Any]:
        return {"rows": self.rows, "merged": self.merged}  # what was computed from them is computed again

    def __repr__(self) -> str:
        lines = [f"Recording of {len(self.rows)} ranks, {self.seconds:.6f} s"]
        for rank in self.ranks if self.seconds > 0 else ():
            words = "  ".join(f"{name} {share:6.1%}" for name, share in self.shares(rank)._asdict().items())
            lines.append(f"  rank {rank:3d}  {words}  overlap {overlap_share(self, rank):6.1%}")
        return "\n".join(lines)


def overlap_share(recording: Recording, rank: int | None = None, alone_s: float | None = None) -> float:
    """Share of the communication, of one rank or of all, that is hidden behind compute: 0 to 1.

    1 where nothing was on the wire: nothing is exposed. With `alone_s`, the seconds that the same communication takes
    with nothing beside it (the `exposed_s` of a run that waits for each verb at once), it is 1 - exposed_s / alone_s,
    which does not depend on when the end of a verb was seen. ValueError for an `alone_s` that is not above 0."""
    if alone_s is not None and not alone_s > 0:
        raise ValueError(f"alone_s is how long the communication takes by itself, above 0; got {alone_s:g} s")
    if alone_s is not None:
        return max(0.0, 1 - recording.exposed_s(rank) / alone_s)
    wire = recording.wire_s(rank)
    return min(1.0, recording.hidden_s(rank) / wire) if wire > 0 else 1.0


def bubble_share(recording: Recording, rank: int | None = None) -> float:
    """Share of the time, of one rank or of all, in which there was nothing to do and nothing on its way: 0 to 1.

    From the first rank's begin to the last one's end; what a rank lacks at either end counts.
    ValueError for no time."""
    return recording.shares(rank).bubble
