"""04.2: micro-batches and ranks of different length, and a gradient in which every token weighs the same."""

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise, sends

IGNORED, WIDTH, CLASSES = -100, 5, 7
COUNT_BYTES = 8


def backward_by_tokens(model: nn.Module, micros: list[tuple[Tensor, Tensor]], group: Group) -> None:
    """Add to each `.grad` this rank's part of the gradient of the mean token loss over all micro-batches of all ranks.

    A micro-batch is (x, targets), [k, d] and [k] with any k; a target of -100 is padding and does not count, and it may
    be that none counts. `F.cross_entropy` of `model(x)` [k, c] is the loss of a token. Afterwards somebody else takes
    the mean of all gradients over the ranks: that must be the gradient of (sum of all token losses) / (number of tokens
    that count). Send one all_reduce of one number. Some token counts somewhere."""
    own = sum(int((targets != -100).sum()) for _, targets in micros)
    total = group.all_reduce(torch.tensor(own, device=group.device))
    for x, targets in micros:
        loss = F.cross_entropy(model(x), targets, reduction="sum", ignore_index=-100)
        (loss * group.size / total).backward()


def cases() -> Sequence[Case]:
    """Worlds of 1 to 4 ranks; the last rank of some has only padding, and those of one have thousands of tokens."""
    shapes = ((3, 4, False, 9), (1, 4, False, 9), (4, 2, True, 9), (2, 3, True, 9), (2, 2, False, 9000))
    return [
        Case.of(n, torch.float64, micros=micros, empty_rank=empty, longest=longest)
        for n, micros, empty, longest in shapes
    ]


def micros_of(draw: random.Random, case: Case, rank: int) -> list[tuple[Tensor, Tensor]]:
    """Micro-batches of a rank, with random lengths and random padding; the last one is padding alone."""
    micros = []
    for micro in range(case["micros"]):
        length = draw.randint(case["longest"] // 3, case["longest"])
        targets = torch.tensor([draw.randrange(CLASSES) for _ in range(length)])
        counted = draw.randint(1, length - 1)
        if micro == case["micros"] - 1 or (case["empty_rank"] and rank == case.n_ranks - 1):
            counted = 0
        targets[counted:] = IGNORED
        micros.append((case.random(length, WIDTH, key=100 * rank + micro), targets))
    return micros


def inputs(case: Case) -> Inputs:
    """Micro-batches by rank, and weights that are the same everywhere.

    Micro-batches are drawn again while a wrong divisor, the number of ranks or of micro-batches, would do as well, or,
    where there are thousands of tokens, a number that bfloat16 or float16 can hold."""
    weights = case.random(WIDTH, WIDTH, key=7001), case.random(CLASSES, WIDTH, key=7002)

    def make(draw: random.Random) -> list[list[tuple[Tensor, Tensor]]]:
        return [micros_of(draw, case, rank) for rank in range(case.n_ranks)]

    def tells(micros: list[list[tuple[Tensor, Tensor]]]) -> bool:
        by_rank = [torch.cat([targets for _, targets in batches]) for batches in micros]
        counts = torch.tensor([int((targets != IGNORED).sum()) for targets in by_rank])
        total, coarse = int(counts.sum()), {counts.to(dtype).sum().item() for dtype in (torch.bfloat16, torch.float16)}
        other = sum(map(len, by_rank)) / total not in (case.n_ranks, case["micros"])
        return other and (case["longest"] < 256 or total not in coarse)

    return [(micros, *weights) for micros in case.draw(make, tells)]


def play(attempt: Any, group: Group, micros: list[tuple[Tensor, Tensor]], first: Tensor, second: Tensor) -> Any:
    """This rank's gradients, before anybody takes their mean."""
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, CLASSES, bias=False)
    ).double()
    for p, weight in zip(model.parameters(), (first, second), strict=True):
        p.data.copy_(weight)
        p.grad = torch.ones_like(p)  # something is there already
    attempt(model, micros, group)
    return [p.grad for p in model.parameters()]


def answer(case: Case, inputs: Inputs) -> Answers:
    """The gradients of each rank: the sum over its tokens that count, divided by the number of all that count, times
    the number of ranks."""
    total = sum(int((targets != IGNORED).sum()) for micros, *_ in inputs for _, targets in micros)
    grads = []
    for micros, *weights in inputs:
        leaves = [weight.clone().requires_grad_() for weight in weights]
        kept = [(x[targets >= 0], targets[targets >= 0]) for x, targets in micros]
        x, targets = torch.cat([a for a, _ in kept]), torch.cat([b for _, b in kept])
        scores = torch.tanh(x @ leaves[0].T) @ leaves[1].T
        picked = scores.log_softmax(1)[torch.arange(len(x)), targets]
        grads.append([1 + g for g in torch.autograd.grad(-picked.sum() * case.n_ranks / total, leaves)])
    return grads


def count_bytes(case: Case, rank: int) -> tuple[float, float]:
    """(least, most) bytes that a rank sends: an all-reduce of a number of 8 bytes or fewer, 2 (n-1)/n of it."""
    return 0, 2 * (case.n_ranks - 1) / case.n_ranks * COUNT_BYTES


PROBLEM = exercise(
    __name__,
    backward_by_tokens,
    laws=(
        sends(
            count_bytes,
            "each rank sends one number, in one all_reduce",
            only=("all_reduce",),
            messages=lambda case, rank: 1,
        ),
    ),
)
