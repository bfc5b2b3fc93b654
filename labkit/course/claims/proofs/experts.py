"""Claims on experts: how many parameters there are, what travels, who waits, and what balance does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from labkit import capped
from labkit.assemble import assemble
from labkit.comm.group import Group
from labkit.comm.mesh import Mesh
from labkit.course.claims.finding import Finding, Setting
from labkit.course.topics.dispatch_film import record
from labkit.course.topics.unfair_router import choose
from labkit.parallel.expert import layers_of
from labkit.plan.job.recipe import Recipe
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout
from labkit.train.config import GPTConfig
from labkit.train.data import batch
from labkit.train.gpt import GPT, cross_entropy

CONFIG = GPTConfig(n_layer=2, d_model=16, n_head=2, seq=16, tied=False, n_expert=8, expert_ff=16)
RECIPE = Recipe("ddp", batch_size=8, precision="fp64")


def c119() -> Finding:
    """Count the parameters of Mixtral 8x7B, in all and those that one token meets, and those of its dense sibling."""
    mixtral = ModelShape.preset("mixtral-8x7b")
    dense = mixtral.changed(n_expert=0, top_k=1).n_params
    return Finding.of(
        [
            Setting("parameters in all, billion", 56.0, mixtral.n_params / 1e9),
            Setting("eight times a dense model of the same sizes, billion", 8 * dense / 1e9, mixtral.n_params / 1e9),
        ],
        active_billion=mixtral.n_active / 1e9,
        dense_billion=dense / 1e9,
    )


def dispatched(group: Group, sizes: tuple[int, ...]) -> dict[int, int]:
    """Bytes of rows that this rank sends forward, by the number of experts; their counts, which do grow, left out."""
    return {
        n: record(group, skew=0.0, n_expert=n, n_tokens=256).n_bytes - 8 * n * (group.size - 1) // group.size
        for n in sizes
    }


def c120() -> Finding:
    """Dispatch the same tokens on four real ranks to 8, 16 and 32 experts of a fair router, two a token."""
    replies = capped.run(dispatched, (8, 16, 32), n_ranks=4)
    sent = {n: sum(reply.value[n] for reply in replies) / 4 for n in (8, 16, 32)}
    return Finding.of(
        [
            Setting(
                f"{n} experts in place of 8: times the bytes", n / 8, sent[n] / sent[8], "times", 0.1, measured=True
            )
            for n in (16, 32)
        ],
        bytes_of_8=sent[8],
    )


def c121() -> Finding:
    """Let routers choose with a capacity of 1.0 and without: rows of the busiest rank over the mean, rows dropped."""
    settings, numbers = [], dict[str, float]()
    for words, skew in (("a fair router", 0.0), ("an unfair router, skew 1.0", 1.0)):
        routing = choose(skew, capacity=1.0)
        settings.append(Setting(f"{words}: busiest rank", 1.0, routing.imbalance, "times the mean", measured=True))
        name = "fair" if skew == 0 else "unfair"
        numbers |= {f"dropped_{name}": routing.dropped / sum(map(sum, routing.wanted))}
        numbers |= {f"without_{name}": choose(skew).imbalance}
    return Finding.of(settings, premise="a router that is fair anyway", **numbers)


def trained(group: Group, config: GPTConfig, layout: Layout) -> tuple[list[float], dict[str, int], int, int]:
    """Losses of three steps, the last one's bytes by axis, and the bytes of this rank's experts and of the rest."""
    mesh = Mesh.connect(layout, group)
    step, losses = assemble(config, RECIPE, mesh), []
    for number in range(3):
        group.ledger.clear()
        rows = batch(0, number, mesh.dp.rank, mesh.dp.size, RECIPE.batch_size, config.seq)
        losses.append(step(*rows, number))
    sent = {axis: group.ledger.sent_bytes(axis=axis) for axis in ("dp", "expert_dp")}
    experts = [p for sync in step.besides for p in sync.module.parameters()]
    return losses, sent, sum(p.nbytes for p in experts), step.parameter_bytes


def losses_of(group: Group, configs: tuple[GPTConfig, ...], layout: Layout) -> list[list[float]]:
    """The losses of each of these models."""
    return [trained(group, config, layout)[0] for config in configs]


def c122() -> Finding:
    """Train with all experts in one process and dealt out to four ranks: dropless, and with rows that are dropped."""
    settings, configs = [], (CONFIG, replace(CONFIG, capacity=0.8))
    one = capped.run(losses_of, configs, Layout(), n_ranks=1)[0].value
    four = capped.run(losses_of, configs, Layout(dp=4, ep=4), n_ranks=4)[0].value
    for words, alone, dealt in zip(("dropless", "capacity 0.8"), one, four, strict=True):
        off = max(abs(a - b) for a, b in zip(alone, dealt, strict=True))
        difference = "the same losses" if off < 1e-12 else f"losses {off:.1e} apart"
        settings.append(Setting(f"{words}, four ranks and one process", "other losses", difference, measured=True))
    return Finding.of(settings)


def c123() -> Finding:
    """Count the bytes of gradients along dp and along expert_dp in a step on four ranks, experts dealt out to two."""
    _, sent, experts, rest = capped.run(trained, CONFIG, Layout(dp=4, ep=2), n_ranks=4)[0].value
    over_dp, n = 2 * 3 / 4, "of the rank's bytes"
    return Finding.of(
        [
            Setting("all over dp: bytes along dp", over_dp * (rest + experts), sent["dp"], "B", measured=True),
            Setting("experts' gradients", over_dp, sent["expert_dp"] / experts, n, measured=True),
        ],
        rest_over_dp=sent["dp"] / rest,
    )


def c124() -> Finding:
    """Train a small GPT of eight experts, two a token, with the bias stepped at two rates, and without any balance."""
    loads = {(kind, rate): _busiest(kind, rate) for kind, rate in (("none", 1), ("bias", 1), ("bias", 10))}
    even = 0.6 * loads["none", 1]
    return Finding.of(
        [
            Setting(f"rate {rate / 1000:g}: busiest expert", even, loads["bias", rate], "times the mean",
                    within=0, rule="at most", measured=True)
            for rate in (1, 10)
        ],
        premise="a rate that is small against the spread of the router's probabilities",
        without=loads["none", 1],
    )  # fmt: skip


def _busiest(balance: str, rate: int) -> float:
    """The busiest expert's rows over the mean, in the mean of the last 30 of 120 steps; `rate` in thousandths."""
    config = GPTConfig(n_layer=1, d_model=48, n_head=2, seq=32, n_expert=8, expert_ff=32, balance=balance)
    model = GPT(config, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    mixture: Any
    ((_, mixture),) = layers_of(model)
    seen = []
    for number in range(120):
        tokens, targets = batch(0, number, 0, 1, 12, config.seq)
        optimizer.zero_grad()
        cross_entropy(model(tokens), targets).backward()
        optimizer.step()
        seen.append(8 * mixture.counts.max().item() / mixture.counts.sum().item())
        load = mixture.load.clone()
        for _ in range(rate):
            mixture.balance_(load)
    return sum(seen[-30:]) / 30
