"""05.3: a loss scale that finds its own size."""

import random
from typing import Any

import torch

from labkit.comm.group import Group
from labkit.comm.private import private
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise


class DynamicScale:
    """A loss scale that halves at an overflow and doubles after `interval` good steps in a row.

    `scale` is the factor for the next loss, a float that begins as given and is never bounded."""

    def __init__(self, scale: float, interval: int):
        """scale: the first factor; interval: good steps in a row, 1 or more, after which it doubles."""
        self.scale, self.interval, self.good = scale, interval, 0

    def update(self, overflow: bool) -> bool:
        """Take note of a step whose gradients overflowed, or did not; return whether its weights may be stepped.

        An overflow halves `scale` and is no good step: the row begins anew. The last good step of a row of `interval`
        doubles `scale`, and then another row begins."""
        self.good = 0 if overflow else self.good + 1
        if overflow:
            self.scale /= 2
        elif self.good == self.interval:
            self.scale, self.good = self.scale * 2, 0
        return not overflow


def cases() -> list[Case]:
    """Scales that begin far too high or far too low, one of them no power of two; rows of one step; ceilings far above
    2^24 and below 1."""
    return [
        Case.of(1, scale=2.0**24, interval=3, steps=90, log2_ceiling=10),
        Case.of(1, scale=2.0**-3, interval=5, steps=120, log2_ceiling=10),
        Case.of(1, scale=384.0, interval=1, steps=40, log2_ceiling=10),
        Case.of(1, scale=2.0**30, interval=2, steps=60, log2_ceiling=44),
        Case.of(1, scale=2.0**4, interval=2, steps=60, log2_ceiling=-12),
    ]


def inputs(case: Case) -> Inputs:
    """The ceiling of each step: a random walk, with eight steps in the middle at which it is 2^14 times lower."""
    draw = random.Random(case.seed)
    height, ceilings = float(case["log2_ceiling"]), []
    for step in range(case["steps"]):
        height += draw.uniform(-1.5, 1.5)
        storm = 14.0 if case["steps"] // 2 < step < case["steps"] // 2 + 9 else 0.0
        ceilings.append(2.0 ** (height - storm))
    return [(case["scale"], case["interval"], ceilings)]


def play(attempt: Any, _: Group, scale: float, interval: int, ceilings: list[float]) -> Any:
    """Run the scale: a step overflows if the scale is above its ceiling, so a mistake changes the steps after it."""
    scaler, scales, taken = attempt(scale, interval), [], []
    for ceiling in ceilings:
        taken.append(scaler.update(scaler.scale > ceiling))
        scales.append(float(scaler.scale))
    return {"scales": scales, "steps taken": taken}


def answer(case: Case, inputs: Inputs) -> Answers:
    """The scales and steps that the kernel of torch's own GradScaler gives."""
    first, interval, ceilings = inputs[0]
    scale, good = torch.tensor(first), torch.tensor(0, dtype=torch.int32)
    update = private("torch._amp_update_scale_")
    scales, taken = [], []
    for ceiling in ceilings:
        overflow = scale.item() > ceiling
        update(scale, good, torch.tensor(float(overflow)), 2.0, 0.5, interval)
        scales.append(scale.item())
        taken.append(not overflow)
    return [{"scales": scales, "steps taken": taken}]


PROBLEM = exercise(__name__, DynamicScale)
