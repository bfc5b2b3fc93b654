"""Parameter groups of a model: its parameters get a mark, which flat shards and masters inherit.

    mark_(model, Grouping(by_kind=True))          each parameter has a `param_group`
    AdamW(grouped(params, weight_decay=0.1))      [{params with decay}, {params without}]

A strategy hands an optimizer either the parameters or flat shards of several (labkit.parallel.sharded). Since those of
different groups never lie in one shard, a shard carries the mark of what lies in it, and `grouped` sorts shards as it
sorts parameters. Which kind belongs to which group is said in plan.partition.groups. Sends nothing, holds nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from labkit.plan.contracts import group_of
from labkit.plan.partition.groups import Grouping, ParamGroup
from labkit.train.gpt import Block


def mark_(module: nn.Module, grouping: Grouping) -> None:
    """Give each parameter of the module its group. A weight with two uses, as of a tied head, belongs to the first."""
    inside = {id(p) for part in module.modules() if isinstance(part, Block) for p in part.parameters()}
    marked: set[int] = set()
    for part in module.modules():
        for p in part.parameters(recurse=False):
            if id(p) not in marked:
                marked.add(id(p))
                p.param_group = grouping.of(_kind(part, p, id(p) in inside))  # type: ignore[attr-defined]


def grouped(params: Iterable[Tensor], weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups as torch's optimizers take them, in order of first appearance; unmarked ones decay.

    Each has `by_matrix`, which optimizers on whole matrices read (by_matrix.py) and others keep."""
    groups: dict[ParamGroup, list[Tensor]] = {}
    for p in params:
        groups.setdefault(group_of(p) or ParamGroup(), []).append(p)
    return [
        {"params": members, "weight_decay": weight_decay if group.decays else 0.0, "by_matrix": group.by_matrix}
        for group, members in groups.items()
    ]


def _kind(part: nn.Module, p: Tensor, in_block: bool) -> str:
    if p.dim() < 2:
        return "vector"
    if "Embedding" in type(part).__name__:  # torch's, and the one that is cut over the vocabulary
        return "table"
    return "hidden" if in_block else "head"
