"""Claims on activation checkpointing: what it keeps, what it recomputes, and where to put the checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as checkpoint_of_torch, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from labkit.course.claims.finding import Finding, Setting
from labkit.plan.breakdown import KINDS
from labkit.plan.pocket.segments import Stack, forwards_from_the_start
from labkit.probe.memory import MemoryProbe
from labkit.train.checkpoint import checkpoint, checkpoint_sequential
from labkit.train.config import GPTConfig
from labkit.train.gpt import Block

CONFIG = GPTConfig(n_layer=1, d_model=32, n_head=4, vocab=8, seq=32)
INPUT_BYTES = 4 * 32 * 32
"""Bytes of activations between two blocks, for one row."""


def most_held(probe: MemoryProbe, kind: str = "activations") -> int:
    """The most bytes of one kind that were alive at any moment."""
    return max(moment.bytes[KINDS.index(kind)] for moment in probe.timeline)


def held(layers: Sequence[Callable[[Tensor], Tensor]], segments: int) -> int:
    """The most bytes of activations in a forward and backward through the layers, cut into `segments` segments."""
    x = torch.randn(1, 32, 32, requires_grad=True)
    with MemoryProbe() as probe:
        checkpoint_sequential(layers, x, segments).sum().backward()
    return most_held(probe)


def blocks(n_layer: int) -> list[Block]:
    """Transformer blocks in a row."""
    return [Block(CONFIG) for _ in range(n_layer)]


def forwards(n_layer: int, segments: int) -> int:
    """The number of layer forwards in one checkpointed step, recomputation included. The layers count themselves."""
    ran = []

    def layer(x: Tensor) -> Tensor:
        ran.append(x.shape)
        return x.tanh()

    x = torch.ones(1, requires_grad=True)
    checkpoint_sequential([layer] * n_layer, x, segments).sum().backward()
    return len(ran)


def c04() -> Finding:
    """Probe 16 transformer blocks: the share of activations that is saved by segments of several lengths."""
    layers = blocks(16)
    plain = held(layers, 1)
    stack = Stack(16, plain / 16, INPUT_BYTES)

    def saved(segments: int) -> float:
        return 1 - held(layers, segments) / plain

    return Finding.of(
        [
            Setting("2 segments", 0.5, saved(2), "saved", within=0.1, measured=True),
            Setting("2 segments, law", 0.5, 1 - stack.peak_bytes(2) / stack.plain_bytes, "saved", within=0.1),
            Setting("4 segments", 0.5, saved(4), "saved", within=0.1, measured=True),
            Setting("every block", 0.5, saved(16), "saved", within=0.1, measured=True),
        ],
        premise="the model is cut into two segments",
    )


def c05() -> Finding:
    """Probe stacks of 2 and 12 blocks and count their flops, with every block checkpointed: once with recomputation
    that stops at the last saved tensor, once with torch's that runs to the end of the block."""
    ranges = {"saved": (0.40, 0.25), "more flops": (0.25, 0.20)}  # 30 to 50 and 20 to 30 percent, as middle and share

    def setting(name: str, unit: str, measured: float) -> Setting:
        return Setting(name, ranges[unit][0], measured, unit, within=ranges[unit][1], measured=True)

    def saved(n_layer: int) -> float:
        layers = blocks(n_layer)
        return 1 - held(layers, n_layer) / held(layers, 1)

    def more_flops(n_layer: int, stops_early: bool) -> float:
        layers, x = blocks(n_layer), torch.randn(1, 32, 32, requires_grad=True)
        torchs = partial(checkpoint_of_torch, use_reentrant=False)
        spent = []
        for run in (lambda layer, x: layer(x), checkpoint if stops_early else torchs):
            early = set_checkpoint_early_stop(stops_early)
            with FlopCounterMode(display=False) as counter, early:
                y = x
                for layer in layers:
                    y = run(layer, y)
                y.sum().backward()
            spent.append(counter.get_total_flops())
        return spent[1] / spent[0] - 1

    return Finding.of(
        [
            setting("memory, 2 blocks", "saved", saved(2)),
            setting("memory, 12 blocks", "saved", saved(12)),
            setting("compute, up to the last saved tensor", "more flops", more_flops(12, True)),
            setting("compute, each block to its end", "more flops", more_flops(12, False)),
        ],
        premise="the model is shallow, and nothing behind a block's last saved tensor is run again",
    )


def c06() -> Finding:
    """Layers that keep as much as their input: find the best segment length for 64 layers and the growth from 64 to 256
    with a probe. Then count the forward runs of layers in a step; a backward is as much work as two of them."""
    by_length = {length: held([torch.tanh] * 64, 64 // length) for length in (1, 2, 4, 8, 16, 32, 64)}
    growth = held([torch.tanh] * 256, 16) / by_length[8]
    return Finding.of(
        [
            Setting("best length of 64", 8, min(by_length, key=by_length.__getitem__), "layers", measured=True),
            Setting("memory, 256 over 64 layers", 2, growth, "times", within=0.1, measured=True),
            Setting("more compute, 64 layers", 1 / 3, forwards(64, 8) / (3 * 64) - 1 / 3, within=0.15, measured=True),
            Setting(
                "more compute, 256 layers", 1 / 3, forwards(256, 16) / (3 * 256) - 1 / 3, within=0.1, measured=True
            ),
        ],
        plain_over_best=by_length[64] / by_length[8],
    )


def c07() -> Finding:
    """Probe 16 and 64 layers, each one checkpointed, and count how often a layer runs forward."""

    def layer(x: Tensor) -> Tensor:
        return x.tanh().tanh().tanh().tanh()

    growth = held([layer] * 64, 64) / held([layer] * 16, 16)
    return Finding.of(
        [
            Setting("memory, 64 over 16 layers", 1, growth, "times", within=0.2, measured=True),
            Setting("more compute", 1, forwards(64, 64) / (3 * 64) - 1 / 3, within=0.2, measured=True),
        ],
        forwards_with_one_input_kept=forwards_from_the_start(64) / 64,
    )


def c76() -> Finding:
    """Probe 24 transformer blocks cut at several lengths, find the one that holds least, and compare with the law."""
    layers = blocks(24)
    by_length = {length: held(layers, -(-24 // length)) for length in (1, 2, 3, 5, 8, 24)}
    stack = Stack(24, by_length[24] / 24, INPUT_BYTES)
    return Finding.of(
        [
            Setting("best length", 5, min(by_length, key=by_length.__getitem__), "blocks", measured=True),
            Setting("best length, law", 5, stack.best_length, "blocks"),
        ],
        five_over_best=by_length[5] / min(by_length.values()),
        block_over_input=stack.layer_bytes / INPUT_BYTES,
    )


def c77() -> Finding:
    """Apply the law to 24 layers that hold ten times their input, [8, 4096, 2048] in bf16, in segments of five."""
    row = 8 * 4096 * 2048 * 2
    stack = Stack(24, 10 * row, row)
    segments = stack.segments_of(5)
    inside = max(stack.lengths(segments)) * stack.layer_bytes
    return Finding.of(
        [
            Setting("without checkpoints", 31, stack.plain_bytes / 1e9, "GB"),
            Setting("inside one segment", 6.5, inside / 1e9, "GB"),
            Setting("and the inputs of the others", 6.5, stack.peak_bytes(segments) / 1e9, "GB"),
        ],
        premise="the inputs that the other segments keep are left out",
        every_layer=stack.peak_bytes(24) / 1e9,
    )
