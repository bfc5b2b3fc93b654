"""Claims on generation after training: the cache, its cut, rows at once, and weights on their way to a generator."""

from __future__ import annotations

from dataclasses import replace

import torch

from labkit import capped
from labkit.comm.group import Group
from labkit.comm.mesh import Mesh
from labkit.course.claims.finding import Finding, Setting
from labkit.parallel.checkpoints import parts_of
from labkit.parallel.tensor_plan import GPT_PLAN, split
from labkit.parallel.weight_handover import gather_and_broadcast, meet, offered, reshard, wanted
from labkit.parallel.zero3 import ZeRO3
from labkit.plan.machine.hardware import Hardware
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout
from labkit.plan.pocket.generation import Generator, cached_numbers
from labkit.train.config import GPTConfig
from labkit.train.generate import decode, generate, prefill
from labkit.train.gpt import GPT
from labkit.train.kv_cache import KVCache

CONFIG = GPTConfig(n_layer=2, d_model=48, n_head=12, vocab=72, seq=24)


def apart(position: str, dtype: torch.dtype) -> float:
    """The largest difference between a score of twelve more tokens with a cache, and that of one forward pass over all
    of them, over the standard deviation of the scores."""
    model = GPT(replace(CONFIG, position=position), seed=0).to(dtype)
    tokens = generate(model, torch.arange(16).view(2, 8), 12)
    with torch.no_grad():
        whole = model(tokens)
    cache = KVCache(model, 2)
    scores = [prefill(model, tokens[:, :8], cache)]
    scores += [decode(model, tokens[:, t], cache) for t in range(8, 20)]
    return max(float((one - whole[:, 7 + t]).abs().max()) for t, one in enumerate(scores)) / float(whole.std())


def c131() -> Finding:
    """Compare the scores with a cache and without, in float64; in bf16, where both are rounded, for its own sake."""
    settings = []
    for position in ("learned", "rotary"):
        off = apart(position, torch.float64)
        words = "the scores of a whole pass" if off < 1e-12 else f"{off:.1e} apart"
        settings.append(Setting(f"{position} positions", "other scores", words, measured=True))
    return Finding.of(settings, apart_in_bf16=apart("rotary", torch.bfloat16))


def held(group: Group) -> int:
    """Bytes of this rank's cache, when tensor parallelism has cut the model."""
    model = GPT(CONFIG, seed=0)
    split(model, GPT_PLAN, group)
    return KVCache(model, 2).n_bytes


def c132() -> Finding:
    """Bytes of a rank's cache on real ranks; and of published models on more ranks than they have key heads."""
    alone = capped.run(held, n_ranks=1)[0].value
    settings = []
    for n in (2, 4):
        most = max(reply.value for reply in capped.run(held, n_ranks=n))
        settings.append(Setting(f"12 key heads on {n} ranks", n, alone / most, "times less", measured=True))
    for name, n in (("llama3-70b", 8), ("llama3-70b", 16), ("deepseek-v3", 8)):
        shape = ModelShape.preset(name)
        settings.append(Setting(f"{name} on {n}", n, cached_numbers(shape) / cached_numbers(shape, n), "times less"))
    return Finding.of(settings, premise="there are as many key heads as ranks, and each head has keys of its own")


def c133() -> Finding:
    """A decode step of Llama 3 70B on 8 H100, by the roofline, with twice as many rows, up to what memory holds."""
    one = Generator(ModelShape.preset("llama3-70b"), Hardware.preset("h100"), tp=8)
    settings = []
    for rows in (1, 16, 64, 128):
        times = one.step_s(2 * rows, 4096) / one.step_s(rows, 4096)
        settings.append(Setting(f"{rows} and {2 * rows} sequences of 4,096 tokens", 2, times, "times as long"))
    return Finding.of(settings, fits=one.rows_in_memory(4096))


def sent(group: Group) -> list[int]:
    """Bytes that this rank sends by both ways, from a trainer under ZeRO-3 on half of the ranks to tp on the others."""
    half = group.size // 2
    trainers = Mesh.within(Layout(dp=half), group, 0, "trainers")
    generators = Mesh.within(Layout(tp=half), group, half, "generators")
    gives, wants = {}, {}
    if trainers:
        sync = ZeRO3(GPT(CONFIG, seed=0), trainers.dp, torch.optim.AdamW)
        names = {name: name for name, _ in sync.module.named_parameters()}
        gives = offered(parts_of([(sync, names)]), trainers, group)
    if generators:
        wants = wanted(split(GPT(CONFIG, seed=1), GPT_PLAN, generators.tp), generators, group)
    plan, counts = meet(group, gives, wants), []
    for way in (gather_and_broadcast, reshard):
        before = group.ledger.sent_bytes()
        way(plan)
        counts.append(group.ledger.sent_bytes() - before)
    return [*counts, plan.n_bytes]


def c134() -> Finding:
    """Hand the same weights over on real ranks by both ways, and count what the busiest rank sends."""
    settings, shares = [], {}
    for n in (4, 6):
        replies = [reply.value for reply in capped.run(sent, n_ranks=n)]
        by_root, straight = (max(reply[way] for reply in replies) for way in (0, 1))
        words = "as much" if by_root < 1.2 * straight else f"{by_root / straight:.1f} times as much by the first rank"
        settings.append(Setting(f"{n // 2} trainers, tp {n // 2}", "as much", words, measured=True))
        shares[f"share_of_{n // 2}"] = straight / by_root
    return Finding.of(settings, weights_bytes=replies[0][2], **shares)
