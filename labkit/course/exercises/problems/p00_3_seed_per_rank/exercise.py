"""00.3: the same weights on every rank, and other noise on each."""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise, silent
from labkit.course.judge.run_record import aside

DRAWN = 8
FAR = (10, 100, 128, 256, 1000, 1024, 4096, 10_000, 65_536)
"""How many seeds further on other runs begin, besides the next ones: numbers that people like."""


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


def cases() -> list[Case]:
    """Worlds of 1 to 4 ranks."""
    return [Case.of(3, width=5), Case.of(4, width=3), Case.of(1, width=4)]


def inputs(case: Case) -> Inputs:
    """The same seed for all."""
    return [(random.Random(case.seed).randrange(1000, 100_000), case["width"])] * case.n_ranks


def mlp(width: int) -> nn.Module:
    """The model that `make_model` makes."""
    return nn.Sequential(nn.Linear(width, 2 * width), nn.Dropout(0.5), nn.Linear(2 * width, 1))


def play(attempt: Any, group: Group, seed: int, width: int) -> Any:
    """Seed twice with one seed, then with others behind it; count the different streams of noise over all ranks."""

    def begin(seed: int) -> tuple[list[Tensor], Tensor]:
        model = attempt(seed, lambda: mlp(width), group)
        return [parameter.detach() for parameter in model.parameters()], torch.rand(DRAWN)

    (weights, noise), (second_weights, second_noise) = begin(seed), begin(seed)
    later = [begin(seed + step)[1] for step in (*range(1, group.size + 1), *FAR)]
    raw = [torch.rand(DRAWN, generator=torch.Generator().manual_seed(seed + step)) for step in range(group.size + 1)]
    ours = aside(group)
    now = ours.all_gather(noise[None])
    over_runs = torch.cat([ours.all_gather(torch.stack([noise, *later])), torch.stack(raw)])
    return {
        "weights": weights,
        "the same seed gives the same weights again": all(map(torch.equal, weights, second_weights)),
        "the same seed gives the same noise again": torch.equal(noise, second_noise),
        "different streams of noise, over the ranks": len(now.unique(dim=0)),
        "different streams, over the ranks, other seeds and the weights": len(over_runs.unique(dim=0)),
    }


def answer(case: Case, inputs: Inputs) -> Answers:
    """The weights that one process draws, and the number of streams if no two are alike."""
    seed, width = inputs[0]
    torch.manual_seed(seed)
    weights = [parameter.detach() for parameter in mlp(width).parameters()]
    n = case.n_ranks
    return [
        {
            "weights": weights,
            "the same seed gives the same weights again": True,
            "the same seed gives the same noise again": True,
            "different streams of noise, over the ranks": n,
            "different streams, over the ranks, other seeds and the weights": n * (1 + n + len(FAR)) + n + 1,
        }
    ] * n


PROBLEM = exercise(__name__, seed_rank, laws=(silent(),))
