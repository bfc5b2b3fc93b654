"""20.3: ring attention, backward: keys and values go round again, and their gradients go with them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise, peak, sends
from labkit.parallel.blockwise_attention import positions_of
from labkit.parallel.context import contiguous, zigzag

MOST_BLOCKS, MOST_SCORES, ROOM_BYTES = 7, 8, 64 << 10


def ring_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    log_sum: Tensor,
    grad: Tensor,
    positions: list[Tensor],
    group: Group,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, from that of y.   q, k, v, y, grad [H, T, W] -> three times [H, T, W]

    y = softmax(q k^T / sqrt(W)) v over the keys of all ranks, with a causal mask: a query looks at the keys at its own
    place in the sequence and before. All tensors are of this rank's T tokens. positions[r] has the places of those of
    rank r, [T of rank r], in any order; ranks may have different numbers. log_sum [H, T] is the logarithm of the sum of
    exp(score) over all keys that a query has looked at, so a weight is exp(score - log_sum).

    With d = sum of grad * y over W:   dv = weights^T grad,   d scores = weights * (grad v^T - d),
    dq = d scores k / sqrt(W),   dk = d scores^T q / sqrt(W). For dk and dv, the terms of all ranks add up.

    Talk to your neighbours on the ring only. Keys and values go to the right, n - 1 times; so do their gradients, which
    end where the keys are at home. A rank holds the block of one other rank at a time."""
    n, me, scale = group.size, group.rank, q.shape[-1] ** -0.5
    right, left = (me + 1) % n, (me - 1) % n
    delta = (grad * y).sum(-1, keepdim=True)
    kv, grad_q = torch.stack([k, v]), torch.zeros_like(q)
    grads = torch.empty(0, device=q.device)  # of the block that is here; hop 1 begins them
    for hop in range(1, n + 1):  # this rank's own block comes last, so that its gradient has to travel n - 1 hops
        kv = group.exchange(kv, right, left) if hop < n else torch.stack([k, v])
        hidden = positions[me][:, None] < positions[(me - hop) % n]
        scores = (q @ kv[0].mT * scale).masked_fill(hidden, -torch.inf)
        weights = (scores - log_sum[..., None]).exp()
        grad_scores = weights * (grad @ kv[1].mT - delta) * scale
        grad_q += grad_scores @ kv[0]
        terms = torch.stack([grad_scores.mT @ q, weights.mT @ grad])
        grads = terms if hop == 1 else terms + group.exchange(grads, right, left)
    return grad_q, grads[0], grads[1]


def cases() -> list[Case]:
    """Worlds of 1 to 7 ranks; sequences in order, where a rank sees nothing of some blocks, and in zigzag order, once
    with each part from its last token to its first; one with parts of different lengths. In the largest world, the
    blocks of all others do not fit beside one's work."""
    return [
        Case.of(2, torch.float64, length=8, heads=2, width=5, order="contiguous"),
        Case.of(3, length=18, heads=2, width=4, order="zigzag", backwards=True),
        Case.of(7, torch.float64, length=196, heads=4, width=600, order="zigzag"),
        Case.of(5, torch.float64, length=20, heads=1, width=6, order="contiguous").among(
            Case.of(4, torch.float64, length=12, heads=2, width=3, order="contiguous"),
            Case.of(3, torch.float64, length=9, heads=3, width=4, order="contiguous"),
        ),
        Case.of(3, torch.float64, length=17, heads=2, width=3, order="zigzag").among(
            Case.of(4, length=14, heads=1, width=5, order="contiguous")
        ),
        Case.of(1, torch.float64, length=9, heads=2, width=4, order="zigzag"),
    ]


def parts(case: Case) -> list[Tensor]:
    """The places of each rank's tokens."""
    order = {"contiguous": contiguous, "zigzag": zigzag}[case["order"]]
    places = [positions_of(part) for part in order(case["length"], case.n_ranks)]
    return [part.flip(0) for part in places] if "backwards" in case.what else places


def whole(case: Case) -> tuple[list[Tensor], Tensor, Tensor]:
    """q, k, v and the gradient of y of the whole sequence, [H, T, W], in the dtype of the case."""
    shape = case["heads"], case["length"], case["width"]
    q, k, v, grad = (case.random(*shape, key=key) for key in range(4))
    return [q, k, v], grad, torch.ones(case["length"], case["length"], dtype=torch.bool).triu(1)


def attention(row: Sequence[Tensor], hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Attention in one process, and the logarithm of each query's sum of weights."""
    q, k, v = row
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def inputs(case: Case) -> Inputs:
    """A rank's tokens of all that forward has kept, and of y's gradient; and all places."""
    row, grad, hidden = whole(case)
    y, log_sum = (x.to(case.dtype) for x in attention([x.double() for x in row], hidden))
    places = parts(case)
    return [(*(x[:, part] for x in (*row, y, log_sum, grad)), places) for part in places]


def play(attempt: Any, group: Group, *args: Any) -> Any:
    """The three gradients, by name."""
    return dict(zip(("dq", "dk", "dv"), attempt(*args, group), strict=True))


def answer(case: Case, inputs: Inputs) -> Answers:
    """Autograd through the attention of the whole sequence in one process, in float64."""
    row, grad, hidden = whole(case)
    leaves = [x.double().requires_grad_() for x in row]
    grads = torch.autograd.grad(attention(leaves, hidden)[0], leaves, grad.double())
    named = dict(zip(("dq", "dk", "dv"), (x.to(case.dtype) for x in grads), strict=True))
    return [{name: x[:, part] for name, x in named.items()} for part in parts(case)]


def block_bytes(case: Case) -> list[int]:
    """Bytes of each rank's keys and values, and as many of their gradients."""
    return [int(2 * case["heads"] * len(part) * case["width"] * case.item_bytes) for part in parts(case)]


def law(case: Case, rank: int) -> int:
    """Bytes that a rank sends: all blocks but its right neighbour's, and the gradients of all blocks but its own."""
    n, blocks = case.n_ranks, block_bytes(case)
    return 2 * sum(blocks) - blocks[(rank + 1) % n] - blocks[rank] if n > 1 else 0


def most(case: Case, rank: int) -> int:
    """Bytes that a rank may hold beyond its inputs: some blocks and some scores, whatever the number of ranks."""
    longest = max(map(len, parts(case)))
    scores = case["heads"] * longest**2 * case.item_bytes
    return MOST_BLOCKS * max(block_bytes(case)) + MOST_SCORES * scores + ROOM_BYTES


PROBLEM = exercise(
    __name__,
    ring_backward,
    laws=(
        sends(
            law,
            "n - 1 blocks of keys and values and n - 1 of their gradients, to the right neighbour",
            only=("send",),
            to=lambda case, rank: {(rank + 1) % case.n_ranks},
            messages=lambda case, rank: 4 * (case.n_ranks - 1),
        ),
        peak(most, "a rank holds the block of one other rank at a time, and never those of all"),
    ),
)
