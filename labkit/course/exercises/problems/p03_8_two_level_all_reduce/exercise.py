"""03.8: an all-reduce that knows which ranks share a machine, and crosses between machines as little as it can."""

from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.comm.mesh import Mesh
from labkit.course.exercises.exercise import Answers, Case, Inputs, by_axis, exercise, sends
from labkit.plan.machine.collectives import sent_bytes
from labkit.plan.partition.layout import Layout


def two_level_all_reduce(x: Tensor, inside: Group, across: Group) -> Tensor:
    """The sum of x over all ranks of all nodes, on every rank.   [n*r, d] -> [n*r, d], n = m k ranks

    There are m nodes of k ranks. `inside` holds the k ranks of this rank's node; `across` holds m ranks, one of each
    node, that have this rank's number in theirs. The wire between nodes is slow: over `across` each rank sends at most
    2 (m-1)/m S/k bytes, over `inside` at most 2 (k-1)/k S, where S is the bytes of x."""
    part = inside.reduce_scatter(x)
    part = across.all_reduce(part)
    return inside.all_gather(part)


def cases() -> list[Case]:
    """`nodes` nodes of `each` ranks, among them one node alone and nodes of one rank."""
    return [
        Case.of(4, nodes=2, each=2, rows=3, width=5),
        Case.of(6, nodes=3, each=2, rows=1, width=4).among(Case.of(8, nodes=4, each=2, rows=1, width=4)),
        Case.of(6, torch.float64, nodes=2, each=3, rows=2, width=3),
        Case.of(3, torch.float64, nodes=3, each=1, rows=2, width=3),
        Case.of(3, torch.int64, nodes=1, each=3, rows=2, width=4),
        Case.of(2, nodes=2, each=1, rows=1, width=7),
        Case.of(1, nodes=1, each=1, rows=4, width=2),
    ]


def inputs(case: Case) -> Inputs:
    """A tensor of its own for each rank."""
    rows = case.n_ranks * case["rows"]
    layout = Layout(dp=case["nodes"], tp=case["each"])  # neighbours in rank share a node
    return [(case.random(rows, case["width"], key=rank), layout) for rank in range(case.n_ranks)]


def play(attempt: Any, group: Group, x: Tensor, layout: Layout) -> Any:
    """Make the two groups of this rank and call the attempt."""
    mesh = Mesh.connect(layout, group)
    return attempt(x, mesh.tp, mesh.dp)


def answer(case: Case, inputs: Inputs) -> Answers:
    """The sum."""
    return [torch.stack([x for x, _ in inputs]).sum(0)] * case.n_ranks


def whole(case: Case) -> int:
    """Bytes of the tensor."""
    return int(case.n_ranks * case["rows"] * case["width"] * case.item_bytes)


def trunk(case: Case, rank: int) -> tuple[float, float]:
    """(least, most) bytes sent: an all-reduce of a k-th of the tensor over m nodes, as a ring sends it."""
    return 0, sent_bytes("ring", "all_reduce", case["nodes"], whole(case) // case["each"], 0, case.item_bytes)


def node(case: Case, rank: int) -> tuple[float, float]:
    """(least, most) bytes sent: a reduce-scatter and an all-gather of the tensor over the k ranks of a node."""
    return 0, sent_bytes("ring", "all_reduce", case["each"], whole(case), 0, case.item_bytes)


PROBLEM = exercise(
    __name__,
    two_level_all_reduce,
    laws=(
        by_axis(
            dp=sends(trunk, "each rank sends at most 2 (m-1)/m S/k bytes between nodes"),
            tp=sends(node, "at most 2 (k-1)/k S bytes inside its node"),
        ),
    ),
)
