"""00.3: the same weights on every rank, and other noise on each."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from labkit.comm.group import Group
from labkit.course.exercises.problem import Mutant, Problem
from labkit.course.judge.case import Case
from labkit.course.judge.laws import silent
from labkit.course.judge.run_record import aside

DRAWN = 8


def seed_rank(seed: int, make_model: Callable[[], nn.Module], group: Group) -> nn.Module:
    """Make the model of this rank, and leave torch's own generator ready for the noise of this rank.

    `make_model()` draws its weights from torch's own generator. They are those that follow `torch.manual_seed(seed)`:
    equal on all ranks without a message. What torch draws after you return (dropout, rows of data) must

    - differ from rank to rank, and come again when the same rank is seeded with the same `seed`;
    - be nobody else's: not that of any rank in a run with `seed` + 1, + 2, ... nor the numbers that are drawn right
      after `torch.manual_seed(seed)`, `torch.manual_seed(seed + 1)`, ..., which some model's weights are made of."""
    torch.manual_seed(seed)
    model = make_model()
    torch.manual_seed(1_000_003 * seed + group.rank + 1)
    return model


def cases() -> Sequence[Case]:
    """Worlds of 1 to 4 ranks."""
    return [Case.of(3, width=5), Case.of(4, width=3), Case.of(1, width=4)]


def inputs(case: Case) -> Sequence[tuple[Any, ...]]:
    """The same seed for all."""
    return [(random.Random(case.seed).randrange(1000, 100_000), case["width"])] * case.n_ranks


def mlp(width: int) -> nn.Module:
    """What is made."""
    return nn.Sequential(nn.Linear(width, 2 * width), nn.Dropout(0.5), nn.Linear(2 * width, 1))


def play(attempt: Any, group: Group, seed: int, width: int) -> Any:
    """Begin twice with one seed, then with those that follow; count the different streams of noise over all ranks."""

    def begin(seed: int) -> tuple[list[Tensor], Tensor]:
        model = attempt(seed, lambda: mlp(width), group)
        return [each.detach() for each in model.parameters()], torch.rand(DRAWN)

    (weights, noise), (again, same) = begin(seed), begin(seed)
    later = [begin(seed + step)[1] for step in range(1, group.size + 1)]
    raw = [torch.rand(DRAWN, generator=torch.Generator().manual_seed(seed + step)) for step in range(group.size + 1)]
    ours = aside(group)
    now = ours.all_gather(noise[None])
    over_runs = torch.cat([ours.all_gather(torch.stack([noise, *later])), torch.stack(raw)])
    return {
        "weights": weights,
        "the same seed gives the same weights again": all(map(torch.equal, weights, again)),
        "the same seed gives the same noise again": torch.equal(noise, same),
        "different streams of noise, over the ranks": len(now.unique(dim=0)),
        "different streams, over the ranks, the next seeds and the weights": len(over_runs.unique(dim=0)),
    }


def answer(case: Case, given: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
    """The weights of one process; everything else must be different."""
    seed, width = given[0]
    torch.manual_seed(seed)
    weights = [each.detach() for each in mlp(width).parameters()]
    n = case.n_ranks
    return [
        {
            "weights": weights,
            "the same seed gives the same weights again": True,
            "the same seed gives the same noise again": True,
            "different streams of noise, over the ranks": n,
            "different streams, over the ranks, the next seeds and the weights": (n + 1) * (n + 1),
        }
    ] * n


FIRST = "    torch.manual_seed(seed)\n"
RESEED = "torch.manual_seed(1_000_003 * seed + group.rank + 1)"

PROBLEM = Problem(
    key="00.3",
    title="A seed for each rank",
    story="""
Two wishes that pull apart. Data parallelism needs the same weights on every rank, so all must begin with the same seed.
But with the same seed every rank also drops the same activations and draws the same rows: eight ranks, and the
diversity of one. And `seed + rank`, which everybody writes, makes rank 1 of your run repeat rank 0 of the next.
""",
    objectives=("equal weights without a message", "noise that differs by rank and comes again"),
    difficulty=2,
    importance=4,
    minutes=10,
    reference=seed_rank,
    cases=cases,
    inputs=inputs,
    play=play,
    answer=answer,
    laws=(silent(),),
    hints=(
        "Seed twice: once alike on all ranks, for the weights, and once more after that, for the noise.",
        "No collective is needed. The second seed is a number that no other pair of seed and rank comes to.",
        "torch.manual_seed(...); model = make_model(); torch.manual_seed(a large number times seed, plus ...); return "
        "model",
    ),
    mutants=(
        Mutant("no second seed: every rank draws the same noise", "values", ((f"    {RESEED}\n", ""),)),
        Mutant("every rank makes weights of its own", "values",
               ((FIRST, FIRST.replace("seed)", "seed + group.rank)")),)),
        Mutant("seed + rank: rank 1 of this run has the noise of rank 0 in the run with the next seed", "values",
               ((RESEED, "torch.manual_seed(seed + group.rank)"),)),
        Mutant("the noise depends on the rank alone: every run, whatever its seed, has the same", "values",
               ((RESEED, "torch.manual_seed(group.rank)"),)),
        Mutant("the noise comes from the clock, and a run cannot be had again", "values", ((RESEED, "torch.seed()"),)),
        Mutant("the rank is seeded before the weights are made, and not after", "values",
               ((f"    {RESEED}\n", ""), (FIRST, f"    {RESEED}\n"))),
        Mutant("weights are broadcast that were equal already", "wire",
               (("model = make_model()\n", "model = make_model()\n    for p in model.parameters():\n"
                 "        p.data.copy_(group.broadcast(p.data))\n"),)),
    ),
)  # fmt: skip
