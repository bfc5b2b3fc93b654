"""Claims on communication: what collectives send, in how many steps, and in what time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from labkit import capped
from labkit.comm import ring, tree
from labkit.comm.group import Group
from labkit.comm.local import run_threads
from labkit.course.claims.finding import Finding, Setting
from labkit.parallel.ddp import DDP
from labkit.parallel.zero2 import ZeRO2
from labkit.parallel.zero3 import ZeRO3
from labkit.plan.machine.collectives import Line, seconds, sent_bytes, steps
from labkit.plan.machine.link import preset
from labkit.plan.pocket.zero_table import ModelState
from labkit.probe.rehearsal import run_fake
from labkit.train.checkpoint import BlockRun, checkpoint


def by_ring(group: Group, verb: str, numel: int) -> tuple[int, int]:
    """Bytes and messages that this rank sends in one collective of the ring, for a whole tensor of `numel` floats."""
    x = torch.ones(numel // group.size if verb == "all_gather" else numel)
    group.ledger.clear()
    getattr(ring, verb)(x, group)
    return group.ledger.sent_bytes(), group.ledger.calls("send")


def through(layers: Sequence[nn.Module], x: Tensor, run: int) -> Tensor:
    """x through all layers, in checkpointed segments of `run` layers each; 0: nothing is checkpointed."""
    if not run:
        return BlockRun(layers)(x)
    for start in range(0, len(layers), run):
        x = checkpoint(BlockRun(layers[start : start + run]), x)
    return x


def sent(group: Group, strategy: Callable[..., Any], n_micro: int = 1, run: int = 0) -> tuple[float, float]:
    """Bytes that this rank sends until gradients are reduced, and in the whole step, in multiples of the model's.

    run    layers in each checkpointed segment; 0: nothing is checkpointed. Every layer is a unit of ZeRO-3."""
    layers = [nn.Linear(256, 256, bias=False) for _ in range(4)]
    model = nn.Sequential(*layers)
    sync = strategy(model, group, partial(torch.optim.SGD, lr=0.1))
    reduced = []
    for _ in range(2):  # in the first step ZeRO-3 learns which layers come next
        group.ledger.clear()
        sync.zero_grad()
        for micro in range(n_micro):
            with nullcontext() if micro == n_micro - 1 else sync.accumulate():
                through(layers, torch.ones(2, 256), run).square().mean().backward()
        sync.finish()
        reduced = [group.ledger.sent_bytes()]
        sync.step()
    n_bytes = 4 * 4 * 256 * 256
    return reduced[0] / n_bytes, group.ledger.sent_bytes() / n_bytes


def c11() -> Finding:
    """Read the ledger of a whole step: two real ranks, and one of 64 in a rehearsal, with one micro-batch and more, and
    with checkpointing of each layer by itself and of all four as one segment."""

    def of_64(strategy: Callable[..., Any], n_micro: int = 1, run: int = 0) -> float:
        return run_fake(partial(sent, strategy=strategy, n_micro=n_micro, run=run), 64).value[1]

    two = [capped.run(sent, strategy, n_ranks=2)[0].value[1] for strategy in (DDP, ZeRO3)]
    setting = partial(Setting, unit="models", measured=True)
    return Finding.of(
        [
            setting("DDP, 64 ranks", 2, of_64(DDP)),
            setting("FSDP, 64 ranks", 3, of_64(ZeRO3)),
            setting("DDP, 64 ranks, 4 micro-batches", 2, of_64(DDP, 4)),
            setting("FSDP, 64 ranks, 4 micro-batches", 3, of_64(ZeRO3, 4)),
            setting("FSDP, 64 ranks, each layer checkpointed", 3, of_64(ZeRO3, run=1)),
            setting("FSDP, 64 ranks, 4 layers in one checkpointed segment", 3, of_64(ZeRO3, run=4)),
            setting("DDP, 2 ranks", 2, two[0]),
            setting("FSDP, 2 ranks", 3, two[1]),
        ],
        premise="many ranks; for FSDP one micro-batch, and no checkpointed segment of several units",
    )


def c12() -> Finding:
    """Read the ledgers of DDP and ZeRO-2 on two ranks for a whole step, with the gather of new weights; and the law."""
    (_, ddp), (reduced, zero2) = (capped.run(sent, strategy, n_ranks=2)[0].value for strategy in (DDP, ZeRO2))
    four = capped.run(sent, ZeRO2, 4, n_ranks=2)[0].value[1]
    law = ModelState(7e9, 8)
    return Finding.of(
        [
            Setting("a step", 0.5, zero2 / ddp, "of DDP's bytes", measured=True),
            Setting("a step of 4 micro-batches", 0.5, four / ddp, "of DDP's bytes", measured=True),
            Setting("7B on 8 ranks, law", 0.5, law.sent(2) / law.sent(0), "of DDP's bytes"),
        ],
        before_the_step=reduced / ddp,
    )


def c13() -> Finding:
    """Compare rank 0's bytes with the formula, for the ring between 2 to 8 threads and between 4 processes, with a
    length that all of them divide and one that none does."""
    claimed = {n: 2 * 4 * 840 * (n - 1) / n for n in range(2, 9)}
    settings = [
        Setting(f"{n} ranks", claimed[n], run_threads(by_ring, n, "all_reduce", 840)[0][0], "B", 0, measured=True)
        for n in range(2, 9)
    ]
    real = capped.run(by_ring, "all_reduce", 840, n_ranks=4)[0].value[0]
    ragged = run_threads(by_ring, 8, "all_reduce", 1009)[0][0]
    return Finding.of(
        [
            *settings,
            Setting("4 processes", claimed[4], real, "B", 0, measured=True),
            Setting("8 ranks, 1009 floats", 2 * 4 * 1009 * 7 / 8, ragged, "B", 0.01, measured=True),
            Setting("1024 ranks, law", 2 * 2**30 * 1023 / 1024, sent_bytes("ring", "all_reduce", 1024, 2**30), "B", 0),
        ]
    )


def messages(n_ranks: int, all_reduce: Callable[..., Tensor]) -> int:
    """The most messages that one rank sends, or receives, one after the other in an all-reduce between threads."""

    def count(group: Group) -> int:
        verbs: list[str] = []
        all_reduce(torch.ones(8), group.tapped(lambda event, peer, tag, x: verbs.append(event)))
        return max(verbs.count("send"), verbs.count("recv"))

    return max(run_threads(count, n_ranks))


def c14() -> Finding:
    """Count messages of the ring at 4 and at 16 ranks; at 8 and 512 take steps and latency from the law."""
    grown = messages(16, ring.all_reduce) / messages(4, ring.all_reduce)
    wire = Line(preset("infiniband").alpha_s, 0)
    latency = [seconds("ring", "all_reduce", n, 0, wire) for n in (8, 512)]
    return Finding.of(
        [
            Setting("messages, 16 ranks over 4", math.log2(16) / math.log2(4), grown, "times", measured=True),
            Setting("steps at 8 ranks", 2 * math.log2(8), steps("ring", "all_reduce", 8), "steps"),
            Setting("latency, 512 ranks over 8", math.log2(512) / math.log2(8), latency[1] / latency[0], "times"),
        ],
        tree_16_over_4=messages(16, tree.all_reduce) / messages(4, tree.all_reduce),
        ring_ms_at_512=latency[1] * 1e3,
        tree_ms_at_512=seconds("tree", "all_reduce", 512, 0, wire) * 1e3,
    )


def c15() -> Finding:
    """Read the ledger of both collectives of the ring on the same tensor, between threads and between processes."""

    def share(sent_by_verb: Any) -> float:
        (scattered, _), (reduced, _) = sent_by_verb
        return scattered / reduced

    verbs = ("reduce_scatter", "all_reduce")
    settings = [
        Setting(f"{n} ranks", 0.5, share([run_threads(by_ring, n, verb, 840)[0] for verb in verbs]), measured=True)
        for n in (2, 4, 8)
    ]
    real = share([capped.run(by_ring, verb, 840, n_ranks=2)[0].value for verb in verbs])
    return Finding.of([*settings, Setting("2 processes", 0.5, real, measured=True)])


def c16() -> Finding:
    """Apply the cost model, latency plus bytes over bandwidth, and compute the bytes of a layer.

    600 GB/s is the figure of an A100's data sheet for NVLink, in both directions together."""
    layer = 440e6
    half = preset("nvlink-a100")
    one_way = half.alpha_s + layer / half.bytes_per_s
    fast, slow = Line(preset("nvlink").alpha_s, 1 / 600e9), Line(preset("infiniband").alpha_s, 1 / 44e9)
    return Finding.of(
        [
            Setting("NVLink at 600 GB/s", 0.7, fast.seconds(layer) * 1e3, "ms", within=0.1),
            Setting("InfiniBand at 44 GB/s", 10, slow.seconds(layer) * 1e3, "ms"),
            Setting("NVLink of an A100, one way", 0.7, one_way * 1e3, "ms", within=0.1),
            Setting("a layer of 7B in 32, bf16", layer, 2 * 7e9 / 32, "B"),
        ],
        premise="the 600 GB/s all go one way",
    )


def both_ways(group: Group) -> tuple[bool, int, int]:
    """Run an all-reduce at once, and as reduce-scatter and all-gather: whether all bits agree, and both bytes."""
    x = torch.randn(840, generator=torch.Generator().manual_seed(group.rank))
    group.ledger.clear()
    whole = ring.all_reduce(x, group)
    at_once = group.ledger.sent_bytes()
    group.ledger.clear()
    joined = ring.all_gather(ring.reduce_scatter(x, group), group)
    return torch.equal(whole, joined), at_once, group.ledger.sent_bytes()


def c81() -> Finding:
    """Do it both ways on real ranks: the same bits everywhere, and the same bytes."""
    replies = [reply.value for reply in capped.run(both_ways, n_ranks=4)]
    same = sum(equal for equal, _, _ in replies)
    return Finding.of(
        [
            Setting("ranks with the same bits", 4, same, "ranks", within=0, measured=True),
            Setting("bytes, in two parts over at once", 1, replies[0][2] / replies[0][1], within=0, measured=True),
        ]
    )


def c82() -> Finding:
    """Compare bandwidths of one direction from data sheets, by generation, with one link of each kind per device."""
    pairs = {"A100, HDR": ("nvlink-a100", "infiniband-hdr"), "H100, NDR": ("nvlink", "infiniband")}
    pairs["B200, NDR"] = ("nvlink-b200", "infiniband")
    gaps = {name: preset(fast).bytes_per_s / preset(slow).bytes_per_s for name, (fast, slow) in pairs.items()}
    gaps["B200, 800 Gb/s"] = preset("nvlink-b200").bytes_per_s / (800e9 / 8)
    return Finding.of(
        [Setting(name, 10, gap, "times", rule="at least") for name, gap in gaps.items()],
        both_directions_over_one=2 * gaps["H100, NDR"],
    )
