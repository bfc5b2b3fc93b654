"""Claims on ZeRO: what a rank holds of a model's state at each stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from labkit import capped
from labkit.comm.group import Group
from labkit.course.claims.finding import Finding, Setting
from labkit.parallel.ddp import DDP
from labkit.parallel.zero1 import ZeRO1
from labkit.parallel.zero2 import ZeRO2
from labkit.parallel.zero3 import ZeRO3
from labkit.plan.pocket.zero_table import ModelState
from labkit.probe.memory import MemoryProbe
from labkit.probe.rehearsal import run_fake
from labkit.train.precision import MasterWeights

GB = 1e9


def equal_layers(n_params: float, n_layer: int, dtype: torch.dtype) -> tuple[nn.Sequential, int]:
    """A model of about `n_params` parameters, in equal layers, and their width."""
    width = round((n_params / n_layer) ** 0.5 / 64) * 64
    return nn.Sequential(*(nn.Linear(width, width, bias=False, dtype=dtype) for _ in range(n_layer))), width


def state_of(group: Group, strategy: Callable[..., Any], n_params: float, n_layer: int, mixed: bool) -> float:
    """Bytes of model state per parameter on this rank, between two micro-batches. `mixed`: bf16 with fp32 masters."""
    dtype = torch.bfloat16 if mixed else torch.float32
    model, width = equal_layers(n_params, n_layer, dtype)
    adamw = partial(torch.optim.AdamW, lr=1e-3)
    sync = strategy(model, group, partial(MasterWeights, make_optimizer=adamw) if mixed else adamw)

    def backward() -> None:
        model(torch.ones(1, width, dtype=dtype)).float().mean().backward()

    with MemoryProbe(model, sync.optimizer) as probe:
        for shard in getattr(sync, "shards", ()):
            probe.label(shard.master, "parameters")
        backward()
        sync.finish()
        sync.step()  # the optimizer creates its state in its first step
        sync.optimizer.zero_grad()
        sync.zero_grad()
        for _ in range(2):
            with sync.accumulate():
                backward()
        held = probe.now
        sync.finish()
    return sum(held[kind] for kind in ("parameters", "gradients", "optimizer")) / (n_layer * width**2)


def states_of(group: Group, strategies: Sequence[Callable[..., Any]]) -> list[float]:
    """`state_of` for several strategies, with a small model in mixed precision."""
    return [state_of(group, strategy, 2**18, 4, True) for strategy in strategies]


def of_one_in(n_ranks: int, strategy: Callable[..., Any], n_params: float, mixed: bool = True) -> float:
    """Bytes per parameter on rank 0 of `n_ranks`, rehearsed at full size in 4 layers."""
    return run_fake(partial(state_of, strategy=strategy, n_params=n_params, n_layer=4, mixed=mixed), n_ranks).value


def c26() -> Finding:
    """Rehearse one rank of 8 and one of 1,024 at each stage, and divide DDP's 16 bytes a parameter by what it holds;
    the law at 64."""
    law, setting = ModelState(1e9, 64), partial(Setting, unit="times less", measured=True)
    return Finding.of(
        [
            setting("ZeRO-1, 1024 ranks", 4, 16 / of_one_in(1024, ZeRO1, 1e9)),
            setting("ZeRO-2, 1024 ranks", 8, 16 / of_one_in(1024, ZeRO2, 1e9)),
            Setting("ZeRO-1, 64 ranks, law", 4, law.times_less(1), "times less"),
            Setting("ZeRO-2, 64 ranks, law", 8, law.times_less(2), "times less"),
            setting("ZeRO-1, 8 ranks", 4, 16 / of_one_in(8, ZeRO1, 1e9)),
            setting("ZeRO-2, 8 ranks", 8, 16 / of_one_in(8, ZeRO2, 1e9)),
        ],
        premise="mixed precision with AdamW, over many ranks",
    )


def c27() -> Finding:
    """Count the state of a small model on eight real ranks, in mixed precision; the law says the same."""
    first, second = capped.run(states_of, (ZeRO1, ZeRO2), n_ranks=8)[0].value
    law, unit = ModelState(7e9, 8), "B a parameter"
    return Finding.of(
        [
            Setting("ZeRO-1, 8 ranks", 9, first, unit, measured=True),
            Setting("ZeRO-2, 8 ranks", 7.25, second, unit, measured=True),
            Setting("ZeRO-1, law", 9, law.bytes_per_param(1), unit),
            Setting("ZeRO-2, law", 7.25, law.bytes_per_param(2), unit),
        ],
        zero1_in_fp32=ModelState(7e9, 8, "fp32").bytes_per_param(1),
    )


def c28() -> Finding:
    """Rehearse one rank of 8 with seven billion parameters, and count its state; the law says the same."""
    return Finding.of(
        [
            Setting("7B on 8 ranks", 14, 7 * of_one_in(8, ZeRO3, 7e9), "GB", measured=True),
            Setting("7B on 8 ranks, law", 14, ModelState(7e9, 8).held(3).total / GB, "GB"),
            Setting("a parameter, 64 ranks", 16 / 64, of_one_in(64, ZeRO3, 7e9), "B", measured=True),
        ]
    )


def c29() -> Finding:
    """Rehearse one rank of 64 with 70 billion parameters, under DDP and ZeRO-3, and count its state, also by law."""
    law = ModelState(70e9, 64)
    return Finding.of(
        [
            Setting("without ZeRO", 280, 70 * of_one_in(64, DDP, 70e9), "GB", measured=True),
            Setting("ZeRO-3", 4, 70 * of_one_in(64, ZeRO3, 70e9), "GB", measured=True),
            Setting("without ZeRO, law", 280, law.held(0).total / GB, "GB"),
            Setting("ZeRO-3, law", 4, law.held(3).total / GB, "GB"),
        ],
        weights_in_fp32=4 * 70,
        their_64th=4 * 70 / 64,
    )


def c87() -> Finding:
    """Rehearse one rank of 4 with the same state under DDP and ZeRO-3: what all ranks hold, minus one copy."""
    whole, part = (2.5 * of_one_in(4, strategy, 2.5e9, mixed=False) for strategy in (DDP, ZeRO3))
    return Finding.of(
        [
            Setting("redundant on 4 ranks", 160, 4 * whole - 4 * part, "GB", measured=True),
            Setting("redundant on 4 ranks, law", 160, ModelState(2.5e9, 4, "fp32").redundant(0) / GB, "GB"),
        ],
        all_ranks=4 * whole,
    )
