"""The cache of keys and values, and the new tokens that look into it.

    the cache of a layer, T_max = 6        k0 k1 k2 k3|k4 k5|.        keys of a row's tokens, as many values,
                                           prefill     decode         and room for those to come

Norms, linears and the MLP work on each token by itself, so a token that has been through the model is not needed again,
but for what later tokens look at: its keys and values. Attention is the one step that changes, and the positions: a
token stands where the cache ends. Both are asked of the modules (`attend` and `positions` in gpt.py), so new tokens put
their own methods there for the time of one forward, and the model stays as it is.

Rows of one batch may have several lengths. Tokens are then padded on their right, and each row has its own length:

    tokens [3, 5]     a0 a1 a2 a3 a4       lengths 5      next: a5 at place 5, sees a0 .. a5
                      b0 b1 .  .  .                2            b2 at place 2, sees b0 .. b2, never the padding
                      c0 c1 c2 .  .                3            c3 at place 3

Padding runs through the model for nothing, and a row that ends early has room in the cache that it does not use. Pages
of a few tokens each, dealt out when a row grows, save that room: labkit.plan.pocket.generation.RowsOfCache counts both.

    shapes      keys and values of a layer [B, K, T_max, W] each, K the key heads that this rank holds
    memory      2 L B K T_max W numbers. Heads that share their keys have fewer of them, and so has a rank of tp: K/n.
                In use are 2 L K W numbers for each token that is there, of `lengths` in all rows
    sent        nothing: labkit.train.cache_transfer sends a cache from rank to rank

Source: Pope et al., arXiv:2211.05102, sections 2 and 3.3; grouped key heads: Ainslie et al., arXiv:2305.13245; room
that rows do not use, and pages: Kwon et al. (vLLM), arXiv:2309.06180, sections 3 and 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.train.config import GPTConfig
from labkit.train.gpt import Embedding, Head

OnLayer = Callable[[int], None]
"""Is told the number of each layer, as soon as the cache has its part of the new tokens."""


class Decoder(Protocol):
    """What generates: a whole GPT, or a stage of one, which lacks an end (labkit.train.generate_staged)."""

    config: GPTConfig
    blocks: nn.ModuleList
    training: bool

    @property
    def embedding(self) -> Embedding | None:
        """In the first stage."""

    @property
    def head(self) -> Head | None:
        """In the last stage."""


class KVCache:
    """Keys and values of the tokens that a model has seen, layer by layer: `layers[i]` = (keys, values), each
    [B, K, T_max, W]. The first `lengths[b]` tokens of row b are there; whoever makes it less forgets the rest."""

    def __init__(
        self, model: Decoder, n_rows: int, capacity: int | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Room for `capacity` tokens (None: the model's `seq`) in each of `n_rows` rows, in the dtype of the weights or
        in another one. ValueError for sizes below 1, for a capacity above `seq`, which has no positions for it, and for
        a model with a window, of which a cache would hold what no query may see."""
        seq = model.config.seq
        if getattr(model.config, "window", 0):
            raise ValueError(
                f"a cache keeps all tokens, and this model looks at the last {model.config.window} alone: generate "
                "with GPTConfig(window=0), or call the model on the whole row for each token"
            )
        capacity = seq if capacity is None else capacity
        if n_rows < 1 or capacity < 1:
            raise ValueError(f"a cache has rows and tokens, at least 1 of each; got n_rows={n_rows}, {capacity} tokens")
        if capacity > seq:
            raise ValueError(
                f"a cache for {capacity} tokens a row is longer than seq={seq}: ask for fewer new tokens, cut the "
                "prompt, or build with a larger seq"
            )
        self.n_rows, self.capacity, self.lengths = n_rows, capacity, [0] * n_rows
        layers = []
        for block in model.blocks:
            attention: Any = block.attention
            weight, width = attention.key.weight, attention.head_width
            shape = (n_rows, weight.shape[0] // width, capacity, width)  # as many heads as the weights at hand have
            layers.append(tuple(weight.new_zeros(shape, dtype=dtype, requires_grad=False) for _ in range(2)))
        self.layers: list[tuple[Tensor, ...]] = layers

    @property
    def length(self) -> int:
        """Tokens of the longest row."""
        return max(self.lengths)

    @property
    def n_bytes(self) -> int:
        """Bytes of all keys and values, whether they are filled or not."""
        return sum(x.nbytes for layer in self.layers for x in layer)

    @property
    def used_bytes(self) -> int:
        """Bytes of the keys and values that are there."""
        return self.n_bytes // (self.n_rows * self.capacity) * sum(self.lengths)

    @contextmanager
    def inside(self, model: Decoder, counts: Sequence[int], on_layer: OnLayer | None = None) -> Iterator[None]:
        """While this lasts, the model's attention looks into this cache, and its tokens stand behind those in it.

        Of the tokens that come, the first counts[b] of row b are kept; `lengths` count them when it is over, unless it
        ends with an error. `on_layer` is told of each layer."""
        new = NewTokens(self, counts)
        with ExitStack() as stack:
            if model.embedding is not None:
                stack.enter_context(_in_place_of(model.embedding, "positions", new.positions))
            for layer, block in enumerate(model.blocks):
                attention: Any = block.attention
                stack.enter_context(_in_place_of(attention, "positions", new.positions))
                stack.enter_context(_in_place_of(attention, "attend", partial(new.attend, layer, on_layer)))
            yield
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]


class NewTokens:
    """Some new tokens of each row on their way through the model: where they stand, and what they see.

    Row b has `first[b]` tokens in the cache, and the first counts[b] of its new ones are no padding."""

    def __init__(self, cache: KVCache, counts: Sequence[int]) -> None:
        """Nothing is kept yet."""
        self.cache, self.counts, self.first = cache, list(counts), list(cache.lengths)
        self.end = max(first + count for first, count in zip(self.first, counts, strict=True))
        self.even = len(set(self.first)) == 1 and len(set(counts)) == 1

    def attend(self, layer: int, on_layer: OnLayer | None, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Keep the keys and values of new tokens, and let their queries meet all tokens up to themselves.

        [B, H, T, W], twice [B, K, T, W] -> [B, H, T, W]"""
        self.keep(layer, key, value)
        if on_layer is not None:
            on_layer(layer)
        new, kept = key.shape[2], self.cache.layers[layer]
        keys, values = (x[:, :, : self.end].to(query.dtype) for x in kept)
        grouped = query.shape[1] != key.shape[1]
        triangle = self.even and not self.first[0] and new > 1  # the mask of tokens that have nothing before them
        mask = None if triangle or (self.even and new == 1) else self.seen(new, query.device)
        return F.scaled_dot_product_attention(query, keys, values, mask, is_causal=triangle, enable_gqa=grouped)

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write keys and values of new tokens behind the old ones, row by row; those of padding are left out."""
        for kept, x in zip(self.cache.layers[layer], (key, value), strict=True):
            if self.even:
                kept[:, :, self.first[0] : self.end] = x[:, :, : self.counts[0]]
            else:  # [rows, tokens, heads, width] of each, so that a row and a place pick one token's heads
                row, place = places(self.counts, x.device)
                behind = torch.tensor(self.first, device=x.device)[row] + place
                kept.transpose(1, 2)[row, behind] = x.transpose(1, 2)[row, place].to(kept.dtype)

    def seen(self, new: int, device: torch.device) -> Tensor:
        """Which places each new token looks at: those before its own, and its own.   -> [B, 1, T, end]"""
        own = self.positions(new, device)[:, None, :, None]
        return torch.arange(self.end, device=device) <= own

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Where `length` new tokens of each row stand: behind those that are kept.   -> [B, T]

        Padding stands there, too, and where the model has no more places, at the last one."""
        own = torch.tensor(self.first, device=device)[:, None] + torch.arange(length, device=device)
        return own.clamp(max=self.cache.capacity - 1)


def places(counts: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and place of the first counts[b] tokens of each row b, row after row.   -> [sum(counts)] each"""
    there = torch.arange(max(counts), device=device) < torch.tensor(counts, device=device)[:, None]
    row, place = there.nonzero(as_tuple=True)
    return row, place


@contextmanager
def _in_place_of(module: nn.Module, name: str, method: Any) -> Iterator[None]:
    """Another method of one module, for a while. What was put there before (context.py does) comes back."""
    own = vars(module)
    before = own.get(name)
    own[name] = method
    try:
        yield
    finally:
        if before is None:
            del own[name]
        else:
            own[name] = before
