"""19.4: experts that stay balanced without a term in the loss."""

from random import Random
from typing import Any

import torch
from torch import Tensor

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise, sends

COUNT_BYTES = 8
Micro = list[Tensor]
"""The logits of a step's micro-batches."""


class BalancedRouter:
    """Chooses k of E experts for each token, and keeps them busy alike by a bias that no gradient ever sees."""

    def __init__(self, n_expert: int, k: int, rate: float, group: Group) -> None:
        """All biases begin at zero; `rate` is how far one moves in a step. `group`: ranks that see other tokens."""
        self.k, self.rate, self.group = k, rate, group
        self.bias = torch.zeros(n_expert)
        self.load = torch.zeros(n_expert, dtype=torch.int64)

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """One micro-batch: logits [T, E] -> (chosen experts [T, k], weights [T, k]); sends nothing.

        Chosen are the k largest of softmax + bias, the largest first. Weights are the softmax of those that are chosen,
        without the bias: divided by their sum, and for k = 1 as it is. Their gradient reaches the logits."""
        p = logits.softmax(-1)
        chosen = (p.detach() + self.bias).topk(self.k).indices
        self.load += torch.bincount(chosen.flatten(), minlength=len(self.bias))
        weights = p.gather(-1, chosen)
        return chosen, weights / weights.sum(-1, keepdim=True) if self.k > 1 else weights

    def balance(self) -> None:
        """After a step, of any number of micro-batches: move the bias of each expert by `rate`, up if it got fewer rows
        than the mean over experts, down if it got more; one with just the mean stays.

        Rows are those of all ranks since the last call: one all_reduce of [E] numbers in int64."""
        load = self.group.all_reduce(self.load)
        self.bias += self.rate * (load.double().mean() - load).sign()
        self.load = torch.zeros_like(load)


def cases() -> list[Case]:
    """Worlds of 1 to 4 ranks; tokens of a micro-batch, steps, and micro-batches in a step. In the first, an expert gets
    no rows at all for a while (`starved`)."""
    return [
        Case.of(2, k=2, experts=4, tokens=6, steps=4, micro=2, rate=0.05, starved=True),
        Case.of(4, k=1, experts=4, tokens=5, steps=5, micro=1, rate=0.03),
        Case.of(3, k=2, experts=6, tokens=7, steps=4, micro=2, rate=0.08).among(
            Case.of(4, k=3, experts=5, tokens=5, steps=4, micro=2, rate=0.07),
            Case.of(2, k=2, experts=8, tokens=10, steps=4, micro=3, rate=0.06),
        ),
        Case.of(1, k=1, experts=3, tokens=11, steps=5, micro=1, rate=0.04),
    ]


def by_step(case: Case) -> list[list[Micro]]:
    """Logits by step, rank and micro-batch, with which biases change choices, and some expert has just the mean, or the
    mean rounded down where that is no whole number."""

    def make(dice: Random) -> list[list[Micro]]:
        def one() -> Tensor:
            logits = case.random(case["tokens"], case["experts"], key=dice.randrange(1 << 30))
            logits[:, 0] += 1.0
            logits[:, -1] -= 3.0 if "starved" in case.what else 0.0
            return logits

        return [[[one() for _ in range(case["micro"])] for _ in range(case.n_ranks)] for _ in range(case["steps"])]

    return case.draw(make, lambda steps: _tells(case, steps, case["rate"]))


def _tells(case: Case, steps: list[list[Micro]], rate: float) -> bool:
    bias = torch.zeros(case["experts"], dtype=torch.float64)
    stayed = moved = own = last = starved = 0  # how often a mistake would tell
    for ranks in steps:
        loads = []
        for micro in ranks:
            counts = []
            for logits in micro:
                p = logits.double().softmax(-1)
                sorted_scores = (p + bias).sort(descending=True)
                near = sorted_scores.values[:, : case["k"]] - sorted_scores.values[:, 1 : case["k"] + 1]
                if float(near.min()) < 1e-4:
                    return False
                chosen = sorted_scores.indices[:, : case["k"]]
                moved += int((chosen != p.topk(case["k"]).indices).sum())
                counts.append(torch.bincount(chosen.flatten(), minlength=case["experts"]).double())
            loads.append(torch.stack(counts))
        rows = torch.stack(loads)  # [n, micro, E]
        sign = _sign(rows.sum((0, 1)))
        own += any(not torch.equal(_sign(rank_loads.sum(0)), sign) for rank_loads in rows)
        last += not torch.equal(_sign(rows[:, -1].sum(0)), sign)
        load = rows.sum((0, 1))
        stayed += int((load == load.mean().floor()).sum())
        starved += not torch.equal((load[load > 0].mean() - load).sign(), sign)
        bias += rate * sign
    if "starved" in case.what and not starved:
        return False
    return bool(stayed and moved and (own or case.n_ranks == 1) and (last or case["micro"] == 1))


def _sign(load: Tensor) -> Tensor:
    return (load.mean() - load).sign()


def inputs(case: Case) -> Inputs:
    """A rank's logits by step and micro-batch, what pulls at its weights, and the router's numbers."""
    steps = by_step(case)
    pull = case.random(case["tokens"], case["k"], key=3)
    return [
        ([ranks[rank] for ranks in steps], pull, case["experts"], case["k"], case["rate"])
        for rank in range(case.n_ranks)
    ]


def play(attempt: Any, group: Group, steps: list[Micro], pull: Tensor, n_expert: int, k: int, rate: float) -> Any:
    """Train for some steps: choices, weights and gradients of each micro-batch, and the bias after each step."""
    router, reports = attempt(n_expert, k, rate, group), []
    for micro in steps:
        for logits in micro:
            leaf = logits.clone().requires_grad_()
            chosen, weights = router.route(leaf)
            if weights.requires_grad:
                (weights * pull).sum().backward()
            grad = torch.zeros_like(logits) if leaf.grad is None else leaf.grad
            reports.append({"chosen": chosen, "weights": weights.detach(), "gradient of the logits": grad})
        router.balance()
        reports.append({"bias": router.bias.detach().clone()})
    return reports


def answer(case: Case, inputs: Inputs) -> Answers:
    """One process that sees the tokens of all ranks, in float64; the gradient by the softmax's formula, without
    autograd."""
    _, pull, n_expert, k, rate = inputs[0]
    bias, reports = torch.zeros(n_expert, dtype=torch.float64), [list[Any]() for _ in inputs]
    for step in range(case["steps"]):
        load = [0] * n_expert
        for rank, (steps, *_) in enumerate(inputs):
            for logits in steps[step]:
                p = logits.double().softmax(-1)
                chosen = (p + bias).topk(k).indices
                for expert in chosen.flatten().tolist():
                    load[expert] += 1
                picked = p.gather(-1, chosen)
                share = picked.sum(-1, keepdim=True) if k > 1 else torch.ones(len(p), 1, dtype=torch.float64)
                weights, pulled = picked / share, pull.double()
                inner = (weights * pulled).sum(-1, keepdim=True) if k > 1 else 0.0
                on_p = torch.zeros_like(p).scatter(-1, chosen, (pulled - inner) / share)
                grad = p * (on_p - (p * on_p).sum(-1, keepdim=True))
                numbers = {"weights": weights, "gradient of the logits": grad}
                rounded = {name: x.to(case.dtype) for name, x in numbers.items()}
                reports[rank].append({"chosen": chosen, **rounded})
        mean = sum(load) / n_expert
        bias += rate * torch.tensor([float((count < mean) - (count > mean)) for count in load]).double()
        for report in reports:
            report.append({"bias": bias.float()})
    return reports


PROBLEM = exercise(
    __name__,
    BalancedRouter,
    laws=(
        sends(
            lambda case, rank: case["steps"] * (2 * (case.n_ranks - 1) * case["experts"] * COUNT_BYTES // case.n_ranks),
            "each rank sends one all_reduce of E counts a step: 2(n-1)/n of 8 E bytes",
            only=("all_reduce",),
            messages=lambda case, rank: case["steps"],
        ),
    ),
)
