"""Claims on rows that are cut over ranks: bytes, work, exactness and memory of attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from labkit import capped
from labkit.comm.group import Group
from labkit.course.claims.finding import Finding, Setting
from labkit.parallel.blockwise_attention import positions_of
from labkit.parallel.context import contiguous, gathered_attention, ring_attention, ulysses_attention, zigzag
from labkit.plan.job.recipe import Recipe
from labkit.plan.laws.context import sent
from labkit.plan.model.cut_attention import CutAttention, at_work
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout
from labkit.plan.step.memory import predict_memory
from labkit.probe.memory import MemoryProbe

WIDTH, LENGTH = 8, 96


def whole(heads: int, key_heads: int) -> list[Tensor]:
    """Queries, keys, values of a whole row and the gradient of the answer, in float64, the same on every rank."""
    stream = torch.Generator().manual_seed(0)
    shapes = [(1, count, LENGTH, WIDTH) for count in (heads, key_heads, key_heads, heads)]
    return [torch.randn(shape, generator=stream, dtype=torch.float64) for shape in shapes]


def attended(group: Group, way: str, heads: int, key_heads: int) -> tuple[Tensor, list[Tensor], int, int]:
    """(places, answer and gradients there, bytes sent forward and backward) of this rank, by one of the three ways."""
    ways: dict[str, Callable[..., Tensor]]
    ways = {"ring": ring_attention, "gather": gathered_attention, "ulysses": ulysses_attention}
    attention = ways[way]
    order = contiguous if way == "ulysses" else zigzag
    places = positions_of(order(LENGTH, group.size)[group.rank])
    q, k, v, grad = (x[:, :, places] for x in whole(heads, key_heads))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    group.ledger.clear()
    y = attention(q, k, v, group)
    forward = group.ledger.sent_bytes()
    grads = torch.autograd.grad(y, (q, k, v), grad)
    return places, [y.detach(), *grads], forward, group.ledger.sent_bytes() - forward


def c125() -> Finding:
    """Run ring and gather on real ranks and count the bytes that each sends."""
    ring, gather = (capped.run(attended, way, 8, 2)[0].value for way in ("ring", "gather"))
    return Finding.of(
        [
            Setting(f"4 ranks, {name}", 1, ring[at] / gather[at], "of the gather's bytes", rule="below", measured=True)
            for name, at in (("forward", 2), ("backward", 3))
        ]
    )


def c126() -> Finding:
    """Count the bytes of both on real ranks with many and with few key heads; for large models ask the law."""

    def share(name: str, n: int, heads: int, key_heads: int) -> Setting:
        by_way = (capped.run(attended, way, heads, key_heads, n_ranks=n)[0].value for way in ("ulysses", "ring"))
        ulysses, ring = (forward + backward for _, _, forward, backward in by_way)
        return Setting(name, 1, ulysses / ring, "of the ring's bytes", rule="below", measured=True)

    def by_law(name: str, n: int, key_heads: int) -> Setting:
        layer = CutAttention(2**17, n, 64, key_heads, 128)
        ratio = sum(sent("ulysses", layer)) / sum(sent("ring", layer))
        return Setting(name, 1, ratio, "of the ring's bytes", rule="below")

    return Finding.of(
        [
            share("4 ranks, 8 heads, 8 key heads", 4, 8, 8),
            share("2 ranks, 16 heads, 2 key heads", 2, 16, 2),
            by_law("2 ranks, 64 heads, 64 key heads, by law", 2, 64),
            by_law("8 ranks, 64 heads, 64 key heads, by law", 8, 64),
            by_law("2 ranks, 64 heads, 8 key heads, by law", 2, 8),
        ],
        premise="many key heads, or many ranks",
    )


def products(group: Group, order: str, causal: bool) -> int:
    """Flops of the products that this rank does in forward."""
    parts = (zigzag if order == "zigzag" else contiguous)(LENGTH, group.size)
    q, k, v, _ = (x[:, :, positions_of(parts[group.rank])] for x in whole(2, 2))
    with FlopCounterMode(display=False) as counter:
        ring_attention(q, k, v, group, causal=causal, parts=parts)
    return int(counter.get_total_flops())


def c127() -> Finding:
    """Count the flops of each rank's products on real ranks: in order and in zigzag order, with a mask and without."""

    def most(name: str, order: str, causal: bool) -> Setting:
        flops = [reply.value for reply in capped.run(products, order, causal)]
        return Setting(name, 1, max(flops) / min(flops), "times the least", measured=True)

    return Finding.of(
        [
            most("causal, in order", "in order", True),
            most("causal, zigzag", "zigzag", True),
            most("no mask, in order", "in order", False),
        ],
        premise="zigzag order, or no causal mask",
    )


def c128() -> Finding:
    """Put answers and gradients of four ranks together and compare them with torch's attention in one process."""
    q, k, v, grad = whole(4, 4)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    exact = [y.detach(), *torch.autograd.grad(y, (q, k, v), grad)]
    settings = []
    for way in ("ring", "gather", "ulysses"):
        off = max(
            float((part - theirs[:, :, places]).abs().max())
            for places, seen, _, _ in (reply.value for reply in capped.run(attended, way, 4, 4))
            for part, theirs in zip(seen, exact, strict=True)
        )
        words = "exact" if off < 1e-12 else "an approximation"
        settings.append(Setting(f"{way}, answers and gradients", "an approximation", words, measured=True))
    return Finding.of(settings)


def kept(group: Group, way: str) -> float:
    """Bytes that autograd keeps of one attention until backward, with this rank's q, k, v and y."""
    tokens = LENGTH // group.size
    with MemoryProbe() as probe:
        q, k, v = (torch.zeros(1, 8, tokens, WIDTH, requires_grad=True) for _ in range(3))
        y = (ring_attention if way == "ring" else gathered_attention)(q, k, v, group)
        now = float(probe.now.total)
    assert y.requires_grad
    return now


def c129() -> Finding:
    """Measure what autograd keeps on four ranks and on one; what is at work in backward by the law."""

    def share(way: str) -> Setting:
        four, one = (capped.run(kept, way, n_ranks=n)[0].value for n in (4, 1))
        return Setting(f"kept until backward, {way}", 1 / 4, four / one, "of one rank's", measured=True)

    def working(way: str, name: str) -> Setting:
        layers = (CutAttention(2**17, n, 64, 8, 128) for n in (16, 4))
        sixteen, four = (at_work(way, layer) for layer in layers)
        return Setting(name, 1 / 4, sixteen / four, "of that on 4 ranks")

    return Finding.of(
        [
            share("ring"),
            share("gather"),
            working("ring", "ring, keys and gradients at work, 16 ranks by law"),
            working("gather", "gather, keys and gradients at work, 16 ranks by law"),
        ],
        premise="what is kept until backward, and what a ring has at work",
    )


def c130() -> Finding:
    """Predict the memory of a 70B model with one row of 128k tokens a device, sharded over more and more devices."""
    shape = ModelShape.preset("llama3-70b").changed(seq=2**17)

    def need(n: int) -> Setting:
        recipe = Recipe("zero3", batch_size=n, precision="bf16", recompute="full")
        total = predict_memory(shape, Layout(n), recipe, device="cuda").total
        return Setting(f"{n:,} devices, every layer recomputed", 80, total / 1e9, "GB", rule="at most")

    return Finding.of([need(64), need(512), need(4096)])
