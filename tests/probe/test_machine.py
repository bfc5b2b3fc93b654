"""Rates of this machine: measured, the same on every rank, and those that the links were given."""

from __future__ import annotations

import psutil
import pytest

from labkit import Cluster, Layout, Links, Recipe, run_threads
from labkit.plan.time import predict_step
from labkit.probe.machine import measure_hardware, through
from labkit.train.config import GPTConfig


@pytest.mark.slow
def test_rates_are_the_same_on_every_rank_and_the_link_is_the_one_that_was_asked_for():
    """Would catch ranks that plan with different machines, flops for bytes, a beta that is taken for a speed."""
    links = Links.uniform(2, alpha_s=20e-3, bytes_per_s=50e6)
    with Cluster(2, device="cpu", links=links, quiet=True) as two:
        here, there = (reply.value for reply in two.run(measure_hardware, 64, 2))
    assert here == there
    assert [item.name for item in here.flops] == ["fp32", "fp64", "bf16", "fp16"]
    assert all(item.value > 1e6 and item.source == "measured by 2 ranks at a time" for item in here.flops)
    assert here.bytes_per_s.value > 1e7
    assert 0 < here.launch_s < 1e-2
    assert here.memory_bytes.value == psutil.virtual_memory().total // 2
    assert here.intra.alpha_s == pytest.approx(20e-3, rel=0.5)
    assert here.intra.bytes_per_s == pytest.approx(50e6, rel=0.5)


def test_a_link_that_is_no_slower_for_large_messages_still_has_a_speed():
    """A bug: on a busy machine the line was flat now and then, and a division by its slope failed."""
    assert through([(100, 1e-3), (1_100, 2e-3)]).bytes_per_s == pytest.approx(1e6)
    flat = through([(64, 2e-3), (4_000_000, 2e-3)])
    assert (flat.alpha_s, flat.bytes_per_s) == (pytest.approx(2e-3), 2e9)


def test_one_rank_needs_no_link_and_can_be_predicted_with():
    """Would catch a ping-pong with nobody."""
    (here,) = run_threads(measure_hardware, 1, 64, 1)
    assert here.intra.source.startswith("assumed")
    assert predict_step(GPTConfig(), Layout(), Recipe(), here).total > 0


@pytest.mark.parametrize("options", [(0, 1), (64, 0)])
def test_nothing_to_measure_is_refused(options):
    """Would catch a median of nothing."""
    with pytest.raises(ValueError, match="at least 1"):
        run_threads(measure_hardware, 1, *options)
