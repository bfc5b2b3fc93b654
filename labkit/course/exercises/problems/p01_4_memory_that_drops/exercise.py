"""01.4: a training loop that keeps numbers for a log, and nothing else."""

from typing import Any

import torch
from torch import Tensor, nn

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Complaint, Inputs, Law, exercise, peak
from labkit.course.judge.run_record import RunRecord, weigh

ITEM, SLACK = 4, 24 << 10
Batch = tuple[Tensor, Tensor]


def train_and_log(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Batch], held_out: Batch
) -> dict[str, Tensor]:
    """Train on each batch (x, y) in turn, one optimizer step each, and return what a log needs, one entry a step:

    "losses"      mean((model(x) - y)^2) of the batch, before its step               [n]
    "held_out"    the same on `held_out`, after the step                             [n]
    "first_rows"  row 0 of model(x) of the batch, before its step   [rows, d] each   [n, d]

    There is no gradient when you are called. When you return, nothing is left but the model, the optimizer's state and
    these three tensors: no graph, no gradient, no storage that is larger than its result. And at no time are more
    activations held than those of one step, whatever the number of batches."""
    losses, after, rows = [], [], []
    for x, y in batches:
        out = model(x)
        loss = (out - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        rows.append(out[0].detach().clone())
        with torch.no_grad():
            after.append((model(held_out[0]) - held_out[1]).square().mean())
    return {"losses": torch.stack(losses), "held_out": torch.stack(after), "first_rows": torch.stack(rows)}


def cases() -> list[Case]:
    """Two shapes, and a single batch."""
    return [Case.of(1, steps=9, rows=64, width=24, hidden=160, out=96),
            Case.of(1, steps=14, rows=48, width=32, hidden=224, out=128),
            Case.of(1, steps=1, rows=32, width=16, hidden=128, out=64)]  # fmt: skip


def inputs(case: Case) -> Inputs:
    """Weights, and all batches; the one that is held out is so large that its activations show."""
    w, h, d, rows = case["width"], case["hidden"], case["out"], case["rows"]
    weights = [
        case.random(h, w, key=1) / 5,
        case.random(h, key=2),
        case.random(d, h, key=3) / 12,
        case.random(d, key=4),
    ]
    sizes = [2 * rows, *[rows] * case["steps"]]
    data = [(case.random(n, w, key=10 + 2 * i), case.random(n, d, key=11 + 2 * i)) for i, n in enumerate(sizes)]
    return [(weights, data[1:], data[0])]


def made(weights: list[Tensor]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A network of two layers, and SGD with momentum."""
    (h, w), d = weights[0].shape, len(weights[3])
    model = nn.Sequential(nn.Linear(w, h), nn.Tanh(), nn.Linear(h, d))
    with torch.no_grad():
        for p, value in zip(model.parameters(), weights, strict=True):
            p.copy_(value)
    return model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.8, foreach=False)


def play(attempt: Any, group: Group, weights: list[Tensor], batches: list[Batch], held_out: Batch) -> Any:
    """Train, and weigh what is held afterwards."""
    model, optimizer = made(weights)
    # copies, since the probe takes a tensor that is older than itself for new where torch hands out a view of it
    kept, apart = tuple((x.clone(), y.clone()) for x, y in batches), (held_out[0].clone(), held_out[1].clone())
    log = attempt(model, optimizer, list(kept), apart)
    weigh(group)
    return {**log, "weights": [p.detach() for p in model.parameters()]}


def answer(case: Case, inputs: Inputs) -> Answers:
    """The log and the weights without autograd: both layers by hand, in float64."""
    weights, batches, held_out = inputs[0]
    w1, b1, w2, b2 = (weight.double() for weight in weights)
    params, speed = [w1, b1, w2, b2], [torch.zeros_like(weight, dtype=torch.float64) for weight in weights]
    losses, after, rows = [], [], []
    for x, y in ((x.double(), y.double()) for x, y in batches):
        w1, b1, w2, b2 = params
        h = (x @ w1.T + b1).tanh()
        out = h @ w2.T + b2
        g = 2 * (out - y) / y.numel()
        dh = (g @ w2) * (1 - h * h)
        speed = [0.8 * v + grad for v, grad in zip(speed, (dh.T @ x, dh.sum(0), g.T @ h, g.sum(0)), strict=True)]
        params = [p - 0.5 * v for p, v in zip(params, speed, strict=True)]
        losses.append((out - y).square().mean())
        rows.append(out[0])
        w1, b1, w2, b2 = params
        prediction = (held_out[0].double() @ w1.T + b1).tanh() @ w2.T + b2
        after.append((prediction - held_out[1].double()).square().mean())
    log = {"losses": torch.stack(losses), "held_out": torch.stack(after), "first_rows": torch.stack(rows)}
    return [{**{name: values.float() for name, values in log.items()}, "weights": [param.float() for param in params]}]


def state(case: Case) -> int:
    """Bytes of the parameters."""
    return ITEM * int(case["hidden"] * (case["width"] + 1) + case["out"] * (case["hidden"] + 1))


def results(case: Case) -> int:
    """Bytes of the log."""
    return ITEM * int(case["steps"] * (2 + case["out"]))


def data(case: Case) -> int:
    """Bytes of all batches, which are held all the time."""
    return ITEM * int((case["steps"] * case["rows"] + 2 * case["rows"]) * (case["width"] + case["out"]))


def highest(case: Case, rank: int) -> float:
    """The most bytes that may be held: data, parameters, gradients and momentum, the tensors that forward keeps and
    backward makes in one step, and twice the log."""
    hidden, out = (ITEM * case["rows"] * case[name] for name in ("hidden", "out"))
    return data(case) + 3 * state(case) + 2 * hidden + 4 * out + 2 * results(case) + SLACK


def left(record: RunRecord) -> Complaint | None:
    """A Complaint if more than data and results is held after the attempt has returned.

    Data count as activations where autograd had saved them."""
    memory, most = record.memory[0], data(record.case) + results(record.case) + 1024
    if memory is None:
        return None
    if held := memory.now.get("gradients", 0):
        return Complaint("0 bytes of gradients", f"{held:,} bytes of gradients", 0)
    held = memory.now.get("activations", 0) + memory.now.get("other", 0)
    if held > most:
        return Complaint(f"at most {most:,} bytes of data and results", f"{held:,} bytes", 0)
    return None


PROBLEM = exercise(
    __name__,
    train_and_log,
    tolerance=(2e-4, 2e-4),
    laws=(
        Law("memory", "when it returns, no gradient is there, no activation, and nothing but the results", left),
        peak(highest, "at no time more than parameters, gradients, momentum, and the activations of one step"),
    ),
)
