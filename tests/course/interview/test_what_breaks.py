"""What breaks first: every answer is held against the planner, asked in another way."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape

import pytest

from labkit.course.interview.what_breaks import (
    CHANGES,
    KINDS,
    carried,
    choices,
    costs,
    drawn,
    possible,
    what_breaks,
)
from labkit.course.interview.what_breaks_panel import FractureQuestion, WhatBreaksPanel
from labkit.course.topics.design_cases import AUDIO, EIGHT, SEVENTY, DesignCase
from labkit.plan.job.recipe import Recipe
from labkit.plan.machine.hardware import Hardware
from labkit.plan.partition.layout import Layout
from labkit.plan.search.search import HEADROOM, Search, plans
from labkit.plan.step.memory import predict_memory
from labkit.plan.step.rank import fullest_ranks
from labkit.plan.step.time import predict_step

NAMES = [change.name for change in CHANGES]


def planned(case: DesignCase, layout: Layout, schedule: str, stages: int, recompute: str) -> DesignCase:
    """The case with one plan, the judgement of a search on it: so that no test has to wait for a whole search."""
    shape = case.shape.changed(seq=case.seq, vocab=case.shape.vocab + -case.shape.vocab % 128, name=case.shape.name)
    search = Search(shape, Hardware.preset(case.hardware), HEADROOM, case.precision)
    base = Recipe(batch_size=case.batch, precision=case.precision)
    plan = search.judge(layout, base, "zero1", None, schedule, stages, recompute, 1)
    assert plan is not None
    assert plan.kept
    known = replace(case)
    known.__dict__["found"] = (plan,)
    return known


@pytest.fixture(scope="module")
def staged() -> DesignCase:
    return planned(SEVENTY, Layout(dp=16, pp=8, tp=2), "interleaved", 2, "selective")


def words_of(widget) -> str:
    """All text that a widget and those in it show now."""
    own = [str(getattr(widget, name, "")) for name in ("value", "description", "options")]
    return unescape(" ".join([*own, *(words_of(child) for child in getattr(widget, "children", ()))]))


@pytest.mark.parametrize("name", ["eight", "audio", "staged"])
def test_the_parts_of_a_step_add_up_to_the_planners_step(name, staged):
    """Would catch a wire that is counted twice, or without what hides it."""
    plan = {"eight": EIGHT, "audio": AUDIO, "staged": staged}[name].found[0]
    now = what_breaks({"eight": EIGHT, "audio": AUDIO, "staged": staged}[name], "fp32").now
    old = replace(now, precision="bf16")
    step = predict_step(plan.shape, plan.layout, plan.recipe, plan.hardware, simulated=0)
    per_token = plan.layout.size / (plan.recipe.batch_size * plan.shape.seq)
    parts = costs(old, plan.layout, plan.recipe)
    assert sum(parts.values()) == pytest.approx(step.total * per_token)
    assert parts["tp"] == pytest.approx(step["tp"] * per_token)


@pytest.mark.parametrize("change", NAMES)
@pytest.mark.parametrize("name", ["eight", "audio", "staged"])
def test_memory_breaks_exactly_where_the_search_refuses_the_plan(name, change, staged):
    """Would catch another limit than the planner's, another rank, and bytes of another moment."""
    fracture = what_breaks({"eight": EIGHT, "audio": AUDIO, "staged": staged}[name], change)
    now = fracture.now
    if fracture.kind == "layout":
        with pytest.raises(ValueError, match=re.escape(fracture.words.partition(": ")[2].rstrip("."))):
            carried(fracture.old, now)
        return
    layout, recipe = carried(fracture.old, now)
    search = Search(now.shape, now.hardware, HEADROOM, now.precision)
    _, reason = search.too_large(layout, recipe)
    assert (fracture.kind == "memory") == bool(reason)
    held = [
        predict_memory(now.shape, layout, recipe, rank, "cuda") for rank in fullest_ranks(now.shape, layout, recipe)
    ]
    top = max(held, key=lambda breakdown: breakdown.total)
    assert f"at the peak: {fracture.moment}" in top.item("activations").formula
    if reason:
        assert f"{top['activations'] / 1e9:.1f} GB activations" in fracture.words
    assert fracture.over == pytest.approx(max(0.0, top.total - search.room))


def test_a_slower_link_between_nodes_breaks_nothing_on_one_node_and_dp_on_two():
    """Would catch a change of the wrong link, and a sentence that is not made from the planner's seconds."""
    assert what_breaks(EIGHT, "slow link").kind == "nothing"
    fracture = what_breaks(AUDIO, "slow link")
    plan, slow = fracture.old, fracture.now.hardware
    step = predict_step(plan.shape, plan.layout, plan.recipe, slow, simulated=0)
    grown = (step.total - plan.step_s) / plan.step_s
    assert fracture.kind == "dp"
    assert f"{grown:+.0%} of the old step" in fracture.words


def test_a_small_batch_pays_for_what_a_step_costs_once():
    """Would catch the host and the optimizer being counted as computing, whose flops per token stay the same."""
    fracture = what_breaks(EIGHT, "small batch")
    step = EIGHT.found[0].step
    most = fracture.parts[0]
    assert fracture.kind == most.name == "once"
    assert most.before == pytest.approx((step["host"] + step["optimizer"]) * 8 / (128 * 2048))
    assert most.after == pytest.approx(16 * most.before, rel=0.01)


def test_the_parts_that_break_a_pipeline_are_told_apart(staged):
    """Would catch growth by seconds of a step, by which a smaller batch breaks nothing."""
    assert [what_breaks(staged, name).kind for name in ("slow link", "small batch", "fp32", "one is missing")] == [
        "dp", "bubble", "memory", "layout",
    ]  # fmt: skip
    fewer = what_breaks(staged, "small batch")
    before, after = fewer.parts[0].before, fewer.parts[0].after
    assert fewer.parts[0].name == "bubble"
    assert after == pytest.approx(16 * before, rel=0.1)


@pytest.mark.parametrize("change", ["half the memory", "small batch", "fp32"])
def test_the_mend_is_the_planners_best_plan(change):
    """Would catch a mend for the old situation, and a plan of which it is not said what changed."""
    fracture = what_breaks(EIGHT, change)
    memory = Hardware.preset("a100-80gb").memory_bytes.value
    device = Hardware.preset("a100-80gb").changed(memory_bytes=memory / 2)
    asked = {
        "half the memory": (device, 8, 128, 2048, "bf16"),
        "small batch": ("a100-80gb", 8, 8, 2048, "bf16"),
        "fp32": ("a100-80gb", 8, 128, 2048, "fp32"),
    }
    *numbers, precision = asked[change]
    best = plans(EIGHT.shape, *numbers, precision=precision, by="seconds")[0]
    assert (fracture.mend.layout, fracture.mend.recipe) == (best.layout, best.recipe)
    assert fracture.mend.step_s == best.step_s
    assert str(best) in fracture.mend_words
    assert fracture.differences
    assert all(difference in fracture.mend_words for difference in fracture.differences)


def test_a_missing_device_may_be_mended_with_fewer_devices():
    """Would catch a mend that needs the device that is missing."""
    fracture = what_breaks(EIGHT, "one is missing")
    assert fracture.mend.layout.size <= 7
    assert "devices 8 -> 7" in fracture.mend_words


@pytest.mark.parametrize("seed", range(4))
def test_four_answers_stand_to_choice_and_the_right_one_once(seed, staged):
    """Would catch an answer that is always first, and the wire of an axis that the plan does not have."""
    for case in (EIGHT, staged):
        for change in NAMES:
            fracture = what_breaks(case, change)
            offered = choices(fracture, seed)
            assert offered == choices(fracture, seed)
            assert len(set(offered)) == 4
            assert fracture.kind in offered
            assert set(offered) <= set(possible(fracture.old)) <= set(KINDS)
    places = {choices(what_breaks(EIGHT, "fp32"), seed).index("memory") for seed in range(20)}
    assert places == {0, 1, 2, 3}


def test_a_round_asks_for_different_answers_and_leaves_out_what_was_asked():
    """Would catch a round in which "memory" is always right, and a second one with the same questions."""
    for seed in range(6):
        first = drawn(EIGHT, seed)
        second = drawn(EIGHT, seed, without=[fracture.change.name for fracture in first])
        assert len({fracture.kind for fracture in first}) == 3
        assert not {fracture.change.name for fracture in first} & {fracture.change.name for fracture in second}
    assert drawn(EIGHT, 3) == drawn(EIGHT, 3)


def test_unknown_names_and_too_long_rounds_are_value_errors():
    """Would catch a KeyError, and a round that is shorter than it was asked for."""
    with pytest.raises(ValueError, match="did you mean 'slow link'"):
        what_breaks(EIGHT, "slow lnk")
    with pytest.raises(ValueError, match="no case 'nine'"):
        what_breaks("nine", "fp32")
    with pytest.raises(ValueError, match="cannot be drawn"):
        drawn(EIGHT, 0, count=9)
    empty = replace(EIGHT)
    empty.__dict__["found"] = ()
    with pytest.raises(ValueError, match="no plan of the case 'eight' fits"):
        what_breaks(empty, "fp32")


def test_no_answer_is_in_the_page_before_a_choice():
    """Would catch a verdict, a mend, or the right one being marked, before the learner has chosen."""
    panel = WhatBreaksPanel("eight")
    fracture, before = panel.asked.fracture, words_of(panel) + panel.static().label
    assert panel.asked.menu.value is None
    for told in (fracture.words, fracture.moment, "Right", "too much"):
        assert told not in before
    panel.asked.answer()
    panel.asked.mend()
    assert "Choose one" in words_of(panel)
    assert fracture.words not in words_of(panel)
    assert not panel.asked.mended.value


def test_a_choice_is_judged_once_and_then_the_mend_is_shown():
    """Would catch a second choice that counts, and a mend that comes with the verdict."""
    judged, mended = list[bool](), list[str]()
    fracture = what_breaks(EIGHT, "half the memory")
    asked = FractureQuestion(fracture, 0, judged.append, lambda: mended.append("shown"), lambda right: f"then {right}")
    asked.menu.value = next(kind for kind in asked.offered if kind != "memory")
    asked.go.click()
    asked.menu.value = "memory"
    asked.go.click()
    assert judged == [False]
    assert fracture.words in words_of(asked)
    assert "then False" in words_of(asked)
    assert fracture.mend_words not in words_of(asked)
    assert not mended
    asked.show_mend.click()
    asked.show_mend.click()
    assert fracture.mend_words in words_of(asked)
    assert mended == ["shown"]


def test_the_menus_ask_another_question():
    """Would catch a panel that keeps the question of its first case."""
    panel = WhatBreaksPanel("eight")
    panel.change.value = "small batch"
    assert panel.asked.fracture.change.name == "small batch"
    assert re.search("sixteenth", words_of(panel))
    panel.case.value = "audio"
    assert panel.asked.fracture.case.name == "audio"
