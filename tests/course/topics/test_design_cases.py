"""The design cases: frozen, complete, and answered by the planner as the lab says."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from labkit.course.topics.design_cases import AUDIO, CASES, EIGHT, FIVE_HUNDRED, SEVENTY, case
from labkit.plan.partition.layout import Layout
from labkit.plan.search.search import plans


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
