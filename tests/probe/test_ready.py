"""The moments at which gradients are ready: their order, their bytes, and what is left out."""

from __future__ import annotations

import torch
from torch import nn

from labkit.probe.ready import Arrivals


def test_the_last_layer_is_ready_first_and_all_are_there():
    """Would catch names in the order of arrival, and bytes of another dtype."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).double()
    with Arrivals(model) as arrivals:
        model(torch.ones(3, 4, dtype=torch.float64)).sum().backward()
    assert [(each.name, each.n_bytes) for each in arrivals.gradients] == [
        ("0.weight", 256), ("0.bias", 64), ("1.weight", 128), ("1.bias", 16),
    ]  # fmt: skip
    at = {each.name: each.at_s for each in arrivals.gradients}
    assert 0 < at["1.weight"] < at["0.weight"] <= arrivals.seconds


def test_what_got_no_gradient_is_left_out_and_a_tied_weight_is_there_once():
    """Would catch a parameter at second 0 that never came, and a weight that travels twice."""
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "frozen": nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight
    model["frozen"].requires_grad_(False)
    with Arrivals(model) as arrivals:
        model["b"](torch.ones(1, 4)).sum().backward()
    assert [each.name for each in arrivals.gradients] == ["a.weight", "b.bias"]


def test_entered_again_it_begins_anew_and_left_it_hears_nothing():
    """Would catch hooks that stay on the model."""
    model = nn.Linear(2, 2)
    arrivals = Arrivals(model)
    with arrivals:
        model(torch.ones(1, 2)).sum().backward()
    first = arrivals.gradients
    model(torch.ones(1, 2)).sum().backward()
    assert arrivals.gradients == first
    with arrivals:
        pass
    assert arrivals.gradients == ()
