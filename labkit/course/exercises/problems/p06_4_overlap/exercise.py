"""06.4: gradients leave while backward still works on others."""

# mypy: disable-error-code="arg-type,var-annotated"
# (the learner's text carries no comments for the type checker; p.grad may be None by its type, but not after backward)
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Complaint, Inputs, exercise, order, sends, stands_still
from labkit.course.judge.run_record import RunRecord, aside, begin_late, mark

STEPS = 3
BEGINS, LAST = "backward begins", "the last gradient is there"


class OverlappedDDP:
    """Averages gradients over the ranks while backward is still at work."""

    def __init__(self, params: list[Tensor], group: Group):
        """Have `begin(p)` called as soon as p.grad is complete, for each parameter, in every backward to come."""
        self.group, self.works = group, []
        for p in params:
            p.register_post_accumulate_grad_hook(self.begin)

    def begin(self, p: Tensor) -> None:
        """p.grad is complete: start its mean over the ranks, and go back to backward without waiting for anybody.

        At least half of all bytes must be on their way before the last gradient is complete."""
        self.works.append(self.group.all_reduce_start(p.grad, "mean"))

    def finish(self) -> None:
        """After backward: return when every p.grad is the mean over the ranks."""
        for work in self.works:
            work.wait()
        self.works.clear()


def cases() -> list[Case]:
    """Worlds of 1 to 3 ranks; the last layer is the largest."""
    return [
        Case.of(3, torch.float64, rows=4, widths=(5, 13, 17, 9)),
        Case.of(2, torch.float32, rows=3, widths=(3, 20, 31)),
        Case.of(1, torch.float64, rows=6, widths=(3, 5, 2)),
    ]


def shapes(case: Case) -> list[tuple[int, ...]]:
    """Shapes of the parameters of a model with some linear layers."""
    widths = case["widths"]
    return [shape for a, b in zip(widths, widths[1:], strict=False) for shape in ((b, a), (b,))]


def inputs(case: Case) -> Inputs:
    """The same weights for each rank, and its rows of each step."""
    weights = [case.random(*shape, key=i) / 2 for i, shape in enumerate(shapes(case))]
    x, y = case["widths"][0], case["widths"][-1]
    rows = [
        [(case.random(case["rows"], x, key=99 + 9 * s + r), case.random(case["rows"], y, key=999 + 9 * s + r))
         for s in range(STEPS)]
        for r in range(case.n_ranks)
    ]  # fmt: skip
    late = list(range(case.n_ranks))[:: case.n_ranks - 1 or 1]  # the first and the last: every rank waits for another
    case.dice.shuffle(late)
    return [([w.clone() for w in weights], steps, late) for steps in rows]


def model_of(weights: Sequence[Tensor]) -> nn.Module:
    """The model with these weights."""
    layers: list[nn.Module] = []
    for weight, bias in zip(weights[::2], weights[1::2], strict=True):
        layers += [nn.Linear(weight.shape[1], weight.shape[0], dtype=weight.dtype), nn.Tanh()]
        layers[-2].weight.data, layers[-2].bias.data = weight, bias  # type: ignore[union-attr]
    return nn.Sequential(*layers)


def play(attempt: Any, group: Group, weights: list[Tensor], rows: list[tuple[Tensor, Tensor]], late: list[int]) -> Any:
    """Run three backward passes. In each of them one rank is late: it begins when the backward of all others has ended.
    If one of them waits in a hook, that never happens: the late rank marks which, as soon as all wait."""
    model, me = model_of(weights), group.rank
    params, gradients, arrivals, sent = list(model.parameters()), [], [], []
    ours, late = aside(group), [*late, *late][:STEPS] if group.size > 1 else [-1] * STEPS

    def arrived(p: Tensor) -> None:
        arrivals.append(p)
        if len(arrivals) % len(params) == 0:
            mark(group, LAST)

    for p in params:
        p.register_post_accumulate_grad_hook(arrived)
    sync = attempt(params, group)
    for step, (x, y) in enumerate(rows):
        model.zero_grad()
        loss = (model(x) - y).square().mean()
        if late[step] == me:
            sent += begin_late(group, ours)
        mark(group, BEGINS)
        loss.backward()
        if late[step] not in (-1, me):
            sent.append(ours.send(torch.zeros(1), late[step]))
        sync.finish()
        gradients.append([p.grad.clone() for p in params if p.grad is not None])
    for work in sent:
        work.wait()
    return gradients


def answer(case: Case, inputs: Inputs) -> Answers:
    """The gradients of all rows in one process."""
    model, gradients = model_of(inputs[0][0]), []
    for step in range(STEPS):
        x, y = (torch.cat([rows[step][k] for _, rows, _ in inputs]) for k in (0, 1))
        gradients.append(torch.autograd.grad((model(x) - y).square().mean(), list(model.parameters())))
    return [gradients] * case.n_ranks


def per_step(case: Case) -> float:
    """Bytes that a rank sends in a step: 2(n-1)/n of the gradients'."""
    whole = case.item_bytes * sum(torch.Size(shape).numel() for shape in shapes(case))
    return 2 * (case.n_ranks - 1) * whole / case.n_ranks


def law(case: Case, _: int) -> tuple[float, float]:
    """(least, most) bytes that a rank sends: the same each step, less at most a byte of rounding a gradient."""
    return STEPS * (per_step(case) - len(shapes(case))), STEPS * per_step(case)


def overlapped(record: RunRecord) -> Complaint | None:
    """A Complaint unless on each rank half of the bytes leave between BEGINS and LAST, and the backward of
    each rank ends while another has not begun."""
    n = record.case.n_ranks
    for rank in range(n if n > 1 else 0):
        early, counting = 0, False
        for event in record.of(rank):
            if event.kind == "mark":
                counting = event.what == BEGINS
                if event.what == LAST and early < (per_step(record.case) - len(shapes(record.case))) / 2:
                    wanted = (
                        f"at least {per_step(record.case) / 2:,.0f} bytes on their way when the last gradient is there"
                    )
                    return Complaint(wanted, f"{early:,} bytes", rank, (event.number,))
                early = 0
            elif counting and event.kind == "collective":
                early += event.n_bytes
    return stands_still(record, BEGINS)


PROBLEM = exercise(
    __name__,
    OverlappedDDP,
    laws=(
        sends(law, "each rank sends 2(n-1)/n of the gradients' bytes a step, by all_reduce", only=("all_reduce",)),
        order("half of the bytes are on their way before the last gradient is there, and no hook waits", overlapped),
    ),
)
