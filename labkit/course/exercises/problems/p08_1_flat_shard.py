"""08.1: a unit's parameters become one flat shard, and whole again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.problem import Mutant, Problem
from labkit.course.judge.case import Case
from labkit.course.judge.laws import holds
from labkit.course.judge.run_record import weigh

ROOM_BYTES = 8 << 10


class FlatUnit:
    """The parameters of one unit of ZeRO-3, of which this rank keeps 1/n; `unit.shard` is that part.   [k]

    The parameters are laid end to end, padded with zeros until n divides them (by fewer than n), and cut into n runs in
    rank order. When __init__ is over, the unit holds its shard and nothing else: nothing keeps the parameters, or a
    whole flat copy of them, alive. Nothing is sent."""

    def __init__(self, params: list[Tensor], group: Group):
        """params: all parameters of the unit, whole, in one dtype."""
        self.shapes = [p.shape for p in params]
        flat = torch.cat([p.flatten() for p in params])
        padded = F.pad(flat, (0, -len(flat) % group.size))
        self.shard = padded.chunk(group.size)[group.rank].clone()

    def windows(self, whole: Tensor) -> list[Tensor]:
        """Each parameter, in its shape, as a view of a gathered buffer, all shards joined.   [n*k] -> one each"""
        sizes = [math.prod(shape) for shape in self.shapes]
        parts = whole[: sum(sizes)].split(sizes)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


def cases() -> Sequence[Case]:
    """Worlds of 1 to 4 ranks."""
    return [
        Case.of(3, shapes=[(64, 250), (64,), (251, 64), ()]),
        Case.of(4, torch.float64, shapes=[(3, 5, 7), (99, 101)]),
        Case.of(2, torch.bfloat16, shapes=[(201, 200), (1,), (60, 1, 150), (4,)]),
        Case.of(1, shapes=[(120, 110), (7,)]),
    ]


def numel(case: Case) -> int:
    """Elements of a shard."""
    return -(-sum(math.prod(shape) for shape in case["shapes"]) // case.n_ranks)


def inputs(case: Case) -> Sequence[tuple[Any, ...]]:
    """The parameters, the same on all ranks, and a gathered buffer with other numbers in it."""
    params = [case.random(*shape, key=i) for i, shape in enumerate(case["shapes"])]
    whole = case.random(case.n_ranks * numel(case), key=100)
    return [([p.clone() for p in params], whole.clone()) for _ in range(case.n_ranks)]


def play(attempt: Any, group: Group, params: list[Tensor], whole: Tensor) -> Any:
    """Take a unit apart, weigh what is left, and lay a gathered buffer over it."""
    unit = attempt([p.clone() for p in params], group)
    weigh(group)
    windows = unit.windows(whole)
    views = [w.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr() for w in windows]
    return {"shard": unit.shard, "windows": windows, "windows are views": all(views)}


def answer(case: Case, given: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
    """Rows of zeros, filled parameter by parameter."""
    params, whole = given[0]
    row, at, windows = torch.zeros(case.n_ranks * numel(case), dtype=case.dtype), 0, []
    for p in params:
        row[at : at + p.numel()] = p.reshape(-1)
        windows.append(torch.as_strided(whole, p.shape, p.stride(), at).clone())
        at += p.numel()
    return [{"shard": part, "windows": windows, "windows are views": True} for part in row.chunk(case.n_ranks)]


def held(case: Case, rank: int) -> dict[str, tuple[float, float]]:
    """A shard, and some room."""
    return {
        "other": (0, numel(case) * case.item_bytes + ROOM_BYTES),
        "parameters": (0, ROOM_BYTES),
        **dict.fromkeys(("gradients", "optimizer", "activations"), (0, 0)),
    }


PROBLEM = Problem(
    key="08.1",
    title="Take a unit apart",
    story="""
ZeRO-3 keeps 1/n of each weight. Cutting each matrix by itself would cost one message for each matrix, and a padding for
each. So a *unit*, as a rule one block, becomes one flat row with one padding, and one all-gather brings all of it. The
work is bookkeeping, with one trap: a slice of a tensor keeps the whole tensor alive.
""",
    objectives=("one row, one padding, n runs", "a slice keeps everything alive"),
    difficulty=2,
    importance=4,
    minutes=15,
    reference=FlatUnit,
    cases=cases,
    inputs=inputs,
    play=play,
    answer=answer,
    laws=(holds(held, "after __init__ a rank holds its shard, 1/n of the unit, and no whole"),),
    hints=(
        "To come back from the row to the parameters you need their shapes and their order, and no more.",
        "`torch.cat` of flattened parameters [N]; `F.pad(flat, (0, -N % n))`; `chunk(n)[rank]` is a view of the whole "
        "row: clone it. Back: leave out the padding, `split(sizes)`, `view(shape)`.",
        "__init__: shapes = [p.shape ...]; flat = cat; padded = F.pad(...); shard = padded.chunk(n)[rank].clone().  "
        "windows: sizes = [prod(shape) ...]; parts = whole[:N].split(sizes); views of each shape",
    ),
    mutants=(
        Mutant("the shard is a view, so the whole flat row stays alive behind it", "memory", ((".clone()", ""),)),
        Mutant("the unit keeps the parameters themselves, for their shapes", "memory",
               (("        self.shapes = [p.shape for p in params]", "        self.params = params"),
                ("        sizes = [math", "        self.shapes = [p.shape for p in self.params]\n        sizes = "
                                          "[math"))),
        Mutant("there is no padding: the last rank's run is shorter", "values",
               (("F.pad(flat, (0, -len(flat) % group.size))", "flat"),)),
        Mutant("n whole elements are padded though fewer would do", "values",
               (("-len(flat) % group.size", "group.size - len(flat) % group.size + group.size"),)),
        Mutant("every parameter is cut by itself", "values",
               (("flat = torch.cat([p.flatten() for p in params])\n        padded = F.pad(flat, (0, -len(flat) % "
                 "group.size))",
                 "cut = [F.pad(p.flatten(), (0, -p.numel() % group.size)).view(group.size, -1) for p in params]\n"
                 "        padded = torch.cat(cut, 1).flatten()"),)),
        Mutant("windows are copies: what is gathered later does not show in them", "values",
               (("part.view(shape)", "part.reshape(shape) + 0"),)),
        Mutant("the elements are dealt out in turn, not in runs", "values",
               (("padded.chunk(group.size)[group.rank].clone()", "padded[group.rank :: group.size].clone()"),)),
    ),
)  # fmt: skip
