"""Claims on FSDP, which is ZeRO-3: what is gathered, when and how often, and what is not sharded."""

from __future__ import annotations

import pydoc
from functools import partial
from typing import Any

import torch
from torch import nn

from labkit import capped
from labkit.comm.group import Group
from labkit.course.claims.finding import Finding, Setting
from labkit.course.claims.proofs.checkpointing import most_held
from labkit.course.claims.proofs.communication import through
from labkit.course.claims.proofs.zero import equal_layers, of_one_in
from labkit.parallel.ddp import DDP
from labkit.parallel.zero3 import ZeRO3
from labkit.probe.memory import MemoryProbe
from labkit.probe.rehearsal import run_fake

GB = 1e9
SEVEN = 7e9


def weights_held(group: Group, strategy: Any, **options: int) -> int:
    """The most bytes of weights on this rank in a step of a 7B model in 32 layers, in bf16."""
    model, width = equal_layers(SEVEN, 32, torch.bfloat16)
    sync = strategy(model, group, partial(torch.optim.SGD, lr=0.1), **options)
    with MemoryProbe(model, sync.optimizer) as probe:
        for shard in getattr(sync, "shards", ()):
            probe.label(shard.master, "parameters")
        for _ in range(1 + options.get("prefetch", 0)):  # prefetch knows the order of layers from the second step on
            probe.reset_peak()
            sync.zero_grad()
            model(torch.ones(1, width, dtype=torch.bfloat16)).float().mean().backward()
            sync.finish()
            sync.step()
    return most_held(probe, "parameters")


def c30() -> Finding:
    """Rehearse one rank of 8 with 7B in 32 layers: the most bytes of weights at any moment of a step."""
    one = run_fake(partial(weights_held, strategy=ZeRO3, prefetch=0), 8).value / GB
    ahead = run_fake(partial(weights_held, strategy=ZeRO3, prefetch=1), 8).value / GB
    whole = run_fake(partial(weights_held, strategy=DDP), 8).value / GB
    return Finding.of(
        [
            Setting("ZeRO-3, one layer at a time", 2.2, one, "GB", measured=True),
            Setting("DDP", 14, whole, "GB", measured=True),
        ],
        one_layer_ahead=ahead,
    )


N_LAYERS, RUNS = 8, (0, 1, 8)
"""Layers, each a unit of ZeRO-3, and how many of them are in a checkpointed segment; 0: nothing is checkpointed."""


def gathers(group: Group, reshard: bool = True) -> list[float]:
    """All-gathers per layer in one step, for each length of a segment in RUNS. The second step counts, since ZeRO-3
    learns the order of its units in the first. reshard=False: units stay whole from forward to backward."""
    per_layer = []
    for run in RUNS:
        layers = [nn.Linear(16, 16, bias=False) for _ in range(N_LAYERS)]
        sync = ZeRO3(nn.Sequential(*layers), group, torch.optim.SGD, reshard=reshard)
        for _ in range(2):
            group.ledger.clear()
            sync.zero_grad()
            through(layers, torch.ones(2, 16), run).square().mean().backward()
            sync.finish()
            sync.step()
        per_layer.append(group.ledger.calls("all_gather") / len(layers))
    return per_layer


def c31() -> Finding:
    """Count the all-gathers of a step on 2 and on 4 real ranks, and divide by the layers; on 2 ranks also with
    checkpointing of each layer by itself, of all layers as one segment, and with layers that stay whole after forward
    (reshard_after_forward=False in PyTorch, which takes it for the root module unless it is told otherwise).

    By the law a segment of k units gathers all but the last of them once more: 3 - 1/k gathers a unit."""
    two, four = (capped.run(gathers, n_ranks=n)[0].value for n in (2, 4))
    plain, alone, together = two
    whole = capped.run(gathers, False, n_ranks=2)[0].value[0]
    gathered = partial(Setting, claimed=2, unit="a layer", within=0, measured=True)
    return Finding.of(
        [
            gathered("2 ranks", truth=plain),
            gathered("4 ranks", truth=four[0]),
            gathered("each layer checkpointed by itself", truth=alone),
            gathered(f"{N_LAYERS} layers in one checkpointed segment", truth=together),
            gathered("layers stay whole after forward", truth=whole),
        ],
        premise="a unit's weights are freed after forward, and no checkpointed segment has several units",
        one_segment_by_law=3 - 1 / N_LAYERS,
    )


def c32() -> Finding:
    """Call torch's FSDP with the claim's arguments. It is found by its name, since only labkit.comm may import
    torch.distributed."""
    wrap: Any = pydoc.locate("torch.distributed.fsdp.FullyShardedDataParallel")
    strategy: Any = pydoc.locate("torch.distributed.fsdp.ShardingStrategy")

    def called(**options: Any) -> str:
        try:
            wrap(nn.Linear(4, 4), **options)
        except Exception as error:
            return type(error).__name__
        return "a sharded module"

    kind = "a strategy" if isinstance("FULL_SHARD", strategy) else "a str"
    return Finding.of(
        [
            Setting(
                "as given",
                "a sharded module",
                called(sharding_strategy="FULL_SHARD", activation_checkpointing=True),
                measured=True,
            ),
            Setting(
                "activation_checkpointing alone",
                "a sharded module",
                called(activation_checkpointing=True),
                measured=True,
            ),
            Setting("what 'FULL_SHARD' is", "a strategy", kind, measured=True),
        ]
    )


def peak(group: Group, strategy: Any, n_rows: int) -> int:
    """The most bytes on this rank in a step of AdamW in fp32, with 2.5 billion parameters in 8 layers."""
    model, width = equal_layers(2.5e9, 8, torch.float32)
    sync = strategy(model, group, partial(torch.optim.AdamW, lr=1e-3))
    with MemoryProbe(model, sync.optimizer) as probe:
        for _ in range(2):
            probe.reset_peak()
            sync.zero_grad()
            model(torch.ones(n_rows, width)).mean().backward()
            sync.finish()
            sync.step()
    return int(probe.peak.total)


def c88() -> Finding:
    """Rehearse one rank of 4 with 40 GB of state: DDP's bytes over ZeRO-3's, for the state and at the peak of a step
    with few and with many rows."""

    def less(n_rows: int) -> float:
        whole, part = (run_fake(partial(peak, strategy=strategy, n_rows=n_rows), 4).value for strategy in (DDP, ZeRO3))
        return whole / part

    state = of_one_in(4, DDP, 2.5e9, mixed=False) / of_one_in(4, ZeRO3, 2.5e9, mixed=False)
    return Finding.of(
        [
            Setting("model state", 4, state, "times less", measured=True),
            Setting("at the peak, 1 row", 4, less(1), "times less", measured=True),
            Setting("at the peak, 16,384 rows", 4, less(16384), "times less", measured=True),
        ],
        premise="model state alone is counted",
    )
