"""Losses of practice: each one makes a step longer, where it should; and what they are fitted to is foretold."""

from __future__ import annotations

import statistics
from dataclasses import fields, replace

import pytest

from labkit.plan.job.recipe import Recipe
from labkit.plan.machine.efficiency import IDEAL, Practice
from labkit.plan.machine.hardware import Hardware
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout
from labkit.plan.search.published import published_runs
from labkit.plan.step.time import predict_step

H100 = Hardware.preset("h100")
SHAPE = ModelShape.preset("llama-7b")
LARGER_IS_FASTER = ("products", "attention", "wire")


def seconds(practice: Practice, layout: Layout, **choices) -> float:
    recipe = Recipe(**{"batch_size": 16, "n_micro": 2, "precision": "bf16", **choices})
    return predict_step(SHAPE, layout, recipe, H100.changed(practice=practice)).total


@pytest.mark.parametrize("name", [field.name for field in fields(Practice) if field.name not in ("sick", "late_s")])
def test_each_loss_makes_a_step_longer(name):
    """Would catch a loss that no prediction reads, and one on the wrong side of a fraction."""
    layout = Layout(dp=2, pp=2, tp=16) if name == "crossing_s" else Layout(dp=4, tp=4)
    worse = {**dict.fromkeys(LARGER_IS_FASTER, 0.1), "half_side": 500.0, "traffic": 3.0, "contention": 0.9}
    practice = replace(IDEAL, **{name: worse.get(name, 1e-2)})
    assert seconds(practice, layout) > 1.01 * seconds(IDEAL, layout)


def test_a_loss_of_communication_costs_one_device_nothing():
    """Would catch a sum, a message or a gather that a single device waits for."""
    talkative = replace(IDEAL, wire=0.1, crossing_s=1.0, contention=1.0, host_call_s=1.0, sick=0.9, late_s=1.0)
    assert seconds(talkative, Layout()) == seconds(IDEAL, Layout())


def test_a_device_waits_for_its_host_or_works_but_not_both():
    """Would catch the host's seconds added to those of large ops, behind which Python runs ahead."""
    slow = replace(IDEAL, host_s=1e-4)
    assert seconds(slow, Layout(), batch_size=64, n_micro=1) == seconds(IDEAL, Layout(), batch_size=64, n_micro=1)
    tiny = ModelShape.gpt(4, 128, 2, 512, 64)
    recipe = Recipe(batch_size=1, precision="bf16")
    step = predict_step(tiny, Layout(), recipe, H100.changed(practice=slow))
    assert step["host"] > step["compute"]


def test_messages_are_late_if_a_sick_node_is_likelier_than_none():
    """Would catch a cluster of any size that is late, or none: with one sick node of 30 it turns at 21 nodes."""
    practice = Practice(sick=1 / 30, late_s=0.2)
    assert [practice.late(n) for n in (1, 20, 21, 64)] == [0.0, 0.0, 0.2, 0.2]
    sick = replace(IDEAL, sick=1 / 30, late_s=0.2)
    for layout, late in ((Layout(dp=80, pp=2), 0.0), (Layout(dp=84, pp=2), 0.2 * 2 * 3), (Layout(dp=168), 0.0)):
        batch = 2 * layout.dp
        more = seconds(sick, layout, batch_size=batch) - seconds(IDEAL, layout, batch_size=batch)
        assert more == pytest.approx(late)


@pytest.mark.parametrize("losses", [{"host_s": -1e-6}, {"wire": 0}, {"wire": 1.2}, {"products": 1.1}, {"sick": 1.0},
                                    {"attention": float("nan")}])  # fmt: skip
def test_losses_that_cannot_be_are_refused(losses):
    """Would catch a device that computes faster than its peak, and seconds below zero."""
    with pytest.raises(ValueError, match=next(iter(losses))):
        Practice(**losses)


# -- published runs ----------------------------------------------------------------------------------------------------


def ratios(source: str, low: float, high: float) -> list[float]:
    """Predicted / measured seconds of the runs of a source whose MFU lies between two shares."""
    runs = [run for run in published_runs() if run.source == source and run.step_s and not run.lacks]
    runs = [run for run in runs if low <= (run.mfu or 0) < high]
    return [predict_step(run.shape, run.layout, run.recipe, run.hardware, 0).total / run.step_s for run in runs]


@pytest.mark.parametrize("source", ["playbook", "foundry"])
def test_four_of_five_published_runs_of_20_percent_and_more_are_foretold_within_15_percent(source):
    """The runs of others: 1,158 of nanotron, 125 of llm-foundry. A quarter and a half of them set the constants.

    Would catch constants that fit one program only, and a prediction that dreams of 80% MFU."""
    good = ratios(source, 0.2, 1.0)
    assert len(good) > 100
    assert sum(0.85 < ratio < 1.15 for ratio in good) >= 0.8 * len(good)
    assert 0.95 < statistics.median(good) < 1.07


def test_runs_below_20_percent_are_foretold_in_the_middle():
    """Runs that wait for Python, for sums between nodes and for sick nodes. Would catch the dream of a step without."""
    slow = ratios("playbook", 0.0, 0.2)
    assert len(slow) > 600
    assert 0.8 < statistics.median(slow) < 1.25
