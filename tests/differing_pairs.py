"""Pairs of runs of one model: healthy ones, which differ by rounding alone, and wrong ones, which do not.

python -m tests.differing_pairs         a table of all healthy pairs: what was measured over its bound
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.comm.local import run_threads
from labkit.comm.mesh import Mesh
from labkit.course.topics.rebuilt_bugs import lose_masters, resume
from labkit.parallel.ddp import DDP
from labkit.parallel.norm import clip_grad_norm_
from labkit.parallel.tensor import RowParallelLinear
from labkit.parallel.tensor_plan import GPT_PLAN, GPT_SEQUENCE_PLAN, split
from labkit.parallel.vocab import vocab_parallel_cross_entropy
from labkit.parallel.zero1 import ZeRO1
from labkit.parallel.zero2 import ZeRO2
from labkit.parallel.zero3 import ZeRO3
from labkit.plan.partition.layout import Layout
from labkit.probe.tensor_probe import TensorProbe
from labkit.train.gpt import GPT, GPTConfig, cross_entropy
from labkit.train.precision import MasterWeights

N_STEPS = 2
ROWS, WORDS, VOCAB = 12, 8, 24
Pair = tuple[Any, Any]
Change = Callable[[Any], None]


def gpt(dtype: torch.dtype = torch.float32, **options: Any) -> GPT:
    """A GPT of two blocks whose sizes 2 and 4 divide."""
    config = GPTConfig(n_layer=2, d_model=16, n_head=4, vocab=VOCAB, seq=WORDS, **options)
    return GPT(config, seed=3).to(dtype)


def tokens(step: int) -> tuple[Tensor, Tensor]:
    """The batch of one step, and its targets."""
    stream = torch.Generator().manual_seed(step)
    row = torch.randint(VOCAB, (ROWS, WORDS + 1), generator=stream)
    return row[:, :-1], row[:, 1:]


def adamw(params: Any) -> torch.optim.Optimizer:
    """Steps that show in a few steps."""
    return torch.optim.AdamW(params, lr=1e-3)


def sgd(params: Any) -> torch.optim.Optimizer:
    """Momentum."""
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def one_process(
    model: Any, make: Any = adamw, n_micro: int = 1, n_steps: int = N_STEPS, clip: float = 0.0,
    loss: Callable[..., Tensor] = cross_entropy, data: Any = tokens, before: Change | None = None,
    after: Change | None = None, amp: bool = False,
) -> Any:  # fmt: skip
    """The record of plain training. `before` and `after` are called with the model or the optimizer around steps."""
    optimizer = make(model.parameters())
    if before is not None:
        before(optimizer)
    probe = TensorProbe(model, optimizer)
    with probe:
        for step in range(n_steps):
            x, y = data(step)
            with probe.step():
                optimizer.zero_grad()
                for own_x, own_y in zip(x.chunk(n_micro), y.chunk(n_micro), strict=True):
                    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
                        output = model(own_x)
                    (loss(output, own_y) / n_micro).backward()
                if clip:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                if after is not None:
                    after(model)
    return probe.record


def tensor_parallel(
    n: int, build: Callable[[], Any] = gpt, plan: Any = GPT_PLAN, make: Any = adamw, clip: str = "",
    change: Callable[[Any, Any], None] | None = None, n_steps: int = N_STEPS,
) -> Any:  # fmt: skip
    """The records of n tensor-parallel ranks; `change(model, group)` puts a mistake in."""

    def on_rank(group: Any) -> Any:
        model = split(build(), plan, group)
        if change is not None:
            change(model, group)
        optimizer = make(model.parameters())
        probe = TensorProbe(model, optimizer, tp=group)
        with probe:
            for step in range(n_steps):
                x, y = tokens(step)
                with probe.step():
                    optimizer.zero_grad()
                    vocab_parallel_cross_entropy(model(x), y, group).backward()
                    _clip(model, group, clip)
                    optimizer.step()
        return probe.record

    return run_threads(on_rank, n, timeout_s=100.0)


def _clip(model: nn.Module, group: Any, clip: str) -> None:
    if clip == "by shard":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    elif clip:
        squares = torch.zeros(1, dtype=torch.float64)
        for p in model.parameters():
            if p.grad is not None and (getattr(p, "shard_dim", None) is not None or group.rank == 0):
                squares += p.grad.double().square().sum()
        norm = float(group.all_reduce(squares).sqrt())
        for p in model.parameters():
            if p.grad is not None and norm > 0.5:
                p.grad.mul_(0.5 / norm)


def data_parallel(
    n: int, build: Callable[[], Any] = gpt, kind: Any = DDP, make: Any = adamw, n_micro: int = 1, order: str = "",
    loss: Callable[..., Tensor] = cross_entropy, data: Any = tokens, clip: float = 0.0,
    change: Callable[[Any, Any], None] | None = None, n_steps: int = N_STEPS,
) -> Any:  # fmt: skip
    """The records of n data-parallel ranks under a strategy. `change(strategy, group)` is called before each step."""

    def on_rank(group: Any) -> Any:
        model = build()
        sync = kind(model, group, make)
        probe = TensorProbe(model, sync)
        mesh = Mesh.connect(Layout(dp=n), group)
        with probe:
            for step in range(n_steps):
                x, y = (z[group.rank :: n] if order else z.chunk(n)[group.rank] for z in data(step))
                with probe.step():
                    sync.zero_grad()
                    pieces = list(zip(x.chunk(n_micro), y.chunk(n_micro), strict=True))
                    for own_x, own_y in pieces[:-1]:
                        with sync.accumulate():
                            (loss(model(own_x), own_y) / n_micro).backward()
                    (loss(model(pieces[-1][0]), pieces[-1][1]) / n_micro).backward()
                    sync.finish()
                    if clip:
                        clip_grad_norm_([sync], mesh, clip)
                    if change is not None:
                        change(sync, group)
                    sync.step()
        sync.close()
        return probe.record

    return run_threads(on_rank, n, timeout_s=100.0)


# -- models of torch's own modules -----------------------------------------------------------------------------


class PlainAttention(nn.Module):
    """Attention by torch's fused kernel, or written out; `by` chooses."""

    def __init__(self, width: int, heads: int, by: str) -> None:
        super().__init__()
        self.heads, self.by = heads, by
        self.inward, self.outward = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> same."""
        q, k, v = (z.unflatten(-1, (self.heads, -1)).transpose(1, 2) for z in self.inward(x).chunk(3, -1))
        if self.by == "fused":
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
            if self.by == "written out":
                scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
            mixed = scores.softmax(-1) @ v
        return self.outward(mixed.transpose(1, 2).flatten(2))


class BackwardsLinear(nn.Linear):
    """A linear that adds up its terms in another order: the last ones first, in pieces of five."""

    def forward(self, x: Tensor) -> Tensor:
        """[.., I] -> [.., O]"""
        total = torch.zeros(())
        for columns, weights in zip(x.flip(-1).split(5, -1), self.weight.flip(-1).split(5, -1), strict=True):
            total = total + columns @ weights.T
        return total if self.bias is None else total + self.bias


def seeded(build: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model with the weights that seed 5 draws."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return build().to(dtype)


def attention(by: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Two attentions with norms between them."""
    return seeded(
        lambda: nn.Sequential(
            nn.Linear(6, 16), PlainAttention(16, 2, by), nn.LayerNorm(16), PlainAttention(16, 2, by), nn.Linear(16, 3)
        ),
        dtype,
    )


def perceptron(linear: type[nn.Linear] = nn.Linear, dtype: torch.dtype = torch.float32, p: float = 0.0) -> nn.Module:
    """Linears, a norm, activations and a dropout."""
    return seeded(
        lambda: nn.Sequential(
            linear(6, 32), nn.GELU(), nn.Dropout(p), nn.LayerNorm(32), linear(32, 24), nn.Tanh(), linear(24, 3)
        ),
        dtype,
    )


def convolutions(dtype: torch.dtype = torch.float32, momentum: float = 0.1) -> nn.Module:
    """Images: convolutions and batch norms."""
    return seeded(
        lambda: nn.Sequential(
            nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8, momentum=momentum), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(),
            nn.Linear(64, 3),
        ),
        dtype,
    )  # fmt: skip


def encoder(dtype: torch.dtype = torch.float32) -> nn.Module:
    """torch's own transformer layer."""
    return seeded(
        lambda: nn.Sequential(
            nn.Linear(6, 16), nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), nn.Linear(16, 3)
        ),
        dtype,
    )


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Batches of this shape, and targets with 3 numbers in each row (or in each position of one)."""

    def data(step: int) -> tuple[Tensor, Tensor]:
        stream = torch.Generator().manual_seed(step)
        rows = shape[:-1] if len(shape) < 4 else shape[:1]
        x = torch.randn(*shape, generator=stream, dtype=torch.float64)
        return x.to(torch.float32).to(dtype), torch.randn(*rows, 3, generator=stream, dtype=torch.float64).to(dtype)

    return data


FLAT, SEQUENCE, IMAGE = (24, 6), (6, 10, 6), (6, 2, 8, 8)
stock = partial(one_process, loss=F.mse_loss)
DOUBLE, BF16 = torch.float64, torch.bfloat16


def autocast(model: nn.Module) -> Any:
    """Mixed precision by torch."""
    return stock(model, data=numbers(*FLAT), amp=True, loss=lambda y, t: F.mse_loss(y.float(), t))


# -- healthy ---------------------------------------------------------------------------------------------------


def healthy() -> Iterator[tuple[str, Callable[[], Pair]]]:
    """(name, what runs both) of pairs that differ by rounding, or not at all."""
    for n in (1, 2, 4):
        yield f"tensor parallel, {n}", lambda n=n: (one_process(gpt()), tensor_parallel(n))
    for n in (2, 4):
        yield f"tensor parallel, {n}, SGD", lambda n=n: (one_process(gpt(), sgd), tensor_parallel(n, make=sgd))
        yield (
            f"tensor and sequence parallel, {n}",
            lambda n=n: (one_process(gpt()), tensor_parallel(n, plan=GPT_SEQUENCE_PLAN)),
        )
        yield (
            f"tensor parallel, {n}, bf16",
            lambda n=n: (one_process(gpt(BF16)), tensor_parallel(n, partial(gpt, BF16))),
        )
    yield "tensor parallel, 2, float64", lambda: (one_process(gpt(DOUBLE)), tensor_parallel(2, partial(gpt, DOUBLE)))
    yield "tensor parallel, 2, float32 to float64", lambda: (one_process(gpt(DOUBLE)), tensor_parallel(2))
    yield (
        "tensor parallel, 2, rotary, two key heads",
        lambda: (
            one_process(gpt(position="rotary", kv_heads=2)),
            tensor_parallel(2, partial(gpt, position="rotary", kv_heads=2)),
        ),
    )
    yield "tensor parallel, 2, clipped", lambda: (one_process(gpt(), clip=0.5), tensor_parallel(2, clip="by all"))
    yield "tensor parallel, 2, ten steps", lambda: (one_process(gpt(), n_steps=10), tensor_parallel(2, n_steps=10))
    for n in (1, 2, 3, 4):
        yield f"DDP, {n}", lambda n=n: (one_process(gpt()), data_parallel(n))
    yield "DDP, 3, rows in turns", lambda: (one_process(gpt()), data_parallel(3, order="in turns"))
    yield "DDP, 3, bf16", lambda: (one_process(gpt(BF16)), data_parallel(3, partial(gpt, BF16)))
    yield "DDP, 2 against 3", lambda: (data_parallel(2), data_parallel(3))
    yield (
        "tensor parallel, 2, dropout with the same seed",
        lambda: (one_process(with_drawn_dropout()), tensor_parallel(2, with_drawn_dropout)),
    )
    yield "DDP, 2, two micro-batches", lambda: (one_process(gpt()), data_parallel(2, n_micro=2))
    yield "DDP, 2, clipped", lambda: (one_process(gpt(), clip=0.5), data_parallel(2, clip=0.5))
    for kind in (ZeRO1, ZeRO2, ZeRO3):
        yield f"{kind.__name__}, 3", lambda kind=kind: (one_process(gpt()), data_parallel(3, kind=kind))
    for n in (2, 4):
        yield f"{n} micro-batches", lambda n=n: (one_process(gpt()), one_process(gpt(), n_micro=n))
    yield "float64 to float32", lambda: (one_process(gpt(DOUBLE)), one_process(gpt()))
    yield "float32 to bf16", lambda: (one_process(gpt()), one_process(gpt(BF16)))
    yield (
        "float32 to bf16 with masters",
        lambda: (
            one_process(gpt(), n_steps=4),
            one_process(gpt(BF16), partial(MasterWeights, make_optimizer=adamw), n_steps=4),
        ),
    )
    yield (
        "DDP, 2, bf16 with masters",
        lambda: (
            one_process(gpt(BF16), partial(MasterWeights, make_optimizer=adamw)),
            data_parallel(2, partial(gpt, BF16), make=partial(MasterWeights, make_optimizer=adamw)),
        ),
    )
    yield (
        "sums in another order",
        lambda: (stock(perceptron(), data=numbers(*FLAT)), stock(perceptron(BackwardsLinear), data=numbers(*FLAT))),
    )
    yield (
        "sums in another order, bf16",
        lambda: (
            stock(perceptron(dtype=BF16), data=numbers(*FLAT, dtype=BF16)),
            stock(perceptron(BackwardsLinear, BF16), data=numbers(*FLAT, dtype=BF16)),
        ),
    )
    yield (
        "a fused attention to one written out",
        lambda: (
            stock(attention("fused"), data=numbers(*SEQUENCE)),
            stock(attention("written out"), data=numbers(*SEQUENCE)),
        ),
    )
    yield (
        "a fused attention to one written out, bf16",
        lambda: (
            stock(attention("fused", BF16), data=numbers(*SEQUENCE, dtype=BF16)),
            stock(attention("written out", BF16), data=numbers(*SEQUENCE, dtype=BF16)),
        ),
    )
    yield (
        "torch's transformer layer, float64 to float32",
        lambda: (
            stock(encoder(DOUBLE), data=numbers(*SEQUENCE, dtype=DOUBLE)),
            stock(encoder(), data=numbers(*SEQUENCE)),
        ),
    )
    yield (
        "convolutions and batch norms, float64 to float32",
        lambda: (
            stock(convolutions(DOUBLE), data=numbers(*IMAGE, dtype=DOUBLE)),
            stock(convolutions(), data=numbers(*IMAGE)),
        ),
    )
    yield (
        "dropout with the same seed, sums in another order",
        lambda: tuple(dropping(perceptron(linear, p=0.3), 1) for linear in (nn.Linear, BackwardsLinear)),  # type: ignore[misc]
    )
    yield (
        "float32 to autocast",
        lambda: (stock(perceptron(), data=numbers(*FLAT)), autocast(perceptron())),
    )
    for make in (torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad):
        yield (
            f"{make.__name__}, float64 to float32",
            lambda make=make: (
                stock(perceptron(dtype=DOUBLE), partial(make, lr=0.01), data=numbers(*FLAT, dtype=DOUBLE), n_steps=4),
                stock(perceptron(), partial(make, lr=0.01), data=numbers(*FLAT), n_steps=4),
            ),
        )


def dropping(model: nn.Module, seed: int) -> Any:
    """A run whose dropouts draw from this seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return stock(model, data=numbers(*FLAT))


# -- wrong -----------------------------------------------------------------------------------------------------


def one_seed(model: Any, group: Any) -> None:
    """Each rank draws its part of a matrix from the same seed, so that all parts are alike."""
    weight = model.blocks[1].mlp.up.weight
    with torch.no_grad():
        weight.normal_(0.0, 0.02, generator=torch.Generator().manual_seed(7))


def bias_in_the_sum(model: Any, group: Any) -> None:
    """A row-parallel bias that each rank adds before the sum."""

    class Early(RowParallelLinear):
        def leave(self, y: Tensor) -> Tensor:
            bias, self.bias = self.bias, None
            try:
                return super().leave(y + bias)
            finally:
                self.bias = bias

    model.blocks[1].mlp.down.__class__ = Early
    with torch.no_grad():
        model.blocks[1].mlp.down.bias += 0.01


def no_sum_of_gradients(model: Any, group: Any) -> None:
    """A column-parallel layer that forgets f: its input keeps a term of its gradient."""
    model.blocks[0].mlp.up.entered = True


def padded(step: int) -> tuple[Tensor, Tensor]:
    """A batch whose first rows are mostly padding."""
    x, y = tokens(step)
    y = y.clone()
    y[: ROWS // 2, 2:] = -100
    return x, y


def forgets_a_rank(sync: Any, group: Any) -> None:
    """Rank 1 steps with a gradient of one layer that is not the mean."""
    if group.rank == 1:
        sync.module.blocks[0].attention.value.weight.grad.mul_(1.5)


def other_norm(model: Any) -> Any:
    """A norm with another epsilon."""
    model.blocks[1].norm1.eps = 1e-2
    return model


def secret_bf16(model: Any) -> Any:
    """One product that is made in bf16 and called float32."""

    class Narrow(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x.bfloat16(), self.weight.bfloat16(), self.bias.bfloat16()).float()

    model.blocks[1].attention.key.__class__ = Narrow
    return model


def rough_gelu(model: Any) -> Any:
    """The tanh formula in one block."""
    model.blocks[1].mlp.activate = partial(F.gelu, approximate="tanh")
    return model


class Drawn(nn.Dropout):
    """A dropout that draws from a seed of its own."""

    seed = 0

    def forward(self, x: Tensor) -> Tensor:
        """same shape"""
        kept = torch.rand(x.shape, generator=torch.Generator().manual_seed(self.seed)) >= self.p
        return x * kept / (1 - self.p)


def with_drawn_dropout() -> Any:
    """A GPT that drops a quarter of one MLP's output."""
    model = gpt()
    model.blocks[0].mlp.dropout = Drawn(0.25)
    return model


def own_seeds(model: Any, group: Any) -> None:
    """Each rank drops other elements of what is whole on all of them."""
    model.blocks[0].mlp.dropout.seed = group.rank


def wrong() -> Iterator[tuple[str, Callable[[], Pair], tuple[str, str, int | None]]]:
    """(name, what runs both, (phase, layer, rank) where the mistake is)."""

    def fresh(**options: Any) -> Any:
        return one_process(gpt(), **options)

    yield (
        "initial weights of tensor-parallel ranks by one seed",
        lambda: (fresh(), tensor_parallel(2, change=one_seed)), ("start", "blocks.1.mlp.up", 0),
    )  # fmt: skip
    yield (
        "dropout seeds that differ between tensor-parallel ranks",
        lambda: (
            one_process(with_drawn_dropout()), tensor_parallel(2, with_drawn_dropout, change=own_seeds),
        ),
        ("forward", "blocks.0.mlp.dropout", 1),
    )  # fmt: skip
    yield (
        "another dropout seed",
        lambda: (dropping(perceptron(p=0.3), 1), dropping(perceptron(p=0.3), 2)), ("forward", "2", 0),
    )  # fmt: skip
    yield (
        "clipping by the norm of each shard",
        lambda: (fresh(clip=0.5), tensor_parallel(2, clip="by shard")), ("gradient", "", None),
    )  # fmt: skip
    yield (
        "a loss averaged over unequal numbers of tokens",
        lambda: (fresh(data=padded), data_parallel(2, data=padded)), ("backward", "", 0),
    )  # fmt: skip
    yield (
        "masters that never reach the parameters",
        lambda: (
            one_process(gpt(BF16), partial(MasterWeights, make_optimizer=adamw)),
            one_process(gpt(BF16), partial(MasterWeights, make_optimizer=adamw), before=lose_masters),
        ),
        ("update", "embedding.token", 0),
    )
    yield (
        "an optimizer resumed without its count of steps",
        lambda: (
            fresh(before=partial(resume, n_steps=100.0)), fresh(before=partial(resume, n_steps=0.0)),
        ),
        ("update", "embedding.token", 0),
    )  # fmt: skip
    yield (
        "a running mean that is never updated",
        lambda: (
            stock(convolutions(), data=numbers(*IMAGE)), stock(convolutions(momentum=0.0), data=numbers(*IMAGE)),
        ),
        ("forward", "1", 0),
    )  # fmt: skip
    yield (
        "a row-parallel bias inside of the sum",
        lambda: (
            fresh_with_bias(), tensor_parallel(2, change=bias_in_the_sum),
        ),
        ("forward", "blocks.1.mlp.down", 0),
    )  # fmt: skip
    yield (
        "a column-parallel layer without f",
        lambda: (fresh(), tensor_parallel(2, change=no_sum_of_gradients)), ("backward", "blocks.0.norm2", 0),
    )  # fmt: skip
    yield (
        "a gradient of one layer that rank 1 has not averaged",
        lambda: (fresh(), data_parallel(3, change=forgets_a_rank)), ("gradient", "blocks.0.attention.value", 1),
    )  # fmt: skip
    yield (
        "another learning rate",
        lambda: (fresh(), fresh(make=partial(torch.optim.AdamW, lr=2e-3))), ("update", "embedding.token", 0),
    )  # fmt: skip
    yield (
        "a norm with another epsilon",
        lambda: (fresh(), one_process(other_norm(gpt()))),
        ("forward", "blocks.1.norm1", 0),
    )
    yield (
        "a product in bf16 that calls itself float32",
        lambda: (fresh(), one_process(secret_bf16(gpt()))), ("forward", "blocks.1.attention.key", 0),
    )  # fmt: skip
    yield (
        "another formula of GELU",
        lambda: (fresh(), one_process(rough_gelu(gpt()))),
        ("forward", "blocks.1.mlp", 0),
    )
    yield (
        "an attention that sees the future",
        lambda: (
            stock(attention("fused"), data=numbers(*SEQUENCE)), stock(attention("all"), data=numbers(*SEQUENCE)),
        ),
        ("forward", "1", 0),
    )  # fmt: skip
    yield (
        "micro-batches whose losses are not divided",
        lambda: (fresh(), fresh(n_micro=2, loss=lambda y, t: 2 * cross_entropy(y, t))), ("backward", "", 0),
    )  # fmt: skip


def fresh_with_bias() -> Any:
    """The reference of `bias_in_the_sum`."""
    model = gpt()
    with torch.no_grad():
        model.blocks[1].mlp.down.bias += 0.01
    return one_process(model)


def rows(names: Sequence[str] = ()) -> Iterator[tuple[str, Any]]:
    """(name, what was found) of each healthy pair."""
    from labkit.probe.first_difference import first_difference

    for name, make in healthy():
        if not names or name in names:
            yield name, first_difference(*make())


if __name__ == "__main__":
    print(f"{'pair':52s} {'tensors':>8s} {'largest':>8s}  where")
    for name, seen in rows():
        near = seen.nearest
        where = (
            f"{near.phase} {near.layer or 'model'}: {near.tensor}, {near.difference / (near.size or 1):.1e} of its size"
        )
        print(f"{name:52s} {seen.looked.tensors:8,d} {near.ratio:8.4f}  {where}{'  FOUND' * seen.differs}", flush=True)
