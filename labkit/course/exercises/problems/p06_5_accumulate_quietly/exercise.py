"""06.5: gradients of several micro-batches that travel once."""

# mypy: disable-error-code="arg-type,var-annotated"
# (the learner's text carries no comments for the type checker; p.grad may be None by its type, but not after backward)
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Complaint, Inputs, exercise, order, sends, stands_still
from labkit.course.judge.run_record import RunRecord, aside, begin_late, mark

STEPS = 2
LAST_ONE, THERE = "the last micro-batch", "its last gradient is there"


class QuietDDP:
    """Averages gradients over the ranks in hooks, but not while it is told to be quiet."""

    def __init__(self, params: list[Tensor], group: Group):
        """Have `begin(p)` called whenever a backward has added to p.grad, for each parameter."""
        self.group, self.works, self.quiet = group, [], False
        for p in params:
            p.register_post_accumulate_grad_hook(self.begin)

    def begin(self, p: Tensor) -> None:
        """Start the mean of p.grad over the ranks, with all that was added up before, and wait for nobody. While quiet,
        do nothing."""
        if not self.quiet:
            self.works.append(self.group.all_reduce_start(p.grad, "mean"))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """`with ddp.no_sync():` backward passes in here add to p.grad and send nothing. However the block ends, by an
        exception too, what comes after it is sent again."""
        self.quiet = True
        try:
            yield
        finally:
            self.quiet = False

    def finish(self) -> None:
        """After the last micro-batch's backward: return when every p.grad is the mean over the ranks."""
        for work in self.works:
            work.wait()
        self.works.clear()


def cases() -> list[Case]:
    """Worlds of 1 to 4 ranks."""
    return [
        Case.of(3, torch.float64, rows=2, micro=4, widths=(5, 13, 9)),
        Case.of(4, torch.float32, rows=3, micro=2, widths=(3, 10, 21)),
        Case.of(1, torch.float64, rows=2, micro=3, widths=(3, 5, 2)),
    ]


def shapes(case: Case) -> list[tuple[int, ...]]:
    """Shapes of the parameters of a model with two linear layers."""
    a, b, c = case["widths"]
    return [(b, a), (b,), (c, b), (c,)]


def inputs(case: Case) -> Inputs:
    """The same weights for each rank, its micro-batches of each step, one in the first, more in the next, and the rank
    that is late."""
    (a, _, c), n, many = case["widths"], case["rows"], (1, case["micro"])
    weights = [case.random(*shape, key=i) / 2 for i, shape in enumerate(shapes(case))]

    def rows(rank: int, step: int, k: int) -> tuple[Tensor, Tensor]:
        key = 1000 + 100 * rank + 10 * step + k
        return case.random(n, a, key=key), case.random(n, c, key=9000 + key)

    late = case.dice.randrange(case.n_ranks)
    return [
        (
            [w.clone() for w in weights],
            [[rows(rank, step, k) for k in range(n_micro)] for step, n_micro in enumerate(many)],
            late,
        )
        for rank in range(case.n_ranks)
    ]


def model_of(weights: Sequence[Tensor]) -> nn.Module:
    """The model with these weights."""
    (b, a), c = weights[0].shape, len(weights[3])
    model = nn.Sequential(nn.Linear(a, b), nn.Tanh(), nn.Linear(b, c)).to(weights[0].dtype)
    for p, w in zip(model.parameters(), weights, strict=True):
        p.data = w.clone()
    return model


def play(attempt: Any, group: Group, weights: list[Tensor], steps: list[list[tuple[Tensor, Tensor]]], late: int) -> Any:
    """Take the steps. Behind each quiet micro-batch another quiet block ends by an exception, which must come out of
    it. The rank that is late begins the last micro-batch of a step when the backward of all others has ended. The
    gradients of each step, and the number of exceptions that did not come out."""
    model, gradients, n_lost = model_of(weights), [], 0
    params, left, ours, signals = list(model.parameters()), [0], aside(group), []

    def arrived(_: Tensor) -> None:
        left[0] -= 1
        if left[0] == 0:
            mark(group, THERE)

    for p in params:
        p.register_post_accumulate_grad_hook(arrived)
    sync = attempt(params, group)
    for micro_batches in steps:
        model.zero_grad()
        left[0] = len(params) * len(micro_batches)
        for x, y in micro_batches[:-1]:
            with sync.no_sync():
                ((model(x) - y).square().mean() / len(micro_batches)).backward()
            with suppress(KeyError):
                with sync.no_sync():
                    raise KeyError("a micro-batch that cannot be read")
                n_lost += 1  # only if the block has swallowed the exception
        if group.rank == late and group.size > 1:
            signals += begin_late(group, ours)
        mark(group, LAST_ONE)
        x, y = micro_batches[-1]
        ((model(x) - y).square().mean() / len(micro_batches)).backward()
        if group.rank != late:
            signals.append(ours.send(torch.zeros(1), late))
        sync.finish()
        gradients.append([p.grad.clone() for p in params if p.grad is not None])
    for signal in signals:
        signal.wait()
    return {"gradients": gradients, "exceptions that no_sync has swallowed": n_lost}


def answer(case: Case, inputs: Inputs) -> Answers:
    """The gradients of all rows of a step in one batch, and no exception swallowed."""
    model, gradients = model_of(inputs[0][0]), []
    for step in range(STEPS):
        x, y = (torch.cat([rows[k] for _, steps, _ in inputs for rows in steps[step]]) for k in (0, 1))
        gradients.append(torch.autograd.grad((model(x) - y).square().mean(), list(model.parameters())))
    return [{"gradients": gradients, "exceptions that no_sync has swallowed": 0}] * case.n_ranks


def law(case: Case, _: int) -> tuple[float, float]:
    """(least, most) bytes that a rank sends: 2(n-1)/n of the gradients' a step, however many micro-batches it has. Each
    all_reduce may round down by a byte."""
    whole = case.item_bytes * sum(torch.Size(shape).numel() for shape in shapes(case))
    most = STEPS * 2 * (case.n_ranks - 1) * whole / case.n_ranks
    return most - STEPS * len(shapes(case)), most


def overlapped(record: RunRecord) -> Complaint | None:
    """A Complaint unless in the last micro-batch a collective begins before the last gradient is complete, and the
    backward of each rank but the late one ends before that one has begun."""
    for rank in range(record.case.n_ranks if record.case.n_ranks > 1 else 0):
        early = 0
        for event in record.of(rank):
            early = 0 if event.what == LAST_ONE else early + event.n_bytes * (event.kind == "collective")
            if event.what == THERE and not early:
                wanted = "a first all_reduce under way before the last gradient of the last micro-batch is there"
                return Complaint(wanted, "none has begun", rank, (event.number,))
    return stands_still(record, LAST_ONE)


PROBLEM = exercise(
    __name__,
    QuietDDP,
    laws=(
        sends(
            law,
            "each rank sends 2(n-1)/n of the gradients' bytes a step, whatever the number of micro-batches",
            only=("all_reduce",),
        ),
        order(
            "in the last micro-batch the first all_reduce begins before the last gradient is there, and no hook waits",
            overlapped,
        ),
    ),
)
