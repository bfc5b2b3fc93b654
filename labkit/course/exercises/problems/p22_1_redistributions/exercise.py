"""22.1: the lines of a DTensor program that move bytes, and the bytes that a line before had moved already."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import Any

import torch

from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise

Program = list[tuple[int, list[tuple[str, str]], tuple[str, tuple[int, int], str]]]
Tensors = dict[str, tuple[tuple[int, int], str]]


def redistributions(
    program: list[Any], tensors: dict[str, Any], n_ranks: int, word: int
) -> list[tuple[int, float, float]]:
    """What each line of a DTensor program makes a rank send, and how much of that is sent again.

    tensors    {name: (shape, placement)} at the beginning; a shape has two dims
    program    steps (line, needs, result), in the order in which they run; a line may run several times.
               needs    [(name, placement)]: the operator wants this tensor placed so
               result   (name, shape, placement): the tensor that it makes, perhaps under a name that existed before
    A placement is "S(0)", "S(1)", "R" or "P(sum)". An operator that finds a tensor in another placement has it
    redistributed for itself; the tensor stays as it was, and the next operator has it redistributed once more.
    A rank sends, with chunks of ceil(size / n) along a dim that is cut or will be (`word` bytes an element):
        S to R        (n-1) chunks                  P(sum) to S   (n-1) chunks
        S to other S  (n-1) chunks of a chunk       P(sum) to R   2(n-1)/n of the tensor        from R: nothing
    `again`: those of the bytes for a tensor that some step before had already brought to the same placement.
    -> [(line, bytes that a rank sends, again)], most bytes first, then by line, without the lines that send nothing."""
    placed, sent, repeated, brought = dict(tensors), dict[int, float](), dict[int, float](), set[tuple[str, str]]()
    for line, needs, (result, *made) in program:
        for name, needed in needs:
            shape, held = placed[name]
            cut = {int(placement[2]) for placement in (held, needed) if placement.startswith("S")}
            elements = (n_ranks - 1) * math.prod(math.ceil(k / n_ranks) if d in cut else k for d, k in enumerate(shape))
            if not cut:
                elements *= 2 / n_ranks
            if held not in (needed, "R"):
                sent[line] = sent.get(line, 0) + elements * word
                repeated[line] = repeated.get(line, 0) + elements * word * ((name, needed) in brought)
                brought.add((name, needed))
        placed[result] = tuple(made)
        brought = {pair for pair in brought if pair[0] != result}
    return sorted(((line, n, repeated[line]) for line, n in sent.items() if n), key=lambda row: (-row[1], row[0]))


def cases() -> Sequence[Case]:
    """Programs of several lengths on several meshes."""
    return [
        Case.of(1, meshes=(2, 4), steps=6),
        Case.of(1, meshes=(3, 5), steps=12).among(Case.of(1, meshes=(3, 7), steps=12)),
        Case.of(1, meshes=(1, 4, 8), steps=25),
    ]


def inputs(case: Case) -> Inputs:
    """Programs on each mesh: some drawn step by step, and a loop whose lines need a weight time after time."""
    dice, jobs = case.dice, []
    for n in case["meshes"]:
        for _ in range(3):
            jobs.append(drawn(dice, n, case["steps"]))
        jobs.append(loop(dice, n))
    return [(jobs,)]


def shape_of(dice: Random, n: int) -> tuple[int, int]:
    """A shape that n does not divide along one dim at least, where n > 1."""
    while True:
        shape = dice.randrange(n + 1, 9 * n), dice.randrange(n + 1, 9 * n)
        if n == 1 or (shape[0] % n and shape[1] % n):
            return shape


def drawn(dice: Random, n: int, n_steps: int) -> tuple[Any, ...]:
    """A program whose steps need tensors in other placements than they have; some names are made anew."""
    tensors: Tensors = {name: (shape_of(dice, n), dice.choice(("S(0)", "S(1)", "R", "P(sum)"))) for name in "abcd"}
    program: Program = []
    for _ in range(n_steps):
        needs = [(name, dice.choice(("S(0)", "S(1)", "R"))) for name in dice.sample("abcd", dice.choice((1, 2)))]
        placement = dice.choice(("S(0)", "S(1)", "R", "P(sum)"))
        result = dice.choice("abcdyyyy"), shape_of(dice, n), placement
        program.append((dice.randrange(10, 22), needs, result))
    return program, tensors, n, dice.choice((2, 4, 8))


def loop(dice: Random, n: int) -> tuple[Any, ...]:
    """A training loop: a weight is gathered for a product in each turn, for a norm that is logged, and changed by every
    second step of the optimizer."""
    weight, x = shape_of(dice, n), shape_of(dice, n)
    tensors: Tensors = {"w": (weight, "S(0)"), "x": (x, "S(0)")}
    program: Program = []
    for turn in range(4):
        program.append((31, [("x", "S(0)"), ("w", "R")], ("y", (x[0], weight[0]), "S(0)")))
        program.append((32, [("w", "R")], ("norm", (1, 1), "R")))
        if turn % 2:
            program.append((33, [("w", "S(0)")], ("w", weight, "S(0)")))
    return program, tensors, n, 4


def play(attempt: Any, group: Any, jobs: list[tuple[Any, ...]]) -> Any:
    """Each program's table; bytes as floats, whichever kind of number the attempt has."""
    return [[(line, float(sent), float(repeated)) for line, sent, repeated in attempt(*job)] for job in jobs]


def answer(case: Case, inputs: Inputs) -> Answers:
    """Step by step, from the chunks that torch.chunk makes of a row of numbers."""
    return [[worked_out(*job) for job in inputs[0][0]]]


def longest(size: int, n: int) -> int:
    """The length of the first chunk of a dim."""
    return len(torch.arange(size).chunk(n)[0])


def cost(shape: tuple[int, int], held: str, needed: str, n: int) -> float:
    """Elements that a rank sends, case by case."""
    if needed == held or held == "R" or n == 1:
        return 0.0
    rows, columns = shape
    if held == "P(sum)" and needed == "R":
        return 2 * (n - 1) * rows * columns / n
    if "S(0)" in (held, needed):
        rows = longest(rows, n)
    if "S(1)" in (held, needed):
        columns = longest(columns, n)
    return float((n - 1) * rows * columns)


def worked_out(program: Program, tensors: Tensors, n: int, word: int) -> list[tuple[int, float, float]]:
    """The same table, from a list of all redistributions in their order, each with the age of its tensor."""
    table = dict(tensors)
    age = dict.fromkeys(tensors, 0)
    moves: list[tuple[int, tuple[str, int, str], float]] = []
    for line, needs, (result, shape, placement) in program:
        for name, needed in needs:
            elements = cost(table[name][0], table[name][1], needed, n)
            if elements:
                moves.append((line, (name, age.get(name, 0), needed), elements * word))
        table[result], age[result] = (shape, placement), age.get(result, 0) + 1
    rows = []
    for line in {line for line, _, _ in moves}:
        total = sum(n_bytes for at, _, n_bytes in moves if at == line)
        earlier = [[key for _, key, _ in moves[:place]] for place in range(len(moves))]
        twice = [n_bytes for place, (at, key, n_bytes) in enumerate(moves) if at == line and key in earlier[place]]
        rows.append((line, total, float(sum(twice))))
    return sorted(rows, key=lambda row: (-row[1], row[0]))


PROBLEM = exercise(__name__, redistributions)
