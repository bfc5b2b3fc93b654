"""Risks and intervals: the rules by hand, the order of plans by them, and what the published runs say to both."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from labkit.plan.breakdown import Breakdown, Item
from labkit.plan.job.recipe import Recipe
from labkit.plan.machine.hardware import Hardware
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout
from labkit.plan.search.interval import kind_of
from labkit.plan.search.risk import risks
from labkit.plan.search.room import edge, interval_words, risk_words
from labkit.plan.search.search import Plan, Search, gb, plans
from labkit.plan.search.uncertainty import FILE, constants

H100 = Hardware.preset("h100")
SMALL = ModelShape.gpt(8, 512, 8, 1024, 512)
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_a_pipeline_on_nodes_waits_for_late_messages_as_the_rule_says():
    """Would catch messages of one direction alone, odds of one node, and a risk where nothing crosses."""
    recipe = Recipe("zero1", batch_size=64, n_micro=16)
    (late,) = risks(Layout(4, 4, 4), recipe, H100)
    known = constants().late
    assert (late.odds, late.lost_s) == pytest.approx((known["share"] * (1 - 0.965**8), 0.22 * 4 * (16 + 3)))
    assert late.expected_s(2.0) == pytest.approx(2.08, abs=0.005)
    assert late.expected_s(2.0) < late._replace(lost_s=1e9).expected_s(2.0) == pytest.approx(2 / (1 - late.odds))
    assert "8 nodes" in late.words
    assert risks(Layout(1, 4, 2), recipe, H100) == risks(Layout(16, 1, 4), recipe, H100) == ()
    assert not risks(Layout(4, 4, 4), recipe, Hardware.preset("laptop"))


def test_a_full_pipeline_is_at_risk_and_one_without_stages_only_on_many_nodes():
    """Would catch a pipeline that is charged twice for the same messages, and full plans without stages."""
    recipe, known = Recipe("zero1", batch_size=64, n_micro=16), constants()
    (full,) = risks(Layout(4, 4, 4), recipe, H100, 61e9)
    assert full.name == "full stages"
    assert (full.odds, full.lost_s) == pytest.approx((known.full["share"], 0.22 * 4 * (16 + 3)))
    assert not risks(Layout(8), recipe, H100, 79e9)
    (many,) = risks(Layout(64, 1, 8), recipe, H100)
    assert (many.odds, many.lost_s) == pytest.approx((known.many["share"], known.many["late_s"] * 16))


def _plan(layout: Layout, seconds: float, hardware: Hardware) -> Plan:
    recipe = Recipe("zero1", batch_size=32, n_micro=8)
    step = Breakdown([Item("compute", seconds, "s", "", "")])
    return Plan(SMALL, hardware, layout, recipe, step, 0.3)


def test_a_full_pipeline_does_not_come_first_though_it_would_be_fastest():
    """Would catch an order by seconds alone, and memory that is never weighed, since bounds do not tell it."""
    pipeline = _plan(Layout(2, 2), 1.0, H100)
    for share, first in ((0.8, 1), (0.5, 0)):
        hardware = H100.changed(memory_bytes=pipeline.memory.total / share)
        candidates = [_plan(Layout(2, 2), 1.0, hardware), _plan(Layout(4), 1.2, hardware)]
        ordered = Search(SMALL, hardware, 0.06, "bf16").in_order(candidates)
        assert [plan.step_s for plan in ordered] == [candidates[first].step_s, candidates[1 - first].step_s]
        assert len(risk_words(ordered, 1)) == first


def test_an_answer_says_in_what_interval_it_lies():
    """Would catch the interval of another kind, factors without seconds, and an interval of what nobody published."""
    hardware = H100.changed(memory_bytes=60e9)
    plan = _plan(Layout(4), 2.0, hardware)
    low, high, runs, _ = constants().seconds["small"]
    (line,) = interval_words(plan)
    assert f"{2 * low:.3g} to {2 * high:.3g} s a step" in line
    assert f"{runs} published runs" in line
    assert not interval_words(replace(plan, hardware=Hardware.preset("laptop")))
    large = ModelShape.preset("llama-7b")
    layouts = {Layout(8): 0.4, Layout(16): 0.3, Layout(512): 0.4, Layout(2, 4): 0.4, Layout(64, 4): 0.4}
    kinds = [kind_of(large, layout, H100, mfu) for layout, mfu in layouts.items()]
    assert kinds == ["35%", "20%", "many nodes", "pipeline", "pipeline, many nodes"]


def test_a_plan_at_the_edge_says_which_change_takes_it_out():
    """Would catch advice to take another layout where half the rows of a micro-batch do."""
    shape = ModelShape.preset("gpt2").changed(vocab=50_304)
    first, recomputed, fewer = (
        plans(shape, "a100-40gb", 8, 256, strategy="ddp", precision="amp", n_micro=n, recompute=way)[0]
        for n, way in ((1, "none"), (1, "full"), (2, "none"))
    )
    (line,) = edge([first, recomputed, fewer])
    held = f"{fewer.memory.total / 1e9:.1f} GB, {fewer.step_s:.3g} s"
    assert line.endswith(f"Out of it: {recomputed}; or with micro-batches of 16 rows ({held})")


def test_a_refusal_names_what_is_held_at_the_highest_moment():
    """K14: "6.0 GB activations" stood there, where the peak was the optimizer's step, which holds other things."""
    recipe, layout, shape = Recipe(batch_size=1), Layout(1), SMALL.changed(seq=8)
    memory = Plan(shape, H100, layout, recipe).memory
    tight = H100.changed(memory_bytes=memory.total * 0.999)
    search = Search(shape, tight, 0.0, "bf16")
    needs, words = search.too_large(layout, recipe)
    assert needs == memory.total
    assert "at the peak, the optimizer's step, " in words
    assert f"{gb(memory['gradients'])} gradients" in words


@pytest.mark.rest
@pytest.mark.slow
def test_published_runs_bear_the_intervals_and_the_order_out(monkeypatch):
    """Would catch constants that nobody can learn again, intervals with fewer than nine of ten runs, and a first choice
    that is no better than by seconds alone; no group's own runs are learnt from."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    spec = importlib.util.spec_from_file_location("uncertainty_benchmark", BENCHMARKS / "uncertainty.py")
    bench = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, bench)
    spec.loader.exec_module(bench)
    runs = bench.foretold()
    assert bench.text(bench.learnt(runs, bench.of_papers())) == FILE.read_text(encoding="utf-8")
    assert bench.halves(runs) >= 0.9
    rows = bench.choices(runs)
    before, after = (sum(row[name] <= 1.1 for row in rows) for name in ("before", "without the group"))
    assert after >= 0.7 * len(rows)
    assert after >= before + 3


def test_plans_can_be_had_by_their_predicted_seconds_alone():
    """Would catch labs that call a plan the fastest which is only the safest."""
    by_seconds = plans("llama-70b", "h100", 64, 512, strategy="zero1", recompute="full", by="seconds")
    kept = [plan.step_s for plan in by_seconds if plan.kept]
    assert kept == sorted(kept)
    with pytest.raises(ValueError, match="did you mean 'seconds'"):
        plans("gpt2", "h100", 8, 64, by="second")
