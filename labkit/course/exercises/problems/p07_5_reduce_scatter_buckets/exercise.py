"""07.5: ZeRO-2: gradients leave bucket by bucket while backward goes on, and only a part comes back."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import (
    Answers,
    Case,
    Complaint,
    Inputs,
    Star,
    exercise,
    highest_peak,
    order,
    peak,
    sends,
)
from labkit.course.judge.run_record import RunRecord, mark
from labkit.plan.machine.collectives import sent_bytes

ROWS = 3
ROOM_BYTES = 16 << 10
BEGINS = "a bucket has its first gradient"
NOISE_BYTES = 4 << 20  # on a busy machine a right answer, most of whose buckets were under way at once, had 2.8 MB


def shard_gradients(buckets: list[list[Tensor]], group: Group) -> dict[int, Tensor]:
    """Have the gradients of each bucket reduce-scattered as soon as backward has made the last of them (ZeRO-2).

    Called before backward: it returns an empty dict, which hooks on the parameters fill during backward. In the end
    result[b] is this rank's part of the mean gradient of bucket b: its gradients flat, one after the other, padded with
    zeros until n divides them, cut into n parts.   [ceil(numel / n)]
    One reduce_scatter a bucket. Once a bucket is on its way its whole gradients are let go: p.grad is None
    afterwards."""
    shards: dict[int, Tensor] = {}
    for b, bucket in enumerate(buckets):

        def ready(_: Tensor, b: int = b, bucket: list[Any] = bucket) -> None:
            if all(p.grad is not None for p in bucket):
                flat = torch.cat([p.grad.flatten() for p in bucket])
                shards[b] = group.reduce_scatter(F.pad(flat, (0, -len(flat) % group.size)), op="mean")
                for p in bucket:
                    p.grad = None

        for p in bucket:
            p.register_post_accumulate_grad_hook(ready)
    return shards


def cases() -> list[Case]:
    """Worlds of 1 to 4 ranks; a bucket holds the weights of one or more consecutive layers."""
    return [
        Case.of(3, width=512, buckets=(1, 1, 1, 1, 1, 1, 1, 1)),
        Case.of(2, width=501, buckets=(1, 2, 1, 2, 1, 1, 1, 1)),
        Case.of(4, width=403, buckets=(2, 1, 1, 2, 1, 1)),
        Case.of(1, width=520, buckets=(1, 1, 1, 1, 1)),
    ]


def inputs(case: Case) -> Inputs:
    """Weights that all ranks share, and rows of each rank's own."""
    d, n_layers = case["width"], sum(case["buckets"])
    weights = [case.random(d, d, key=i) / d**0.5 for i in range(n_layers)]
    return [([w.clone() for w in weights], case.random(ROWS, d, key=1000 + r)) for r in range(case.n_ranks)]


def loss_of(weights: Sequence[Tensor], x: Tensor) -> Tensor:
    """The loss of a stack of linear layers."""
    for w in weights:
        x = torch.tanh(x @ w)
    return x.square().sum()


def bucketed(case_buckets: Sequence[int], weights: Sequence[Tensor]) -> list[list[Tensor]]:
    """The weights in buckets of so many consecutive layers. Every second bucket begins with its last layer, so that the
    gradient that comes last is not always that of a bucket's first weight."""
    ends = list(accumulate(case_buckets))
    buckets = [list(weights[end - count : end]) for count, end in zip(case_buckets, ends, strict=True)]
    return [bucket[:: -1 if place % 2 else 1] for place, bucket in enumerate(buckets)]


def inputs_with_buckets(case: Case) -> Inputs:
    """The same inputs, and how many weights are in each bucket."""
    return [(*arguments, case["buckets"]) for arguments in inputs(case)]


def play(attempt: Any, group: Group, weights: list[Tensor], x: Tensor, counts: Sequence[int]) -> Any:
    """Run one backward pass, with a mark where each bucket gets its first gradient. The shards that the attempt has
    filled in, and the number of parameters that still have a gradient."""
    params = [w.requires_grad_() for w in weights]
    for end in accumulate(counts):  # backward comes to a bucket's last layer first
        params[end - 1].register_post_accumulate_grad_hook(lambda _: mark(group, BEGINS))
    shards = attempt(bucketed(counts, params), group)
    loss_of(params, x).backward()
    return {"shards": dict(sorted(shards.items())), "gradients left": sum(p.grad is not None for p in params)}


def answer(case: Case, inputs: Inputs) -> Answers:
    """The parts of the gradient of the mean of all losses, computed in one process in float64."""
    params = [w.double().detach().requires_grad_() for w in inputs[0][0]]
    total = sum(loss_of(params, x.double()) for _, x, _ in inputs) / case.n_ranks
    total.backward()  # type: ignore[union-attr]
    parts = []
    for bucket in bucketed(case["buckets"], params):
        row = torch.zeros(case.n_ranks * bucket_numel(case, len(bucket)), dtype=torch.float64)
        grads = torch.cat([p.grad.reshape(-1) for p in bucket])  # type: ignore[union-attr]
        row[: len(grads)] = grads
        parts.append(row.float().chunk(case.n_ranks))
    return [
        {"shards": {b: bucket_parts[r] for b, bucket_parts in enumerate(parts)}, "gradients left": 0}
        for r in range(case.n_ranks)
    ]


def bucket_numel(case: Case, count: int) -> int:
    """Elements of one rank's part of a bucket of so many weights."""
    return -(-count * case["width"] ** 2 // case.n_ranks)


def law(case: Case, rank: int) -> float:
    """Bytes that a rank sends: (n-1)/n of each padded bucket."""
    wholes = [4 * case.n_ranks * bucket_numel(case, count) for count in case["buckets"]]
    return sum(sent_bytes("ring", "reduce_scatter", case.n_ranks, whole, rank, 4) for whole in wholes)


def at_once(record: RunRecord) -> Complaint | None:
    """A Complaint unless each bucket is on its way before the bucket below has its first gradient."""
    for rank in range(record.case.n_ranks if record.case.n_ranks > 1 else 0):
        n_begun = n_sent = 0
        for event in record.of(rank):
            n_sent += event.kind == "collective"
            if event.what == BEGINS:
                if n_sent < n_begun:
                    wanted = f"{n_begun} buckets on their way when bucket {n_begun + 1}, counted from the end, begins"
                    return Complaint(wanted, f"{n_sent}", rank, (event.number,))
                n_begun += 1
    return None


def most(case: Case, times: float) -> float:
    """The most bytes that may be held: all shards, and `times` the largest bucket."""
    parts = [4 * bucket_numel(case, count) for count in case["buckets"]]
    return sum(parts) + times * case.n_ranks * max(parts) + ROOM_BYTES


PROBLEM = exercise(
    __name__,
    shard_gradients,
    inputs=inputs_with_buckets,
    changes=(0,),
    laws=(
        sends(
            law,
            "each rank sends (n-1)/n of the padded gradients, once, in one collective a bucket",
            only=("reduce_scatter",),
            messages=lambda case, rank: len(case["buckets"]),
        ),
        peak(
            lambda case, rank: most(case, 3.5),
            "a rank holds its shards and the gradients of about one bucket",
            NOISE_BYTES,
        ),
        order("each bucket is on its way before the bucket below has its first gradient", at_once),
    ),
    star=Star("bytes held at the peak, over all ranks", highest_peak, lambda case: most(case, 2.3)),
)
