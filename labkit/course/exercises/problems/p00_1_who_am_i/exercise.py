"""00.1: every rank says where it is, and learns who all the others are."""

import random

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise, sends

ITEM = 8


def who_am_i(node: Tensor, group: Group) -> dict[str, int | Tensor]:
    """A dict of seven facts that a rank must know about itself and about the others.

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
    local = nodes == node
    return {
        "rank": me,
        "size": n,
        "left": (me - 1) % n,
        "right": (me + 1) % n,
        "nodes": nodes,
        "local_size": int(local.sum()),
        "local_rank": int(local[:me].sum()),
    }


def cases() -> list[Case]:
    """Worlds of 1 to 4 ranks, on up to three machines. `on` is the machine of each rank, or "any" to draw it."""
    return [Case.of(4, on=(0, 1, 1, 0)), Case.of(4, on=(2, 0, 1, 0)), Case.of(3, on="any"), Case.of(2, on="any"),
            Case.of(1, on="any")]  # fmt: skip


def inputs(case: Case) -> Inputs:
    """The node number of each rank. Numbers are so far from evenly spaced that no bins of one width part them."""

    def make(dice: random.Random) -> tuple[list[int], list[int]]:
        return dice.sample(range(1000, 10_000), 3), [dice.randrange(3) for _ in range(case.n_ranks)]

    def tells(value: tuple[list[int], list[int]]) -> bool:
        low, middle, high = sorted(value[0])
        return not 0.3 < (middle - low) / (high - low) < 0.7

    names, drawn = case.draw(make, tells)
    places = case["on"] if case["on"] != "any" else drawn
    return [(torch.tensor([names[place]]),) for place in places]


def answer(case: Case, inputs: Inputs) -> Answers:
    """The seven entries of each rank, from the list of all node numbers."""
    nodes = [int(node) for (node,) in inputs]
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


PROBLEM = exercise(
    __name__,
    who_am_i,
    laws=(
        sends(
            lambda case, rank: (case.n_ranks - 1) * ITEM,
            "one all_gather of 8 bytes a rank: each sends (n-1) times 8 bytes",
            only=("all_gather",),
            messages=lambda case, rank: 1,
        ),
    ),
)
