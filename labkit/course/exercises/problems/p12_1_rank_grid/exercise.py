"""12.1: the position of a rank on three axes, and the rank at a position."""

import random
from typing import Any

import torch

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise


class RankGrid:
    """Ranks on three axes: dp outermost, then pp, and tp innermost, so that neighbours in rank are neighbours in tp.

    For dp = 2, pp = 2, tp = 2: rank 0 is at dp 0, pp 0, tp 0; rank 1 at tp 1; rank 2 at pp 1, tp 0; rank 4 at dp 1."""

    def __init__(self, dp: int, pp: int, tp: int):
        """The number of ranks along each axis."""
        self.dp, self.pp, self.tp = dp, pp, tp

    def coords(self, rank: int) -> dict[str, int]:
        """{"dp": .., "pp": .., "tp": ..} of a rank. Raises ValueError for a rank that does not exist."""
        if not 0 <= rank < self.dp * self.pp * self.tp:
            raise ValueError(f"there are {self.dp * self.pp * self.tp} ranks, got {rank}")
        return {"dp": rank // (self.pp * self.tp), "pp": rank // self.tp % self.pp, "tp": rank % self.tp}

    def rank(self, dp: int, pp: int, tp: int) -> int:
        """The rank at a position."""
        return (dp * self.pp + pp) * self.tp + tp


def cases() -> list[Case]:
    """Three axes of different sizes, in several orders; axes of one rank; axes that are alike."""
    return [
        Case.of(1, sizes=order)
        for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0), (3, 1, 3), (3, 3, 0), (0, 0, 0), (0, 1, 0))
    ]


def inputs(case: Case) -> Inputs:
    """Random sizes of the axes. The case's `sizes` are places in the list of them, of which place 3 is size 1."""
    drawn = [*random.Random(case.seed).sample(range(2, 9), 3), 1]
    return [tuple(drawn[place] for place in case["sizes"])]


def play(attempt: Any, group: Group, dp: int, pp: int, tp: int) -> Any:
    """The coordinates of all ranks, the ranks at all positions, and the outcome for three ranks that do not exist."""
    grid = attempt(dp, pp, tp)
    places = [(i, j, k) for i in range(dp) for j in range(pp) for k in range(tp)]
    outside = [refused(grid, rank) for rank in (-1, dp * pp * tp, 2 * dp * pp * tp)]
    coords = [grid.coords(rank) for rank in range(dp * pp * tp)]
    return {"coords": coords, "rank": [grid.rank(*place) for place in places], "outside": outside}


def refused(grid: Any, rank: int) -> str:
    """The outcome for a rank that does not exist."""
    try:
        grid.coords(rank)
    except ValueError:
        return "ValueError"
    return "accepted"


def answer(case: Case, inputs: Inputs) -> Answers:
    """The coordinates and ranks from torch's own numbering of a tensor with three dimensions."""
    ranks = torch.arange(torch.tensor(inputs[0]).prod().item()).reshape(inputs[0])
    coords = [dict(zip(("dp", "pp", "tp"), place.tolist(), strict=True)) for place in (ranks >= 0).nonzero()]
    return [{"coords": coords, "rank": ranks.flatten().tolist(), "outside": ["ValueError"] * 3}]


PROBLEM = exercise(__name__, RankGrid)
