"""08.3: backward gathers a unit once more, and its gradient goes where its shard is."""

from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise, peak, sends
from labkit.course.exercises.problems.p08_2_gather_and_free.exercise import cases, inputs, unit_bytes
from labkit.course.judge.run_record import weigh
from labkit.plan.machine.collectives import sent_bytes

ROOM_BYTES = 32 << 10


class GatheredLinear(torch.autograd.Function):
    """y = x W of ZeRO-3: W [d, d] is whole only while it is used. GatheredLinear.apply(x, shard, group) -> y

    x [rows, d] are this rank's rows; shard [k] is its run of W, which is d * d elements, row after row (n divides
    them). Forward gathers W, multiplies, and keeps x and the shard, never W. Backward gathers W again, and gives x its
    gradient grad_y W^T; the gradient of W, x^T grad_y, is averaged over the ranks, and only this rank's run of it
    comes back. Others may need grad_y as well: leave it as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Tensor, group: Group) -> Tensor:
        """[rows, d], [k] -> [rows, d]"""
        ctx.save_for_backward(x, shard)
        ctx.group = group
        return x @ group.all_gather(shard).view(x.shape[1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The gradients of x and of the shard, and None for the group; grads[0] is that of y."""
        x, shard = ctx.saved_tensors
        grad_x = grads[0] @ ctx.group.all_gather(shard).view(x.shape[1], -1).T
        grad_shard = ctx.group.reduce_scatter((x.T @ grads[0]).flatten(), op="mean")
        return grad_x, grad_shard, None


def play(attempt: Any, group: Group, x: Tensor, shards: list[Tensor]) -> Any:
    """Run forward and backward through all units, with a path around each, as blocks have: the gradient of what a unit
    gave then goes to both, and is not the unit's alone."""
    leaves = [shard.requires_grad_() for shard in shards]
    first = y = x.clone().requires_grad_()
    for leaf in leaves:
        y = y + attempt.apply(torch.tanh(y), leaf, group)
    loss = y.square().sum()
    # an attempt that keeps weights from forward shows here; one that keeps those of backward, only in the peak
    weigh(group)
    loss.backward()
    return {"loss": loss, "x": first.grad, "shards": [leaf.grad for leaf in leaves]}


def answer(case: Case, inputs: Inputs) -> Answers:
    """The gradients from autograd on whole weights, in one process; the gradient of a weight is the mean over ranks."""
    n, d = case.n_ranks, case["width"]
    wholes = [torch.cat([shards[i].detach() for _, shards in inputs]).double().view(d, d).requires_grad_()
              for i in range(case["units"])]  # fmt: skip
    rows = [x.double().requires_grad_() for x, _ in inputs]
    losses = []
    for y in rows:
        for whole in wholes:
            y = y + torch.tanh(y) @ whole
        losses.append(y.square().sum())
    by_row = torch.autograd.grad(torch.stack(losses).sum(), [*rows, *wholes])
    grads = [(grad / n).to(case.dtype).flatten().chunk(n) for grad in by_row[n:]]
    return [{"loss": losses[r].detach().to(case.dtype), "x": by_row[r].to(case.dtype),
             "shards": [grad[r] for grad in grads]} for r in range(n)]  # fmt: skip


def law(case: Case, rank: int) -> float:
    """Bytes that a rank sends: 3 (n-1)/n of every unit, for two gathers and a reduce-scatter."""
    verbs = ("all_gather", "all_gather", "reduce_scatter")
    sent = (sent_bytes("ring", verb, case.n_ranks, unit_bytes(case), rank, case.item_bytes) for verb in verbs)
    return sum(sent) * case["units"]


def most(case: Case, rank: int) -> float:
    """The most bytes that may be held: the gradients of all shards, and one unit with its gradient and a copy of it."""
    return (case["units"] / case.n_ranks + 3.3) * unit_bytes(case) + ROOM_BYTES


PROBLEM = exercise(
    __name__,
    GatheredLinear,
    cases=cases,
    inputs=inputs,
    laws=(
        sends(law, "each rank sends 3 (n-1)/n S bytes: two gathers and one reduce-scatter of each unit"),
        peak(most, "a rank holds the gradients of its shards, and one unit with its gradient"),
    ),
)
