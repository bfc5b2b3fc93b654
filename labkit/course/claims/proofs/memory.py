"""Claims on memory, and the arithmetic behind them: bytes a parameter, activations, what fits on a card."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from labkit.comm.group import Group
from labkit.course.claims.finding import Finding, Setting
from labkit.course.claims.proofs.checkpointing import most_held
from labkit.plan.breakdown import KINDS
from labkit.plan.job.recipe import Recipe
from labkit.plan.machine.hardware import Hardware
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout
from labkit.plan.pocket.zero_table import ModelState
from labkit.plan.step.time import predict_step
from labkit.probe.memory import MemoryProbe
from labkit.probe.rehearsal import run_fake
from labkit.train.config import GPTConfig
from labkit.train.gpt import GPT, Block, cross_entropy
from labkit.train.precision import MasterWeights

GB = 1e9


def bytes_a_parameter(mixed: bool) -> dict[str, float]:
    """Bytes per parameter that a step of AdamW holds after backward, by kind."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).to(torch.bfloat16 if mixed else None)
    adamw = partial(torch.optim.AdamW, lr=1e-3)
    optimizer = MasterWeights(model.parameters(), adamw) if mixed else adamw(model.parameters())
    rows = torch.ones(2, 64, dtype=torch.bfloat16 if mixed else None)
    with MemoryProbe(model, optimizer) as probe:
        for _ in range(2):
            model(rows).square().mean().backward()
            held = probe.now
            optimizer.step()
            optimizer.zero_grad()
    n_params = sum(p.numel() for p in model.parameters())
    return {kind: held[kind] / n_params for kind in KINDS[:3]}


def c08() -> Finding:
    """Divide as the example does (bf16 halves everything, checkpointing halves the activations), and compare each sum
    with the 16 GB of the card; also the single row that is said not to fit."""
    card, model, row = 16.0, 10.0, 2.0
    halved = (model + 32 * row) / 2
    return Finding.of(
        [
            Setting("after bf16", card, halved, "GB", rule="at most"),
            Setting("after bf16 and checkpointing", card, model / 2 + 32 * row / 2 / 2, "GB", rule="at most"),
            Setting("one row does not fit", card, model + row, "GB", rule="above"),
        ],
        rows_that_fit=(card - model) // row,
    )


def c09() -> Finding:
    """Take the planner's bytes for ten billion parameters, and count probe bytes a parameter of a small model."""
    law, probed = ModelState(10e9, 1).held(0), bytes_a_parameter(mixed=True)
    return Finding.of(
        [
            Setting("Adam's state, law", 40, law["optimizer"] / GB, "GB"),
            Setting("all of it, law", 80, law.total / GB, "GB"),
            Setting("Adam's state, probed", 4, probed["optimizer"], "B a parameter", measured=True),
            Setting("all of it, probed", 8, sum(probed.values()), "B a parameter", measured=True),
        ],
        moments_alone=bytes_a_parameter(mixed=False)["optimizer"],
    )


def c10() -> Finding:
    """Probe a bf16 model with fp32 masters after backward, kind by kind; the law says the same."""
    probed, law = bytes_a_parameter(mixed=True), ModelState(1e9, 1)
    return Finding.of(
        [
            Setting("weights", 2, probed["parameters"], "B a parameter", measured=True),
            Setting("gradients", 2, probed["gradients"], "B a parameter", measured=True),
            Setting("master, m and v", 12, probed["optimizer"], "B a parameter", measured=True),
            Setting("all of it", 16, sum(probed.values()), "B a parameter", measured=True),
            Setting("all of it, law", 16, law.bytes_per_param(0), "B a parameter"),
        ],
        with_fp32_gradients=sum(probed.values()) + probed["gradients"],
        with_both_gradients=sum(probed.values()) + 2 * probed["gradients"],
        in_fp32=sum(bytes_a_parameter(mixed=False).values()),
    )


def a_block(group: Group, width: int, dtype: torch.dtype, autocast: bool = False, rows: int = 1) -> int:
    """Bytes that autograd holds of one block, for rows of 2,048 positions, at full size on fake tensors: its input
    among them, and not its output, which is the next block's input."""
    config = GPTConfig(n_layer=1, d_model=width, n_head=32, vocab=8, seq=2048)
    block = Block(config).to(dtype)
    with MemoryProbe(block) as probe, torch.autocast("cpu", torch.bfloat16, autocast):
        out = block(torch.zeros(rows, 2048, width, dtype=dtype))
        held = int(probe.now["activations"])
        del out  # until here it keeps the graph alive
    return held


def c33() -> Finding:
    """Do the division; then rehearse one block of this width and compute how many rows fit with 32 layers."""
    n_bytes, row = 20 * GB, 2048 * 4096
    block = run_fake(partial(a_block, width=4096, dtype=torch.bfloat16), 1).value
    return Finding.of(
        [
            Setting("the quotient", 1.2e6, n_bytes / (row * 2)),
            Setting("1.2 million elements", 4, 1.2e6 / row, "rows"),
            Setting("32 layers of a transformer", 4, n_bytes / (32 * block), "rows", measured=True),
        ],
        tensors_a_layer=block / (row * 2),
    )


def c34() -> Finding:
    """Divide tokens by tokens a second, and check the other direction."""
    rate, hour = 16e3, 3600
    return Finding.of(
        [
            Setting("hours for 10^12 tokens", 17, 1e12 / rate / hour, "h"),
            Setting("tokens in 17 hours", 1e12, 17 * hour * rate, "tokens"),
        ],
        seconds=1e12 / rate,
        days=1e12 / rate / 24 / hour,
    )


def c35() -> Finding:
    """Apply the law of model state to three splits of the 60 GB: how many more rows the rest of 80 GB holds."""

    def more_rows(state: float) -> float:
        model = ModelState(state * GB / 16, 8)
        return (80 * GB - model.held(3).total) / (80 * GB - model.held(0).total)

    return Finding.of(
        [
            Setting("all 60 GB are model state", 3.5, more_rows(60), "times the rows"),
            Setting("45 GB are model state", 3.5, more_rows(45), "times the rows"),
            Setting("30 GB are model state", 3.5, more_rows(30), "times the rows"),
        ]
    )


def c78() -> Finding:
    """Plan the time of a step with the small and with the large batch: it has more rows, and takes more seconds."""
    shape = ModelShape.gpt(n_layer=18, d_model=4096, n_head=32, vocab=50304, seq=2048)
    hardware = Hardware.preset("a100-80gb")

    def tokens_per_s(strategy: str, rows: int) -> float:
        recipe = Recipe(strategy=strategy, batch_size=8 * rows, precision="bf16", recompute="full")
        return 8 * rows * shape.seq / predict_step(shape, Layout(dp=8), recipe, hardware).total

    four, fourteen = tokens_per_s("ddp", 4), tokens_per_s("zero3", 14)
    return Finding.of(
        [
            Setting("ZeRO-3 with 14 rows over DDP with 4", 3, fourteen / four, "times the tokens/s"),
            Setting("DDP with 14 rows over DDP with 4", 3, tokens_per_s("ddp", 14) / four, "times the tokens/s"),
        ],
        tokens_a_step=14 / 4,
    )


def c79() -> Finding:
    """Probe what autograd holds of a GPT at 512 and 128 positions; the law also covers scores written to memory."""
    config = GPTConfig(n_layer=2, d_model=32, n_head=4, vocab=64, seq=512)
    model = GPT(config)

    def held(seq: int) -> int:
        tokens = torch.zeros(1, seq, dtype=torch.int64)
        with MemoryProbe(model) as probe:
            cross_entropy(model(tokens), tokens).backward()
        return most_held(probe)

    def law(seq: int, fused: bool) -> float:
        return ModelShape.preset("gpt2").changed(seq=seq, fused_attention=fused).activations().total

    return Finding.of(
        [
            Setting("fused attention, probed", 4, held(512) / held(128), "times less", measured=True),
            Setting("fused attention, law", 4, law(2048, True) / law(512, True), "times less"),
            Setting("scores in memory, law", 4, law(2048, False) / law(512, False), "times less"),
        ],
        premise="the attention scores are not written to memory",
    )


def c80() -> Finding:
    """Count the state of a small model, and activations of one block of width 1,024 at full size: in fp32, in bf16, and
    under autocast with few and with many rows of 2,048 tokens. Autocast also holds a bf16 copy of each weight, whatever
    the number of rows: (40 + 24 D / tokens) bytes for each number of the block's input, where fp32 holds 64."""
    state = [sum(bytes_a_parameter(mixed).values()) for mixed in (False, True)]
    width = 1024

    def block(dtype: torch.dtype, autocast: bool = False, rows: int = 1) -> int:
        return run_fake(partial(a_block, width=width, dtype=dtype, autocast=autocast, rows=rows), 1).value

    def saved(rows: int) -> float:
        return 1 - block(torch.float32, True, rows) / block(torch.float32, rows=rows)

    def saved_by_law(rows: int) -> float:
        return 1 - (40 + 24 * width / (2048 * rows)) / 64

    whole, few, many = block(torch.float32), saved(1), saved(8)
    less, off = (partial(Setting, unit=unit, measured=True) for unit in ("times less", "of the activations saved"))
    return Finding.of(
        [
            less("activations, all in bf16", 2, whole / block(torch.bfloat16)),
            off("autocast, 2 tokens for each number of the width", 0.5, few),
            off("autocast, 16 tokens for each number of the width", 0.5, many),
            less("model state with AdamW", 2, state[0] / state[1]),
        ],
        premise="activations, in a model that is all in half precision",
        few_by_law=saved_by_law(1),
        many_by_law=saved_by_law(8),
    )
