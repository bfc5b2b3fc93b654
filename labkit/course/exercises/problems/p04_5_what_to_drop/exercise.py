"""04.5: which activations to drop, so that the rest fits under a cap and as little as possible is computed again."""

import itertools
import random
from typing import Any

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise

Held = list[tuple[int, int]]


def what_to_drop(activations: list[tuple[int, int]], cap_bytes: int) -> list[int]:
    """The places of the activations to drop, so that the others take at most cap_bytes, for the fewest flops.

    An activation is (bytes, flops): what it holds, and what it costs to compute it again, by itself. cap_bytes is not
    below zero, and there are at most 10 activations: all choices can be tried."""
    places = range(len(activations))
    choices: list[tuple[int, ...]] = []
    for count in range(len(places) + 1):
        choices += itertools.combinations(places, count)

    def kept_bytes(chosen: tuple[int, ...]) -> int:
        return sum(activations[place][0] for place in places if place not in chosen)

    def flops(chosen: tuple[int, ...]) -> int:
        return sum(activations[place][1] for place in chosen)

    best = min((choice for choice in choices if kept_bytes(choice) <= cap_bytes), key=flops)
    return list(best)


def blocks(case: Case) -> dict[str, tuple[Held, int]]:
    """Activations and caps by name. Bytes and flops are drawn apart; one large activation of each block is cheap.
    In one block, three activations have the same bytes and flops."""
    draw = random.Random(case.seed)
    named: dict[str, tuple[Held, int]] = {}
    for number in range(case["n_blocks"]):
        held = [(draw.randint(10, 99), draw.randint(100, 999)) for _ in range(draw.randint(7, 9))]
        held += [(draw.randint(200, 400), draw.randint(20, 90))]
        total = sum(n_bytes for n_bytes, _ in held)
        exact = sum(n_bytes for n_bytes, _ in draw.sample(held, 4))
        named |= {f"block {number}: some cap": (held, draw.randint(total // 5, 4 * total // 5)),
                  f"block {number}: a cap that some meet exactly": (held, exact)}  # fmt: skip
    alike = (draw.randint(60, 99), draw.randint(20, 90))  # as query, key and value are: the best drops two of three
    held = [alike] * 3 + [(draw.randint(10, 50), draw.randint(500, 999)) for _ in range(4)]
    draw.shuffle(held)
    named["three that are alike"] = held, sum(n_bytes for n_bytes, _ in held) - 2 * alike[0]
    held = [(draw.randint(10, 99), draw.randint(100, 999)) for _ in range(6)]
    return named | {"no room at all": (held, 0), "room for everything": (held, sum(n_bytes for n_bytes, _ in held))}


def cases() -> list[Case]:
    """A few blocks, then more."""
    return [Case.of(1, n_blocks=6), Case.of(1, n_blocks=20)]


def inputs(case: Case) -> Inputs:
    """Activations and caps."""
    return [(blocks(case),)]


def play(attempt: Any, group: Group, tasks: dict[str, tuple[Held, int]]) -> Any:
    """The cost of each of the attempt's choices, and whether it fits. The choices are not compared, since two may be
    equally good."""
    replies = {}
    for name, (held, cap) in tasks.items():
        dropped = {int(place) for place in attempt(list(held), cap)}
        kept = sum(n_bytes for place, (n_bytes, _) in enumerate(held) if place not in dropped)
        replies[name] = f"{sum(held[place][1] for place in dropped)} flops, {'fits' if kept <= cap else 'does not fit'}"
    return replies


def fewest(held: Held, cap: int) -> int:
    """The fewest flops under this cap, from a table for all caps up to it that takes in one activation after another:
    it is kept if there is room, or dropped."""
    least = [0] * (cap + 1)
    for n_bytes, flops in held:
        least = [min(least[room] + flops, least[room - n_bytes] if n_bytes <= room else least[room] + flops)
                 for room in range(cap + 1)]  # fmt: skip
    return least[cap]


def answer(case: Case, inputs: Inputs) -> Answers:
    """The fewest flops for each block, by a table over all caps."""
    return [{name: f"{fewest(held, cap)} flops, fits" for name, (held, cap) in blocks(case).items()}]


PROBLEM = exercise(__name__, what_to_drop)
