"""00.1: every rank says where it is, and learns who all the others are."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.problem import Mutant, Problem
from labkit.course.judge.case import Case
from labkit.course.judge.laws import sends

ITEM = 8


def who_am_i(node: Tensor, group: Group) -> dict[str, int | Tensor]:
    """What a rank must know about itself and about the others, as a dict with these seven entries.

    `node`, int64 [1], is the number of the machine that this rank runs on; no rank knows another's.

    "rank", "size"    which member of the group this is, and how many there are
    "left", "right"   the ranks before and after it on the ring 0, 1, ..., n-1, 0
    "nodes"           everybody's node number in rank order   [1] -> [n]
    "local_size"      how many ranks run on this machine, this one included
    "local_rank"      which of them this is: how many lower ranks run on this machine (a launcher gives GPU 0 to
                      local rank 0). Ranks of one machine need not follow each other.

    Entries are ints but for "nodes". Each rank's number travels to the others in one collective."""
    n, me = group.size, group.rank
    nodes = group.all_gather(node)
    here = nodes == node
    return {
        "rank": me,
        "size": n,
        "left": (me - 1) % n,
        "right": (me + 1) % n,
        "nodes": nodes,
        "local_size": int(here.sum()),
        "local_rank": int(here[:me].sum()),
    }


def cases() -> Sequence[Case]:
    """Worlds of 1 to 4 ranks; `on` says who shares a machine, "any" that it is drawn."""
    return [Case.of(4, on=(0, 1, 1, 0)), Case.of(4, on="any"), Case.of(3, on="any"), Case.of(2, on="any"),
            Case.of(1, on="any")]  # fmt: skip


def inputs(case: Case) -> Sequence[tuple[Any, ...]]:
    """The node number of each rank."""
    drawn = random.Random(case.seed)
    names = drawn.sample(range(1000, 10_000), 2)
    places = case["on"] if case["on"] != "any" else [drawn.randrange(2) for _ in range(case.n_ranks)]
    return [(torch.tensor([names[place]]),) for place in places]


def answer(case: Case, given: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
    """Counted by hand."""
    nodes = [int(node) for (node,) in given]
    n = case.n_ranks
    return [
        {
            "rank": rank,
            "size": n,
            "left": rank - 1 if rank else n - 1,
            "right": rank + 1 if rank < n - 1 else 0,
            "nodes": torch.tensor(nodes),
            "local_size": nodes.count(nodes[rank]),
            "local_rank": nodes[:rank].count(nodes[rank]),
        }
        for rank in range(n)
    ]


PROBLEM = Problem(
    key="00.1",
    title="Who am I?",
    story="""
The same program starts on every rank, and the only thing that differs is its number. From that number follows
everything else: who the neighbours are, and which GPU of the machine to take. A launcher sets `RANK`, `WORLD_SIZE` and
`LOCAL_RANK` in the environment. Here you work them out, for machines that somebody else has filled in any order.
""",
    objectives=("rank, size and neighbours on a ring", "learn what only the others know", "local rank"),
    difficulty=1,
    importance=4,
    minutes=10,
    reference=who_am_i,
    cases=cases,
    inputs=inputs,
    answer=answer,
    laws=(
        sends(
            lambda case, rank: (case.n_ranks - 1) * ITEM,
            "one all_gather of 8 bytes a rank: each sends (n-1) times 8 bytes",
            only=("all_gather",),
            messages=lambda case, rank: 1,
        ),
    ),
    hints=(
        "All but two things follow from `group.rank` and `group.size`. The others' machines must be asked for, by all.",
        "`group.all_gather(node)` gives [n] in rank order. `% n` closes the ring. `nodes == node` marks who is here.",
        'nodes = group.all_gather(...); here = nodes == node; "local_size": how many of here; "local_rank": how many '
        "of here[:me]",
    ),
    mutants=(
        Mutant("the ring is not closed: there is no rank -1 to the left of 0, nor a rank n", "values",
               (("(me - 1) % n", "me - 1"), ("(me + 1) % n", "me + 1"))),
        Mutant("left and right are swapped", "values", (("(me - 1) % n", "(me + 1 + n) % n"),
                                                         ('"right": (me + 1) % n', '"right": (me - 1) % n'))),
        Mutant("the local rank is taken from the rank alone, as if machines were filled one after the other", "values",
               (("int(here[:me].sum())", "me % int(here.sum())"),)),
        Mutant("a rank counts itself among those before it: local ranks begin at 0", "values",
               (("here[:me].sum()", "here[: me + 1].sum()"),)),
        Mutant("the rank in the world is taken for that on the machine", "values",
               (("int(here[:me].sum())", "me"),)),
        Mutant("nobody is asked: a rank knows its own machine only", "values",
               (("group.all_gather(node)", "node.clone()"),)),
        Mutant("a table with one filled place a rank is summed: that moves twice n numbers and not n", "wire",
               (("group.all_gather(node)", "group.all_reduce(torch.zeros(n, dtype=torch.int64).index_fill_(0, "
                 "torch.tensor(me), 1) * node)"), ("n, me = group.size", "import torch\n    n, me = group.size"))),
        Mutant("only rank 0 calls the collective, and waits for the others for ever", "liveness",
               (("group.all_gather(node)", "group.all_gather(node) if me == 0 else node.expand(n)"),)),
    ),
)  # fmt: skip
