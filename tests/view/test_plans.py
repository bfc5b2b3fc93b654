"""The planner's pictures and its panel: what they say, what they refuse, and how little a pick costs."""

from __future__ import annotations

import pytest

from labkit.course.topics.design_cases import CASES, EIGHT, FIVE_HUNDRED, SEVENTY
from labkit.course.topics.planner_panel import OWN, PlannerPanel
from labkit.plan.machine.hardware import Hardware
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout
from labkit.plan.search.search import plans
from labkit.view.plans import ideas_of, in_short, name_of, plan_list, shortlist, spent, strategy_map
from tests.counting import lines
from tests.view import page


@pytest.mark.parametrize("each", CASES, ids=lambda each: each.name)
def test_the_list_is_whole_whichever_plan_is_opened(each):
    """Would catch words on words, and a refused plan without a bar or a reason."""
    listed = shortlist(each.found)
    for pick in range(len(listed)):
        picture = plan_list(listed, pick, each.title, headroom=0.06)
        page.check(picture)
        assert "75.2 GB usable of 80 GB a device" in page.texts(picture)


def test_tiny_devices_and_searches_without_a_kept_plan_have_a_picture():
    """Would catch a scale that divides by nothing, and `0 GB` for a laptop's megabytes."""
    toy = Hardware.measured(1e10, 4e9, memory_bytes=4.5 * 2**20, node_size=4)
    shape = ModelShape.gpt(4, 64, 4, 512, 64, tied=False)
    found = plans(shape, toy, 4, 16, precision="fp32")
    page.check(plan_list(shortlist(found), 0, headroom=0.06))
    assert "MB" in str(found[0])
    assert "MB are there" in next(plan.refused for plan in found if plan.needs_bytes)
    nothing = shortlist(plans("llama3-405b", "laptop", 2, 8))
    assert nothing
    assert not any(plan.kept for plan in nothing)
    page.check(plan_list(nothing, 0))
    with pytest.raises(ValueError, match="plan 1 of 0"):
        plan_list([])
    with pytest.raises(ValueError, match="is none that can be shown"):
        plan_list(nothing, 99)


def test_the_short_list_has_the_best_of_each_layout_and_one_of_each_reason():
    """Would catch six plans of one layout, and a list of refusals that says one thing six times."""
    listed = shortlist(SEVENTY.found)
    kept = [plan for plan in listed if plan.kept]
    assert kept[0] is SEVENTY.found[0]
    assert len({plan.layout for plan in kept}) == len(kept) == 6
    assert kept == sorted(kept, key=lambda plan: plan.step_s)
    refused = [plan for plan in listed if not plan.kept]
    assert {plan.recipe.strategy for plan in refused if plan.needs_bytes} == {"ddp", "zero1", "zero2", "zero3"}
    assert all(plan.layout == Layout(dp=256) for plan in refused if plan.needs_bytes)
    assert any("spans 2 nodes" in plan.refused or "stages" in plan.refused for plan in refused)


def test_the_drawn_step_is_the_plans_step():
    """Would catch overlap that is drawn as time, or taken twice."""
    for plan in SEVENTY.found[:40] + FIVE_HUNDRED.found[:40]:
        assert sum(spent(plan.step).values()) == pytest.approx(plan.step_s)


def test_the_opened_plan_shows_every_number_with_its_formula():
    """Would catch a bar whose number nobody can read."""
    listed = shortlist(EIGHT.found)
    words = page.texts(plan_list(listed, 0))
    assert words.count("total") == 2
    for part in (listed[0].memory, listed[0].step):
        for item in part.items:
            assert item.name in words
            assert any(item.formula.startswith(each.rstrip("…")) for each in words if len(each) > 5)
    ddp = next(k for k, plan in enumerate(listed) if not plan.kept)
    picture = plan_list(listed, ddp)
    assert f"refused: {listed[ddp].refused}" in " ".join(page.texts(picture))
    assert page.texts(picture).count("total") == 1


def test_names_say_what_a_plan_is():
    """Would catch a strategy that is named where there is one replica."""
    alone = plans("gpt2", "h100", 1, 8)[0]
    two = [plan for plan in SEVENTY.found if plan.layout == Layout(128, 1, 2) and plan.recipe.strategy == "zero3"][0]
    assert name_of(two)[0] == "dp 128, pp 1, tp 2"
    assert name_of(two)[1].startswith("ZeRO-3, ")
    assert in_short(two).startswith("ZeRO-3, tp 2")
    assert in_short(alone) == "one device"
    assert [ideas_of(plan) for plan in (alone, EIGHT.found[0], two)] == [0, 1, 2]
    assert ideas_of(next(plan for plan in SEVENTY.found if plan.layout.pp > 1)) == 3


def test_the_map_says_the_fastest_and_the_simplest():
    """Would catch a cell of another model, and an empty search that is drawn as a plan."""
    found = {(name, n): plans(name, "h100", n, 64, 2048) for name in ("gpt2-xl", "llama-65b") for n in (1, 8, 64)}
    picture = strategy_map(found)
    page.check(picture)
    assert "llama-65b on 1: does not fit" in picture.label
    for name, n_ranks in (("llama-65b", 64), ("gpt2-xl", 8)):
        assert f"{name} on {n_ranks}: {in_short(found[name, n_ranks][0])}" in picture.label
    assert "simplest: DDP" in picture.label
    page.check(strategy_map({("a", 1): found["gpt2-xl", 1], ("b", 8): found["gpt2-xl", 8]}))  # with holes
    with pytest.raises(ValueError, match="at least one search"):
        strategy_map({})


# -- the panel ---------------------------------------------------------------------------------------------------------


def test_a_case_is_loaded_as_it_is_asked():
    """Would catch a panel that opens with other numbers than its question."""
    panel = PlannerPanel(case="seventy")
    assert panel.answer is SEVENTY.found
    assert SEVENTY.question in panel.children[0].value
    assert (panel.ranks.value, panel.rows.value, panel.seq.value) == ("256", "1024", "4096")
    assert "llama-70b, 256 x h100" in panel.static().label
    assert panel.sizes["n_layer"].value == "80"
    assert panel.sizes["n_layer"].disabled
    with pytest.raises(ValueError, match="did you mean 'seventy'"):
        PlannerPanel(case="sevnty")


@pytest.mark.slow
def test_the_controls_ask_the_planner_again_and_a_pick_does_not():
    """Would catch a menu without effect, and a search for every plan that is opened."""
    panel = PlannerPanel()
    assert panel.answer is EIGHT.found
    panel.plan.value = len(panel.listed) - 1
    assert panel.answer is EIGHT.found
    assert "refused" in panel.static().label.split("opened")[0]
    panel.hardware.value = "h200"
    assert panel.plan.value == 0
    assert "of 141 GB a device" in panel.shown.value
    searched = panel.answer
    panel.plan.value = 1
    assert panel.answer is searched
    panel.ranks.value = "16"
    assert all(plan.layout.size == 16 for plan in panel.answer)
    panel.optimizer.value = "sgd"
    assert all(plan.recipe.optimizer == "sgd" for plan in panel.answer)
    panel.precision.value = "fp32"
    assert all(plan.recipe.precision == "fp32" for plan in panel.answer)
    panel.rows.value, panel.seq.value = "64", "1,024"
    assert panel.answer[0].recipe.batch_size == 64
    assert panel.answer[0].shape.seq == 1024
    panel.model.value = "gpt2"
    assert panel.sizes["d_model"].value == "768"
    panel.model.value = OWN
    panel.sizes["n_layer"].value = "24"
    assert not panel.sizes["n_layer"].disabled
    assert panel.answer[0].shape.n_layer == 24
    assert panel.answer[0].shape.d_model == 768


def test_nonsense_is_told_and_the_picture_stays():
    """Would catch a typing error that empties the page, and a search for a million devices."""
    panel = PlannerPanel()
    before, found = panel.shown.value, panel.answer
    for field, odd, said in (
        (panel.ranks, "1000000", "devices: a whole number from 1 to 65,536, got"),
        (panel.rows, "2.5", "sequences a step: a whole number from 1 to"),
    ):
        good, field.value = field.value, odd
        assert said in panel.message.value
        assert "the picture is the last one that made sense" in panel.message.value
        assert panel.shown.value == before == str(panel.static())
        assert panel.answer is found
        field.value = good
        assert panel.message.value == ""
    panel.model.value = OWN
    panel.sizes["n_head"].value = "7"
    assert "cannot be cut into n_head=7 heads" in panel.message.value
    panel.sizes["n_head"].value = "24"
    assert panel.message.value == ""


def test_opening_a_plan_is_little_work():
    """Would catch a search, or a walk of memory, under a menu."""
    panel = PlannerPanel()

    def pick():
        panel.plan.value = 3

    assert lines(pick) < 30_000
