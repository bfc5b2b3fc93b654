"""19.1: from a router's logits to rows that lie in the order of their experts."""

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise

Route = tuple[int, int, int]
"""A token, the number of its choice (0 is the most probable one), and the expert."""


def route_and_permute(x: Tensor, logits: Tensor, k: int, capacity: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens x [N, D] and a router's logits [N, E] -> (rows [R, D], counts [E], weights [R]).

    A token goes to the k experts with the largest softmax p. Its weights are p divided by the sum of the k chosen; for
    k = 1 the weight is p itself. Gradients of the rows must reach x, and those of the weights
    the logits.

    capacity   None drops nothing, and R = N k. With a factor, an expert takes ceil(capacity k N / E) rows, first come
               first served: by token, and in each by falling p. What is dropped changes no other weight.
    rows       those of expert 0, then those of expert 1, ...; for each expert in the order of the tokens
    counts     kept rows by expert, also of experts without any
    weights    in the order of the rows"""
    n_expert = logits.shape[1]
    p, chosen = logits.softmax(-1).topk(k)
    weights = p / p.sum(-1, keepdim=True) if k > 1 else p
    target = chosen.flatten()
    if capacity is not None:
        room = math.ceil(capacity * k * len(x) / n_expert)
        place = one_hot(target, n_expert).cumsum(0).gather(1, target[:, None])[:, 0]
        target = target.masked_fill(place > room, n_expert)
    counts = torch.bincount(target, minlength=n_expert)[:n_expert]
    order = target.argsort(stable=True)[: int(counts.sum())]
    return x[order // k], counts, weights.flatten()[order]


def cases() -> list[Case]:
    """One to three experts a token, with and without a capacity, and with none at all; nobody wants the last expert."""
    return [
        Case.of(1, k=3, capacity=None, tokens=9, experts=6, width=3),
        Case.of(1, torch.float64, k=1, capacity=1.0, tokens=20, experts=4, width=5),
        Case.of(1, k=2, capacity=0.8, tokens=23, experts=6, width=4).among(
            Case.of(1, k=2, capacity=0.7, tokens=29, experts=5, width=4),
            Case.of(1, torch.float64, k=2, capacity=0.65, tokens=27, experts=7, width=2),
        ),
        Case.of(1, k=1, capacity=None, tokens=7, experts=3, width=2),
        Case.of(1, k=2, capacity=0.0, tokens=6, experts=4, width=2),
    ]


def drawn(case: Case) -> tuple[Tensor, Tensor]:
    """Tokens, and logits on which each order of serving gives another result.   -> [N, D], [N, E]"""
    n, n_expert = case["tokens"], case["experts"]

    def make(dice: Random) -> Tensor:
        logits = case.random(n, n_expert, key=dice.randrange(1 << 20))
        logits[:, 0] += 1.0
        logits[:, -1] -= 50.0
        return logits

    def tells(logits: Tensor) -> bool:
        routes, room = chosen_by(logits, case["k"]), room_of(case)
        largest = logits.softmax(-1).sort(descending=True).values[:, : case["k"] + 1]
        if float((largest[:, :-1] - largest[:, 1:]).min()) < 1e-4 or len({e for *_, e in routes}) < n_expert - 1:
            return False
        if not case["capacity"]:  # everything is kept, or nothing: no order is better than another
            return True
        p = logits.softmax(-1)
        orders: list[Callable[[Route], Any]] = [lambda r: (-r[0], -r[1]), lambda r: -float(p[r[0], r[2]])]
        orders += [lambda r: (r[1], r[0])] if case["k"] > 1 else []
        right = served(routes, room)
        cut = math.ceil(int(case["capacity"] * case["k"] * n) / n_expert)  # to whole rows before it is shared out
        other_rooms = {room - 1, room + 1, math.ceil(case["capacity"] * n / n_expert), cut} - {room}
        wrong = [served(sorted(routes, key=key), room) for key in orders] + [served(routes, m) for m in other_rooms]
        split = case["k"] == 1 or any(sum(r in right for r in routes if r[0] == token) == 1 for token in range(n))
        return split and all(sorted(kept) != sorted(right) for kept in wrong)

    return case.random(n, case["width"], key=1), case.draw(make, tells)


def room_of(case: Case) -> int:
    """Rows that an expert takes."""
    if case["capacity"] is None:
        return int(case["tokens"])
    return math.ceil(case["capacity"] * case["k"] * case["tokens"] / case["experts"])


def chosen_by(logits: Tensor, k: int) -> list[Route]:
    """The rows that tokens ask for, in the order of the tokens."""
    rows = [sorted(range(len(row)), key=row.__getitem__, reverse=True)[:k] for row in logits.tolist()]
    return [(token, choice, expert) for token, row in enumerate(rows) for choice, expert in enumerate(row)]


def served(routes: Sequence[Route], room: int) -> list[Route]:
    """Those that find room at their expert, if they come in this order."""
    taken = dict[int, int]()
    kept = []
    for route in routes:
        taken[route[2]] = taken.get(route[2], 0) + 1
        if taken[route[2]] <= room:
            kept.append(route)
    return kept


def inputs(case: Case) -> Inputs:
    """Tokens, logits, k, the capacity, and what pulls at each weight and at each row."""
    n_routes = case["tokens"] * case["k"]
    pulls = case.random(n_routes, key=2), case.random(n_routes, case["width"], key=3)
    return [(*drawn(case), case["k"], case["capacity"], *pulls)]


def play(
    attempt: Any, _: Group, x: Tensor, logits: Tensor, k: int, capacity: float | None, pull: Tensor, row_pull: Tensor
) -> Any:
    """What the attempt gives, and the gradients of tokens and logits when something pulls at the rows and weights."""
    leaves = x.clone().requires_grad_(), logits.clone().requires_grad_()
    rows, counts, weights = attempt(*leaves, k, capacity)
    for pulled in ((weights * pull[: len(weights)]).sum(), (rows * row_pull[: len(rows)]).sum()):
        if pulled.requires_grad:
            pulled.backward()
    grad_x, grad = (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves)
    reply = {"rows": rows.detach(), "counts": counts, "weights": weights.detach()}
    return {**reply, "gradient of x": grad_x, "gradient of the logits": grad}


def answer(case: Case, inputs: Inputs) -> Answers:
    """Token by token in float64, with a queue for each expert."""
    x, logits, k, _, pull, row_pull = inputs[0]
    leaf = logits.double().clone().requires_grad_()
    p = leaf.softmax(-1)
    routes = chosen_by(logits, k)
    kept = sorted(served(routes, room_of(case)), key=lambda route: (route[2], route[0]))
    asked: dict[int, list[int]] = {}
    for token, _, expert in routes:
        asked.setdefault(token, []).append(expert)
    sums = torch.stack([p[token, asked[token]].sum() if k > 1 else p.new_ones(()) for token in range(len(x))])
    tokens, experts = (torch.tensor([route[place] for route in kept], dtype=torch.int64) for place in (0, 2))
    weights = p[tokens, experts] / sums[tokens]
    (grad,) = torch.autograd.grad((weights * pull.double()[: len(kept)]).sum(), leaf)
    counts = torch.tensor([sum(expert == e for *_, expert in kept) for e in range(case["experts"])])
    return [
        {
            "rows": x[tokens],
            "counts": counts,
            "weights": weights.detach().to(case.dtype),
            "gradient of x": torch.zeros_like(x).index_add(0, tokens, row_pull[: len(kept)]),
            "gradient of the logits": grad.to(case.dtype),
        }
    ]


PROBLEM = exercise(__name__, route_and_permute)
