"""The second step of a plan: its bytes are those of the law, and nothing of the first step counts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from labkit import Cluster, GPTConfig, Layout, Recipe, predict_memory, run_threads
from labkit.course.topics import second_step as module
from labkit.course.topics.second_step import second_step

CONFIG = GPTConfig(n_layer=2, d_model=64, n_head=4, vocab=256, seq=32, tied=False)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two ranks for all plans of this file."""
    with Cluster(2, device="cpu", quiet=True) as started:
        yield started


@pytest.mark.parametrize(
    ("layout", "recipe"),
    [(Layout(dp=2), Recipe("zero1", batch_size=4)), (Layout(pp=2), Recipe(batch_size=4, n_micro=2))],
    ids=("shards", "stages"),
)
def test_the_peak_is_that_of_the_law(cluster, layout, recipe):
    """Would catch a peak without the optimizer's state, and one of a plan that is not the one asked for."""
    for reply in cluster.run(second_step, CONFIG, layout, recipe):
        law = predict_memory(CONFIG, layout, recipe, reply.rank)
        assert reply.value.peak.total == pytest.approx(law.total, rel=0.1)
        assert reply.value.seconds > 0


def test_the_first_step_does_not_count(monkeypatch):
    """Would catch a peak that is not reset: a first step also holds what is needed once."""

    def step(tokens, targets, number):
        torch.ones(1_000_000 if number == 0 else 1_000)

    monkeypatch.setattr(module, "assemble", lambda config, recipe, mesh: step)
    (costs,) = run_threads(second_step, 1, CONFIG, Layout(), Recipe(batch_size=1))
    assert 4_000 <= costs.peak.total < 100_000
