"""Claims on how far two runs of one model may differ, and on mistakes that raise no error."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from labkit import capped
from labkit.comm.group import Group
from labkit.course.claims.finding import Finding, Setting
from labkit.course.topics.rebuilt_bugs import Ran, gpt, one_process, rebuilt_bugs
from labkit.plan.pocket.rounding import likely, roundoff


def accepted(a: Ran, b: Ran) -> str:
    """Whether torch.testing.assert_close takes the weights of two runs after their last step for the same."""
    weights = [{name: piece.flat for name, piece in run[1].steps[-1].parameters.items()} for run in (a, b)]
    try:
        torch.testing.assert_close(weights[0], {name: w.to(weights[0][name].dtype) for name, w in weights[1].items()})
    except AssertionError:
        return "rejected"
    return "accepted"


def c139() -> Finding:
    """Give torch.testing.assert_close, with its own tolerances, the weights of right and of wrong pairs of runs."""
    bugs = {bug.name: bug for bug in rebuilt_bugs()}
    still = bugs["a norm whose running mean stands still"]
    lost = bugs["masters that never reach the parameters"]
    wrong = {
        name: tuple(capped.run(run, n_ranks=1)[0].value for run in (bug.repaired, bug.train))
        for name, bug in (("a batch norm whose mean stands still", still), ("masters that never arrive", lost))
    }
    alone = one_process()
    right = {
        "float32 and itself": (alone, one_process()),
        "float32 and bf16": (alone, one_process(gpt(torch.bfloat16))),
    }
    settings, counts = [], {"right_rejected": 0, "wrong_accepted": 0}
    for kind, pairs, claimed in (("right", right, "accepted"), ("wrong", wrong, "rejected")):
        for name, pair in pairs.items():
            verdict = accepted(pair[0], pair[1])
            settings.append(Setting(f"{kind}: {name}", claimed, verdict, measured=True))
            counts[f"{kind}_{verdict}"] = counts.get(f"{kind}_{verdict}", 0) + 1
    return Finding.of(settings, right_rejected=counts["right_rejected"], wrong_accepted=counts["wrong_accepted"])


def error(n: int, add: Callable[[Tensor], Tensor]) -> float:
    """The error of sums of n terms between 0 and 1 in float32, relative to the sum, over 256 sums."""
    x = torch.rand(256, n, generator=torch.Generator().manual_seed(n))
    exact = x.double().sum(1)
    return float(((add(x).double() - exact) / exact).square().mean().sqrt())


def in_turn(x: Tensor) -> Tensor:
    """One term after the other.   [b, n] -> [b]"""
    total = torch.zeros(len(x))
    for k in range(x.shape[1]):
        total = total + x[:, k]
    return total


def c140() -> Finding:
    """Add up more and more terms in turn, and compare the error with n and with the root of n."""
    settings = []
    u = roundoff("fp32")
    short = error(64, in_turn)
    for n in (1024, 4096):
        settings.append(
            Setting(f"{n:,} terms beside 64", n / 64, error(n, in_turn) / short, "times", 0.3, measured=True)
        )
    bound = likely(4096, u)
    return Finding.of(settings, root=math.sqrt(4096 / 64), share_of_bound=error(4096, in_turn) / bound)


def shards(group: Group, one_seed: bool) -> Tensor:
    """A matrix of 8 rows a rank, each shard drawn by its rank, put together."""
    seed = 0 if one_seed else group.rank
    return group.all_gather(torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)))


def c141() -> Finding:
    """Draw the shards of a matrix on real ranks, with one seed and with one for each rank, and count different rows."""
    settings, numbers = [], dict[str, Any]()
    for n in (2, 3):
        for one_seed in (True, False):
            whole = capped.run(shards, one_seed, n_ranks=n)[0].value
            rows = len({tuple(row) for row in whole.tolist()})
            name = "one seed" if one_seed else "a seed for each rank"
            if one_seed:
                settings.append(Setting(f"different rows of {8 * n}, {n} ranks", 8 * n, rows, measured=True))
            numbers[f"rows_of_{8 * n}_{name.split()[0]}"] = rows
    return Finding.of(settings, **numbers)


def first_steps(betas: tuple[float, float]) -> float:
    """The length of Adam's first step after its count was lost, over that with the right one; gradients are noise."""
    stream = torch.Generator().manual_seed(0)
    lengths = []
    for lost in (False, True):
        stream.manual_seed(0)
        p = torch.nn.Parameter(torch.zeros(4096, dtype=torch.float64))
        optimizer = torch.optim.Adam([p], lr=1.0, betas=betas, foreach=False)
        before = p.detach().clone()
        for step in range(3001):
            if step == 3000:
                before = p.detach().clone()
                if lost:
                    optimizer.state[p]["step"].zero_()
            p.grad = torch.randn(p.shape, generator=stream, dtype=torch.float64)
            optimizer.step()
        lengths.append(float((p.detach() - before).norm()))
    return lengths[1] / lengths[0]


def c142() -> Finding:
    """Lose the count of Adam's steps after 3,000 of them, and compare the next step with the one that should be."""
    settings, numbers = [], dict[str, Any]()
    for name, betas in (("0.95", (0.9, 0.95)), ("0.999", (0.9, 0.999))):
        times = first_steps(betas)
        settings.append(Setting(f"second beta {name}", 1, times, "times as long", 0.1, measured=True))
        numbers[f"law_{name[2:]}"] = math.sqrt(1 - betas[1]) / (1 - betas[0])
    return Finding.of(settings, **numbers)
