"""19.3: tokens travel to the ranks that hold their experts, and back."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Complaint, Inputs, Law, exercise, sends
from labkit.course.judge.run_record import RunRecord, mark
from labkit.plan.laws.experts import expert_traffic

Expert = Callable[[Tensor], Tensor]
COUNT_BYTES = 8


def dispatch_and_combine(x: Tensor, chosen: Tensor, weights: Tensor, experts: list[Expert], group: Group) -> Tensor:
    """What a mixture of experts makes of this rank's tokens: y[t] = sum over j of weights[t, j] * expert(x[t]).

    x [T, D], chosen [T, k] (numbers of experts, all different in a row), weights [T, k] -> [T, D]

    T differs by rank, and may be 0. Each of the n ranks holds m experts, n m in all: `experts` are this rank's, number
    rank * m and those behind it. Each is a function [r, D] -> [r, D], also for r = 0. Call each once, with the rows of
    all ranks for it.

    Tell the others first how many rows come for each of their experts, in int64; then a row travels there and back.
    Use `group.all_to_all`."""
    n, m, k = group.size, len(experts), chosen.shape[1]
    order = chosen.flatten().argsort(stable=True)
    counts = torch.bincount(chosen.flatten(), minlength=n * m)
    coming = group.all_to_all(counts).view(n, m)
    send, receive = counts.view(n, m).sum(1).tolist(), coming.sum(1).tolist()
    arrived = group.all_to_all(x[order // k], send_rows=send, receive_rows=receive)
    by_expert = torch.arange(m, device=x.device).repeat(n).repeat_interleave(coming.flatten()).argsort(stable=True)
    runs = arrived[by_expert].split(coming.sum(0).tolist())
    out = torch.empty_like(arrived)
    out[by_expert] = torch.cat([expert(run) for expert, run in zip(experts, runs, strict=True)])
    home = group.all_to_all(out, send_rows=receive, receive_rows=send)
    return torch.zeros_like(x).index_add(0, order // k, home * weights.flatten()[order, None])


def cases() -> list[Case]:
    """Worlds of 1 to 5 ranks with a few experts each; `tokens` by rank, `unused` an expert that nobody wants."""
    return [
        Case.of(2, k=2, each=2, width=4, tokens=(5, 8), unused=None),
        Case.of(4, torch.float64, k=1, each=2, width=3, tokens=(6, 9, 4, 7), unused=5),
        Case.of(3, k=2, each=3, width=5, tokens=(11, 0, 7), unused=0).among(
            Case.of(5, torch.float64, k=3, each=2, width=2, tokens=(3, 8, 0, 6, 5), unused=9),
            Case.of(4, k=4, each=2, width=3, tokens=(5, 2, 7, 1), unused=2),
        ),
        Case.of(1, torch.float64, k=2, each=4, width=3, tokens=(9,), unused=3),
    ]


def routes(case: Case) -> list[Tensor]:
    """The experts of each rank's tokens, more rows for some ranks than for others.   [T, k] of each rank"""
    usable = [e for e in range(case.n_ranks * case["each"]) if e != case["unused"]]

    def make(dice: Random) -> list[Tensor]:
        return [
            torch.tensor([dice.sample(usable, case["k"]) for _ in range(t)], dtype=torch.int64).view(t, case["k"])
            for t in case["tokens"]
        ]

    def tells(chosen: list[Tensor]) -> bool:
        tables = counted(case, chosen)
        both = expert_traffic(tables, case.n_ranks)
        return case.n_ranks == 1 or all(leave != come for leave, come in both)

    return case.draw(make, tells)


def counted(case: Case, chosen: Sequence[Tensor]) -> list[list[int]]:
    """Rows of each rank for each expert, [n][E]."""
    n_expert = case.n_ranks * case["each"]
    return [torch.bincount(experts.flatten(), minlength=n_expert).tolist() for experts in chosen]


def inputs(case: Case) -> Inputs:
    """Tokens, routes and weights of a rank, and the matrices of its experts."""
    d, m, rows = case["width"], case["each"], []
    for rank, chosen in enumerate(routes(case)):
        x = case.random(len(chosen), d, key=10 + rank)
        weights = 0.1 + case.random(*chosen.shape, key=30 + rank).sigmoid()
        matrices = [case.random(d, d, key=50 + rank * m + expert) for expert in range(m)]
        rows.append((x, chosen, weights, matrices))
    return rows


def play(attempt: Any, group: Group, x: Tensor, chosen: Tensor, weights: Tensor, matrices: list[Tensor]) -> Any:
    """Run the attempt with experts that leave a mark in the record when they are called."""
    first = group.rank * len(matrices)

    def expert(number: int, matrix: Tensor) -> Expert:
        def run(rows: Tensor) -> Tensor:
            mark(group, f"expert {first + number} runs on {len(rows)} rows")
            return torch.tanh(rows @ matrix)

        return run

    return attempt(x, chosen, weights, [expert(number, matrix) for number, matrix in enumerate(matrices)], group)


def answer(case: Case, inputs: Inputs) -> Answers:
    """All experts in one process, token by token, in float64."""
    matrices = [matrix.double() for *_, experts in inputs for matrix in experts]
    results = []
    for x, chosen, weights, _ in inputs:
        y = torch.zeros_like(x, dtype=torch.float64)
        for t, row in enumerate(chosen.tolist()):
            for j, e in enumerate(row):
                y[t] += weights[t, j].double() * torch.tanh(x[t].double() @ matrices[e])
        results.append(y.to(case.dtype))
    return results


def most(case: Case, rank: int) -> float:
    """Bytes that a rank sends: its rows for experts of others and others' rows for its own, and the counts."""
    n, n_expert = case.n_ranks, case.n_ranks * case["each"]
    leave, come = expert_traffic(counted(case, routes(case)), n)[rank]
    return (leave + come) * case["width"] * case.item_bytes + COUNT_BYTES * n_expert * (n - 1) // n


def told(record: RunRecord) -> Complaint | None:
    """A Complaint unless the first that a rank sends is a count for each expert of the others, in int64."""
    case = record.case
    wanted = COUNT_BYTES * case.n_ranks * case["each"] * (case.n_ranks - 1) // case.n_ranks
    for rank in range(case.n_ranks):
        for event in record.sent(rank)[:1]:
            if event.n_bytes != wanted:
                return Complaint(f"{wanted:,} bytes of counts first", f"{event.n_bytes:,} bytes", rank, (event.number,))
    return None


def once(record: RunRecord) -> Complaint | None:
    """A Complaint unless each expert was called once, with all of its rows."""
    case = record.case
    rows = torch.tensor(counted(case, routes(case))).sum(0).tolist()
    for rank in range(case.n_ranks):
        first = rank * case["each"]
        wanted = [f"expert {e} runs on {rows[e]} rows" for e in range(first, first + case["each"])]
        events = [event for event in record.marks(rank) if event.what.startswith("expert ")]
        seen = [event.what for event in events]
        if sorted(seen) != sorted(wanted):
            at = tuple(event.number for event in events)
            return Complaint("; ".join(wanted), "; ".join(seen) or "no expert runs", rank, at)
    return None


PROBLEM = exercise(
    __name__,
    dispatch_and_combine,
    laws=(
        sends(
            lambda case, rank: (0, most(case, rank)),
            "each rank sends at most (out + in) D numbers and (n-1)/n of E counts: what leaves, and what came, once",
        ),
        Law("wire", "counts of rows travel first, in int64", told),
        Law("order", "each expert runs once, on the rows of all ranks together", once),
    ),
)
