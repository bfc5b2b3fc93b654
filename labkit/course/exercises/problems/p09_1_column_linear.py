"""09.1: a linear layer cut by its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.problem import Complaint, Law, Mutant, Problem
from labkit.course.judge.case import Case
from labkit.course.judge.laws import hidden, silent
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


def cases() -> Sequence[Case]:
    """Worlds of 1 to 4 ranks; `each` outputs a rank."""
    return [
        Case.of(3, each=40, inputs=200, rows=5),
        Case.of(2, torch.float64, each=60, inputs=120, rows=4),
        Case.of(4, each=30, inputs=180, rows=1),
        Case.of(1, torch.float64, each=70, inputs=110, rows=3),
    ]


def inputs(case: Case) -> Sequence[tuple[Any, ...]]:
    """The same layer and the same x on every rank."""
    n_outputs = case.n_ranks * case["each"]
    layer = case.random(n_outputs, case["inputs"], key=1), case.random(n_outputs, key=2)
    return [(*layer, case.random(case["rows"], case["inputs"], key=3)) for _ in range(case.n_ranks)]


def play(attempt: Any, group: Group, weight: Tensor, bias: Tensor, x: Tensor) -> Any:
    """Cut copies of the whole, let go of them, see what is held; then a forward, and a layer that cannot be cut."""
    layer = attempt(weight.clone(), bias.clone(), group)
    weigh(group)
    y = layer.forward(x)
    try:
        attempt(weight[:-1], bias[:-1], group)
        told = "accepted"
    except ValueError:
        told = "ValueError"
    return {"y": y, "one output less": told}


def answer(case: Case, given: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
    """torch's linear layer, cut afterwards."""
    weight, bias, x = given[0]
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], dtype=case.dtype)
    layer.load_state_dict({"weight": weight, "bias": bias})
    told = "accepted" if case.n_ranks == 1 else "ValueError"
    parts = layer(x).detach().split(case["each"], dim=1)
    return [{"y": part, "one output less": told} for part in parts]


def holds_its_part(record: RunRecord) -> Complaint | None:
    """More than W[O/n, I] and b[O/n] is held after __init__."""
    most = record.case["each"] * (record.case["inputs"] + 1) * record.case.item_bytes + SLACK_BYTES
    for rank, memory in enumerate(record.memory):
        held = sum(memory.now.values()) if memory is not None else 0
        if held > most:
            return Complaint(f"at most {most:,} bytes held after __init__", f"{held:,} bytes", rank)
    return hidden(record, lambda case, rank: most)


PROBLEM = Problem(
    key="09.1",
    title="A column-parallel linear",
    story="""
One linear layer of a 70B model has 235 million weights. Cut by its outputs, each of 8 ranks keeps every eighth part of
them and computes those outputs alone, for every token. All ranks need the whole x; none needs a message. The name comes
from W^T, whose columns are what is dealt out: in torch's W [O, I] they are rows.
""",
    objectives=("which dim of W is cut", "a part that does not keep the whole alive"),
    difficulty=1,
    importance=5,
    minutes=10,
    reference=ColumnLinear,
    cases=cases,
    inputs=inputs,
    play=play,
    answer=answer,
    laws=(
        silent(),
        Law("memory", "after __init__ a rank holds O/n (I + 1) numbers, not O (I + 1)", holds_its_part),
    ),
    hints=(
        "Output o is x times row o of W, plus b[o]. Whoever has that row and all of x needs nobody.",
        "W [O, I] -> W_r [O/n, I] along dim 0, b [O] -> b_r [O/n]; no collective. Copy the part, so that W can go.",
        "check len(weight) % n;  self.weight = weight.chunk(n)[r], copied;  forward: x @ W_r.T + b_r",
    ),
    mutants=(
        Mutant("W is cut along its inputs, which do not meet the whole x", "values",
               (("weight.chunk(group.size)[group.rank].clone()", "weight.chunk(group.size, 1)[group.rank].clone()"),)),
        Mutant("every rank takes the first part", "values",
               (("weight.chunk(group.size)[group.rank]", "weight.chunk(group.size)[0]"),
                ("bias.chunk(group.size)[group.rank]", "bias.chunk(group.size)[0]"))),
        Mutant("b is not cut with W: this rank's outputs get the first outputs' biases", "values",
               (("bias.chunk(group.size)[group.rank]", "bias.chunk(group.size)[0]"),)),
        Mutant("outputs are dealt out one by one, not in a run of O/n", "values",
               (("weight.chunk(group.size)[group.rank]", "weight[group.rank :: group.size]"),
                ("bias.chunk(group.size)[group.rank]", "bias[group.rank :: group.size]"))),
        Mutant("an O that n does not divide is cut all the same", "values",
               (("if len(weight) % group.size:", "if group.size < 1:"),)),
        Mutant("the outputs are gathered, and cut again: they were where they belong", "wire", instead="""
            class ColumnLinear:
                def __init__(self, weight, bias, group):
                    if len(weight) % group.size:
                        raise ValueError("no equal parts")
                    self.group = group
                    self.weight = weight.chunk(group.size)[group.rank].clone()
                    self.bias = bias.chunk(group.size)[group.rank].clone()

                def forward(self, x):
                    whole = self.group.all_gather((x @ self.weight.T + self.bias).T)
                    return whole.chunk(self.group.size)[self.group.rank].T
        """),
        Mutant("the part is a view, so the whole W stays in memory on every rank", "memory",
               (("weight.chunk(group.size)[group.rank].clone()", "weight.chunk(group.size)[group.rank]"),)),
        Mutant("every rank keeps the whole layer, and cuts only its output", "memory", instead="""
            class ColumnLinear:
                def __init__(self, weight, bias, group):
                    if len(weight) % group.size:
                        raise ValueError("no equal parts")
                    self.weight, self.bias, self.group = weight.clone(), bias.clone(), group

                def forward(self, x):
                    y = x @ self.weight.T + self.bias
                    return y.chunk(self.group.size, 1)[self.group.rank].clone()
        """),
    ),
)  # fmt: skip
