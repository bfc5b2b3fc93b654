"""10.1: a model cut by layers, and one batch that goes through it and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from labkit.comm.group import Group
from labkit.course.exercises.problem import Mutant, Problem
from labkit.course.judge.case import Case
from labkit.course.judge.laws import sends


def naive_step(stage: nn.Module, x: Tensor | None, target: Tensor | None, group: Group) -> Tensor | None:
    """Forward and backward of one batch through n stages, one on each rank.   activations [B, D_r] -> [B, D_r+1]

    Rank r holds stage r. Only rank 0 has x, only the last rank has the target (None elsewhere; in a world of 1 the one
    rank has both). The loss is `mse_loss` of the last stage's output; the last rank returns it, the others None.
    Afterwards every stage's parameters have their gradients. A rank sends its activation to the next rank and the
    gradient of what it received to the one before: two messages at most, and nothing else."""
    before, after = group.rank - 1, group.rank + 1
    taken: Any = group.recv(before).requires_grad_() if x is None else x
    y = stage(taken)
    if target is None:
        group.send(y.detach(), after)
        y.backward(group.recv(after))
        loss = None
    else:
        loss = mse_loss(y, target)
        loss.backward()
    if before >= 0:
        group.send(taken.grad, before)
    return loss


def cases() -> Sequence[Case]:
    """Worlds of 1 to 4 ranks; `widths` of x, of what flows between ranks, and of the output."""
    return [
        Case.of(3, torch.float64, rows=4, widths=(5, 7, 3, 2)),
        Case.of(2, rows=3, widths=(4, 6, 2)),
        Case.of(4, torch.float64, rows=2, widths=(3, 8, 4, 6, 1)),
        Case.of(1, rows=5, widths=(3, 2)),
    ]


def inputs(case: Case) -> Sequence[tuple[Any, ...]]:
    """This rank's weights; x for the first, the target for the last."""
    widths, n = case["widths"], case.n_ranks
    x, target = case.random(case["rows"], widths[0], key=1), case.random(case["rows"], widths[-1], key=2)
    weights = [case.random(b, a, key=10 + r) for r, (a, b) in enumerate(zip(widths, widths[1:], strict=False))]
    return [(weights[r], x if r == 0 else None, target if r == n - 1 else None) for r in range(n)]


def stage_of(weight: Tensor) -> nn.Module:
    """A linear layer and a tanh."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], dtype=weight.dtype)
    linear.load_state_dict({"weight": weight.clone(), "bias": weight[:, 0].clone()})
    return nn.Sequential(linear, nn.Tanh())


def play(attempt: Any, group: Group, weight: Tensor, x: Tensor | None, target: Tensor | None) -> Any:
    """One step; the loss, and this stage's gradients."""
    stage = stage_of(weight)
    loss = attempt(stage, x, target, group)
    return {"loss": loss, "gradients": [p.grad for p in stage.parameters()]}


def answer(case: Case, given: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
    """All stages in one process, in float64."""
    stages = [stage_of(weight.double()) for weight, *_ in given]
    x, target = given[0][1], given[-1][2]
    loss = mse_loss(nn.Sequential(*stages)(x.double()), target.double())
    loss.backward()
    found: list[Any] = [
        {"loss": None, "gradients": [p.grad.to(case.dtype) for p in stage.parameters() if p.grad is not None]}
        for stage in stages
    ]
    found[-1]["loss"] = loss.detach().to(case.dtype)
    return found


def law(case: Case, rank: int) -> float:
    """The activation on, unless this is the last rank; the gradient of what came in back, unless it is the first."""
    on = case["widths"][rank + 1] * (rank < case.n_ranks - 1)
    return float(case["rows"] * (on + case["widths"][rank] * (rank > 0)) * case.item_bytes)


GRADIENT_FIRST = """
from torch.nn.functional import mse_loss

def naive_step(stage, x, target, group):
    before, after = group.rank - 1, group.rank + 1
    x = x if x is not None else group.recv(before).requires_grad_()
    y = stage(x)
    if target is None:
        came = group.recv(after)
        group.send(y.detach(), after)
        y.backward(came)
        loss = None
    else:
        loss = mse_loss(y, target)
        loss.backward()
    if before >= 0:
        group.send(x.grad, before)
    return loss
"""

PROBLEM = Problem(
    key="10.1",
    title="One batch there and back",
    story="""
A model of four parts, too large for one device, on four devices. What flows between two of them is one activation
there and one gradient back, and each device needs to know no more of the others. All but one are idle at any moment,
so four devices are as fast as one; the rest of this lab mends that, and sends nothing else.
""",
    objectives=("backward from a gradient that came by mail", "what a received activation needs"),
    difficulty=2,
    importance=5,
    minutes=20,
    reference=naive_step,
    cases=cases,
    inputs=inputs,
    play=play,
    answer=answer,
    laws=(
        sends(
            law,
            "each rank sends its activation on and a gradient as large as its input back, to its neighbours, once",
            only=("send",),
            to=lambda case, rank: {rank - 1, rank + 1} & set(range(case.n_ranks)),
            messages=lambda case, rank: (rank > 0) + (rank < case.n_ranks - 1),
        ),
    ),
    hints=(
        "A stage's backward begins with the gradient of its output. Who has that? It is the gradient of whose input?",
        "recv x and ask for its gradient; send y; recv dy, as large as y; y.backward(dy); send x.grad, as large as x.",
        "x = recv(before).requires_grad_();  y = stage(x);  send(y), y.backward(recv(after)) or loss;  send(x.grad)",
    ),
    mutants=(
        Mutant("what was received is not asked for a gradient, so there is none to send back", "values",
               ((".requires_grad_()", ""),)),
        Mutant("each stage begins its backward with ones, not with the gradient that came", "values",
               (("y.backward(group.recv(after))", "y.backward(torch.ones_like(group.recv(after)))"),
                ("from torch import", "import torch\nfrom torch import"))),
        Mutant("the gradient of the loss is not taken: nothing goes back but zeros", "values",
               (("loss.backward()", "(0 * loss).backward()"),)),
        Mutant("what goes back is what came in, not its gradient", "values",
               (("group.send(taken.grad, before)", "group.send(taken.detach(), before)"),)),
        Mutant("the loss is sent back as well: one message more than there need be", "wire",
               (("group.send(taken.grad, before)", "group.send(taken.grad, before)\n        "
                 "loss = group.recv(after) if loss is None else loss\n        group.send(loss.detach(), before)\n    "
                 "elif loss is None:\n        loss = group.recv(after)"),
                ("return loss", "return loss if target is not None else None"))),
        Mutant("every rank's activation is broadcast to all, though only its neighbour wants it", "wire", instead="""
            from torch.nn.functional import mse_loss

            def naive_step(stage, x, target, group):
                shapes = [group.recv(group.rank - 1)] if group.rank else []
                x = shapes[0].requires_grad_() if x is None else x
                y = stage(x)
                for to in range(group.rank + 1, group.size):
                    group.send(y.detach(), to)
                for source in range(group.rank - 1):
                    group.recv(source)
                if target is None:
                    y.backward(group.recv(group.rank + 1))
                else:
                    loss = mse_loss(y, target)
                    loss.backward()
                if group.rank:
                    group.send(x.grad, group.rank - 1)
                return None if target is None else loss
        """),
        Mutant("a rank waits for a gradient before it has sent the activation that it is the gradient of", "liveness",
               instead=GRADIENT_FIRST),
    ),
)  # fmt: skip
