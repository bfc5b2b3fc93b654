"""14.4: which of several plans to take, by their memory and time."""

import random
from collections.abc import Sequence

from labkit.course.exercises.exercise import Answers, Case, Inputs, call_each, exercise
from labkit.plan.partition.layout import Layout

Plan = tuple[Layout, float, float]


def chosen_plan(plans: list[tuple[Layout, float, float]], device_bytes: float, node_size: int) -> int:
    """The place in `plans` of the one to take; -1 if there is none. A plan is (layout, bytes of a rank, step seconds).

    A plan fits if it wants at most 94% of device_bytes and if each of its tp groups lies within one node: node_size is
    a multiple of tp. Predicted times are not better than 2%: of the plans that fit, all that take at most 1.02 times as
    long as the fastest of them count as equally fast. Of these take the simplest: the smallest tp; of these the
    smallest pp; of these the fastest."""
    fits = [
        place
        for place, (layout, needs, _) in enumerate(plans)
        if needs <= 0.94 * device_bytes and node_size % layout.tp == 0
    ]
    quickest = min((plans[place][2] for place in fits), default=0)
    equal = [place for place in fits if plans[place][2] <= 1.02 * quickest]
    return min(equal, key=lambda place: (plans[place][0].tp, plans[place][0].pp, plans[place][2]), default=-1)


def cases() -> Sequence[Case]:
    """Tables with many near ties, and some in which nothing fits."""
    return [Case.of(1, n_tables=60, rows=9), Case.of(1, n_tables=16, rows=3)]


def inputs(case: Case) -> Inputs:
    """Tables of plans. No time or memory is so near a limit that rounding decides. In one of every eight tables all
    plans are equally fast, the slowest is first, and plans with a small tp have a large pp; in another none fits; in
    one more the plan to take wants exactly the memory that it may."""
    dice, tables = random.Random(case.seed), []
    for number in range(case["n_tables"]):
        node, device, base = dice.choice((4, 6, 8)), dice.uniform(16e9, 80e9), dice.uniform(0.5, 20)
        times = [base * (1 + 0.0081 * dice.randint(0, 6)) * dice.uniform(1, 1.0005) for _ in range(case["rows"])]
        plans, sizes = [], (dice.sample((1, 2, 4), 2), dice.sample((1, 2, 3, 4, 8, 16), 3))
        equal = number % 8 == 1
        if equal:
            times = sorted((base * dice.uniform(1, 1.018) for _ in times), reverse=True)
        for place, time in enumerate(times):
            layout = Layout(dice.randint(1, 16), dice.choice(sizes[0]), dice.choice(sizes[1]))
            if equal:
                layout = Layout(layout.dp, *((4, 1), (1, 2))[place % 3 == 1])
            share = dice.choice((dice.uniform(0.3, 0.93), dice.uniform(0.9, 0.938), dice.uniform(0.945, 0.995), 1.3))
            plans.append((layout, device * (share if number % 8 else max(share, 0.96)), time))
        if number % 8 == 4:  # the fastest by far crosses nodes: tp is 16, and no node has more than 8 ranks
            plans[0] = (Layout(1, 1, 16), 0.5 * device, 0.9 * base)
        tables.append(on_a_limit(dice, plans) if number % 8 == 2 else (plans, device, node))
    return [(tables,)]


def on_a_limit(dice: random.Random, plans: list[Plan]) -> tuple[list[Plan], float, int]:
    """A table whose simplest plan wants exactly 94% of the device: 47 of 50, by powers of two. `<=` holds there for
    products and for quotients, whatever rounding does; of 1.02 times as long no numbers do so, since 1.02 - 1 is more
    than 0.02 in floats. The other plans are slower. (plans, bytes of the device, ranks of a node)"""
    device, fastest = 50.0 * 2 ** dice.randint(29, 31), 50.0 / 2 ** dice.randint(2, 7)
    others = [(layout, device * dice.uniform(0.3, 1.2), 1.1 * fastest * dice.uniform(1, 2)) for layout, *_ in plans[2:]]
    fast = (Layout(dice.randint(1, 16), 2, 4), device * dice.uniform(0.3, 0.9), fastest)
    simplest = (Layout(dice.randint(1, 16), 1, 2), device * 47 / 50, fastest * dice.uniform(1, 1.01))
    table = [fast, simplest, *others]
    return dice.sample(table, len(table)), device, dice.choice((4, 8))


def better(one: Plan, other: Plan) -> bool:
    """True if the plan `one` goes before `other`, which counts as equally fast."""
    if one[0].tp != other[0].tp:
        return one[0].tp < other[0].tp
    return one[0].pp < other[0].pp if one[0].pp != other[0].pp else one[2] < other[2]


def knocked_out(plans: list[Plan], device_bytes: float, node: int) -> int:
    """The place of the plan to take, by comparing pairs: a plan is out if it does not fit, if another that fits is
    clearly faster, or if another that is equally fast goes before it. -1 if none is left."""
    able = [k for k, (layout, needs, _) in enumerate(plans)
            if needs / device_bytes <= 0.94 and layout.tp in range(1, node + 1) and not node % layout.tp]  # fmt: skip
    close = [k for k in able if not any(plans[k][2] / plans[j][2] > 1.02 for j in able)]
    left = [k for k in close if not any(better(plans[j], plans[k]) for j in close)]
    return left[0] if left else -1


def answer(case: Case, inputs: Inputs) -> Answers:
    """The place of the plan to take in each table, by comparing pairs."""
    return [[knocked_out(*table) for table in inputs[0][0]]]


PROBLEM = exercise(__name__, chosen_plan, play=call_each, imports=("Layout",))
