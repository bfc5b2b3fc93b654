"""Generation with a cache: each token's keys and values are computed once, and kept for the tokens after it.

    prompt  t0 t1 t2 t3   prefill: all at once               logits of t3 --> t4
            t4            decode:  t4 alone meets k0 .. k4   logits of t4 --> t5
            t5            decode:  t5 alone meets k0 .. k5   ...

    the cache of a layer, T_max = 6        k0 k1 k2 k3|k4 k5|.        keys of a row's tokens, as many values,
                                           prefill     decode         and room for those to come

Norms, linears and the MLP work on each token by itself, so a token that has been through the model is not needed again,
but for what later tokens look at: its keys and values. Attention is the one step that changes, and the positions: a
token stands where the cache ends. Both are asked of the modules (`attend` and `positions` in gpt.py), so a cache takes
their place for the time of one forward, and the model stays as it is.

    shapes      keys and values of a layer [B, K, T_max, W] each, K the key heads that this rank holds
    memory      2 L B K T_max W numbers. Heads that share their keys have fewer of them, and so has a rank of tp: K/n.
                Of these 2 L K W are used for each token that is there, the sum over rows of `lengths`
    flops       a token 2 N + 4 L D t with t tokens before it; without a cache each new token costs t times 2 N
    sent        nothing on one rank. With tp (labkit.parallel.tensor), of n ranks each sends for T new tokens a row
                (2L + 1) all_reduces of [B, T, D]: 2 a block, 1 of the embedding            2(n-1)/n B T D each
                an all_gather of the last token's logits [B, V]                             (n-1)/n B V
                decode is T = 1; `sent_bytes` adds it up. If tokens are drawn, rank 0 tells them: 8 B bytes more

Rows of one batch may have several lengths. A prompt is then padded on its right, and each row has a length of its own:

    tokens [3, 5]     a0 a1 a2 a3 a4       lengths 5      next: a5 at place 5, sees a0 .. a5
                      b0 b1 .  .  .                2            b2 at place 2, sees b0 .. b2, never the padding
                      c0 c1 c2 .  .                3            c3 at place 3

Padding runs through the model for nothing, and a row that ends early keeps room in the cache that it does not use. Pages
of a few tokens each, dealt out when a row grows, save that room (labkit.plan.generation.RowsOfCache counts both).

Only the last token's logits are computed: of the others nothing is asked, and [B, T, V] would be large.

The same functions run a model that tp has cut: its attention holds n_head/n heads, so its cache does, too. Layers that
ZeRO-3 shards are gathered when they are called, as in training. A prompt may come in parts, one prefill after another.

Prefill and decode may run on ranks of their own: labkit.train.cache_transfer sends the cache between them.

Source: Pope et al., arXiv:2211.05102, sections 2 and 3.3; grouped key heads: Ainslie et al., arXiv:2305.13245; room
that rows do not use, and pages: Kwon et al. (vLLM), arXiv:2309.06180.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.comm.group import Group
from labkit.train.config import GPTConfig
from labkit.train.gpt import GPT


OnLayer = Callable[[int], None]
"""Is told the number of each layer, as soon as the cache has its part of the new tokens."""


class KVCache:
    """Keys and values of the tokens that a model has seen, layer by layer: `layers[i]` = (keys, values), each
    [B, K, T_max, W]. The first `lengths[b]` tokens of row b are there; whoever makes it less forgets the rest."""

    def __init__(self, model: GPT, n_rows: int, capacity: int | None = None, dtype: torch.dtype | None = None) -> None:
        """Room for `capacity` tokens (None: the model's `seq`) in each of `n_rows` rows, in the dtype of the weights or
        in another one. ValueError for sizes below 1, and for a capacity above `seq`, which has no positions for it."""
        seq = model.config.seq
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
        return sum(x.numel() * x.element_size() for layer in self.layers for x in layer)

    @property
    def used_bytes(self) -> int:
        """Bytes of the keys and values that are there."""
        return self.n_bytes // (self.n_rows * self.capacity) * sum(self.lengths)

    @contextmanager
    def inside(self, model: GPT, counts: Sequence[int], on_layer: OnLayer | None = None) -> Iterator[None]:
        """While this lasts, the model's attention looks into this cache, and its tokens stand behind those in it.

        Of the tokens that come, the first counts[b] of row b are kept. `on_layer` is called as `prefill` says."""
        new = NewTokens(self, counts)
        with ExitStack() as stack:
            stack.enter_context(_in_place_of(model.embedding, "positions", new.positions))
            for layer, block in enumerate(model.blocks):
                attention: Any = block.attention
                stack.enter_context(_in_place_of(attention, "positions", new.positions_of_heads))
                stack.enter_context(_in_place_of(attention, "attend", partial(new.attend, layer, on_layer)))
            yield


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
        own = self.positions_of_heads(new, device)[..., None]
        return torch.arange(self.end, device=device) <= own

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Where `length` new tokens of each row stand: behind those that are kept.   -> [B, T]

        Padding stands there, too, and where the model has no more places, at the last one."""
        own = torch.tensor(self.first, device=device)[:, None] + torch.arange(length, device=device)
        return own.clamp(max=self.cache.capacity - 1)

    def positions_of_heads(self, length: int, device: torch.device) -> Tensor:
        """The same for all heads of a row.   -> [B, 1, T]"""
        return self.positions(length, device)[:, None]


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


@torch.no_grad()
def prefill(
    model: GPT,
    tokens: Tensor,
    cache: KVCache,
    counts: Sequence[int] | None = None,
    on_layer: OnLayer | None = None,
) -> Tensor:
    """Run the tokens of a prompt, or its next part, and keep their keys and values.   [B, T] -> logits [B, V]

    counts      of row b the first counts[b] tokens, at least one, are the prompt's, and the rest is padding (None: all T)
    on_layer    is called with the number of each layer, as soon as the cache has its keys and values of these tokens

    The logits are those of each row's last token, whole on every rank of tp, and tell what comes next. Raises ValueError
    for tokens that do not fit the cache or the model, and for models that cannot go on token by token (`_check`)."""
    counts = [tokens.shape[-1]] * cache.n_rows if counts is None else list(counts)
    _check(model, tokens, cache, counts)
    with cache.inside(model, counts, on_layer):
        x = tokens
        for layer in model.layers[:-1]:
            x = layer(x)
        if x.shape[1] != tokens.shape[1]:
            raise ValueError(
                f"of {tokens.shape[1]} tokens {x.shape[1]} came to the head: this model is sequence-parallel, and one "
                "token cannot be cut; split it by GPT_PLAN in place of GPT_SEQUENCE_PLAN, the weights are the same"
            )
        last = x[torch.arange(len(counts), device=x.device), torch.tensor(counts, device=x.device) - 1]
        logits = _whole(model.head(last[:, None])[:, 0], model)
    cache.lengths = [length + count for length, count in zip(cache.lengths, counts, strict=True)]
    return logits


def decode(model: GPT, token: Tensor, cache: KVCache) -> Tensor:
    """Run one more token of each row.   [B] -> logits [B, V], as `prefill` does. ValueError as there."""
    if token.dim() != 1:
        raise ValueError(f"decode takes one token a row, [B], got {tuple(token.shape)}: prefill takes [B, T]")
    return prefill(model, token[:, None], cache)


@torch.no_grad()
def generate(
    model: GPT,
    prompt: Tensor | Sequence[Sequence[int]],
    n_new: int,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The prompt and `n_new` tokens behind it, row by row.   [B, T] -> [B, T + n_new]

    temperature 0 takes the most probable token; above 0 tokens are drawn from softmax(logits / temperature), with
    `generator` or torch's own. With tp the draw of rank 0 counts for all. Prompts are equally long (`generate_rows` takes
    others). ValueError for others, for more tokens than the model has positions, and for what `prefill` refuses."""
    tokens = prompt if isinstance(prompt, Tensor) else _rectangle(prompt, next(model.parameters()).device)
    if tokens.dim() != 2 or not tokens.numel():
        raise ValueError(f"a prompt is [rows, tokens] with at least one of each, got {tuple(tokens.shape)}")
    counts = [tokens.shape[1]] * tokens.shape[0]
    return torch.cat([tokens, _continued(model, tokens, counts, n_new, temperature, generator).to(tokens.dtype)], 1)


@torch.no_grad()
def generate_rows(
    model: GPT,
    prompts: Sequence[Tensor | Sequence[int]],
    n_new: int,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> list[Tensor]:
    """The same for prompts of several lengths, which run together.   [T_b] for each row b -> [T_b + n_new] for each

    Each row gets the tokens that it would get alone, and the cache has room for the longest row in all of them. A draw
    takes one number of the generator for each row. ValueError as `generate`, and for a prompt of no tokens."""
    device = next(model.parameters()).device
    rows = [torch.as_tensor(row, device=device) for row in prompts]
    for number, row in enumerate(rows):
        if row.dim() != 1 or not row.numel() or row.is_floating_point():
            raise ValueError(
                f"prompt {number} is {str(row.dtype)[6:]} {tuple(row.shape)}: prompts are rows of whole numbers, [T] "
                "with T above 0"
            )
    if not rows:
        raise ValueError("there are no prompts: give one row of tokens or more")
    counts = [row.numel() for row in rows]
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)  # with token 0, which nobody looks at
    new = _continued(model, tokens, counts, n_new, temperature, generator)
    return [torch.cat([row, more.to(row.dtype)]) for row, more in zip(rows, new, strict=True)]


def tp_of(model: GPT) -> Group | None:
    """The ranks that tensor parallelism has cut the model over: its head knows them. None for a whole model."""
    return getattr(model.head.out, "group", None)


def sent_bytes(config: GPTConfig, n_rows: int, new: int, n: int, word: int) -> int:
    """Bytes that each of n ranks of tp sends for `new` tokens in each of `n_rows` rows, `word` bytes a number.

    Where n does not divide B T D, the ranks of a ring differ from this by a few numbers."""
    sums = (2 * config.n_layer + 1) * n_rows * new * config.d_model
    return (n - 1) * (2 * sums + n_rows * config.vocab) * word // n


def _continued(
    model: GPT,
    tokens: Tensor,
    counts: Sequence[int],
    n_new: int,
    temperature: float,
    generator: torch.Generator | None,
) -> Tensor:
    """New tokens behind the first counts[b] of each row b.   [B, T] -> [B, n_new]"""
    if n_new < 0 or temperature < 0:
        raise ValueError(f"n_new and temperature are 0 or more, got n_new={n_new}, temperature={temperature}")
    if n_new == 0:
        return tokens[:, :0]
    cache = KVCache(model, tokens.shape[0], tokens.shape[1] + n_new - 1)  # nobody looks back at the last one
    logits = prefill(model, tokens, cache, counts)
    new = [_chosen(logits, temperature, generator, tp_of(model))]
    while len(new) < n_new:
        logits = decode(model, new[-1], cache)
        new.append(_chosen(logits, temperature, generator, tp_of(model)))
    return torch.stack(new, 1)


def _chosen(logits: Tensor, temperature: float, generator: torch.Generator | None, tp: Group | None) -> Tensor:
    """[B, V] -> [B]"""
    if not temperature:
        return logits.argmax(-1)  # the same on every rank of tp: sums over it have the same bits everywhere
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    drawn = torch.multinomial((exact / temperature).softmax(-1), 1, generator=generator)[:, 0]
    return drawn if tp is None or tp.size == 1 else tp.broadcast(drawn)


def _whole(logits: Tensor, model: GPT) -> Tensor:
    """The scores of all words, where the head is cut by words.   [B, V/n] -> [B, V]"""
    group = tp_of(model)
    if group is None or logits.shape[-1] == model.config.vocab:
        return logits
    return group.all_gather(logits.T.contiguous()).T  # it joins along dim 0, so words come first on the way


def _rectangle(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    lengths = sorted({len(row) for row in rows})
    if len(lengths) != 1:
        raise ValueError(
            f"prompts are of {', '.join(map(str, lengths)) or 'no'} tokens, and here all rows of a batch have the same "
            "length: generate_rows(model, prompts, n_new) takes several"
        )
    return torch.tensor([list(row) for row in rows], device=device)


def _check(model: GPT, tokens: Tensor, cache: KVCache, counts: Sequence[int]) -> None:
    config = model.config
    if tokens.dim() != 2 or tokens.shape[0] != cache.n_rows or not tokens.shape[1]:
        raise ValueError(
            f"this cache has {cache.n_rows} rows and takes tokens [{cache.n_rows}, T] with T above 0, got "
            f"{tuple(tokens.shape)}: make another cache for another batch"
        )
    if len(counts) != cache.n_rows or not all(0 < count <= tokens.shape[1] for count in counts):
        raise ValueError(
            f"counts say how many of the {tokens.shape[1]} tokens of each of {cache.n_rows} rows are no padding, at "
            f"least 1 of each, got {list(counts)}"
        )
    for row, (kept, come) in enumerate(zip(cache.lengths, counts, strict=True)):
        if kept + come > cache.capacity:
            raise ValueError(
                f"row {row}: {kept} tokens are kept and {come} come, but there is room for {cache.capacity}: make "
                "a larger cache, KVCache(model, n_rows, capacity)"
            )
    if model.training and config.dropout:
        raise ValueError(f"the model would drop numbers with p={config.dropout}: call model.eval() before")
    if config.n_expert and config.capacity is not None:
        raise ValueError(
            f"capacity={config.capacity} lets an expert drop rows by their place in the whole sequence, and a token "
            "alone does not know it: build with capacity=None, the weights are the same"
        )
