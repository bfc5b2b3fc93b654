"""09.6: the ends of a tensor-parallel region when positions are cut outside of it."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Complaint, Inputs, Law, exercise, hidden
from labkit.course.judge.run_record import Event, RunRecord, alone, mark, weigh
from labkit.plan.machine.collectives import sent_bytes

LAYERS, SLACK_BYTES = 4, 16 << 10


class SequencePair:
    """f' and g', the ends of a tensor-parallel region under sequence parallelism.

    Outside the region rank r has the r-th T/n positions; inside every rank sees all T of them, and computes its own
    part. Neither end keeps a tensor from forward to backward, since neither needs one."""

    class Gather(Function):
        """f', the end at which x enters."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
            """This rank's positions -> all of them, in rank order.   [T/n, D] -> [T, D]"""
            ctx.group = group
            return group.all_gather(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            """The gradient of x [T, D] from this rank's use -> from all ranks' uses, this rank's positions [T/n, D]"""
            return ctx.group.reduce_scatter(grad), None

    class Scatter(Function):
        """g', the end at which y leaves."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
            """This rank's term of a sum -> the sum, at this rank's positions.   [T, D] -> [T/n, D]"""
            ctx.group = group
            return group.reduce_scatter(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            """The gradient of the sum at this rank's positions [T/n, D] -> of this rank's term [T, D]"""
            return ctx.group.all_gather(grad), None


def cases() -> list[Case]:
    """Worlds of 1 to 4 ranks; `each` positions a rank."""
    return [
        Case.of(3, each=20, width=320, hidden=18),
        Case.of(2, torch.float64, each=30, width=160, hidden=10),
        Case.of(4, each=15, width=320, hidden=8),
        Case.of(1, torch.float64, each=10, width=30, hidden=4),
    ]


def whole(case: Case) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    """x [T, D], the gradient of y [T, D], and (up [H, D], down [D, H]) of each layer."""
    t, d, h = case.n_ranks * case["each"], case["width"], case["hidden"]
    ups = [case.random(h, d, key=10 + k) / d**0.5 for k in range(LAYERS)]
    downs = [case.random(d, h, key=20 + k) / h**0.5 for k in range(LAYERS)]
    return case.random(t, d, key=1), case.random(t, d, key=2), list(zip(ups, downs, strict=True))


def inputs(case: Case) -> Inputs:
    """A rank's positions of x and of the gradient, and its rows and columns of the layers."""
    (x, dy, layers), n = whole(case), case.n_ranks
    return [
        (
            x.chunk(n)[rank].clone(),
            dy.chunk(n)[rank].clone(),
            [(up.chunk(n)[rank].clone(), down.chunk(n, 1)[rank].clone()) for up, down in layers],
        )
        for rank in range(n)
    ]


def play(attempt: Any, group: Group, x: Tensor, dy: Tensor, layers: list[tuple[Tensor, Tensor]]) -> Any:
    """Run layers one after the other, in which positions meet in a running sum, as they do in attention. Between the
    layers stands a sine, which keeps its input for backward. In front of them lies a region over this rank only, in
    which there is nothing."""
    leaf, itself = x.clone().requires_grad_(), alone(group)
    y = attempt.Scatter.apply(attempt.Gather.apply(leaf, itself), itself)
    for up, down in layers:
        part = torch.tanh(running(attempt.Gather.apply(torch.sin(y), group)) @ up.T)
        y = attempt.Scatter.apply(part @ down.T, group)
    del part
    mark(group, "the forward is done")
    weigh(group)
    y.backward(dy)
    return {"y": y, "gradient of x": leaf.grad}


def running(x: Tensor) -> Tensor:
    """The running sum: each position sees itself and those before it.   same shape"""
    return x.cumsum(0) / len(x) ** 0.5


def answer(case: Case, inputs: Inputs) -> Answers:
    """The result and the gradient of x from autograd on all positions and whole layers, in float64."""
    x, dy, layers = whole(case)
    leaf = x.double().requires_grad_()
    y = leaf
    for up, down in layers:
        y = torch.tanh(running(torch.sin(y)) @ up.double().T) @ down.double().T
    (dx,) = torch.autograd.grad(y, leaf, dy.double())
    parts = zip(*(tensor.detach().to(case.dtype).chunk(case.n_ranks) for tensor in (y, dx)), strict=True)
    return [{"y": a, "gradient of x": b} for a, b in parts]


def same_bytes(record: RunRecord) -> Complaint | None:
    """A Complaint unless each rank sends (n-1)/n of the bytes of all positions at each end, forward and backward."""
    case, n = record.case, record.case.n_ranks
    n_bytes = n * case["each"] * case["width"] * case.item_bytes
    for rank in range(n):
        ends = [
            sent_bytes("ring", verb, n, n_bytes, rank, case.item_bytes) for verb in ("all_gather", "reduce_scatter")
        ]
        middle = next((event.number for event in record.marks(rank)), 0)
        ways: dict[str, list[Event]] = {"forward": [], "backward": []}
        for event in record.sent(rank):
            ways["forward" if event.number < middle else "backward"].append(event)
        for way, events in ways.items():
            sent, law = sum(event.n_bytes for event in events), LAYERS * sum(ends)
            if sent != law:
                marked = tuple(event.number for event in events)
                return Complaint(f"{law:,} bytes in {way}, {LAYERS} layers", f"{sent:,} bytes in {way}", rank, marked)
    return None


def thin(record: RunRecord) -> Complaint | None:
    """A Complaint if after forward more is held than T/n positions a layer and the hidden numbers inside regions."""
    case, n = record.case, record.case.n_ranks
    outside, inside = case["each"] * case["width"], case["each"] * n * (case["hidden"] // n + 1)
    most = ((LAYERS + 2) * outside + LAYERS * inside) * case.item_bytes + SLACK_BYTES
    for rank, memory in enumerate(record.memory):
        held = sum(memory.now.values()) if memory is not None else 0
        if held > most:
            return Complaint(f"at most {most:,} bytes held after forward", f"{held:,} bytes", rank)
    return hidden(record, lambda case, rank: most)


PROBLEM = exercise(
    __name__,
    SequencePair,
    laws=(
        Law("wire", "(n-1)/n S at each end, forward and backward: in all what f and g send", same_bytes),
        Law("memory", "after forward a rank holds T/n positions a layer outside the regions, and no whole one", thin),
    ),
)
