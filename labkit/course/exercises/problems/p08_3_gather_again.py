"""08.3: backward gathers a unit once more, and its gradient goes where its shard is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.problem import Mutant, Problem
from labkit.course.exercises.problems.p08_2_gather_and_free import cases, inputs, unit_bytes
from labkit.course.judge.case import Case
from labkit.course.judge.laws import peak, sends
from labkit.course.judge.run_record import weigh
from labkit.plan.collectives import sent_bytes

ROOM_BYTES = 32 << 10


class GatheredLinear(torch.autograd.Function):
    """y = x W of ZeRO-3: W [d, d] is whole only while it is used. GatheredLinear.apply(x, shard, group) -> y

    x [rows, d] are this rank's rows; shard [k] is its run of W, which is d * d elements, row after row (n divides
    them). Forward gathers W, multiplies, and keeps x and the shard, never W. Backward gathers W again, and gives x its
    gradient grad_y W^T; the gradient of W, x^T grad_y, is averaged over the ranks, and only this rank's run of it
    comes back."""

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
    """Forward and backward through all units."""
    leaves = [shard.requires_grad_() for shard in shards]
    first = y = x.clone().requires_grad_()
    for leaf in leaves:
        y = torch.tanh(attempt.apply(y, leaf, group))
    loss = y.square().sum()
    weigh(group)  # tells those apart who keep weights since forward and who keep those of backward
    loss.backward()
    return {"loss": loss, "x": first.grad, "shards": [leaf.grad for leaf in leaves]}


def answer(case: Case, given: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
    """Autograd on whole weights, in one process; the loss of all ranks is the mean of theirs."""
    n, d = case.n_ranks, case["width"]
    wholes = [torch.cat([shards[i].detach() for _, shards in given]).double().view(d, d).requires_grad_()
              for i in range(case["units"])]  # fmt: skip
    rows = [x.double().requires_grad_() for x, _ in given]
    losses = []
    for y in rows:
        for whole in wholes:
            y = torch.tanh(y @ whole)
        losses.append(y.square().sum())
    by_row = torch.autograd.grad(torch.stack(losses).sum(), [*rows, *wholes])
    grads = [(grad / n).to(case.dtype).flatten().chunk(n) for grad in by_row[n:]]
    return [{"loss": losses[r].detach().to(case.dtype), "x": by_row[r].to(case.dtype),
             "shards": [grad[r] for grad in grads]} for r in range(n)]  # fmt: skip


def law(case: Case, rank: int) -> float:
    """3 (n-1)/n N: two gathers and a reduce-scatter."""
    verbs = ("all_gather", "all_gather", "reduce_scatter")
    each = (sent_bytes("ring", verb, case.n_ranks, unit_bytes(case), rank, case.item_bytes) for verb in verbs)
    return sum(each) * case["units"]


def most(case: Case, rank: int) -> float:
    """The gradients of all shards, and a unit with its gradient, flat or not."""
    return (case["units"] / case.n_ranks + 3.3) * unit_bytes(case) + ROOM_BYTES


PROBLEM = Problem(
    key="08.3",
    title="Gather again",
    story="""
The first layer's backward comes when everything else is over. To keep its weights until then would be to hold the whole
model in the middle of the step, so ZeRO-3 gathers them a second time. Two gathers and a reduce-scatter: 3 (n-1)/n N
bytes a step, half as much again as DDP. All of it fits into one autograd function of ten lines.
""",
    objectives=("save the shard, not the whole", "the gradient of a gather is a reduce-scatter"),
    difficulty=4,
    importance=5,
    minutes=25,
    reference=GatheredLinear,
    cases=cases,
    inputs=inputs,
    play=play,
    answer=answer,
    laws=(
        sends(law, "each rank sends 3 (n-1)/n N bytes: two gathers and one reduce-scatter of each unit"),
        peak(most, "a rank holds the gradients of its shards, and one unit with its gradient"),
    ),
    hints=(
        "What is saved for backward lives until backward: save what is small, and make the large thing again.",
        "`ctx.save_for_backward(x, shard)`, `ctx.group = group`. dx = dy W^T [rows, d]; dW = x^T dy [d, d]; flat, then "
        "`group.reduce_scatter(.., op=\"mean\")`: [d*d] -> [k]. Return one gradient for each input of forward.",
        "forward: save; return x @ gathered.view(d, d).  backward: x, shard = ctx.saved_tensors; gather again for "
        "grad_x; grad_shard = reduce_scatter((x.T @ grads[0]).flatten(), ...); return grad_x, grad_shard, None",
    ),
    mutants=(
        Mutant("the gathered weights are kept for backward, so the whole model is there in the middle of the step",
               "wire",
               (("ctx.save_for_backward(x, shard)\n        ctx.group = group\n        return x @ "
                 "group.all_gather(shard).view(x.shape[1], -1)",
                 "ctx.group, whole = group, group.all_gather(shard)\n        ctx.save_for_backward(x, whole)\n"
                 "        return x @ whole.view(x.shape[1], -1)"),
                ("x, shard = ctx", "x, whole = ctx"), ("ctx.group.all_gather(shard)", "whole"))),
        Mutant("gradients are summed over the ranks, not averaged", "values", ((', op="mean"', ""),)),
        Mutant("the whole gradient is all-reduced, and most of it thrown away", "wire",
               (("ctx.group.reduce_scatter((x.T @ grads[0]).flatten(), op=\"mean\")",
                 "ctx.group.all_reduce((x.T @ grads[0]).flatten(), "
                 "op=\"mean\").chunk(ctx.group.size)[ctx.group.rank].clone()"),)),
        Mutant("DDP under another name: whole weights, all-reduced gradients; the bytes sent are the same, those held "
               "are not", "memory",
               (("ctx.save_for_backward(x, shard)\n        ctx.group = group\n        return x @ "
                 "group.all_gather(shard).view(x.shape[1], -1)",
                 "ctx.group, whole = group, group.all_gather(shard)\n        ctx.save_for_backward(x, whole)\n"
                 "        return x @ whole.view(x.shape[1], -1)"),
                ("x, shard = ctx", "x, whole = ctx"), ("ctx.group.all_gather(shard)", "whole"),
                ("ctx.group.reduce_scatter((x.T @ grads[0]).flatten(), op=\"mean\")",
                 "ctx.group.all_reduce((x.T @ grads[0]).flatten(), "
                 "op=\"mean\").chunk(ctx.group.size)[ctx.group.rank].clone()"))),
        Mutant("the gathered weights are kept though they are gathered again", "memory",
               (("        return x @ group.all_gather(shard).view(x.shape[1], -1)",
                 "        ctx.whole = group.all_gather(shard)\n        return x @ ctx.whole.view(x.shape[1], -1)"),)),
        Mutant("what backward gathers is never freed: the graph still points to it", "memory",
               (("        grad_x = grads[0] @ ctx.group.all_gather(shard)",
                 "        ctx.whole = ctx.group.all_gather(shard)\n        grad_x = grads[0] @ ctx.whole"),)),
        Mutant("each rank keeps the gradient of its own rows: nothing is reduced", "values",
               (("ctx.group.reduce_scatter((x.T @ grads[0]).flatten(), op=\"mean\")",
                 "(x.T @ grads[0]).flatten().chunk(ctx.group.size)[ctx.group.rank].clone()"),)),
    ),
)  # fmt: skip
