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
    memory      2 L B K T_max W numbers. Heads that share their keys have fewer of them, and so has a rank of tp: K/n
    flops       a token 2 N + 4 L D t with t tokens before it; without a cache each new token costs t times 2 N
    sent        nothing on one rank. With tp (labkit.parallel.tensor), of n ranks each sends for T new tokens a row
                (2L + 1) all_reduces of [B, T, D]: 2 a block, 1 of the embedding            2(n-1)/n B T D each
                an all_gather of the last token's logits [B, V]                             (n-1)/n B V
                decode is T = 1; `sent_bytes` adds it up. If tokens are drawn, rank 0 tells them: 8 B bytes more

Prefill is bound by arithmetic and decode by memory, so they may run on ranks of their own: the cache travels between
them (`send_cache`), 2 L B K t W numbers for t tokens a row.

Only the last token's logits are computed: of the others nothing is asked, and [B, T, V] would be large.

The same functions run a model that tp has cut: its attention holds n_head/n heads, so its cache does, too. Layers that
ZeRO-3 shards are gathered when they are called, as in training. A prompt may come in parts, one prefill after another.

Source: Pope et al., arXiv:2211.05102, sections 2 and 3.3; grouped key heads: Ainslie et al., arXiv:2305.13245; ranks
for each phase: Zhong et al. (DistServe), arXiv:2401.09670.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.comm.group import Group
from labkit.train.config import GPTConfig
from labkit.train.gpt import GPT


class KVCache:
    """Keys and values of the tokens that a model has seen, layer by layer: `layers[i]` = (keys, values), each
    [B, K, T_max, W]. The first `length` tokens of each row are there; whoever changes `length` forgets the rest."""

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
        self.n_rows, self.capacity, self.length = n_rows, capacity, 0
        layers = []
        for block in model.blocks:
            attention: Any = block.attention
            weight, width = attention.key.weight, attention.head_width
            shape = (n_rows, weight.shape[0] // width, capacity, width)  # as many heads as the weights at hand have
            layers.append(tuple(weight.new_zeros(shape, dtype=dtype, requires_grad=False) for _ in range(2)))
        self.layers: list[tuple[Tensor, ...]] = layers

    @property
    def n_bytes(self) -> int:
        """Bytes of all keys and values, whether they are filled or not."""
        return sum(x.numel() * x.element_size() for layer in self.layers for x in layer)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Keep the keys and values of new tokens, and let their queries meet all tokens up to themselves.

        [B, H, T, W], twice [B, K, T, W] -> [B, H, T, W]"""
        first, new = self.length, key.shape[2]
        for kept, x in zip(self.layers[layer], (key, value), strict=True):
            kept[:, :, first : first + new] = x
        keys, values = (kept[:, :, : first + new].to(query.dtype) for kept in self.layers[layer])
        mask = None  # a token alone sees everything; tokens at the start see a triangle; in between they see both
        if first and new > 1:
            mask = torch.ones(new, first + new, dtype=torch.bool, device=query.device).tril(first)
        grouped = query.shape[1] != key.shape[1]
        triangle = not first and new > 1
        return F.scaled_dot_product_attention(query, keys, values, mask, is_causal=triangle, enable_gqa=grouped)

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Where `length` new tokens stand: behind those that are kept.   -> [T]"""
        return torch.arange(self.length, self.length + length, device=device)

    @contextmanager
    def inside(self, model: GPT) -> Iterator[None]:
        """While this lasts, the model's attention looks into this cache, and its tokens stand behind those in it."""
        with ExitStack() as stack:
            stack.enter_context(_in_place_of(model.embedding, "positions", self.positions))
            for layer, block in enumerate(model.blocks):
                attention: Any = block.attention
                stack.enter_context(_in_place_of(attention, "positions", self.positions))
                stack.enter_context(_in_place_of(attention, "attend", partial(self.attend, layer)))
            yield


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
def prefill(model: GPT, tokens: Tensor, cache: KVCache) -> Tensor:
    """Run the tokens of a prompt, or its next part, and keep their keys and values.   [B, T] -> logits [B, V]

    The logits are those of the last token, whole on every rank of tp, and tell what comes next. Raises ValueError for
    tokens that do not fit the cache or the model, and for models that cannot go on token by token (`_check`)."""
    _check(model, tokens, cache)
    with cache.inside(model):
        x = tokens
        for layer in model.layers[:-1]:
            x = layer(x)
        if x.shape[1] != tokens.shape[1]:
            raise ValueError(
                f"of {tokens.shape[1]} tokens {x.shape[1]} came to the head: this model is sequence-parallel, and one "
                "token cannot be cut; split it by GPT_PLAN in place of GPT_SEQUENCE_PLAN, the weights are the same"
            )
        logits = _whole(model.head(x[:, -1:])[:, 0], model)
    cache.length += tokens.shape[1]
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
    `generator` or torch's own. With tp the draw of rank 0 counts for all. Prompts are equally long. ValueError for
    others, for more tokens than the model has positions, and for what `prefill` refuses."""
    tokens = prompt if isinstance(prompt, Tensor) else _rectangle(prompt, next(model.parameters()).device)
    if n_new < 0 or temperature < 0:
        raise ValueError(f"n_new and temperature are 0 or more, got n_new={n_new}, temperature={temperature}")
    if n_new == 0:
        return tokens.clone()
    if tokens.dim() != 2 or not tokens.numel():
        raise ValueError(f"a prompt is [rows, tokens] with at least one of each, got {tuple(tokens.shape)}")
    cache = KVCache(model, tokens.shape[0], tokens.shape[1] + n_new - 1)  # nobody looks back at the last one
    logits = prefill(model, tokens, cache)
    new = [_chosen(logits, temperature, generator, tp_of(model))]
    while len(new) < n_new:
        logits = decode(model, new[-1], cache)
        new.append(_chosen(logits, temperature, generator, tp_of(model)))
    return torch.cat([tokens, torch.stack(new, 1).to(tokens.dtype)], 1)


def send_cache(cache: KVCache, group: Group, to: int) -> None:
    """Send what is kept to member `to`, which goes on from there: prefill on one rank, decode on another.

    Sends 2 L B K t W numbers for t tokens a row, layer by layer, and holds a copy of them until they are taken. With tp
    on both sides each rank sends to the one that has the same heads."""
    layers = [torch.stack([kept[:, :, : cache.length] for kept in layer]) for layer in cache.layers]
    for work in [group.send(layer, to) for layer in layers]:
        work.wait()


def receive_cache(cache: KVCache, group: Group, source: int) -> None:
    """Take what member `source` sends with `send_cache`; what was in the cache is forgotten.

    Both caches are of the same model. ValueError, before anything is changed, for other rows or heads, or no room for
    the tokens."""
    layers = [group.recv(source) for _ in cache.layers]
    length = layers[0].shape[3]
    for kept, came in zip(cache.layers, layers, strict=True):
        room = tuple(kept[0].shape)
        if (*came.shape[1:3], came.shape[4]) != (*room[:2], room[3]) or length > room[2]:
            raise ValueError(
                f"keys and values {tuple(came.shape[1:])} came, and this cache has room for {room}: [rows, key heads, "
                "tokens, width]; cut both models alike, and make room for all tokens"
            )
    for kept, came in zip(cache.layers, layers, strict=True):
        for mine, theirs in zip(kept, came, strict=True):
            mine[:, :, :length] = theirs
    cache.length = length


def tp_of(model: GPT) -> Group | None:
    """The ranks that tensor parallelism has cut the model over: its head knows them. None for a whole model."""
    return getattr(model.head.out, "group", None)


def sent_bytes(config: GPTConfig, n_rows: int, new: int, n: int, word: int) -> int:
    """Bytes that each of n ranks of tp sends for `new` tokens in each of `n_rows` rows, `word` bytes a number.

    Where n does not divide B T D, the ranks of a ring differ from this by a few numbers."""
    sums = (2 * config.n_layer + 1) * n_rows * new * config.d_model
    return (n - 1) * (2 * sums + n_rows * config.vocab) * word // n


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
            f"prompts are of {', '.join(map(str, lengths)) or 'no'} tokens: rows of one batch have the same length, "
            "since they move on together; generate those of each length by themselves"
        )
    return torch.tensor([list(row) for row in rows], device=device)


def _check(model: GPT, tokens: Tensor, cache: KVCache) -> None:
    config = model.config
    if tokens.dim() != 2 or tokens.shape[0] != cache.n_rows or not tokens.shape[1]:
        raise ValueError(
            f"this cache has {cache.n_rows} rows and takes tokens [{cache.n_rows}, T] with T above 0, got "
            f"{tuple(tokens.shape)}: make another cache for another batch"
        )
    if cache.length + tokens.shape[1] > cache.capacity:
        raise ValueError(
            f"{cache.length} tokens are kept and {tokens.shape[1]} come, but there is room for {cache.capacity}: make "
            "a larger cache, KVCache(model, n_rows, capacity)"
        )
    if model.training and config.dropout:
        raise ValueError(f"the model would drop numbers with p={config.dropout}: call model.eval() before")
    if config.n_expert and config.capacity is not None:
        raise ValueError(
            f"capacity={config.capacity} lets an expert drop rows by their place in the whole sequence, and a token "
            "alone does not know it: build with capacity=None, the weights are the same"
        )
