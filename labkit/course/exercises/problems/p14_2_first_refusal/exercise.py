"""14.2: the first reason for which a plan is refused, with its number."""

import random
from fractions import Fraction
from typing import Any

from labkit.course.exercises.exercise import Answers, Case, Inputs, call_each, exercise
from labkit.plan.job.recipe import STRATEGIES, Recipe
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout

Plan = tuple[ModelShape, Layout, Recipe, float]


def first_refusal(shape: ModelShape, layout: Layout, recipe: Recipe, device_bytes: float) -> tuple[str, float]:
    """The first reason why a plan cannot run, and by how much; ("", 0) if it can. The reasons, in order:

    "heads"   shape.n_head over tp            "batch"   recipe.batch_size over dp x recipe.n_micro
    "layers"  shape.n_layer over pp                     the number of these three: what is left over
    "memory"  more than 94% of device_bytes; its number: the bytes above that

    Memory of a rank: its 1/(tp pp) of shape.n_params at 4 bytes of parameters, 4 of gradients, 8 of optimizer, of which
    recipe.strategy "zero1" divides the optimizer by dp, "zero2" gradients, too, "zero3" parameters, too ("ddp":
    nothing). For each sequence and layer 34 x shape.seq x shape.d_model bytes of activations, 1/tp of them on a rank;
    it has its layers, the sequences of one micro-batch, and min(pp, n_micro) micro-batches in flight."""
    zero = ("ddp", "zero1", "zero2", "zero3").index(recipe.strategy)
    state = sum(width / layout.dp if zero > place else width for place, width in enumerate((8, 4, 4)))
    rows = recipe.batch_size // layout.dp // recipe.n_micro * min(layout.pp, recipe.n_micro)
    kept = 34 * rows * shape.seq * shape.d_model * shape.n_layer
    needs = (state * shape.n_params + kept) / (layout.tp * layout.pp)
    asked = {
        "heads": shape.n_head % layout.tp,
        "layers": shape.n_layer % layout.pp,
        "batch": recipe.batch_size % (layout.dp * recipe.n_micro),
        "memory": max(0, needs - 0.94 * device_bytes),
    }
    return next(((why, number) for why, number in asked.items() if number), ("", 0))


def cases() -> list[Case]:
    """Plans of all kinds, then only plans in which everything divides."""
    return [Case.of(1, n_plans=48, divides=0.4), Case.of(1, n_plans=24, divides=1.0)]


def inputs(case: Case) -> Inputs:
    """Plans. In the first case some do not divide, and at least one divides neither its heads nor its layers."""

    def tells(plans: list[Plan]) -> bool:
        return case["divides"] == 1 or any(
            shape.n_head % layout.tp and shape.n_layer % layout.pp for shape, layout, *_ in plans
        )

    return [(case.draw(lambda dice: drawn(dice, case), tells),)]


def drawn(dice: random.Random, case: Case) -> list[Plan]:
    """Plans, some of which are refused for several reasons. The device has from half to twice the bytes needed."""
    plans = []
    for k in range(case["n_plans"]):
        layout = Layout(dice.choice((1, 2, 3, 4)), dice.choice((1, 2, 4)), dice.choice((1, 2, 4)))
        n_micro = dice.choice((1, 2, 4, 8))
        heads, layers = 4 * dice.randint(2, 6), 4 * dice.randint(1, 6)
        batch = layout.dp * n_micro * dice.randint(1, 3)
        if dice.random() > case["divides"]:
            batch += layout.dp * dice.randint(0, 2) + dice.choice((0, 1))
            layers += dice.choice((0, 0, 1, 3))
            layout = Layout(layout.dp, layout.pp, dice.choice((layout.tp, layout.tp, 5, 8)))
        vocab, seq = 1000 * dice.randint(5, 40), 256 * dice.randint(1, 5)
        shape = ModelShape.gpt(layers, 32 * heads, heads, vocab, seq, tied=False)
        recipe = Recipe(STRATEGIES[k % 4], batch_size=batch, n_micro=n_micro)
        room = float(wanted(shape, layout, recipe)) / 0.94
        plans.append((shape, layout, recipe, room * dice.choice((dice.uniform(0.5, 0.99), dice.uniform(1.01, 2)))))
    return plans


def wanted(shape: ModelShape, layout: Layout, recipe: Recipe) -> Fraction:
    """Bytes of a rank, in exact fractions, summed kind by kind."""
    n_params = Fraction(shape.n_params, layout.tp * layout.pp)
    shards = ["optimizer", "gradients", "parameters"][: STRATEGIES.index(recipe.strategy)]
    total = Fraction(0)
    for kind, width in (("parameters", 4), ("gradients", 4), ("optimizer", 8)):
        total += n_params * width / (layout.dp if kind in shards else 1)
    block = Fraction(34 * shape.seq * shape.d_model, layout.tp)  # of a row
    in_flight = min(layout.pp, recipe.n_micro) * (recipe.batch_size // (layout.dp * recipe.n_micro))
    return total + block * in_flight * shape.n_layer / layout.pp


def judged(shape: ModelShape, layout: Layout, recipe: Recipe, device_bytes: float) -> list[Any]:
    """The first reason and its number, found by asking the questions one after another."""
    for why, number, parts in (("heads", shape.n_head, layout.tp), ("layers", shape.n_layer, layout.pp),
                               ("batch", recipe.batch_size, layout.dp * recipe.n_micro)):  # fmt: skip
        if number not in range(0, number + 1, parts):
            return [why, float(number - parts * (number // parts))]
    above = wanted(shape, layout, recipe) - Fraction(94, 100) * Fraction(device_bytes)
    return ["memory", float(above)] if above > 0 else ["", 0.0]


def answer(case: Case, inputs: Inputs) -> Answers:
    """The first refusal of each plan, in exact fractions."""
    return [[judged(*plan) for plan in inputs[0][0]]]


PROBLEM = exercise(__name__, first_refusal, play=call_each, imports=("Layout", "ModelShape", "Recipe"))
