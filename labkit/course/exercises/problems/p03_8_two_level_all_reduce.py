"""03.8: an all-reduce that knows which ranks share a machine, and crosses between machines as little as it can."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.comm.mesh import Mesh
from labkit.course.exercises.problem import Mutant, Problem
from labkit.course.judge.case import Case
from labkit.course.judge.laws import sends
from labkit.plan.collectives import sent_bytes
from labkit.plan.layout import Layout


def two_level_all_reduce(x: Tensor, inside: Group, across: Group) -> Tensor:
    """The sum of x over all ranks of all nodes, on every rank.   [n*r, d] -> [n*r, d], n = m k ranks

    There are m nodes of k ranks. `inside` holds the k ranks of this rank's node; `across` holds m ranks, one of each
    node, that have this rank's number in theirs. The wire between nodes is slow: over `across` each rank sends at most
    2 (m-1)/m N/k bytes, over `inside` at most 2 (k-1)/k N, where N is the bytes of x."""
    part = inside.reduce_scatter(x)
    part = across.all_reduce(part)
    return inside.all_gather(part)


def cases() -> Sequence[Case]:
    """Nodes by ranks in each: one node alone, and nodes of one rank, are worlds too."""
    return [
        Case.of(4, nodes=2, each=2, rows=3, width=5),
        Case.of(3, torch.float64, nodes=3, each=1, rows=2, width=3),
        Case.of(3, torch.int64, nodes=1, each=3, rows=2, width=4),
        Case.of(2, nodes=2, each=1, rows=1, width=7),
        Case.of(1, nodes=1, each=1, rows=4, width=2),
    ]


def inputs(case: Case) -> Sequence[tuple[Any, ...]]:
    """A tensor of its own for each rank."""
    rows = case.n_ranks * case["rows"]
    layout = Layout(dp=case["nodes"], tp=case["each"])  # neighbours in rank share a node
    return [(case.random(rows, case["width"], key=rank), layout) for rank in range(case.n_ranks)]


def play(attempt: Any, group: Group, x: Tensor, layout: Layout) -> Any:
    """The two groups of this rank, and the call."""
    mesh = Mesh.connect(layout, group)
    return attempt(x, mesh.tp, mesh.dp)


def answer(case: Case, given: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
    """The sum."""
    return [torch.stack([x for x, _ in given]).sum(0)] * case.n_ranks


def whole(case: Case) -> int:
    """Bytes of the tensor."""
    return int(case.n_ranks * case["rows"] * case["width"] * case.item_bytes)


def trunk(case: Case, rank: int) -> tuple[float, float]:
    """An all-reduce of a k-th of the tensor over m nodes, as a ring sends it."""
    return 0, sent_bytes("ring", "all_reduce", case["nodes"], whole(case) // case["each"], 0, case.item_bytes)


def node(case: Case, rank: int) -> tuple[float, float]:
    """A reduce-scatter and an all-gather of the tensor over the k ranks of a node."""
    return 0, sent_bytes("ring", "all_reduce", case["each"], whole(case), 0, case.item_bytes)


PROBLEM = Problem(
    key="03.8",
    title="Two nodes, one thin wire",
    story="""
Inside a node NVLink moves hundreds of gigabytes a second; between nodes a network card moves a tenth of that, and all
ranks of a node want it at once. A ring that takes no notice waits for the thin wire in every step. Sum inside first:
then each rank has one finished part of its node's sum, and only that part has to cross.
""",
    objectives=("which collective over which group", "what crosses the thin wire: N/k a rank, not N"),
    difficulty=3,
    importance=4,
    minutes=15,
    reference=two_level_all_reduce,
    cases=cases,
    inputs=inputs,
    play=play,
    answer=answer,
    laws=(
        sends(trunk, "over the wire between nodes each rank sends at most 2 (m-1)/m N/k bytes", axis="dp"),
        sends(node, "inside its node each rank sends at most 2 (k-1)/k N bytes", axis="tp"),
    ),
    hints=(
        "An all-reduce is a reduce-scatter and an all-gather. What is the least that a node must hear of another, and "
        "when is that least?",
        "After `inside.reduce_scatter(x)` [n*r, d] -> [n*r/k, d] the k ranks of a node hold different parts; over "
        "`across` are those who hold the same part.",
        "part = reduce-scatter inside; part = sum of part across; return the parts of the node, gathered inside",
    ),
    mutants=(
        Mutant("whole tensors cross between the nodes: right sums, and k times the bytes", "wire", instead="""
            def two_level_all_reduce(x, inside, across):
                return across.all_reduce(inside.all_reduce(x))
        """),
        Mutant("one rank of each node crosses for all: its share of the wire carries everything, and k - 1 ranks wait",
               "wire", instead="""
            def two_level_all_reduce(x, inside, across):
                total = inside.all_reduce(x)
                if inside.rank == 0:
                    total = across.all_reduce(total)
                return inside.broadcast(total)
        """),
        Mutant("everybody's part is gathered across the nodes and then summed: the bytes grow with the nodes", "wire",
               (("across.all_reduce(part)", "across.all_gather(part[None]).sum(0)"),)),
        Mutant("each node sums for itself: nothing crosses", "values",
               (("    part = across.all_reduce(part)\n", ""),)),
        Mutant("the parts are never joined: each rank ends with a k-th of the sum", "values",
               (("inside.all_gather(part)", "part"),)),
        Mutant("the parts are joined across the nodes, but there everybody has the same part", "values",
               (("inside.all_gather(part)", "across.all_gather(part)"),)),
        Mutant("what crosses is taken for the sum of all, but it is summed inside once more", "values",
               (("return inside.all_gather(part)", "return inside.all_reduce(inside.all_gather(part))"),)),
        Mutant("the groups have changed places: the large messages go over the thin wire", "wire", instead="""
            def two_level_all_reduce(x, inside, across):
                part = across.reduce_scatter(x)
                part = inside.all_reduce(part)
                return across.all_gather(part)
        """),
    ),
)  # fmt: skip
