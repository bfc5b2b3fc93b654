"""The search over cp: where it is tried, that its plans are what the predictions say, and how they are told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from labkit.plan.job.recipe import Recipe
from labkit.plan.machine.hardware import Hardware
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout
from labkit.plan.search.explain import explain, simplest, table, waiting_s
from labkit.plan.search.search import HEADROOM, LEAST_TOKENS, Plan, layouts, plans
from labkit.plan.step.memory import predict_memory
from labkit.plan.step.time import predict_step
from tests.cases import cases

H100 = Hardware.preset("h100")
LONG = 2**17


@pytest.fixture(scope="module")
def long() -> list[Plan]:
    """Llama 3 8B with rows of 128k tokens, on two nodes."""
    return plans("llama3-8b", H100, 16, 16, LONG)


@cases(("seq", "most"), [(8192, 1), (16_384, 2), (LONG, 4)])
def test_rows_are_cut_as_long_as_each_rank_keeps_enough_of_them(seq, most):
    """Would catch short rows that are cut, and long ones that are not: a search says of short ones what it said."""
    found = {plan.layout for plan in plans("llama3-8b", H100, 4, 4, seq)}
    assert found == set(layouts(4, 0, max(1, seq // LEAST_TOKENS)))
    assert max(layout.cp for layout in found) == most
    assert all(layout.size == 4 for layout in found)


def test_rows_are_cut_beside_experts_that_do_not_count_them():
    """Would catch a search that leaves cp out for all experts, and an axis that the words about a plan forget."""
    mixtral = ModelShape.preset("mixtral-8x7b").changed(n_layer=4, balance="bias")
    found = plans(mixtral, H100, 8, 8, 2**14)
    both = next(plan for plan in found if plan.kept and plan.layout.cp > 1 and plan.layout.ep > 1)
    lay = both.layout
    assert both.step == predict_step(both.shape, lay, both.recipe, H100, simulated=0)
    words = explain([both])
    assert f"Gradients of experts go over {lay.dp * lay.cp // lay.ep} ranks, all others over {lay.dp * lay.cp}" in words
    assert {"cp", "ep"} <= set(table([both], 4).splitlines()[0].split())


def test_a_halo_is_tried_where_all_blocks_have_a_window_and_sends_less_than_a_ring():
    """Would catch a way that no search finds, and one that is taken for models whose blocks see all keys."""
    whole = ModelShape.preset("llama3-8b").changed(seq=LONG)
    windowed = whole.changed(window=4096, n_windowed=whole.n_layer)
    for shape, there in ((whole, False), (windowed, True)):
        kept = [plan for plan in plans(shape, H100, 8, 8, LONG) if plan.kept and plan.layout.cp > 1]
        assert ("halo" in {plan.recipe.context for plan in kept}) == there
    recipe = Recipe("zero3", batch_size=1, precision="bf16", recompute="full")
    halo, ring = (
        predict_step(windowed, Layout(cp=8), replace(recipe, context=way), H100)["cp"] for way in ("halo", "ring")
    )
    assert halo < ring / 10


def test_latent_attention_is_cut_over_cp_too():
    """Would catch an attention whose keys and values cross nothing, and blocks that are counted as those without cp."""
    shape = ModelShape.preset("deepseek-v3").changed(n_layer=8, seq=LONG)
    recipe = Recipe("zero1", batch_size=16, precision="bf16", recompute="full")
    whole, cut = (predict_memory(shape, Layout(16, cp=cp, ep=16), recipe, 0, "cuda") for cp in (1, 4))
    assert cut["activations"] < whole["activations"] / 3
    step = predict_step(shape, Layout(16, cp=4, ep=16), recipe, H100)
    assert step["cp"] > 0
    assert step["compute"] < predict_step(shape, Layout(16, ep=16), recipe, H100)["compute"] / 3.5


def test_what_is_refused_beside_cp_is_not_tried():
    """Would catch a search full of refusals, or one that breaks off."""
    assert all(plan.layout.cp == 1 for plan in plans("mixtral-8x7b", H100, 4, 4, LONG))


def test_every_plan_with_cp_fits_and_is_what_the_predictions_say(long):
    """Would catch the memory of another rank than the fullest: with cp the ranks of a stage stand further apart."""
    room = H100.memory_bytes.value * (1 - HEADROOM)
    kept = [plan for plan in long if plan.kept and plan.layout.cp > 1]
    ways = {(plan.layout.cp, plan.recipe.context) for plan in kept}
    assert {kind for _, kind in ways} == {"ring", "gather", "ulysses"}
    assert (16, "ulysses") not in ways  # 8 key heads
    assert {plan.recipe.strategy for plan in kept} == {"ddp", "zero1", "zero2", "zero3"}
    assert {(plan.layout.dp, plan.layout.cp) for plan in kept if plan.recipe.shard_ranks == 2} == {(4, 2)}
    for plan in [*kept[::40], next(plan for plan in kept if plan.layout.pp > 1)]:
        lay = plan.layout
        ranks = [lay.rank(pp=place) for place in range(lay.pp)]
        held = max(predict_memory(plan.shape, lay, plan.recipe, rank, "cuda").total for rank in ranks)
        assert plan.memory.total == held <= room
        assert plan.step == predict_step(plan.shape, lay, plan.recipe, H100, simulated=0)


def test_rows_of_128k_are_cut_and_their_plans_are_faster_than_those_of_whole_rows(long):
    """Would catch a planner that has no answer for long rows but recomputation."""
    whole = next(plan for plan in long if plan.kept and plan.layout.cp == 1)
    assert long[0].layout.cp > 1
    assert long[0].step_s < 0.9 * whole.step_s


def test_a_plan_with_cp_is_told_in_the_table_and_in_words(long):
    """Would catch an axis that nobody sees: strategies over dp x cp, waits, the way of attention."""
    best = long[0]
    rows = table(long, 4).splitlines()
    assert rows[0].split()[:4] == ["dp", "pp", "tp", "cp"]
    assert f"{best.layout.cp} {best.recipe.context}" in rows[1]
    assert best.recipe.strategy in rows[1]
    words = explain(long)
    assert f"cp={best.layout.cp}: each rank has {LONG // best.layout.cp:,} of the 131,072 tokens of a row" in words
    assert f"cp {best.step['cp']:.3g} s" in words
    assert f"cp={best.layout.cp} by {best.recipe.context}" in str(best)
    assert waiting_s(best.step) > 0.5 * best.step["cp"]
    only = [plan for plan in long if plan.kept and plan.layout.cp > 1 and plan.recipe.context == "ulysses"]
    assert "all_to_alls exchange tokens for heads" in explain(only)
    assert "cp" not in table([plan for plan in long if plan.layout.cp == 1], 4).splitlines()[0].split()


def test_cp_is_an_idea_like_any_other_axis():
    """Would catch a simplest plan that cuts rows though whole ones fit."""
    shape, recipe = ModelShape.preset("gpt2"), Recipe(batch_size=4)
    both = [
        Plan(shape, H100, layout, recipe, predict_step(shape, layout, recipe, H100), 0.1)
        for layout in (Layout(cp=4), Layout(4))
    ]
    assert simplest(both) == both[1]
