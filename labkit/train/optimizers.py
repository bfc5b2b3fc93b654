"""The optimizers that a recipe names, made for one rank. What each keeps and sends is in labkit.plan.laws.optimizers.

    optimizer_of("adamw")(params, lr=1e-3, weight_decay=0.1)
    optimizer_of("muon", tp)(grouped(params, 0.1), ...)      `tp` is the group that cuts matrices

Sends nothing, holds nothing: it only says which class a name stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch

from labkit.comm.group import Group
from labkit.plan.laws.optimizers import LAWS
from labkit.train.by_matrix import ByMatrix
from labkit.train.large_batch import LAMB, LARS
from labkit.train.muon import Muon
from labkit.train.shampoo import Shampoo

ELEMENTWISE: Mapping[str, Callable[..., torch.optim.Optimizer]] = MappingProxyType(
    {
        "adamw": torch.optim.AdamW,
        "adam": torch.optim.Adam,
        "sgd": partial(torch.optim.SGD, momentum=0.9),
        "lamb": LAMB,
        "lars": LARS,
    }
)
BY_MATRIX: Mapping[str, type[ByMatrix]] = MappingProxyType({"muon": Muon, "shampoo": Shampoo})
"""Optimizers on whole matrices, which have to know the ranks over which matrices are cut."""


def optimizer_of(name: str, tp: Group | None = None) -> Callable[..., torch.optim.Optimizer]:
    """What makes the optimizer of this name from parameters or parameter groups, `lr` and `weight_decay`.

    ValueError for an unknown name."""
    if name in BY_MATRIX:
        return partial(BY_MATRIX[name], tp=tp)
    if name not in ELEMENTWISE:
        known = ", ".join([*ELEMENTWISE, *BY_MATRIX])
        if name in LAWS:
            raise ValueError(f"optimizer={name!r} is planned with alone; labkit trains with {known}")
        raise ValueError(f"optimizer must be one of {known}, got {name!r}")
    return ELEMENTWISE[name]
