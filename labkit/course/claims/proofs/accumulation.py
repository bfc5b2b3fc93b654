"""Claims on gradient accumulation: when it equals the large batch, what it costs and what it saves."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from labkit import capped
from labkit.comm.group import Group
from labkit.course.claims.finding import Finding, Setting
from labkit.course.claims.proofs.checkpointing import most_held
from labkit.parallel.ddp import DDP
from labkit.parallel.zero1 import ZeRO1
from labkit.parallel.zero2 import ZeRO2
from labkit.parallel.zero3 import ZeRO3
from labkit.plan.job.recipe import Recipe
from labkit.plan.machine.hardware import Hardware
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout
from labkit.plan.step.time import predict_step
from labkit.probe.memory import MemoryProbe
from labkit.train.checkpoint import checkpoint
from labkit.train.config import GPTConfig
from labkit.train.gpt import GPT, cross_entropy

CONFIG = GPTConfig(n_layer=1, d_model=64, n_head=4, vocab=64, seq=64)


def micro_step(model: GPT, rows: Tensor, n_micro: int) -> None:
    """Forward and backward of all rows in `n_micro` equal micro-batches."""
    for micro in rows.chunk(n_micro):
        (cross_entropy(model(micro), micro) / n_micro).backward()


@torch.random.fork_rng(devices=[])
def c02() -> Finding:
    """Compute gradients of 32 rows at once and one by one, in float64: the share of numbers that agree to nine digits.
    Four settings: a plain model, one with batch statistics, ragged rows, and a loss that is not divided."""
    torch.manual_seed(0)
    x, y, whole = torch.randn(32, 4, 8).double(), torch.randn(32, 4).double(), torch.ones(32, 4).double()
    ragged = (torch.arange(4) <= torch.arange(32)[:, None] % 4).double()  # 1 to 4 tokens count in a row

    def gradient(model: nn.Module, n_micro: int, counts: Tensor, divide: int) -> Tensor:
        model.zero_grad()
        for a, b, n in zip(x.chunk(n_micro), y.chunk(n_micro), counts.chunk(n_micro), strict=True):
            loss = ((model(a).squeeze(-1) - b).square() * n).sum() / n.sum()
            (loss / divide).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    def agree(norm: nn.Module, counts: Tensor = whole, divide: int = 32) -> float:
        model = nn.Sequential(nn.Linear(8, 16), norm, nn.Tanh(), nn.Linear(16, 1)).double()
        large, small = gradient(model, 1, counts, 1), gradient(model, 32, counts, divide)
        return torch.isclose(small, large, rtol=1e-9, atol=1e-15).double().mean().item()

    share = partial(Setting, claimed=1, unit="of the gradient", within=0, measured=True)
    return Finding.of(
        [
            share("equal rows, LayerNorm", truth=agree(nn.LayerNorm(16))),
            share("BatchNorm", truth=agree(nn.BatchNorm1d(4))),
            share("ragged rows", truth=agree(nn.LayerNorm(16), ragged)),
            share("loss not divided", truth=agree(nn.LayerNorm(16), divide=1)),
        ],
        premise="mean losses of equally many tokens each, divided by their number, and no batch statistics",
    )


def c03() -> Finding:
    """Run 32 rows of a GPT in one batch and in 32 micro-batches: count flops, and time both in turn."""
    model, rows = GPT(CONFIG), torch.zeros(32, CONFIG.seq, dtype=torch.int64)

    def flops(n_rows: int, n_micro: int) -> int:
        with FlopCounterMode(display=False) as counter:
            micro_step(model, rows[:n_rows], n_micro)
        return counter.get_total_flops()

    def seconds(n_micro: int) -> float:
        began = time.perf_counter()
        micro_step(model, rows, n_micro)
        return time.perf_counter() - began

    seconds(1)  # the first one loads code
    slower = statistics.median([seconds(32) / seconds(1) for _ in range(3)])
    return Finding.of(
        [
            Setting("flops for 32 rows", 32, flops(32, 32) / flops(32, 1), "times", measured=True),
            Setting("seconds for 32 rows", 32, slower, "times", rule="at least", measured=True),
        ],
        flops_of_a_step_over_one_micro_batch=flops(32, 32) / flops(1, 1),
    )


def c73() -> Finding:
    """Count flops: 32 micro-batches of one row plain, and 16 of two rows with every block checkpointed. Flops are not
    time: plan the seconds as well, for a small model, which waits for kernels to start, and for a large one."""
    rows = torch.zeros(32, CONFIG.seq, dtype=torch.int64)

    def flops(n_micro: int, checkpointed: bool) -> int:
        model = GPT(CONFIG)
        for block in model.blocks if checkpointed else ():
            block.forward = partial(checkpoint, block.forward)
        with FlopCounterMode(display=False) as counter:
            micro_step(model, rows, n_micro)
        return counter.get_total_flops()

    def seconds(shape: ModelShape, n_micro: int, checkpointed: bool) -> float:
        recompute = "full" if checkpointed else "none"
        recipe = Recipe(batch_size=32, n_micro=n_micro, precision="bf16", recompute=recompute)
        step = predict_step(shape, Layout(), recipe, Hardware.preset("h100"))
        return step.total - step["optimizer"]

    def of_the_time(shape: ModelShape, checkpointed: bool = True) -> float:
        return seconds(shape, 16, checkpointed) / seconds(shape, 32, False)

    plain, short = flops(32, False), ModelShape.preset("gpt2").changed(seq=128)
    return Finding.of(
        [
            Setting("16 x 2 checkpointed", 0.5, flops(16, True) / plain, "of the flops", measured=True),
            Setting("16 x 2 plain", 0.5, flops(16, False) / plain, "of the flops", measured=True),
            Setting("GPT-2, 128 tokens a row, H100: 16 x 2 checkpointed", 0.5, of_the_time(short), "of the time"),
            Setting(
                "LLaMA 7B, H100: 16 x 2 checkpointed", 0.5, of_the_time(ModelShape.preset("llama-7b")), "of the time"
            ),
        ],
        short_rows_without_checkpointing=of_the_time(short, checkpointed=False),
    )


def sent_by(group: Group, counts: Sequence[int]) -> dict[str, list[int]]:
    """Bytes that this rank sends in a step of each number of micro-batches, by strategy."""
    sent: dict[str, list[int]] = {}
    for kind in (DDP, ZeRO1, ZeRO2, ZeRO3):
        for n_micro in counts:
            model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(4)))
            sync = kind(model, group, torch.optim.SGD)
            group.ledger.clear()
            for micro in range(n_micro):
                with nullcontext() if micro == n_micro - 1 else sync.accumulate():
                    model(torch.ones(2, 32)).square().mean().backward()
            sync.finish()
            sync.step()
            sent.setdefault(kind.__name__, []).append(group.ledger.sent_bytes())
    return sent


def c74() -> Finding:
    """The bytes that each strategy sends in a step of eight micro-batches, divided by those of a step of one."""
    sent = capped.run(sent_by, (1, 8), n_ranks=2)[0].value
    return Finding.of(
        [Setting(name, 1, eight / one, "times the bytes", measured=True) for name, (one, eight) in sent.items()],
        premise="whole gradients can wait on each rank, as with DDP and ZeRO-1",
    )


def c75() -> Finding:
    """Probe a step of eight rows, at once and one by one: activations shrink, model state does not."""
    rows = torch.zeros(8, CONFIG.seq, dtype=torch.int64)

    def held(n_micro: int) -> tuple[int, float]:
        model = GPT(CONFIG)
        optimizer = torch.optim.AdamW(model.parameters())
        micro_step(model, rows[:1], 1)
        optimizer.step()
        with MemoryProbe(model, optimizer) as probe:
            micro_step(model, rows, n_micro)
            state = sum(probe.now[kind] for kind in ("parameters", "gradients", "optimizer"))
        return most_held(probe), state

    (large, state), (small, same) = held(1), held(8)
    return Finding.of(
        [
            Setting("activations", 8, large / small, "times less", measured=True),
            Setting("weights, gradients and AdamW", 1, state / same, "times less", within=0, measured=True),
        ]
    )
