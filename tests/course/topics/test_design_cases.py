"""The design cases: frozen, complete, and answered by the planner as the lab says."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from labkit.course.topics.design_cases import AUDIO, CASES, EIGHT, FIVE_HUNDRED, SEVENTY, THREE_DESIGNS, case
from labkit.plan.partition.layout import Layout
from labkit.plan.search.search import plans
from labkit.plan.step.time import predict_step


@pytest.mark.parametrize("each", CASES, ids=lambda each: each.name)
def test_a_case_has_a_question_its_numbers_and_an_answer(each):
    """Would catch a case that nothing fits, and a number in the question that the planner is not asked."""
    assert each.question.endswith("?") or each.question.endswith(".")
    assert each.asks
    given = {item.name: item for item in each.given}
    assert given["devices"].value == each.n_ranks
    assert given["tokens of a step"].value == each.batch * each.seq
    assert given["state"].value == 16 * each.shape.n_params
    assert all(item.unit and item.source for item in each.given)
    assert each.found[0].kept
    assert not each.found[-1].kept
    assert all(plan.layout.size == each.n_ranks for plan in each.found)


def test_the_numbers_of_the_questions_are_those_of_the_models():
    """Would catch a "60 GB" that is 40, and a 3B model of 5."""
    assert 16 * EIGHT.shape.n_params == pytest.approx(60e9, rel=0.02)
    assert SEVENTY.shape.n_params == pytest.approx(70e9, rel=0.02)
    assert AUDIO.shape.n_params == pytest.approx(3e9, rel=0.05)
    assert FIVE_HUNDRED.shape.n_params == pytest.approx(175e9, rel=0.02)


def test_a_case_is_frozen_and_searched_once():
    """Would catch a search in every redraw."""
    assert EIGHT.found is EIGHT.found
    assert isinstance(EIGHT.found, tuple)
    with pytest.raises(FrozenInstanceError):
        EIGHT.batch = 3


def test_the_answer_is_the_planners():
    """Would catch a case that asks for something else than it says."""
    asked = plans(EIGHT.shape, EIGHT.hardware, 8, EIGHT.batch, EIGHT.seq)
    assert [(p.layout, p.recipe, p.refused) for p in asked] == [(p.layout, p.recipe, p.refused) for p in EIGHT.found]


def test_the_eight_device_case_refuses_ddp_and_keeps_zero():
    """The lab says: DDP does not fit, ZeRO-1 does, and ZeRO-3 gains next to nothing and not 3.5 times."""
    alone = [plan for plan in EIGHT.found if plan.layout == Layout(dp=8)]
    best = {s: next((p for p in alone if p.kept and p.recipe.strategy == s), None) for s in ("ddp", "zero1", "zero3")}
    assert best["ddp"] is None
    assert best["zero1"].step_s / best["zero3"].step_s == pytest.approx(1, abs=0.05)
    assert min(p.needs_bytes for p in alone if p.recipe.strategy == "ddp") > 0.94 * 80e9


def test_a_case_is_found_by_its_name_or_told():
    """Would catch a typing error that opens another case."""
    assert case("seventy") is SEVENTY
    assert case(AUDIO) is AUDIO
    with pytest.raises(ValueError, match="no case 'eigth'; did you mean 'eight'"):
        case("eigth")
    with pytest.raises(ValueError, match="there are eight, seventy, audio, 512"):
        case("zzz")


def test_each_of_the_three_designs_has_the_fault_that_the_lab_finds_in_it():
    """Would catch a design that is repaired by accident: A's tp leaves the node, B is exposed to its gathers, C's batch
    is far beyond the others'. All of them are for the devices of the case."""
    best = FIVE_HUNDRED.found[0]
    assert all(layout.size == FIVE_HUNDRED.n_ranks for layout, _ in THREE_DESIGNS.values())
    steps = {name: predict_step(best.shape, *design, best.hardware) for name, design in THREE_DESIGNS.items()}
    exposed = {name: step["dp"] + step["overlap"] for name, step in steps.items()}
    batches = {name: recipe.batch_size for name, (_, recipe) in THREE_DESIGNS.items()}
    assert THREE_DESIGNS["A"][0].tp > best.hardware.node_size
    assert steps["A"]["tp"] > 0.3 * steps["A"].total
    assert exposed["B"] > steps["B"]["compute"]
    assert batches["C"] == 16 * batches["A"] == 16 * batches["B"]
    assert all(steps[name].total > 1.5 * best.step_s for name in ("A", "B"))
