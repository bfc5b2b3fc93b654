"""05.5: narrow parameters, stepped through float32 copies."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise, holds
from labkit.course.judge.run_record import weigh

STEPS, LR = 12, 2e-4


class MasterCopies:
    """Any optimizer for parameters in 16 bits, which it steps through float32 copies of them, the masters."""

    def __init__(self, params: list[Tensor], make_optimizer: Callable[[list[Tensor]], Any]):
        """Copy each parameter to float32, once, in order, and call `make_optimizer(masters)` on the list of copies."""
        self.params = params
        self.masters = [p.detach().float() for p in params]
        self.optimizer = make_optimizer(self.masters)

    def step(self) -> None:
        """Step the masters with the gradients p.grad, in float32; then each parameter becomes its master, rounded.

        A parameter whose p.grad is None is not stepped. Afterwards there is no gradient left: neither
        a parameter nor a master has one."""
        for p, master in zip(self.params, self.masters, strict=True):
            if p.grad is not None:
                master.grad, p.grad = p.grad.float(), None
        self.optimizer.step()
        for p, master in zip(self.params, self.masters, strict=True):
            p.data.copy_(master)
            master.grad = None


def cases() -> list[Case]:
    """bfloat16 and float16; tensors so large that copies of them show in the pages of a process."""
    return [
        Case.of(1, torch.bfloat16, shapes=((600, 1000), (33,), (7, 400))),
        Case.of(1, torch.float16, shapes=((500_000,), (3, 5, 8))),
    ]


def inputs(case: Case) -> Inputs:
    """Weights around 1, and the gradients of each step, all of the case's dtype. A gradient keeps its signs from step
    to step, so that small updates add up."""
    signs = [case.random(*shape, key=i).sign() for i, shape in enumerate(case["shapes"])]
    sizes = [sign * (0.5 + case.random(*sign.shape, key=i + 50).abs()) for i, sign in enumerate(signs)]
    grads: list[list[Tensor | None]] = [
        [sign * size.abs().roll(7919 * step) for sign, size in zip(signs, sizes, strict=True)] for step in range(STEPS)
    ]
    grads[0][-1] = None  # a parameter that this step does not use
    grads[3][-1] = torch.zeros_like(sizes[-1])  # one that it uses: moments go on moving it
    weights = [1 + case.random(*shape, key=7000 + i) / 8 for i, shape in enumerate(case["shapes"])]
    return [(weights, grads, case.dice.randint(3, STEPS))]


def adamw(params: list[Tensor]) -> Any:
    """The optimizer inside."""
    return torch.optim.AdamW(params, lr=LR, foreach=False)


def play(attempt: Any, group: Group, weights: list[Tensor], grads: list[list[Tensor | None]], weighed: int) -> Any:
    """Take twelve steps, and after one of them weigh what is held; return the masters that the optimizer was given, and
    checks of the parameters."""
    params, all_masters = [torch.nn.Parameter(w) for w in weights], []

    def make(masters: list[Tensor]) -> Any:
        all_masters.extend(masters)
        return adamw(all_masters)

    optimizer = attempt(params, make)
    for number, step in enumerate(grads, 1):
        for p, g in zip(params, step, strict=True):
            p.grad = None if g is None else g.to(p.dtype, copy=True)
        optimizer.step()
        if number == weighed:
            weigh(group)
    rounded = [torch.equal(p.data, m.detach().to(p.dtype)) for p, m in zip(params, all_masters, strict=False)]
    checks = {"parameters are masters, rounded": rounded, "dtypes": [str(p.dtype) for p in params]}
    return {"masters": [m.detach() for m in all_masters], **checks}


def answer(case: Case, inputs: Inputs) -> Answers:
    """torch's AdamW on float64 weights, with the same gradients."""
    weights, grads, _ = inputs[0]
    params = [torch.nn.Parameter(w.double()) for w in weights]
    optimizer = adamw(params)  # type: ignore[arg-type]
    for step in grads:
        for p, g in zip(params, step, strict=True):
            p.grad = None if g is None else g.double()
        optimizer.step()
    masters = [p.detach().float() for p in params]
    checks = {"parameters are masters, rounded": [True] * len(masters), "dtypes": [str(case.dtype)] * len(masters)}
    return [{"masters": masters, **checks}]


def numel(case: Case) -> int:
    """Numbers in all parameters."""
    return sum(torch.Size(shape).numel() for shape in case["shapes"])


def law(case: Case, _: int) -> dict[str, tuple[float, float]]:
    """(least, most) bytes held by kind: 4 of master and 8 of AdamW's moments for each number, and nothing else that
    grows with the model."""
    n, counters = numel(case), 64 * len(case["shapes"])
    return {
        "parameters": (4 * n, 4 * n),
        "optimizer": (8 * n, 8 * n + counters),
        "gradients": (0, 0),
        "activations": (0, 0),
        "other": (0, 4096),
    }


PROBLEM = exercise(
    __name__,
    MasterCopies,
    changes=(0,),
    laws=(holds(law, "after a step: 4 bytes of master and 8 of moments for each weight, no gradient, no other copy"),),
)
