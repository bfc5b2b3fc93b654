"""20.2: a sequence of tokens in zigzag order: which tokens each rank holds, the cut, and the way back."""

from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise, holds, sends
from labkit.course.judge.run_record import weigh

ROOM_BYTES, LABEL_BYTES = 48 << 10, 8


class Zigzag:
    """A sequence of `length` tokens, cut over the ranks of a group so that causal attention is the same work on each.

    The sequence is padded with zeros at its end until 2n divides it (by fewer than 2n), and cut into 2n chunks of one
    length. Rank r holds two of them, in this order: chunk r, and chunk 2n - 1 - r, which is as far from the end."""

    def __init__(self, length: int, group: Group):
        """length: tokens of the whole sequence, without padding."""
        self.length, self.group = length, group
        self.chunk = -(-length // (2 * group.size))

    def positions(self, rank: int) -> Tensor:
        """The places in the padded sequence of the tokens that a rank holds, in its order.   -> [2 * chunk], int64"""
        chunk = torch.arange(self.chunk, device=self.group.device)
        late = 2 * self.group.size - 1 - rank
        return torch.cat([rank * self.chunk + chunk, late * self.chunk + chunk])

    def work(self, rank: int) -> int:
        """How many keys all queries of a rank look at: each those up to itself, and padding none."""
        places = self.positions(rank)
        return int((places[places < self.length] + 1).sum())

    def part_of(self, x: Tensor) -> Tensor:
        """This rank's tokens of a whole sequence, which is not kept afterwards.   [length, ...] -> [2 * chunk, ...]"""
        padded = x.new_zeros(2 * self.group.size * self.chunk, *x.shape[1:])
        padded[: self.length] = x
        return padded[self.positions(self.group.rank)]

    def whole_of(self, part: Tensor) -> Tensor:
        """The whole sequence on every rank, without padding, by one all_gather.   [2 * chunk, ...] -> [length, ...]"""
        gathered = self.group.all_gather(part)
        whole = torch.empty_like(gathered)
        whole[torch.cat([self.positions(rank) for rank in range(self.group.size)])] = gathered
        return whole[: self.length]


def cases() -> list[Case]:
    """Worlds of 1 to 5 ranks: sequences without padding, with some, with nothing else on a rank, and a large one."""
    return [
        Case.of(2, torch.float64, length=12, width=3),
        Case.of(4, length=3, width=2),
        Case.of(3, length=1021, width=1200),
        Case.of(4, torch.bfloat16, length=37, width=5).among(
            Case.of(5, torch.float64, length=23, width=4), Case.of(2, length=7, width=6)
        ),
        Case.of(1, torch.float64, length=5, width=2),
    ]


def inputs(case: Case) -> Inputs:
    """A whole sequence of hidden numbers [T, D], and one of labels [T], the same on every rank."""
    hidden, labels = case.random(case["length"], case["width"]), case.random(case["length"], key=1, dtype=torch.int64)
    return [(hidden.clone(), labels.clone(), case["length"]) for _ in range(case.n_ranks)]


def play(attempt: Any, group: Group, hidden: Tensor, labels: Tensor, length: int) -> Any:
    """Cut a sequence, weigh what is left, and put what each rank has made of its part together again."""
    row = attempt(length, group)
    reply: dict[str, Any] = {
        "positions": [row.positions(rank) for rank in range(group.size)],
        "work": [row.work(rank) for rank in range(group.size)],
        "part": row.part_of(hidden),
    }
    weigh(group)
    reply["part, with two dims more"] = row.part_of(hidden[:, None])
    return {**reply, "joined": row.whole_of(reply["part"] * 2), "labels": row.whole_of(row.part_of(labels))}


def chunk(case: Case) -> int:
    """Tokens of a chunk."""
    return -(-case["length"] // (2 * case.n_ranks))


def answer(case: Case, inputs: Inputs) -> Answers:
    """Chunks dealt to the ranks there and back; work counted in the causal mask itself; the sequence as it was."""
    n, length, (hidden, labels, _) = case.n_ranks, case["length"], inputs[0]
    dealt: list[list[int]] = [[] for _ in range(n)]
    chunks = torch.arange(2 * n * chunk(case)).chunk(2 * n)
    for rank, places in zip([*range(n), *reversed(range(n))], chunks, strict=True):
        dealt[rank] += [int(place) for place in places]
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    padded = torch.cat([hidden, torch.zeros(2 * n * chunk(case) - length, case["width"], dtype=case.dtype)])
    return [
        {
            "positions": [torch.tensor(places) for places in dealt],
            "work": [int(mask[[place for place in places if place < length]].sum()) for places in dealt],
            "part": padded[dealt[rank]],
            "part, with two dims more": padded[dealt[rank]][:, None],
            "joined": hidden * 2,
            "labels": labels,
        }
        for rank in range(n)
    ]


def part_bytes(case: Case) -> int:
    """Bytes of a rank's part of the hidden numbers."""
    return int(2 * chunk(case) * case["width"] * case.item_bytes)


def law(case: Case, rank: int) -> int:
    """Bytes that a rank sends: its part of the hidden numbers and of the labels, to n - 1 others."""
    return (case.n_ranks - 1) * (part_bytes(case) + 2 * chunk(case) * LABEL_BYTES)


def held(case: Case, rank: int) -> dict[str, tuple[float, float]]:
    """(least, most) bytes held by kind once a sequence is cut: the part, and room for positions."""
    return {
        "other": (0, part_bytes(case) + ROOM_BYTES),
        **dict.fromkeys(("parameters", "gradients", "optimizer", "activations"), (0, 0)),
    }


PROBLEM = exercise(
    __name__,
    Zigzag,
    laws=(
        sends(
            law,
            "taking a part sends nothing; the way back sends this rank's part to n - 1 others",
            only=("all_gather",),
        ),
        holds(held, "once a sequence is cut, a rank holds its two chunks, and no whole sequence"),
    ),
)
