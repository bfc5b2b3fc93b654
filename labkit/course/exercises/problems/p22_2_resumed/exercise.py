"""22.2: the state of a job that other ranks saved: weights, the optimizer's moments, and where the data stood."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise, silent

ROWS = 3
"""Sequences that a rank can take at once."""


def resumed(saved: dict[str, Any], names: list[str], rank: int, n_ranks: int) -> tuple[dict[str, Any], list[list[int]]]:
    """What rank `rank` of `n_ranks` needs to go on with a job that other ranks have saved.

    saved["n_ranks"]      how many ranks there were
    saved["weights"]      {name: [chunk of old rank 0, of old rank 1, ...]}: cut along dim 0 as `torch.chunk` does
    saved["names"]        the names of the parameters, in the order in which the old optimizer had them
    saved["optimizer"]    {place in that order: {"step": number, "exp_avg": chunks, "exp_avg_sq": chunks}}
    saved["step"]         how many steps of the optimizer were done
    saved["rows"], saved["accumulated"]    sequences of an old rank in a micro-batch; micro-batches of a step
    names                 the order of the new optimizer
    -> ({name: (weight, exp_avg, exp_avg_sq, step)}, micro-batches): names in the new order, own chunks along dim 0 as
    Shard(0) places them, with 0 rows on a rank behind the last chunk; and the numbers of the sequences that this rank
    takes in the next step. A step takes as many sequences as before the restart, the next ones of 0, 1, 2, ...; rank r
    takes every n-th of them from the r-th on, in micro-batches of saved["rows"], of which the last one may have fewer.
    Nothing is sent."""

    def own(chunks: list[Tensor]) -> Tensor:
        whole = torch.cat(chunks)
        longest = -(-len(whole) // n_ranks)
        return whole[rank * longest : (rank + 1) * longest].clone()

    state = {}
    for name in names:
        moments = saved["optimizer"][saved["names"].index(name)]
        state[name] = own(saved["weights"][name]), own(moments["exp_avg"]), own(moments["exp_avg_sq"]), moments["step"]
    per_step = saved["rows"] * saved["n_ranks"] * saved["accumulated"]
    first = saved["step"] * per_step
    samples = list(range(first + rank, first + per_step, n_ranks))
    return state, [samples[k : k + saved["rows"]] for k in range(0, len(samples), saved["rows"])]


def cases() -> Sequence[Case]:
    """To fewer ranks, to more, to as many; sizes that no number of ranks divides, and one smaller than the ranks."""
    return [
        Case.of(3, saved=4, accumulated=1),
        Case.of(4, torch.float64, saved=3, accumulated=2),
        Case.of(4, torch.bfloat16, saved=4, accumulated=3).among(Case.of(4, torch.bfloat16, saved=4, accumulated=2)),
        Case.of(1, saved=2, accumulated=2),
        Case.of(2, saved=1, accumulated=2),
    ]


def shapes_of(case: Case) -> dict[str, tuple[int, ...]]:
    """Shapes by name: a bias shorter than the ranks are many, and matrices of several lengths."""
    dice, n = case.dice, max(case.n_ranks, case["saved"])
    return {
        "embedding.weight": (dice.randrange(5 * n, 8 * n), 3),
        "block.weight": (dice.randrange(2 * n + 1, 3 * n), 4),
        "block.bias": (dice.randrange(2 * n + 1, 3 * n),),
        "gate.bias": (max(1, n - 2),),
    }


def inputs(case: Case) -> Inputs:
    """The folder, which every rank can read, and the order of the new optimizer, which is never the old one."""
    dice, shapes, n = case.dice, shapes_of(case), case["saved"]
    old, new = list(shapes), list(shapes)
    while old == new or old[0] == new[0]:
        dice.shuffle(old)
        dice.shuffle(new)

    def chunks(place: int, shape: tuple[int, ...]) -> list[Tensor]:
        whole = case.random(*shape, key=place)
        pieces = [piece.clone() for piece in whole.chunk(n)]
        return [*pieces, *(whole[:0].clone() for _ in range(n - len(pieces)))]

    step = dice.randrange(20, 400)
    saved = {
        "n_ranks": n, "names": old, "step": step, "rows": ROWS, "accumulated": case["accumulated"],
        "weights": {name: chunks(k, shape) for k, (name, shape) in enumerate(shapes.items())},
        "optimizer": {
            k: {"step": step - k, "exp_avg": chunks(10 + k, shapes[name]), "exp_avg_sq": chunks(20 + k, shapes[name])}
            for k, name in enumerate(old)
        },
    }  # fmt: skip
    return [(saved, new) for _ in range(case.n_ranks)]


def play(attempt: Any, group: Any, saved: dict[str, Any], names: list[str]) -> Any:
    """Resume, and hand back the state with its names in their order."""
    state, batches = attempt(saved, names, group.rank, group.size)
    return [[name, *state[name]] for name in state], [list(batch) for batch in batches]


def answer(case: Case, inputs: Inputs) -> Answers:
    """Cut by torch's own chunk from tensors that are put together; sequences are dealt out one by one."""
    saved, names = inputs[0]
    answers = []
    dealt: list[list[int]] = [[] for _ in range(case.n_ranks)]
    count = ROWS * case["saved"] * case["accumulated"]
    for place in range(count):
        dealt[place % case.n_ranks].append(saved["step"] * count + place)
    for rank in range(case.n_ranks):
        state = []
        for name in names:
            kept = next(saved["optimizer"][k] for k, old in enumerate(saved["names"]) if old == name)
            wholes = [torch.cat(chunks) for chunks in (saved["weights"][name], kept["exp_avg"], kept["exp_avg_sq"])]
            pieces = [(*whole.chunk(case.n_ranks), *([whole[:0]] * case.n_ranks))[rank] for whole in wholes]
            state.append([name, *pieces, kept["step"]])
        batches = list[list[int]]()
        for number in dealt[rank]:
            if not batches or len(batches[-1]) == ROWS:
                batches.append([])
            batches[-1].append(number)
        answers.append((state, batches))
    return answers


PROBLEM = exercise(__name__, resumed, play=play, laws=(silent(),))
