"""Claims on Muon: whether it runs where matrices are cut, and what it keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from labkit import capped
from labkit.comm.group import Group
from labkit.course.claims.finding import Finding, Setting
from labkit.parallel.zero1 import ZeRO1
from labkit.parallel.zero3 import ZeRO3
from labkit.plan.partition.groups import Grouping
from labkit.probe.memory import MemoryProbe
from labkit.train.config import GPTConfig
from labkit.train.gpt import GPT, cross_entropy
from labkit.train.groups import grouped, mark_
from labkit.train.muon import Muon
from labkit.train.precision import MasterWeights

CONFIG = GPTConfig(n_layer=2, d_model=48, n_head=4, vocab=64, seq=8)


def muon(params: list[Any]) -> Muon:
    """Muon for the matrices of blocks, AdamW for the rest."""
    return Muon(grouped(params, 0.1), lr=0.01)


def trained(group: Group, strategy: Callable[..., Any] | None) -> tuple[Tensor, float]:
    """The weights after three steps on the same rows, in float64, and Muon's bytes over those of the weights."""
    model = GPT(CONFIG, seed=0).double()
    mark_(model, Grouping(by_matrix=True))
    n_bytes = sum(8 * p.numel() for p in model.parameters())
    sync = strategy(model, group, muon) if strategy else None
    optimizer = sync or muon(list(model.parameters()))
    rows = torch.arange(16).view(2, 8) % CONFIG.vocab
    for _ in range(3):
        optimizer.zero_grad()
        cross_entropy(model(rows), rows).backward()
        if sync:
            sync.finish()
        optimizer.step()
    if sync:
        sync.close()
    whole = torch.cat([p.detach().flatten() for p in model.parameters()])
    return whole, group.ledger.sent_bytes("send") / 3 / n_bytes


def c117() -> Finding:
    """Train a GPT with Muon under ZeRO-1 and ZeRO-3 on real ranks, and in one process on the same rows."""
    alone, _ = capped.run(trained, None, n_ranks=1)[0].value
    settings = []
    for name, strategy, n in (("ZeRO-1 on 4 ranks", ZeRO1, 4), ("ZeRO-3 on 4 ranks", ZeRO3, 4)):
        replies = [reply.value for reply in capped.run(trained, strategy, n_ranks=n)]
        off = max(float((weights - alone).abs().max()) for weights, _ in replies)
        words = "trains as one process does" if off < 1e-10 else f"{off:.1e} apart"
        settings.append(Setting(name, "cannot run", words, measured=True))
        most = max(share for _, share in replies)
        settings.append(Setting(f"{name}: pieces sent by the busiest rank", 1, most, "S", rule="above", measured=True))
    return Finding.of(settings)


def state_of(muons: bool, mixed: bool, everything: bool) -> float:
    """Bytes of the optimizer, masters included, after a step: of one block's matrices, or of a whole GPT."""
    model = GPT(CONFIG, seed=0).to(torch.bfloat16 if mixed else torch.float32)
    mark_(model, Grouping(by_matrix=muons))
    hidden = [p for block in model.blocks for p in block.parameters() if p.dim() == 2]
    params = list(model.parameters()) if everything else hidden
    make: Callable[[Any], Any] = muon if muons else lambda params: torch.optim.AdamW(params, lr=0.01)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = MasterWeights(params, make) if mixed else make(params)
    with MemoryProbe(model, optimizer) as probe:
        optimizer.step()
        return float(probe.now["optimizer"])


def c118() -> Finding:
    """Take a step with both optimizers and count their state: of the matrices alone, with masters, of a whole GPT."""

    def share(name: str, mixed: bool, everything: bool) -> Setting:
        ratio = state_of(True, mixed, everything) / state_of(False, mixed, everything)
        return Setting(name, 0.5, ratio, "of AdamW's", measured=True)

    return Finding.of(
        [
            share("hidden matrices, fp32", False, False),
            share("hidden matrices, bf16 with fp32 masters", True, False),
            share("a GPT with embeddings, bf16 with fp32 masters", True, True),
        ],
        premise="hidden matrices alone, without fp32 masters",
    )
