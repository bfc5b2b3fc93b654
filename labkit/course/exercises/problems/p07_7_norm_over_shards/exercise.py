"""07.7: the norm of gradients that nobody has whole, and clipping by it."""

from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise, sends


def clip_sharded_(shard: Tensor, n_real: int, replicated: list[Tensor], max_norm: float, group: Group) -> Tensor:
    """The norm of all gradients, on every rank; they are scaled in place so that it is at most `max_norm`.

    shard [k]       this rank's part of the sharded gradients. Only the first `n_real` elements are real; what follows
                    is padding, and may hold anything
    replicated      gradients that every rank has whole, the same on all: they count once
    Returns the norm before clipping, a scalar in float32: sqrt of the sum of squares of every element that there is.
    Gradients may be in half precision, whose squares overflow: sum in float32. If the norm is below `max_norm` nothing
    is scaled. One scalar is sent, in one all_reduce."""
    local = shard[:n_real].float().square().sum()
    common = sum(g.float().square().sum() for g in replicated)
    norm = (group.all_reduce(local) + common).sqrt()
    if norm > max_norm:
        for g in (shard, *replicated):
            g.mul_(max_norm / norm)
    return norm


def cases() -> list[Case]:
    """Worlds of 1 to 4 ranks; in one of them the norm is below `max_norm`, so that nothing is scaled, and in one the
    last rank has no real element."""
    return [
        Case.of(3, numel=1000, max_norm=1.0, size=1.0),
        Case.of(4, torch.float16, numel=1402, max_norm=2.0, size=300.0),
        Case.of(2, numel=301, max_norm=1e6, size=1.0),
        Case.of(4, numel=9, max_norm=1.5, size=1.0),
        Case.of(1, torch.bfloat16, numel=77, max_norm=0.5, size=1.0),
    ]


def inputs(case: Case) -> Inputs:
    """A run of a long row for each rank, with junk behind the row's end, and two gradients that all ranks have."""
    n, k = case.n_ranks, -(-case["numel"] // case.n_ranks)
    row = case["size"] * case.random(n * k, dtype=torch.float64)
    row[case["numel"] :] = 50 * case["size"]
    common = [
        (case["size"] * case.random(*shape, key=9, dtype=torch.float64)).to(case.dtype) for shape in ((7, 9), (31,))
    ]
    return [
        (row[r * k : (r + 1) * k].to(case.dtype), max(0, min(k, case["numel"] - r * k)), [g.clone() for g in common],
         case["max_norm"])
        for r in range(n)
    ]  # fmt: skip


def play(attempt: Any, group: Group, shard: Tensor, n_real: int, replicated: list[Tensor], max_norm: float) -> Any:
    """The norm, and the gradients afterwards."""
    norm = attempt(shard, n_real, replicated, max_norm, group)
    return {"norm": norm, "shard": shard[:n_real], "replicated": replicated}


def answer(case: Case, inputs: Inputs) -> Answers:
    """The norm and gradients that torch's own clipping gives, on one row of all elements, in float64."""
    rows = [shard[:n_real].double() for shard, n_real, *_ in inputs]
    common = [g.double() for g in inputs[0][2]]
    whole = torch.nn.Parameter(torch.zeros(sum(map(torch.numel, [*rows, *common])), dtype=torch.float64))
    whole.grad = torch.cat([*rows, *(g.flatten() for g in common)])
    norm = torch.nn.utils.clip_grad_norm_([whole], case["max_norm"])
    parts = whole.grad.split([len(row) for row in rows] + [g.numel() for g in common])
    clipped = [part.view(g.shape).to(case.dtype) for part, g in zip(parts[case.n_ranks :], common, strict=True)]
    return [
        {"norm": norm.float(), "shard": part.to(case.dtype), "replicated": clipped} for part in parts[: case.n_ranks]
    ]


def law(case: Case, rank: int) -> tuple[float, float]:
    """(least, most) bytes that a rank sends: an all-reduce of one scalar of up to 8 bytes."""
    n = case.n_ranks
    return (0, 0) if n == 1 else (1, 2 * (n - 1) * 8 // n)


PROBLEM = exercise(
    __name__,
    clip_sharded_,
    changes=(0, 2),
    laws=(sends(law, "one scalar is all-reduced", only=("all_reduce",), messages=lambda case, rank: 1),),
)
