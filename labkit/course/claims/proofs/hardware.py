"""Claims on devices and links: what fits into memory, which algorithm is faster, and how fast thin products run."""

from __future__ import annotations

import torch

from labkit.comm import star
from labkit.comm.group import Group
from labkit.comm.local import run_threads
from labkit.course.claims.finding import Finding, Setting
from labkit.plan.machine.collectives import ALGORITHMS, Line, crossover_bytes, seconds
from labkit.plan.machine.hardware import Hardware, line_of
from labkit.plan.model.layers import held
from labkit.plan.model.setting import Setting as Way
from labkit.plan.model.shape import ModelShape
from labkit.plan.pocket.zero_table import ModelState
from labkit.plan.step.compute_time import seconds_of
from labkit.probe.memory import MemoryProbe
from labkit.train.config import GPTConfig
from labkit.train.gpt import GPT


def bytes_of_a_block(d: int = 64, seq: int = 64, rows: int = 2) -> float:
    """Bytes that autograd holds of one bf16 block of labkit's GPT, over rows x seq x d: two blocks minus one."""
    held_bytes = []
    for n_layer in (1, 2):
        model = GPT(GPTConfig(n_layer, d, 4, 64, seq), seed=0).bfloat16()
        with MemoryProbe(model) as probe:
            loss = model(torch.zeros(rows, seq, dtype=torch.int64)).float().sum()
            held_bytes.append(probe.now["activations"])
            del loss
    return (held_bytes[1] - held_bytes[0]) / (rows * seq * d)


def c63() -> Finding:
    """Run a block in bf16 and count what autograd holds; compute others by law, all in bytes over b s d."""
    korthikanti = ModelShape.preset("gpt3-175b")

    def law(name: str) -> float:
        shape = ModelShape.preset(name)
        return held(shape, Way(1, shape.seq, way="half")).total / (shape.seq * shape.d_model)

    return Finding.of(
        [
            Setting("a block of labkit's GPT", 20.0, bytes_of_a_block(), "b s d bytes", measured=True),
            Setting("a block of GPT-3 6.7B, fused attention", 20.0, law("gpt3-6.7b"), "b s d bytes"),
            Setting("a block of LLaMA 7B, fused attention", 20.0, law("llama-7b"), "b s d bytes"),
            Setting("a block of Megatron 7.5B, scores in memory", 20.0, law("megatron-7.5b"), "b s d bytes"),
        ],
        korthikanti_gpt3=34 + 5 * korthikanti.n_head * korthikanti.seq / korthikanti.d_model,
    )


def c64() -> Finding:
    """Compute 16 bytes a parameter by law, and count them in a small GPT with AdamW after a step."""
    model = GPT(GPTConfig(2, 64, 4, 256, 32), seed=0)
    with MemoryProbe(model) as probe:
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.zeros(1, 32, dtype=torch.int64)).sum().backward()
        optimizer.step()
        now = probe.now
    bytes_per_param = (now["parameters"] + now["gradients"] + now["optimizer"]) / sum(
        p.numel() for p in model.parameters()
    )
    room, state = Hardware.preset("a100-80gb").memory_bytes.value, ModelState(3e9, 1).held(0).total
    return Finding.of(
        [
            Setting("state of 3 billion parameters", 48e9, state, "B"),
            Setting("as counted, times 3 billion", 48e9, bytes_per_param * 3e9, "B", measured=True),
            Setting("left on an A100", 32e9, room - state, "B"),
        ]
    )


def fastest(n_ranks: int, n_bytes: float, line: Line) -> str:
    """The algorithm that finishes an all-reduce first."""
    return min(ALGORITHMS, key=lambda name: seconds(name, "all_reduce", n_ranks, n_bytes, line))


def busiest(group: Group, through_rank_0: bool) -> int:
    """Bytes that this rank sends in an all-reduce of a megabyte."""
    x = torch.zeros(2**18)
    (group.using(all_reduce=star.all_reduce) if through_rank_0 else group).all_reduce(x)
    return group.ledger.sent_bytes("send")


def c66() -> Finding:
    """Time an all-reduce by ring, tree and star, for large and small messages, and count the busiest rank's bytes."""
    line = line_of(Hardware.preset("h100").inter)
    server, ring = (max(run_threads(busiest, 8, through)) for through in (True, False))
    return Finding.of(
        [
            Setting("1 GB on 64 ranks: fastest", "ring", fastest(64, 1e9, line)),
            Setting("440 MB on 8 ranks: fastest", "ring", fastest(8, 440e6, line)),
            Setting("8 KB on 64 ranks: fastest", "ring", fastest(64, 8192, line)),
        ],
        premise="messages are so large that bytes count and not hops",
        tree_up_to_bytes=crossover_bytes(64, line),
        server_over_ring=server / ring,
    )


def share_kept(model: str, rows: int, tp: int = 8) -> float:
    """The share of speed that is left when a block on an H100 is cut over `tp` of them, without communication."""
    shape, h100 = ModelShape.preset(model), Hardware.preset("h100")
    whole, part = (
        seconds_of(shape, "block", Way(rows, shape.seq, n, in_sequence=n > 1, way="half"), "bf16", h100)
        for n in (1, tp)
    )
    return (whole.forward + whole.backward) / (tp * (part.forward + part.backward))


def c90() -> Finding:
    """Time every op of a block, whole and cut over 8 H100s, where products, norms and sums are thinner."""

    def at(name: str, model: str, rows: int) -> Setting:
        return Setting(name, 0.9, share_kept(model, rows), "of one GPU's speed", rule="below")

    return Finding.of(
        [
            at("GPT-2 medium, 1 row", "gpt2-medium", 1),
            at("GPT-3 6.7B, 1 row", "gpt3-6.7b", 1),
            at("GPT-3 6.7B, 8 rows", "gpt3-6.7b", 8),
            at("GPT-3 175B, 1 row", "gpt3-175b", 1),
        ],
        premise="the model is narrow or the micro-batch small",
    )
