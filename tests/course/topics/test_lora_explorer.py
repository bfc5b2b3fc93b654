"""The pictures of LoRA, and its explorer: what they say, and what the controls do."""

from __future__ import annotations

import math

import pytest

from labkit import GPTConfig
from labkit.course.topics.lora_explorer import FULL, LoRAExplorer
from labkit.course.topics.lora_picture import Seen, factors, lora
from labkit.plan.breakdown import Breakdown
from labkit.plan.model.shape import ModelShape
from labkit.plan.step.adapters import TARGETS, lora_memory
from tests.cases import cases
from tests.view import page

SHAPE = ModelShape.of(GPTConfig(n_layer=4, d_model=64, n_head=4, vocab=128, seq=32))
LAW = {name: lora_memory(SHAPE, linears, 8, 8) for name, linears in TARGETS.items()}
WHOLE = lora_memory(SHAPE, None, rows=8)
LOSSES = {(name, r): 3.2 - 0.1 * k - 0.1 * math.log2(r) for k, name in enumerate(TARGETS) for r in (1, 4, 16)}
SEEN = Seen(LOSSES, full=2.3, untouched=4.0)
HELD = {("query, value", 8): {kind: LAW["query, value"][kind] for kind in WHOLE}}
HELD[FULL, 8] = {kind: WHOLE[kind] for kind in WHOLE}


@pytest.mark.parametrize("sizes", [(256, 256, 8), (4096, 4096, 1), (64, 512, 64), (512, 64, 64), (8, 8, 8)])
def test_the_factors_are_whole_for_any_shape(sizes):
    """Would catch a matrix that leaves the page, and words on words."""
    page.check(factors(*sizes))


def test_the_factors_say_how_many_numbers_train():
    """Would catch sides that are swapped."""
    words = page.words(factors(4096, 1024, 8))
    assert "40,960 numbers train beside 4,194,304 that do not: 102 times fewer" in words
    assert "A  8 x 4,096" in words
    assert "B  1,024 x 8" in words
    with pytest.raises(ValueError, match="rank of 1 to 1024"):
        factors(4096, 1024, 2000)


@cases("quality", [SEEN, None, Seen({("query, value", 8): 2.5}, 2.5, 2.5 + 1e-9)])
@cases("law", [*LAW.values(), None])
@cases("measured", [True, False])
def test_the_picture_is_whole_with_and_without_runs(quality, law, measured):
    """Would catch bars on the curves, and marks on marks."""
    seen = Breakdown.of({kind: (law or WHOLE)[kind] for kind in WHOLE}) if measured else None
    page.check(lora(WHOLE, law, seen, quality, "query, value", 8, "8,192 of 210,304 parameters train, 3.895%"))


def test_it_says_bytes_of_each_kind_and_what_a_run_recovered():
    """Would catch the bytes of another kind, and a share of the loss in place of a share of the gain."""
    words = page.words(lora(WHOLE, LAW["mlp"], None, SEEN, "mlp", 4))
    assert f"optimizer, full: {WHOLE['optimizer']:,.0f} B" in words
    assert f"optimizer, LoRA, law: {LAW['mlp']['optimizer']:,.0f} B" in words
    assert "measured" not in words
    assert "mlp, rank 4: 71% of full fine-tuning's gain" in words
    assert SEEN.recovered("mlp", 4) == pytest.approx((4 - 2.8) / 1.7)
    assert "no run of mlp at rank 2" in page.words(lora(WHOLE, LAW["mlp"], None, SEEN, "mlp", 2))


def test_losses_that_are_none_are_refused():
    """Would catch an empty axis."""
    with pytest.raises(ValueError, match="at least one run"):
        Seen({}, 1.0, 2.0)
    with pytest.raises(ValueError, match="finite losses"):
        Seen({("mlp", 1): math.inf}, 1.0, 2.0)


def test_controls_move_the_picture_and_measurements_stay_with_their_run():
    """Would catch a measurement of one rank beside the law of another."""
    explorer = LoRAExplorer(SHAPE, 8, 8, HELD, SEEN)
    assert "8,192 of 210,304 parameters train, 3.895%" in explorer.shown.value
    assert "measured" in explorer.shown.value
    assert explorer.message.value == ""
    explorer.rank.value = 16
    assert "measured" not in explorer.shown.value
    assert "16,384 of 210,304" in explorer.static().label
    assert "by law" in explorer.message.value
    explorer.targets.value = FULL
    assert "210,304 of 210,304 parameters train, 100.000%" in explorer.shown.value
    assert "measured" in explorer.shown.value
    explorer.width.value = "1,024"
    assert explorer.shape.d_model == 1024
    explorer.width.value = ""
    assert explorer.shape == SHAPE
    explorer.targets.value, explorer.rank.value = "all linears", 4
    assert "all linears, rank 4" in explorer.shown.value
    explorer.model.value, explorer.rank.value = "llama-7b", 8
    assert "19,988,480 of 6,738,415,616 parameters train, 0.297%" in explorer.shown.value
    explorer.precision.value = "4 bits"
    inside = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
    frozen = inside * 4.127 / 8 + 2 * (6_738_415_616 - inside) + 4 * 19_988_480
    assert f"parameters, LoRA, law: {frozen:,.0f} B" in explorer.shown.value
