"""09.1: a linear layer cut by its outputs."""

from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Complaint, Inputs, Law, exercise, hidden, silent
from labkit.course.judge.run_record import RunRecord, weigh

SLACK_BYTES = 8 << 10


class ColumnLinear:
    """One rank's part of y = x W^T + b, cut by outputs.   x [B, I] -> y_r [B, O/n]   with W[O/n, I] and b[O/n]

    Rank r has outputs r * O/n up to (r + 1) * O/n, in their order. It sends nothing. Between calls it holds its own
    part of W and b, and no more: a view of the whole would keep the whole in memory."""

    def __init__(self, weight: Tensor, bias: Tensor, group: Group):
        """weight [O, I] and bias [O] are the whole layer's. Raises ValueError if n does not divide O."""
        if len(weight) % group.size:
            raise ValueError(f"{len(weight)} outputs have no {group.size} equal parts")
        self.weight = weight.chunk(group.size)[group.rank].clone()
        self.bias = bias.chunk(group.size)[group.rank].clone()

    def forward(self, x: Tensor) -> Tensor:
        """x [B, I], whole on every rank -> this rank's outputs [B, O/n]"""
        return x @ self.weight.T + self.bias


def cases() -> list[Case]:
    """Worlds of 1 to 4 ranks; `each` outputs a rank, once so many that the biases of others show, too."""
    return [
        Case.of(3, each=40, inputs=200, rows=5),
        Case.of(2, torch.float64, each=2000, inputs=20, rows=4),
        Case.of(4, each=30, inputs=180, rows=1),
        Case.of(1, torch.float64, each=70, inputs=110, rows=3),
    ]


def inputs(case: Case) -> Inputs:
    """The same layer and the same x on every rank."""
    n_outputs = case.n_ranks * case["each"]
    layer = case.random(n_outputs, case["inputs"], key=1), case.random(n_outputs, key=2)
    return [(*layer, case.random(case["rows"], case["inputs"], key=3)) for _ in range(case.n_ranks)]


def play(attempt: Any, group: Group, weight: Tensor, bias: Tensor, x: Tensor) -> Any:
    """Cut copies of the whole layer, let go of them, and weigh what is held; then run forward, and try a layer that
    cannot be cut."""
    layer = attempt(weight.clone(), bias.clone(), group)
    weigh(group)
    y = layer.forward(x)
    try:
        attempt(weight[:-1], bias[:-1], group)
        outcome = "accepted"
    except ValueError:
        outcome = "ValueError"
    return {"y": y, "one output less": outcome}


def answer(case: Case, inputs: Inputs) -> Answers:
    """The parts of the result of torch's linear layer."""
    weight, bias, x = inputs[0]
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], dtype=case.dtype)
    layer.load_state_dict({"weight": weight, "bias": bias})
    outcome = "accepted" if case.n_ranks == 1 else "ValueError"
    parts = layer(x).detach().split(case["each"], dim=1)
    return [{"y": part, "one output less": outcome} for part in parts]


def holds_its_part(record: RunRecord) -> Complaint | None:
    """A Complaint if more than W[O/n, I] and b[O/n] is held after __init__."""
    most = record.case["each"] * (record.case["inputs"] + 1) * record.case.item_bytes + SLACK_BYTES
    for rank, memory in enumerate(record.memory):
        held = sum(memory.now.values()) if memory is not None else 0
        if held > most:
            return Complaint(f"at most {most:,} bytes held after __init__", f"{held:,} bytes", rank)
    return hidden(record, lambda case, rank: most)


PROBLEM = exercise(
    __name__,
    ColumnLinear,
    laws=(
        silent(),
        Law("memory", "after __init__ a rank holds O/n (I + 1) numbers, not O (I + 1)", holds_its_part),
    ),
)
