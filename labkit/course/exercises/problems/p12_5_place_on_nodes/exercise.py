"""12.5: which ranks lie on which of two nodes."""

import random
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import torch

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise
from labkit.plan.partition.layout import Layout


def place_on_nodes(layout: Layout, sent: dict[str, int]) -> list[list[int]]:
    """Put the ranks of a layout on two nodes, half on each, so that the fewest bytes cross between them.

    Along each axis a group (`layout.ranks(axis, rank)`) is a ring in that order: each rank sends sent[axis] bytes a
    step to the next in its group, the last one to the first; two in a group send to each other, and a rank alone in its
    group sends nothing. `sent` has "dp", "pp" and "tp". -> the ranks of the first node and those of the second. Where
    several placements are equally good, any of them will do. There are at most 12 ranks, so all can be tried."""
    ranks, hops = range(layout.size), []
    for axis, n_bytes in sent.items():
        for ring in {layout.ranks(axis, rank) for rank in ranks}:
            hops += [(a, b, n_bytes) for a, b in zip(ring, ring[1:] + ring[:1], strict=True)]

    def across(node: tuple[int, ...]) -> int:
        return sum(n_bytes for a, b, n_bytes in hops if (a in node) != (b in node))

    best = min(combinations(ranks, layout.size // 2), key=across)
    return [list(best), [rank for rank in ranks if rank not in best]]


def cases() -> list[Case]:
    """Layouts, and their axes from the one that sends most to the one that sends least; `near`: they send nearly as
    much. tp does not always send most. In near cases it decides that a ring of two, too, crosses twice."""
    return [
        Case.of(1, sizes=(2, 2, 2), most="tp dp pp"),
        Case.of(1, sizes=(2, 2, 2), most="pp tp dp"),
        Case.of(1, sizes=(2, 2, 2), most="dp pp tp"),
        Case.of(1, sizes=(3, 1, 4), most="tp dp pp"),
        Case.of(1, sizes=(3, 2, 2), most="dp tp pp"),
        Case.of(1, sizes=(1, 2, 4), most="tp pp dp"),
        Case.of(1, sizes=(3, 2, 2), most="tp pp dp", near=True),
        Case.of(1, sizes=(1, 2, 4), most="tp pp dp", near=True),
        Case.of(1, sizes=(3, 2, 2), most="pp tp dp", near=True),
    ]


def inputs(case: Case) -> Inputs:
    """A layout, and bytes of each axis: about a tenth of those of the axis before, or, in near cases, two thirds."""
    draw = random.Random(case.seed)
    amounts = [draw.randrange(500, 999), draw.randrange(50, 99), draw.randrange(5, 9)]
    if "near" in case.what:
        amounts[1] = int(amounts[0] / draw.uniform(1.3, 1.7))
        amounts[2] = int(amounts[1] / draw.uniform(1.3, 1.7))
    sent = dict(zip(case["most"].split(), amounts, strict=True))
    return [(Layout(*case["sizes"]), {axis: sent[axis] << 20 for axis in ("dp", "pp", "tp")})]


def play(attempt: Any, group: Group, layout: Layout, sent: dict[str, int]) -> Any:
    """The bytes that cross between the attempt's two nodes; -1 if they are not two halves of the ranks."""
    nodes = [sorted(node) for node in attempt(layout, dict(sent))]
    halves = len(nodes) == 2 and len(nodes[0]) == len(nodes[1]) and sorted(sum(nodes, [])) == [*range(layout.size)]
    crossing = int((traffic(layout, sent) * apart(nodes[0], layout.size)).sum()) if halves else -1
    return {"half of the ranks on each": halves, "nodes": nodes, "bytes between them": crossing}


def traffic(layout: Layout, sent: dict[str, int]) -> torch.Tensor:
    """Bytes that each rank sends to each other rank.   [n, n]"""
    ranks = torch.arange(layout.size).reshape(layout.dp, layout.pp, layout.tp)
    table = torch.zeros(layout.size, layout.size, dtype=torch.int64)
    for dim, axis in enumerate(("dp", "pp", "tp")):
        table[ranks.flatten(), ranks.roll(-1, dim).flatten()] += sent[axis]
    return table


def apart(node: Sequence[int], size: int) -> torch.Tensor:
    """True where two ranks lie on different nodes.   [n, n]"""
    on_node = torch.zeros(size, dtype=torch.bool)
    on_node[list(node)] = True
    return on_node[:, None] != on_node


def answer(case: Case, inputs: Inputs) -> Answers:
    """The fewest crossing bytes of all placements, from the table of who sends to whom."""
    layout, sent = inputs[0]
    table, halves = traffic(layout, sent), list(combinations(range(layout.size), layout.size // 2))
    inside = torch.zeros(len(halves), layout.size)
    inside.scatter_(1, torch.tensor(halves), 1.0)
    leaving = torch.einsum("ka,ab,kb->k", inside.double(), table.double(), 1 - inside.double())
    coming = torch.einsum("ka,ab,kb->k", 1 - inside.double(), table.double(), inside.double())
    least = int((leaving + coming).min())
    return [{"half of the ranks on each": True, "nodes": ..., "bytes between them": least}]


PROBLEM = exercise(__name__, place_on_nodes, imports=("Layout",))
