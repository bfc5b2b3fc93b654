"""Layers that sleep: they compute what others do, and sleep where a slow device would work."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from labkit.probe.paced import PacedLinear, pace


@pytest.fixture
def slept(monkeypatch):
    """The seconds of each sleep, in order; nobody sleeps."""
    seconds = list[float]()
    monkeypatch.setattr("labkit.probe.paced.sleep", seconds.append)
    return seconds


def test_a_paced_layer_computes_what_a_linear_layer_does(slept):
    """Would catch a gradient that is lost or scaled on its way through the sleep, and a layer that cannot be sent."""
    torch.manual_seed(0)
    layer = pickle.loads(pickle.dumps(copy.deepcopy(PacedLinear(3, 2, 1.0, 2.0, 3.0).double())))
    plain = copy.deepcopy(layer.linear)
    x = torch.randn(4, 3, dtype=torch.float64)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for module, rows in zip((layer, plain), inputs, strict=True):
        module(rows).square().sum().backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    for p, q in zip(layer.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_each_part_of_the_work_has_its_own_sleep(slept):
    """Would catch a backward that sleeps for both gradients at once: with zero_bubble, the weight's is due later."""
    layer, x = PacedLinear(3, 2, 1.0, 2.0, 3.0), torch.ones(1, 3, requires_grad=True)
    y = layer(x).sum()
    assert slept[-1] == 1.0
    slept.clear()
    torch.autograd.grad(y, x, retain_graph=True)
    assert slept == [2.0]
    slept.clear()
    y.backward()
    assert slept == [2.0, 3.0]
    slept.clear()
    pace(x, backward_s=0.5).sum().backward()
    assert slept == [0.0, 0.5]
