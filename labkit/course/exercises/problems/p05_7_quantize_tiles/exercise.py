"""05.7: a scale for each block of a matrix."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise

LARGEST = 448.0


def quantized(x: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """x in blocks of rows x columns, as (codes, scales), so that x is about codes * the scale of their block.

    x: float32 [M, K], finite. Blocks begin at the upper left; those at the right and lower edges may be smaller.
    scales: float32 [M / rows, K / columns], both rounded up: the largest size in a block / 448, or 1 if all are zero.
    codes: float32 [M, K], x / scale, divided in float32, rounded to `torch.float8_e4m3fn`. x stays as it is."""
    m, k = x.shape
    padded = F.pad(x, (0, -k % columns, 0, -m % rows))
    blocks = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    largest = blocks.abs().amax((1, 3))
    scales = torch.where(largest > 0, largest / 448, 1.0)
    codes = (blocks / scales[:, None, :, None]).view(padded.shape)[:m, :k]
    return codes.to(torch.float8_e4m3fn).float(), scales


def cases() -> list[Case]:
    """Whole blocks, ragged ones, and a matrix smaller than a block."""
    return [
        Case.of(1, m=6, k=32, rows=1, columns=8),
        Case.of(1, m=11, k=29, rows=4, columns=8),
        Case.of(1, m=5, k=7, rows=8, columns=16),
    ]


def inputs(case: Case) -> Inputs:
    """A matrix of many sizes with a large negative outlier, a block of zeros, and a last row unlike the others; in the
    block beside the zeros, numbers that lie half way between two codes, and below them tiny ones."""
    x = case.random(case["m"], case["k"], key=1) * case.random(case["m"], case["k"], key=2).exp()
    x[-1] *= 100.0
    x[case["m"] // 2, case["k"] // 3] = -3000.0
    x[: case["rows"], : case["columns"]] *= float(case["m"] <= case["rows"])
    if case["m"] > case["rows"]:
        scale, ties = halfway(case)
        x[: case["rows"], case["columns"] : 2 * case["columns"]].clamp_(-100, 100)
        x[0, case["columns"] : case["columns"] + 4] = scale * torch.tensor([-LARGEST, *ties])
        x[case["rows"] : 2 * case["rows"], : case["columns"]] *= 1e-20
    return [(x, case["rows"], case["columns"])]


def halfway(case: Case) -> tuple[float, list[float]]:
    """A scale, and three numbers half way between two codes: divided by the scale, their products with it are exact.
    To multiply by a reciprocal of the scale, or of 448, rounds twice, and makes of one of them its neighbour."""
    codes = torch.arange(8, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    between = (codes[1:] + codes[:-1]) / 2

    def ties(scale: float) -> list[float]:
        unit = torch.tensor(scale)
        x, largest = unit * between, LARGEST * unit
        twice = x * (1 / unit), x * (LARGEST / largest), x / (largest * (1 / LARGEST))
        wrong = [coarse(quotient) != coarse(x / unit) for quotient in twice]
        return [float(between[place][-1]) for place in wrong if place.any()]

    def coarse(quotients: Tensor) -> Tensor:
        return quotients.to(torch.float8_e4m3fn).float()

    scale = case.draw(lambda dice: (2 * dice.randrange(2**14, 2**15) + 1) / 2**14, lambda it: len(ties(it)) == 3)
    return scale, ties(scale)


def play(attempt: Any, _: Group, x: Tensor, rows: int, columns: int) -> Any:
    """Codes and scales."""
    codes, scales = attempt(x, rows, columns)
    return {"codes": codes, "scales": scales}


def answer(case: Case, inputs: Inputs) -> Answers:
    """Block by block, each by itself."""
    x, rows, columns = inputs[0]
    codes, scales = torch.zeros_like(x), torch.ones(-(-x.shape[0] // rows), -(-x.shape[1] // columns))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            if (size := float(x[place].abs().max())) > 0:
                scales[i, j] = torch.tensor(size) / LARGEST
            codes[place] = (x[place] / scales[i, j]).to(torch.float8_e4m3fn).float()
    return [{"codes": codes, "scales": scales}]


PROBLEM = exercise(__name__, quantized)
