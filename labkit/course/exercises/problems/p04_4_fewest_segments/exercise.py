"""04.4: into how few segments a stack of blocks must be cut to fit under a cap."""

import math
import random
from typing import Any

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise

Stacked = tuple[int, int, int, int]


def fewest_segments(n_layer: int, layer_bytes: int, input_bytes: int, cap_bytes: int) -> int:
    """The number of segments that recomputes least and fits under the cap; 0 if no number fits.

    A stack of n_layer equal layers is cut in s segments, 1 <= s <= n_layer, as evenly as can be: the longest, which is
    the last one, has ceil(n_layer / s) layers. Each layer holds layer_bytes inside, and is given input_bytes. All
    segments but the last keep only their input, s - 1 of them, and run again in backward; at the highest moment the
    inside of the longest segment is held besides. That sum may be as large as cap_bytes. Of two numbers that recompute
    the same, give the smaller."""
    for segments in range(1, n_layer + 1):
        held = (segments - 1) * input_bytes + math.ceil(n_layer / segments) * layer_bytes
        if held <= cap_bytes:
            return segments
    return 0


def lengths(n_layer: int, segments: int) -> list[int]:
    """Layers of each segment, the longer ones last."""
    short, longer = divmod(n_layer, segments)
    return [short + (index >= segments - longer) for index in range(segments)]


def played(n_layer: int, layer_bytes: int, input_bytes: int, segments: int) -> tuple[int, int]:
    """(bytes at the highest moment, layers that run again): forward and backward, layer by layer."""
    runs = lengths(n_layer, segments)
    live = highest = (segments - 1) * input_bytes
    n_rerun = 0
    for place, length in reversed(list(enumerate(runs))):
        last = place == segments - 1
        n_rerun += 0 if last else length
        live += length * layer_bytes
        highest = max(highest, live)
        live -= length * layer_bytes + (0 if last else input_bytes)
    return highest, n_rerun


def stacks(case: Case) -> dict[str, Stacked]:
    """Stacks and caps by name: caps that are met exactly, caps between, and caps a byte below the least that fits."""
    draw = random.Random(case.seed)
    named: dict[str, Stacked] = {}
    for number in range(case["n_stacks"]):
        n_layer, unit = draw.randint(7, 60), draw.randint(1000, 9000)
        ratio = draw.choice((1, 2, 16))
        layer_bytes, input_bytes = ratio * unit + draw.randrange(unit // 4), unit
        chosen = draw.randint(1, n_layer)
        exactly = played(n_layer, layer_bytes, input_bytes, chosen)[0]
        least = min(played(n_layer, layer_bytes, input_bytes, s)[0] for s in range(1, n_layer + 1))
        plain = n_layer * layer_bytes
        caps = {"a cap that is met exactly": exactly, "some cap": draw.randint(least, plain),
                "the least that fits": least, "a byte too little": least - 1,
                "room for the plain stack": plain + draw.randrange(unit)}  # fmt: skip
        for label, cap in caps.items():
            named[f"stack {number}: {label}"] = (n_layer, layer_bytes, input_bytes, cap)
    return named


def cases() -> list[Case]:
    """Few stacks, then more."""
    return [Case.of(1, n_stacks=8), Case.of(1, n_stacks=40)]


def inputs(case: Case) -> Inputs:
    """Stacks and caps."""
    return [(stacks(case),)]


def play(attempt: Any, group: Group, stacks: dict[str, Stacked]) -> Any:
    """The attempt's number of segments for each stack."""
    return {name: attempt(*stack) for name, stack in stacks.items()}


def best(n_layer: int, layer_bytes: int, input_bytes: int, cap_bytes: int) -> int:
    """The number of segments, by playing through all numbers."""
    tried = {s: played(n_layer, layer_bytes, input_bytes, s) for s in range(1, n_layer + 1)}
    fit = [(n_rerun, s) for s, (highest, n_rerun) in tried.items() if highest <= cap_bytes]
    return min(fit)[1] if fit else 0


def answer(case: Case, inputs: Inputs) -> Answers:
    """The number of segments for each stack, by trying all."""
    return [{name: best(*stack) for name, stack in stacks(case).items()}]


PROBLEM = exercise(__name__, fewest_segments)
