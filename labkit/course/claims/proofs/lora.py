"""Claims on LoRA: how many parameters it trains, and how near the result comes to training all of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from labkit.course.claims.finding import Finding, Setting
from labkit.plan.model.shape import ModelShape
from labkit.plan.step.adapters import TARGETS, trainable_share
from labkit.train.config import GPTConfig
from labkit.train.gpt import GPT
from labkit.train.lora import LoRALinear, inject_lora


def trains(module: nn.Module) -> int:
    """The number of parameters of a module that have a gradient."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def c61() -> Finding:
    """Build the layer on the meta device, and count its parameters."""
    with torch.device("meta"):
        layer = LoRALinear(nn.Linear(4096, 4096, bias=False), rank=8)
    frozen = layer.linear.weight.numel()
    return Finding.of(
        [
            Setting("numbers that train", 65_000, trains(layer), measured=True),
            Setting("numbers of the weight", 16e6, frozen, measured=True),
            Setting("times fewer", 250, frozen / trains(layer), "times", measured=True),
        ],
        by_law=8 * (4096 + 4096),
    )


def c62() -> Finding:
    """Count adapters for two models, several targets and ranks by arithmetic, and in one case by building the model."""
    gpt2 = GPTConfig(12, 768, 12, 50_257, 1024)
    with torch.device("meta"):
        model = GPT(gpt2, seed=0)
        whole = trains(model)
        inject_lora(model, ["query", "value"], rank=8)

    def share(name: str, targets: str, rank: int) -> float:
        return trainable_share(ModelShape.preset(name), TARGETS[targets], rank)

    law = share("gpt2", "query, value", 8)
    return Finding.of(
        [
            Setting("GPT-2, query and value, rank 8", 0.01, trains(model) / whole, rule="at most", measured=True),
            Setting(
                "GPT-2, query and value, rank 8: not less", 0.001, trains(model) / whole, rule="at least", measured=True
            ),
            Setting("LLaMA 7B, all linears, rank 8", 0.01, share("llama-7b", "all linears", 8), rule="at most"),
            Setting(
                "LLaMA 7B, all linears, rank 8: not less", 0.001, share("llama-7b", "all linears", 8), rule="at least"
            ),
            Setting("LLaMA 7B, query and value, rank 8", 0.001, share("llama-7b", "query, value", 8), rule="at least"),
            Setting("GPT-2, all linears, rank 64", 0.01, share("gpt2", "all linears", 64), rule="at most"),
        ],
        premise="rank 8, on some linears of a small model or all of a large one",
        gpt2_by_law=law,
        largest=share("gpt2", "all linears", 256),
        smallest=share("llama-7b", "query, value", 1),
    )


def kept(wanted: Tensor, rank: int, rounds: int = 20) -> float:
    """The share of a wanted change of a weight that LoRA of this rank reaches on white inputs; full training reaches 1.

    B and A are fitted in turns, each by least squares while the other is fixed."""
    n = len(wanted)
    layer = LoRALinear(nn.Linear(n, n, bias=False), rank)
    b, a = layer.B, torch.randn(rank, n, generator=torch.Generator().manual_seed(1))
    for _ in range(rounds):
        b = torch.linalg.lstsq(a.T, wanted.T).solution.T
        a = torch.linalg.lstsq(b, wanted).solution
    layer.A.data.copy_(a)
    layer.B.data.copy_(b)
    return 1 - float((wanted - layer.delta()).square().sum() / wanted.square().sum())


def c106() -> Finding:
    """Fit a LoRA of rank 8 to changes of known rank; an SVD gives the best possible correction of rank 8."""
    draw = torch.Generator().manual_seed(0)
    narrow = torch.randn(64, 4, generator=draw) @ torch.randn(4, 64, generator=draw)
    wide = torch.randn(64, 64, generator=draw)
    squares = torch.linalg.svdvals(wide).square()
    return Finding.of(
        [
            Setting(
                "the task wants a change of rank 4", 0.9, kept(narrow, 8), rule="at least", within=0, measured=True
            ),
            Setting(
                "the task wants a change of full rank", 0.9, kept(wide, 8), rule="at least", within=0, measured=True
            ),
        ],
        premise="the change that the task wants has a rank as low as the adapter's",
        best_of_rank_8=float(squares[:8].sum() / squares.sum()),
        full_rank_with_rank_32=kept(wide, 32),
    )
