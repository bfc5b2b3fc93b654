"""The report of a run whose experts are dealt out: columns of ep and of those with the same experts, beside the law."""

from __future__ import annotations

import pytest
from rich.console import Console

from labkit.comm.local import run_threads
from labkit.course.training.training import Order, life, report_of
from labkit.plan.job.recipe import Recipe
from labkit.plan.partition.layout import Layout
from labkit.train.config import GPTConfig


def test_bytes_of_experts_stand_in_columns_of_their_own_beside_the_law(monkeypatch):
    """Would catch an axis without a column, bytes of experts counted among those of dp, and a law of a dense model."""
    monkeypatch.setattr("labkit.probe.peak.peak_flops", lambda group, dtype: 1.0)
    config = GPTConfig(n_layer=2, d_model=16, n_head=2, vocab=256, seq=8, tied=False, n_expert=4, balance="none")
    order = Order(config, Recipe("zero1", batch_size=8), Layout(4, ep=2), 3)
    report = report_of(order, run_threads(lambda group: life(group, order), 4))
    for sent, law in zip(report.sent, report.law, strict=True):
        assert sent["dp"] == pytest.approx(law["dp"], abs=64)
        assert sent["expert_dp"] == pytest.approx(law["expert_dp"], abs=64)
        assert law["expert_dp"] > 0
        assert 0.3 < sent["ep"] / law["ep"] < 3
    console = Console(width=400)
    with console.capture() as capture:
        console.print(report)
    table = capture.get()
    assert "ep sent" in table
    assert "expert_dp sent" in table
    assert "equally busy" in table
    assert "MFU not measurable" in table  # of a peak of one flop/s a step did more than all
