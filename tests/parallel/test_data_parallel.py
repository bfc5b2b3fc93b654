"""What all strategies have in common: they let go of what they hold, and hold no module that another one has."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from labkit import DDP, ZeRO1, ZeRO2, ZeRO3, run_threads
from labkit.parallel.bucket import as_on_rank_0
from labkit.probe.memory import MemoryProbe
from tests.cases import cases
from tests.parallel.training import adamw, batch, ragged, train

STRATEGIES = (DDP, ZeRO1, ZeRO2, ZeRO3)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategy_that_nobody_holds_is_gone_with_its_module(strategy, steps):
    """A bug: hooks on gradients held the strategy, where no collector of garbage looks: a model that was trained in a
    call kept its memory until the rank ended, unless close() was called."""

    def one(group):
        module = ragged()
        sync = strategy(module, group, adamw)
        if steps:
            train(sync, steps)
        return [weakref.ref(each) for each in (sync, module, *module.parameters())]

    found = run_threads(one, 2)
    gc.collect()  # here, for of two threads that collect at the same time only one does
    assert [ref() is None for refs in found for ref in refs] == [True] * sum(map(len, found))


@cases("second", STRATEGIES)
@cases("first", STRATEGIES)
def test_a_module_belongs_to_one_strategy_until_that_one_is_closed_or_gone(first, second):
    """Would catch gradients that are averaged twice, and a module that can never be wrapped again."""

    def one(group):
        module = ragged()
        sync = first(module, group, adamw)
        with pytest.raises(ValueError, match="belongs to another strategy already: close\\(\\) that one first"):
            second(module, group, adamw)
        sync.close()
        del sync
        after = second(module, group, adamw)
        after.zero_grad()
        x, y = batch(0)
        torch.nn.functional.mse_loss(module(x), y).backward()
        after.finish()
        after.step()

    run_threads(one, 2)


def test_weights_are_made_equal_with_little_memory():
    """A bug: small tensors were sent 25 MiB at a time, so a strategy held three times the model while it was made."""

    def one(group):
        tensors = [torch.full((50_000,), float(group.rank)) for _ in range(40)]
        with MemoryProbe() as probe:
            as_on_rank_0(tensors, group)
        return max(each.sum().item() for each in tensors), probe.peak.total

    for highest, peak in run_threads(one, 2):
        assert highest == 0.0
        assert peak < 4 * 2**20 + 4 * 50_000 * 4  # of 8 MB of tensors
