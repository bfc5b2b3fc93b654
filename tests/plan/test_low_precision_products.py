"""The law of products in 8 bits against the real ones under a MemoryProbe, for sides of any length."""

from __future__ import annotations

import torch
from torch import nn

from labkit.plan.model.low_precision_products import needs
from labkit.probe.memory import MemoryProbe
from labkit.train.fp8 import SCALINGS
from tests.cases import cases

SINGLE = 12
"""Bytes of the unit of a tensor in nvfp4, and of the largest numbers that are looked up, which the law leaves out."""


@cases("units", [*SCALINGS])
@cases("role", ["y", "gx", "gw"])
@cases("size", [(64, 32, 48), (300, 25, 64), (64, 33, 96), (33, 64, 96), (16, 136, 140), (0, 40, 48), (32, 0, 48)])
def test_a_product_holds_what_the_law_says_whatever_its_sides(units, role, size):
    """Bugs that were there: blocks that are filled up at the end of ragged rows, of which a unit stands in the place of
    each number; 16 bytes a unit of mx; units of a weight's rows."""
    (m, k, n), multiply = size, SCALINGS[units](0, torch.device("cpu"))
    a, b = torch.ones(m, k).bfloat16(), torch.ones(n, k).bfloat16()
    with MemoryProbe(nn.Module()) as probe:
        multiply(role, a, b)
    law = needs(units, size, 2, drawn=role != "y", turned=role == "gw")
    assert 0 <= probe.peak.total - law <= SINGLE * (units in ("delayed", "nvfp4"))
