"""A GPT that can be cut: a list of layers, each a plain module from one tensor to one tensor.

    tokens [B, T] -> Embedding -> Block 0 -> ... -> Block L-1 -> Head -> logits [B, T, V]
                         \\_________________ .layers __________________/

    Block:   x ---+--> norm1 -> attention ---(+)---+--> norm2 -> mlp ---(+)--> x      D = d_model, F = d_ff
                  |___________________________|    |_____________________|

Running `.layers` one after another IS the forward, so a pipeline stage is a run of layers, a ZeRO-3 unit is a layer,
and a checkpointed region is a layer. Query, key and value are three linears rather than one, because a tensor-parallel
rank takes whole heads of each: attention asks the tensors at hand how many heads there are, not the configuration.
With `kv_heads` query heads share keys and values in groups: there are fewer heads of these, K = kv_heads x head width,
and all that depends on them is smaller by n_head / kv_heads: two of the four matrices, the gradients of these, the
keys and values that ranks of cp send each other, and the cache of generation.

    parameters             VD (token, tied with the head) + [TD positions] + L(2DD + 2DK + 2DF + ...) + norms and biases
    activations            about 34 B T D bytes a block in 16 bits (Korthikanti 2022, arXiv:2205.05198, section 4.1)
    flops of a token       6 N + 12 L D T, forward and backward (see `GPTConfig.flops_per_token`)

A row may pack several documents (packed.py). `documents` [B, T] then number them, token by token. They are no part of
what flows from layer to layer, so each layer is called with both, `layer(x, documents)`, and with `layer(x)` if there
are none. Embedding and attention look at them, and a document gets in a packed row what it gets alone.

Norms come before the sublayers (Xiong 2020, arXiv:2002.04745, figure 1b): the residual path is a plain sum, so that
gradients reach the first block unharmed and warm-up can be short. Sizes and initialisation: Radford 2019, section 2.3.
Rotary positions: Su 2021, arXiv:2104.09864, section 3.4.2. Tied head: Press and Wolf 2016, arXiv:1608.05859.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.plan.model.cut_attention import window_piece
from labkit.train.config import GPTConfig
from labkit.train.moe import MoE
from labkit.train.packed import lengths, places

INIT_STD = 0.02
ROTARY_BASE = 10_000.0


class Embedding(nn.Module):
    """Token ids to vectors, with learned positions added if the configuration asks for them.   [B, T] -> [B, T, D]"""

    def __init__(self, config: GPTConfig) -> None:
        """`token` is V x D, `position` seq x D (None for rotary: attention turns queries and keys instead)."""
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocab, config.d_model)
        self.position = nn.Embedding(config.seq, config.d_model) if config.position == "learned" else None
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor, *documents: Tensor) -> Tensor:
        """[B, T] -> [B, T, D]. Raises ValueError for a wrong shape or dtype, T > seq, and ids outside the vocabulary.

        (Ids are checked on the CPU only: on a GPU the check would wait for the device at every step.)"""
        if tokens.dim() != 2 or tokens.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"a GPT takes whole-number tokens [batch, time], got {tokens.dtype} {tuple(tokens.shape)}"
                + (": add a batch dimension, tokens[None]" if tokens.dim() == 1 else "")
            )
        length = tokens.shape[1]
        if length > self.config.seq:
            raise ValueError(
                f"{length} tokens are longer than seq={self.config.seq}: cut them, or build with a larger seq"
            )
        try:
            x = self.token(tokens)
        except IndexError:
            raise ValueError(
                f"token ids go from {int(tokens.min())} to {int(tokens.max())}, "
                f"but the vocabulary has {self.config.vocab} (0 to {self.config.vocab - 1})"
            ) from None
        if self.position is not None:
            x = x + self.position(places(self.positions(length, tokens.device), *documents))
        return self.dropout(x)

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Where these tokens stand in their row: from 0 on, unless the row is cut over ranks (context.py).   -> [T]"""
        return torch.arange(length, device=device)


class Attention(nn.Module):
    """Causal self-attention over the heads that this rank holds.   [B, T, D] -> [B, T, D]"""

    def __init__(self, config: GPTConfig) -> None:
        """Four linears, query and out D x D, key and value K x D. The width of a head is fixed here, and the numbers of
        heads follow from the weights."""
        super().__init__()
        self.head_width, self.rotary, self.dropout = config.head_width, config.position == "rotary", config.dropout
        self.window = config.window
        self.query = nn.Linear(config.d_model, config.d_model, bias=config.bias)
        self.key = nn.Linear(config.d_model, config.kv_width, bias=config.bias)
        self.value = nn.Linear(config.d_model, config.kv_width, bias=config.bias)
        self.out = nn.Linear(config.d_model, config.d_model, bias=config.bias)
        self.out_dropout = nn.Dropout(config.dropout)

    @property
    def n_head(self) -> int:
        """Number of heads on this rank: rows of the query's weight / width of a head."""
        return self.query.weight.shape[0] // self.head_width

    @property
    def kv_heads(self) -> int:
        """Number of key heads on this rank, and of value heads: rows of the key's weight / width of a head."""
        return self.key.weight.shape[0] // self.head_width

    def forward(self, x: Tensor, *documents: Tensor) -> Tensor:
        """softmax(q k^T / sqrt(head width)) v, every position looking at itself and the past.   [B, T, D] -> same"""
        query, key, value = (self.heads(linear(x)) for linear in (self.query, self.key, self.value))
        if self.rotary:
            times = places(self.positions(query.shape[-2], x.device), *documents)
            query, key = rotate(query, times), rotate(key, times)
        mixed = self.attend(query, key, value, *documents)
        return self.out_dropout(self.out(mixed.transpose(1, 2).flatten(2)))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None = None) -> Tensor:
        """Where a token meets others: the one step that changes if the row is cut over ranks.

        [B, n, T, w], twice [B, k, T, w] -> [B, n, T, w]. Key head j serves query heads j n/k up to (j + 1) n/k.
        Each document is attended by itself, one after the other, so that no mask of T x T is made."""
        if documents is None:
            return self.attend_alone(query, key, value)
        rows = []
        for row, numbers in enumerate(documents):
            parts = (x[row : row + 1].split(lengths(numbers), dim=2) for x in (query, key, value))
            rows.append(torch.cat([self.attend_alone(*part) for part in zip(*parts, strict=True)], dim=2))
        return torch.cat(rows)

    def attend_alone(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The same for rows of one document each."""
        dropout = self.dropout if self.training else 0.0
        grouped = query.shape[1] != key.shape[1]
        if 0 < self.window < query.shape[-2]:
            return in_window(query, key, value, self.window, dropout_p=dropout, enable_gqa=grouped)
        return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True, enable_gqa=grouped)

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Where these tokens stand in their row, as in Embedding.   -> [T]"""
        return torch.arange(length, device=device)

    def heads(self, x: Tensor) -> Tensor:
        """Cut the last dimension into heads, as many as there are.   [B, T, n*w] -> [B, n, T, w]"""
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)


def in_window(query: Tensor, key: Tensor, value: Tensor, window: int, **options: Any) -> Tensor:
    """Causal attention to the last `window` keys, a query's own among them.   [B, n, T, w], twice [B, k, T, w] -> same

    Queries go in pieces, each with the keys that it may see, so that work and memory grow with T and not with its
    square; one mask serves all pieces. `options` are those of torch's attention."""
    length = query.shape[-2]
    piece = window_piece(length, window)
    near = torch.ones(piece, piece + window - 1, dtype=torch.bool, device=query.device).tril(window - 1).triu()
    # column 0 stands for the key that is window - 1 tokens before the piece
    mask = torch.zeros_like(near, dtype=query.dtype).masked_fill_(near.logical_not_(), -torch.inf)
    del near
    pieces = []
    for begin in range(0, length, piece):
        end, first = min(begin + piece, length), max(0, begin - window + 1)
        column = first - (begin - window + 1)
        seen = mask[: end - begin, column : column + end - first]
        keys, values = key[..., first:end, :], value[..., first:end, :]
        pieces.append(F.scaled_dot_product_attention(query[..., begin:end, :], keys, values, seen, **options))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-2)


def rotate(x: Tensor, times: Tensor | None = None) -> Tensor:
    """Turn the pair (x[i], x[i + w/2]) of position t by the angle t * 10000^(-2i/w).   [..., T, w] -> same

    `times` are the positions: [T], or [B, T] for x [B, n, T, w] whose rows have other ones; None for 0, 1, 2, ...
    The product of a query at s and a key at t then depends on s - t alone. Angles are taken in float32 at least: in
    bf16 position 257 could not be told from 256. Source: arXiv:2104.09864, section 3.4.2, pairs cut in halves."""
    length, width = x.shape[-2:]
    exact = torch.promote_types(x.dtype, torch.float32)
    slots = torch.arange(width // 2, device=x.device, dtype=exact)
    times = torch.arange(length, device=x.device) if times is None else times
    angle = times.to(exact)[..., None] * ROTARY_BASE ** (-2 * slots / width)
    angle = angle[:, None] if times.dim() == 2 else angle  # the same for all heads of a row
    cos, sin = angle.cos(), angle.sin()
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x.dtype)


class MLP(nn.Module):
    """Two linears with a GELU between them.   [..., D] -> [..., F] -> [..., D]"""

    def __init__(self, config: GPTConfig) -> None:
        """`up` is F x D, `down` D x F."""
        super().__init__()
        self.up = nn.Linear(config.d_model, config.hidden, bias=config.bias)
        self.down = nn.Linear(config.hidden, config.d_model, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]"""
        return self.dropout(self.down(self.activate(self.up(x))))

    def activate(self, x: Tensor) -> Tensor:
        """GELU.   [..., F] -> [..., F]"""
        return F.gelu(x)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).   [B, T, D] -> [B, T, D]"""

    def __init__(self, config: GPTConfig) -> None:
        """About 12 D^2 parameters for the usual F = 4D, and as many key heads as query heads."""
        super().__init__()
        self.norm1 = nn.LayerNorm(config.d_model, bias=config.bias)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.d_model, bias=config.bias)
        self.mlp = MoE(config, MLP) if config.n_expert else MLP(config)

    def forward(self, x: Tensor, *documents: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]"""
        x = x + self.attention(self.norm1(x), *documents)
        return x + self.mlp(self.norm2(x))


class Head(nn.Module):
    """The last norm and the scores of every token of the vocabulary.   [B, T, D] -> [B, T, V]"""

    def __init__(self, config: GPTConfig) -> None:
        """`out` is V x D without a bias; in a tied model its weight is the token embedding's, one Parameter."""
        super().__init__()
        self.norm = nn.LayerNorm(config.d_model, bias=config.bias)
        self.out = nn.Linear(config.d_model, config.vocab, bias=False)

    def forward(self, x: Tensor, *documents: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, V], for which it does not matter to which document a token belongs."""
        return self.out(self.norm(x))


class GPT(nn.Module):
    """The whole model.   tokens [B, T], and their documents [B, T] if rows pack several -> logits [B, T, V]

    With `seed` the weights are a function of (config, seed) alone, the same on every device and for every part of a
    cut model, and the CPU's generator is left as it was. Without, the seed is drawn from torch's own stream, so that
    `torch.manual_seed(...)` before decides (fake tensors cannot: give a seed). `n_params` counts the whole model, a
    tied weight once, and stays as it was built when a strategy cuts or frees weights later."""

    def __init__(self, config: GPTConfig, seed: int | None = None) -> None:
        """Build on torch's default device and dtype; on the meta device nothing is drawn."""
        super().__init__()
        self.config = config
        with torch.random.fork_rng(devices=[], enabled=seed is not None):  # torch's modules draw when they are made
            self.embedding = Embedding(config)
            self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
            self.head = Head(config)
        if config.tied:
            self.head.out.weight = self.embedding.token.weight
        self.n_params = sum(parameter.numel() for parameter in self.parameters())
        self.init_(int(torch.randint(2**31, (), device="cpu")) if seed is None else seed)

    @property
    def layers(self) -> list[nn.Module]:
        """[embedding, block 0, ..., block L-1, head]: run one after another they are the forward."""
        return [self.embedding, *self.blocks, self.head]

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """[B, T] -> [B, T, V]. Raises ValueError for tokens that do not fit (see Embedding)."""
        x, extra = tokens, () if documents is None else (documents,)
        for layer in self.layers:
            x = layer(x, *extra)
        return x

    def flops_per_token(self, seq: int | None = None) -> int:
        """Floating-point operations of forward and backward for one token (see `GPTConfig.flops_per_token`)."""
        return self.config.flops_per_token(seq)

    @torch.no_grad()
    def init_(self, seed: int) -> None:
        """Draw all weights anew: N(0, 0.02), biases 0, norms 1 and 0; smaller what writes to the residual path.

        The 2L sublayers add up on that path; with a standard deviation of 0.02 / sqrt(2L) each, the sum's variance does
        not grow with depth (Radford 2019, section 2.3). Layer i draws from a stream of (seed, i) on the CPU in float32,
        so a stage that is filled alone gets the same weights; expert e of it draws from one of (seed, i, e), for a rank
        that has some of the experts. Parameters on the meta device are left there."""
        small = INIT_STD / math.sqrt(2 * self.config.n_layer)
        for index, layer in enumerate(self.layers):
            if next(layer.parameters()).is_meta:
                continue
            if layer is self.head and self.config.tied:
                index = 0  # draws what the token embedding drew, also where `to_empty` has separated the two
            number = (seed << 16) + index
            stream = torch.Generator().manual_seed(number % 2**63)
            streams = {"": stream}
            for name, module in layer.named_modules():
                expert = name.split(".")[2] if name.startswith("mlp.experts.") else ""
                if expert not in streams:
                    streams[expert] = torch.Generator().manual_seed(((number << 16) + 1 + int(expert)) % 2**63)
                if isinstance(module, MoE) and module.bias is not None:
                    module.bias.zero_()
                if isinstance(module, nn.LayerNorm):
                    module.reset_parameters()
                elif isinstance(module, nn.Linear | nn.Embedding):
                    writes = name == "attention.out" or (name.startswith("mlp.") and name.endswith(".down"))
                    std = small if writes else INIT_STD
                    draw_(module, std, streams[expert])


def draw_(module: nn.Linear | nn.Embedding, std: float, stream: torch.Generator) -> None:
    """Fill the weight from the stream with N(0, std), the bias with 0; nothing on the meta device."""
    if not module.weight.is_meta:
        drawn = torch.empty(module.weight.shape, device="cpu", dtype=torch.float32)
        module.weight.copy_(drawn.normal_(0.0, std, generator=stream))
    if isinstance(module, nn.Linear) and module.bias is not None:
        module.bias.zero_()


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """-log softmax(logits)[target], in float32 at least.   [..., V], [...] -> [] (or [...] with reduction "none")

    A target of -100 does not count, neither in the sum nor in the mean (a mean of nothing is NaN). Raises ValueError
    for shapes that do not match and, on the CPU, for targets outside the vocabulary."""
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"logits {tuple(logits.shape)} need targets {tuple(logits.shape[:-1])}, got {tuple(targets.shape)}"
        )
    exact = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
    try:
        loss = F.cross_entropy(exact, targets.flatten(), reduction=reduction)
    except IndexError as error:
        raise ValueError(f"the vocabulary has {logits.shape[-1]} tokens: {error}") from None
    return loss.view(targets.shape) if reduction == "none" else loss
