"""14.1: what a rank of a plan holds between two steps, by hand."""

import random

from labkit.course.exercises.exercise import Answers, Case, Inputs, call_each, exercise
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout


def hand_plan(shape: ModelShape, layout: Layout, zero: int, rank: int) -> dict[str, int]:
    """Bytes of "parameters", "gradients" and "optimizer" that `rank` holds between two steps: all in fp32, AdamW.

    A block has linears [d, 3d], [d, d], [d, 4d], [4d, d] with biases, and two norms of 2d. Stage s of pp has the blocks
    from L s // pp to L (s+1) // pp; the first also the token table [vocab, d] and positions [seq, d], the last also a
    norm of 2d and the head [vocab, d], no bias. tp cuts all linears, their biases where they are cut by columns (3d and
    4d), token table and head; all else is whole on each. zero: 0 nothing is sharded; 1 the optimizer; 2 gradients, too;
    3 parameters, too: over dp, all of a rank as one flat tensor, a shard rounded up. L, d: shape.n_layer, .d_model."""
    d, tp, pp, stage = shape.d_model, layout.tp, layout.pp, layout.coords(rank)["pp"]
    blocks = shape.n_layer * (stage + 1) // pp - shape.n_layer * stage // pp
    n = blocks * ((12 * d * d + 7 * d) // tp + 6 * d)
    n += (stage == 0) * (shape.vocab // tp + shape.seq) * d
    n += (stage == pp - 1) * (2 * d + shape.vocab // tp * d)
    share = -(-n // layout.dp)
    kinds = {"optimizer": 8, "gradients": 4, "parameters": 4}
    return {kind: width * (share if zero > place else n) for place, (kind, width) in enumerate(kinds.items())}


def cases() -> list[Case]:
    """Ranks of layouts of three axes, of two, and of none."""
    return [
        Case.of(1, n_plans=24, tp=(2, 4), pp=(2, 3, 5), dp=(2, 3, 7)),
        Case.of(1, n_plans=12, tp=(1, 2), pp=(1, 2), dp=(1, 5)),
        Case.of(1, n_plans=4, tp=(1,), pp=(1,), dp=(1,)),
    ]


def inputs(case: Case) -> Inputs:
    """Plans of small GPTs, since nothing in the law depends on their size. With five stages, the first plan has 7 or 8
    blocks, and a stage that has another number of them than if all that are left over went to the last stages."""
    dice, plans = random.Random(case.seed), []
    for k in range(case["n_plans"]):
        layout = Layout(dice.choice(case["dp"]), dice.choice(case["pp"]), dice.choice(case["tp"]))
        d, vocab = 8 * dice.randint(2, 12), 4 * dice.randint(50, 300)
        shape = ModelShape.gpt(dice.randint(5, 9), d, 4, vocab, dice.randint(10, 90), tied=False)
        plans.append((shape, layout, k % 4, dice.randrange(layout.size)))
    if 5 in case["pp"]:
        n_layer, stage = dice.choice(((7, 2), (7, 3), (8, 1), (8, 2)))
        layout, (shape, _, zero, _) = Layout(2, 5, 2), plans[0]
        one = ModelShape.gpt(n_layer, shape.d_model, 4, shape.vocab, shape.seq, tied=False)
        plans[0] = one, layout, zero, layout.tp * stage
    return [(plans,)]


def tensors_of(shape: ModelShape) -> list[list[tuple[int, bool]]]:
    """The tensors of each layer: (elements, True if tp cuts it)."""
    d, vocab = shape.d_model, shape.vocab
    linears = ((d, d, True), (d, d, True), (d, d, True), (d, d, False), (d, 4 * d, True), (4 * d, d, False))
    block = [(d, False)] * 4  # two norms, a scale and a shift each
    for n_in, n_out, by_columns in linears:  # query, key, value, out; up, down
        block += [(n_in * n_out, True), (n_out, by_columns)]
    return [
        [(vocab * d, True), (shape.seq * d, False)],
        *[block] * shape.n_layer,
        [(d, False)] * 2 + [(vocab * d, True)],
    ]


def by_tensors(shape: ModelShape, layout: Layout, zero: int, rank: int) -> dict[str, float]:
    """The bytes of a rank, summed over all tensors of its layers one by one."""
    stage, n = rank // layout.tp % layout.pp, 0
    for place, layer in enumerate(tensors_of(shape)):
        block = min(max(place - 1, 0), shape.n_layer - 1)
        at = next(s for s in range(layout.pp) if block < shape.n_layer * (s + 1) // layout.pp)
        for size, cut in layer if at == stage else ():
            n += size // layout.tp if cut else size
    held = {"parameters": 4 * n, "gradients": 4 * n, "optimizer": 8 * n}
    for kind in ("optimizer", "gradients", "parameters")[:zero]:
        held[kind] = held[kind] // n * ((n + layout.dp - 1) // layout.dp)
    return {kind: float(number) for kind, number in held.items()}


def answer(case: Case, inputs: Inputs) -> Answers:
    """The bytes of each plan, by counting tensors."""
    return [[by_tensors(*plan) for plan in inputs[0][0]]]


PROBLEM = exercise(__name__, hand_plan, play=call_each, tolerance=(1e-9, 0.0), imports=("Layout", "ModelShape"))
