"""The rank that all others wait for, by when ranks came to their collectives; and the rule that tells it from noise.

    collective #7    rank 0  |....x              late 0.041 s: the time from the last but one to the last;
                     rank 1  |.x                 "the others waited for it alone"
                     rank 2  |..x

Somebody always comes last. So a rank is slow only if all of this holds:

    large         the collectives to which somebody was FLOOR_S late or more are counted, and no others
    significant   with equal ranks each would be the last of them once in n; that this rank came last so often has
                  a chance below CHANCE (Chernoff's bound of the binomial tail, times n ranks)
    steady        in both halves of the run it cost the others a share of LATE_SHARE, and more than all the others cost
    not noise     most of it is left when the seconds in which its threads were ready and no core was free are taken off

The clocks of ranks are those of one machine. Pure: numbers in, values out.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

FLOOR_S = 0.005
"""The least lateness at one collective that counts: longer than a scheduler's slice on a machine with work to do."""
CHANCE = 1e-3
LATE_SHARE = 0.1
"""The least part of the run, and of each of its halves, that is worth a word."""
FEWEST = 4


class Late(NamedTuple):
    """The number of times, of all, that a rank came last to a collective, and the seconds of waiting for it."""

    rank: int
    times: int
    of: int
    seconds: float


@dataclass(frozen=True)
class Noise:
    """What the machine did to the ranks. `queued_s` has, of each rank where the system tells it, the seconds in which
    its threads were ready to run and no core was free; `crowded` says that ranks or load exceeded the cores."""

    queued_s: Mapping[int, float]
    crowded: bool


@dataclass(frozen=True)
class SlowRank:
    """A rank that the others wait for: it was the last, and late by FLOOR_S or more, `times` of the `of` times that
    somebody was; `seconds` in all, `median_s` at one collective, of which `queued_s` is the machine's doing at most.
    `chance` bounds the probability that this happens to any of n equal ranks."""

    rank: int
    times: int
    of: int
    seconds: float
    median_s: float
    queued_s: float | None
    chance: float


class CollectiveArrivals:
    """The rank that came last to each collective of two ranks or more, and its lateness; 20 bytes a collective."""

    def __init__(self) -> None:
        """Nothing has met yet."""
        self._last, self._late_ns, self._at_ns = array("i"), array("q"), array("q")

    def __len__(self) -> int:
        return len(self._last)

    def add(self, came_ns: Mapping[int, int]) -> None:
        """Note a collective by the moment at which each of its ranks called it, in nanoseconds of one clock."""
        *_, second, last = sorted(came_ns.values())
        self._last.append(max(came_ns, key=lambda rank: came_ns[rank]))
        self._late_ns.append(last - second)
        self._at_ns.append(last)

    def late(self, n_ranks: int) -> list[Late]:
        """All ranks, by how long the others waited for them alone, longest first."""
        times, seconds = [0] * n_ranks, [0.0] * n_ranks
        for rank, late_ns in zip(self._last, self._late_ns, strict=True):
            times[rank] += 1
            seconds[rank] += late_ns / 1e9
        late = [Late(rank, times[rank], len(self), seconds[rank]) for rank in range(n_ranks)]
        return sorted(late, key=lambda entry: -entry.seconds)

    def slow(self, n_ranks: int, run_s: float, noise: Noise) -> SlowRank | None:
        """The slow rank by the rule at the head of this file, if there is one, in a run of `run_s` seconds."""
        if len(self) < FEWEST or not run_s > 0:
            return None
        rank, *_ = self.late(n_ranks)[0]
        rows = sorted(zip(self._at_ns, self._last, self._late_ns, strict=True))
        large = [(last, late / 1e9) for _, last, late in rows if late >= FLOOR_S * 1e9]
        own = [late for last, late in large if last == rank]
        odds = chance(len(own), len(large), n_ranks)
        if len(large) < FEWEST or odds >= CHANCE:
            return None
        for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
            for_it = sum(late for _, last, late in half if last == rank)
            for_others = sum(late for _, last, late in half if last != rank)
            if for_it <= for_others or for_it < LATE_SHARE * (half[-1][0] - half[0][0]):
                return None
        queued_s = noise.queued_s.get(rank)
        seconds = sum(own)
        if queued_s is None and noise.crowded:
            return None
        left_s = seconds - (queued_s or 0.0)
        if left_s < LATE_SHARE * run_s or left_s < seconds / 2:
            return None
        return SlowRank(rank, len(own), len(large), seconds, _median(own), queued_s, odds)


def chance(times: int, of: int, n_ranks: int) -> float:
    """An upper bound of the probability that one of `n_ranks` equal ranks is last at least `times` of `of` times.

    Chernoff: n exp(-of KL(times/of, 1/n)); exact for one rank if it is always last."""
    share, fair = times / of if of else 0.0, 1 / n_ranks
    if share <= fair:
        return 1.0
    divergence = share * math.log(share / fair)
    if share < 1:
        divergence += (1 - share) * math.log((1 - share) / (1 - fair))
    return min(1.0, n_ranks * math.exp(-of * divergence))


def _median(numbers: Sequence[float]) -> float:
    return sorted(numbers)[len(numbers) // 2]
