"""The planner's law of products in pieces, and what is rehearsed of them."""

from dataclasses import replace

import pytest

from labkit.plan.job.recipe import Recipe, refusals
from labkit.plan.job.stages import setting_of
from labkit.plan.laws import tensor
from labkit.plan.laws.timing import Timing
from labkit.plan.machine.efficiency import IDEAL
from labkit.plan.machine.hardware import Hardware
from labkit.plan.machine.link import Link
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout
from labkit.plan.step.bytes_sent import sent_per_step
from labkit.plan.step.time import LayoutTables, predict_step
from labkit.rehearsal import rehearse
from labkit.train.config import GPTConfig

CONFIG = GPTConfig(n_layer=4, d_model=48, n_head=4, vocab=96, seq=24, tied=False)
PIECES = {"sequence_parallel": True, "tp_overlap": True}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"sequence_parallel": False}, "set sequence_parallel=True, too"),
        ({"recompute": "gathers"}, "take recompute='none' or 'full'"),
        ({"recompute": "selective"}, "take recompute='none' or 'full'"),
        ({"precision": "amp"}, "take 'bf16' or 'fp32'"),
        ({"precision": "fp8"}, "take 'bf16'"),
        ({"schedule": "zero_bubble"}, "take '1f1b' or 'interleaved'"),
    ],
)
def test_choices_that_products_in_pieces_exclude_are_refused(changes, told):
    """Would catch a choice with which a message is sent twice, or a product computed in another dtype, unseen."""
    with pytest.raises(ValueError, match="tp_overlap=True") as refused:
        Recipe(**{**PIECES, **changes})
    assert told in str(refused.value)
    Recipe(**{**PIECES, **changes, "tp_overlap": False})


def test_experts_are_refused_with_their_number():
    """Would catch a plan in which the products of experts are counted as cut, which nobody cuts."""
    shape, recipe = ModelShape.of(replace(CONFIG, n_expert=4, top_k=2)), Recipe(**PIECES)
    assert any("4 experts" in reason for reason in refusals(shape, recipe, Layout(tp=2), False))
    assert not any("tp_overlap" in reason for reason in refusals(shape, recipe, Layout(), False))


def pieces_and_plain(machine, layer, **choices):
    """Forward and backward of a layer of CONFIG over 4 ranks, in pieces and plain."""
    layout, shape = Layout(tp=4), ModelShape.of(CONFIG)
    for recipe in (Recipe(**PIECES, **choices), Recipe(sequence_parallel=True, **choices)):
        yield tensor.layer_s(Timing(shape, layout, recipe, setting_of(shape, layout, recipe), "fp32", machine), layer)


@pytest.mark.parametrize("rate", [1e6, 1e8, 1e10])
def test_of_each_message_as_much_is_hidden_as_a_piece_lasts(rate):
    """Bugs: a message hidden for longer than it takes or than its piece takes; the gather that attention's products
    share thought hidden; only one product counted where a piece of backward is two."""
    machine = Hardware.preset("h100").changed(practice=IDEAL, intra=Link("", 1e-6, rate))
    (ahead, behind), (plain, plain_behind) = pieces_and_plain(machine, "block")
    n, tokens, d = 4, 8 * CONFIG.seq, CONFIG.d_model
    message = 1e-6 + tokens * d * 4 / n / rate

    def piece(inside, out):
        return machine.op_s(2.0 * tokens * inside * out, 0.0, "fp32") / n

    up, down, out = piece(d, 4 * d // n), piece(4 * d // n, d), piece(d // n, d)
    forward = sum(min(product, message) for product in (up, down, out))
    backward = sum(min(product, message) for product in (2 * up, down, out))
    assert plain.tp == pytest.approx(4 * (n - 1) * message) == plain_behind.tp
    assert plain.tp - ahead.tp == pytest.approx((n - 1) * forward)
    assert plain.tp - behind.tp == pytest.approx((n - 1) * backward)
    assert ahead.tp >= 0.999 * (n - 1) * message  # attention's gather


def test_products_in_pieces_are_paid_for_in_calls_and_in_smaller_products():
    """Would catch a plan that cuts products wherever it may, since that seems to cost nothing."""
    practice = replace(IDEAL, host_s=1e-5, host_call_s=1e-4, half_side=512.0)
    machine = Hardware.preset("h100").changed(practice=practice, intra=Link("", 0.0, 1e18))
    (ahead, behind), (plain, plain_behind) = pieces_and_plain(machine, "block")
    assert ahead.host - plain.host == pytest.approx(3 * (5 * 1e-4 + 3 * 1e-5))
    assert behind.host - plain_behind.host == pytest.approx(3 * (5 * 1e-4 + 3 * 1e-5) + 3 * 1e-5)
    assert plain.compute == 0 < ahead.compute < behind.compute
    layout, shape = Layout(tp=4), ModelShape.of(CONFIG)
    step, usual = (
        predict_step(shape, layout, Recipe(sequence_parallel=True, tp_overlap=cut), machine) for cut in (True, False)
    )
    assert step["compute"] > usual["compute"]
    assert step.total > usual.total


def test_a_search_that_asks_for_both_mixes_up_neither():
    """Would catch seconds of the one recipe taken for the other's, since tables of a layout are shared."""
    shape, layout, tables = ModelShape.of(CONFIG), Layout(tp=2), LayoutTables()
    h100 = Hardware.preset("h100")
    for cut in (False, True, False):
        recipe = Recipe(sequence_parallel=True, tp_overlap=cut)
        assert predict_step(shape, layout, recipe, h100, tables=tables) == predict_step(shape, layout, recipe, h100)


CASES = [
    (Layout(tp=2), {}),
    (Layout(tp=4), {"recompute": "full"}),
    (Layout(2, 1, 2), {"strategy": "zero3", "n_micro": 2, "precision": "bf16"}),
    (Layout(1, 2, 2), {"n_micro": 4, "recompute": "full"}),
    (Layout(tp=2, cp=2), {"strategy": "zero1"}),
]


@pytest.mark.parametrize(
    ("layout", "choices"), [*CASES[:2], *(pytest.param(*case, marks=pytest.mark.rest) for case in CASES[2:])], ids=str
)
def test_what_is_rehearsed_sends_what_the_law_says(layout, choices):
    """Bugs: the last sum of a block that runs again forgotten, a gather that each of several layers asks for, messages
    of another dtype, pieces that every layer keeps until the end of the step."""
    recipe = Recipe(batch_size=8, **PIECES, **choices)
    plain = replace(recipe, tp_overlap=False)
    rank = layout.size - 1
    seen, usual = (rehearse(CONFIG, layout, choice, rank) for choice in (recipe, plain))
    n_layer = CONFIG.n_layer // layout.pp
    # gradients of norms and biases are summed on top of the law, in both alike
    law, usual_law = (
        sent_per_step(layout, choice, rank, parameter_bytes=0, n_layer=n_layer, d_model=CONFIG.d_model, seq=CONFIG.seq)[
            "tp"
        ]
        for choice in (recipe, plain)
    )
    assert seen.ledger.sent_bytes(axis="tp") - usual.ledger.sent_bytes(axis="tp") == law - usual_law
    rows = recipe.batch_size // layout.dp // recipe.n_micro
    gathered = rows * CONFIG.seq // layout.cp * CONFIG.d_model * recipe.weight_bytes
    # parts beside what they are joined to, and parts of the largest gradient of a weight
    weight = max(CONFIG.vocab, 4 * CONFIG.d_model) // layout.tp * CONFIG.d_model * recipe.weight_bytes
    assert 0 <= seen.peak - seen.predicted.total <= 2 * gathered + 2 * weight
