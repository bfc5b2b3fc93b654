"""07.3: the updated shards of all ranks become the parameters again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.problem import Mutant, Problem
from labkit.course.judge.case import Case
from labkit.course.judge.laws import peak, sends
from labkit.plan.collectives import sent_bytes

ROOM_BYTES = 24 << 10
Shapes = list[tuple[int, ...]]


def gather_weights(shard: Tensor, shapes: list[tuple[int, ...]], group: Group) -> list[Tensor]:
    """The whole parameters of these shapes, from the shards of all ranks.   [k] on each rank -> one tensor a shape

    Laid end to end in rank order, the shards are all parameters, flat, one after the other, and then padding (n * k is
    a little more than they have elements; what is in the padding has no meaning). The parameters are views of the one
    gathered buffer: no second copy of the weights is made. Each rank sends its shard's bytes n - 1 times, no more."""
    sizes = [math.prod(shape) for shape in shapes]
    whole = group.all_gather(shard)
    windows = whole[: sum(sizes)].split(sizes)
    return [window.view(shape) for window, shape in zip(windows, shapes, strict=True)]


def cases() -> Sequence[Case]:
    """Worlds of 1 to 4 ranks, none of which divides the number of elements."""
    return [
        Case.of(3, shapes=[(90, 110), (77,), (110, 61), (3, 5, 7), ()]),
        Case.of(4, torch.float64, shapes=[(51, 101), (101,), (101, 50)]),
        Case.of(2, torch.bfloat16, shapes=[(251,), (120, 180)]),
        Case.of(1, shapes=[(100, 160), (9,)]),
    ]


def shard_numel(case: Case) -> int:
    """Elements of one shard."""
    return -(-sum(math.prod(shape) for shape in case["shapes"]) // case.n_ranks)


def inputs(case: Case) -> Sequence[tuple[Any, ...]]:
    """Shards of random weights; the padding is not a number, so that nobody takes it for one."""
    k, n_real = shard_numel(case), sum(math.prod(shape) for shape in case["shapes"])
    whole = case.random(case.n_ranks * k)
    whole[n_real:] = torch.nan
    return [(part.clone(), list(case["shapes"])) for part in whole.chunk(case.n_ranks)]


def answer(case: Case, given: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
    """Element by element from the row of all shards."""
    row, at, whole = torch.cat([shard for shard, _ in given]), 0, []
    for shape in given[0][1]:
        whole.append(torch.stack([row[at + i] for i in range(math.prod(shape))]).reshape(shape))
        at += math.prod(shape)
    return [whole] * case.n_ranks


def law(case: Case, rank: int) -> float:
    """(n-1)/n N."""
    whole = case.n_ranks * shard_numel(case) * case.item_bytes
    return sent_bytes("ring", "all_gather", case.n_ranks, whole, rank, case.item_bytes)


PROBLEM = Problem(
    key="07.3",
    title="Gather the new weights",
    story="""
Each rank has stepped on its own run of elements; nobody has a whole new weight. One all-gather of the flat shards mends
that. It is the second half of what an all-reduce would have sent, and the reason why ZeRO-1 costs no more traffic than
DDP. The runs know nothing of matrices: borders lie in the middle of rows, and at the very end there is padding.
""",
    objectives=("one collective for all parameters", "windows of one buffer instead of copies"),
    difficulty=2,
    importance=4,
    minutes=12,
    reference=gather_weights,
    cases=cases,
    inputs=inputs,
    answer=answer,
    laws=(
        sends(law, "each rank sends (n-1)/n N bytes, its own shard n - 1 times", only=("all_gather", "send")),
        peak(lambda case, rank: 1.25 * case.n_ranks * shard_numel(case) * case.item_bytes + ROOM_BYTES,
             "the gathered buffer is held, and no second copy of the weights"),
    ),
    hints=(
        "The shards of all ranks, joined, are the flat row of all parameters: only the end is too long.",
        "`group.all_gather(shard)`: [k] -> [n*k]. Leave out the padding once, at the end of the row; `split(sizes)` "
        "and `view(shape)` copy nothing. `math.prod(())` is 1.",
        "sizes = [math.prod(s) for s in shapes]; whole = group.all_gather(...); windows = whole[:...].split(...); "
        "return each window as a view of its shape",
    ),
    mutants=(
        Mutant("each parameter is copied out of the buffer: for a moment the weights are there twice", "memory",
               (("window.view(shape) for", "window.reshape(shape).clone() for"),)),
        Mutant("nothing is gathered: this rank's own shard is taken for everybody's", "values",
               (("group.all_gather(shard)", "shard.repeat(group.size)"),)),
        Mutant("the padding is taken off the front of the row", "values",
               (("whole[: sum(sizes)]", "whole[len(whole) - sum(sizes) :]"),)),
        Mutant("padding is taken off every shard, though only the end of the row has some", "values",
               (("whole = group.all_gather(shard)",
                 "parts = group.all_gather(shard).chunk(group.size)\n"
                 "    whole = torch.cat([part[: -(-len(part) * group.size + sum(sizes)) or None] for part in parts]"
                 " + [torch.zeros(len(shard) * group.size, dtype=shard.dtype)])"),
                ("import math", "import math\nimport torch"))),
        Mutant("the windows stay flat", "values", (("window.view(shape)", "window"),)),
        Mutant("a buffer of zeros with one's own shard in it is summed over the ranks: twice the bytes", "wire",
               (("group.all_gather(shard)",
                 "torch.zeros(group.size * len(shard), dtype=shard.dtype)\n"
                 "    whole[group.rank * len(shard) :][: len(shard)] = shard\n"
                 "    whole = group.all_reduce_start(whole).wait()"),
                ("import math", "import math\nimport torch"))),
    ),
)  # fmt: skip
