"""Generation with a cache: each token's keys and values are computed once, and kept for the tokens after it.

    prompt  t0 t1 t2 t3   prefill: all at once               logits of t3 --> t4
            t4            decode:  t4 alone meets k0 .. k4   logits of t4 --> t5
            t5            decode:  t5 alone meets k0 .. k5   ...

Of an old token attention needs keys and values, and nothing else does (labkit.train.kv_cache). Only the last token's
logits are computed: of the others nothing is asked, and [B, T, V] would be large. Prompts of several lengths run in one
batch with padding on their right (`generate_rows`), and each gets the tokens that it would get alone.

    flops       a token 2 N + 4 L D t with t tokens before it; without a cache each new token costs t times 2 N
    memory      the cache, see there
    sent        nothing on one rank. With tp (labkit.parallel.tensor), of n ranks each sends for T new tokens a row
                (2L + 1) all_reduces of [B, T, D]: 2 a block, 1 of the embedding            2(n-1)/n B T D each
                an all_gather of the last token's logits [B, V]                             (n-1)/n B V
                decode is T = 1; `sent_bytes` adds it up. If tokens are drawn, rank 0 tells them: 8 B bytes more

The same functions run a model that tp has cut: its attention holds n_head/n heads, so its cache does, too. Layers that
ZeRO-3 shards are gathered when they are called, as in training. A prompt may come in parts, one prefill after another.
Prefill and decode may run on ranks of their own (labkit.train.cache_transfer), and layers on several ranks
(labkit.train.generate_staged).

Source: Pope et al., arXiv:2211.05102, sections 2 and 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from labkit.comm.group import Group
from labkit.plan.words import dtype_name
from labkit.train.config import GPTConfig
from labkit.train.gpt import GPT
from labkit.train.kv_cache import Decoder, KVCache, OnLayer


@torch.no_grad()
def prefill(
    model: GPT,
    tokens: Tensor,
    cache: KVCache,
    counts: Sequence[int] | None = None,
    on_layer: OnLayer | None = None,
) -> Tensor:
    """Run the tokens of a prompt, or its next part, and keep their keys and values.   [B, T] -> logits [B, V]

    counts      of row b the first counts[b] tokens, at least one, are the prompt's, the rest is padding (None: all T)
    on_layer    is called with the number of each layer, as soon as the cache has its keys and values of these tokens

    The logits are those of each row's last token, whole on every rank of tp, and tell what comes next. Raises
    ValueError for tokens that do not fit the cache or the model, and for models that cannot go on token by token."""
    counts = [tokens.shape[-1]] * cache.n_rows if counts is None else list(counts)
    check(model, tokens, cache, counts)
    with cache.inside(model, counts, on_layer):
        x = tokens
        for layer in model.layers[:-1]:
            x = layer(x)
        if x.shape[1] != tokens.shape[1]:
            raise ValueError(
                f"of {tokens.shape[1]} tokens {x.shape[1]} came to the head: this model is sequence-parallel, and one "
                "token cannot be cut; split it by GPT_PLAN in place of GPT_SEQUENCE_PLAN, the weights are the same"
            )
    return last_scores(model, x, counts)


def last_scores(model: Decoder, x: Tensor, counts: Sequence[int]) -> Tensor:
    """The head's scores of each row's last token, whole where the head is cut by words.   [B, T, D] -> [B, V]"""
    assert model.head is not None
    last = x[torch.arange(len(counts), device=x.device), torch.tensor(counts, device=x.device) - 1]
    logits, group = model.head(last[:, None])[:, 0], tp_of(model)
    if group is None or logits.shape[-1] == model.config.vocab:
        return logits
    return group.all_gather(logits.T.contiguous()).T  # it joins along dim 0, so words come first on the way


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
    `generator` or torch's own. With tp the draw of rank 0 counts for all. Prompts are equally long: `generate_rows`
    takes others. ValueError for others, for more tokens than the model has positions, and as `prefill`."""
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
    rows, tokens = padded_prompts(prompts, next(model.parameters()).device)
    counts = [row.numel() for row in rows]
    new = _continued(model, tokens, counts, n_new, temperature, generator)
    return [torch.cat([row, fresh.to(row.dtype)]) for row, fresh in zip(rows, new, strict=True)]


def padded_prompts(prompts: Sequence[Tensor | Sequence[int]], device: torch.device) -> tuple[list[Tensor], Tensor]:
    """Each prompt [T_b], and all of them with padding on the right [B, T]. ValueError as `generate_rows`."""
    rows = [torch.as_tensor(row, device=device) for row in prompts]
    for number, row in enumerate(rows):
        if row.dim() != 1 or not row.numel() or row.is_floating_point():
            raise ValueError(
                f"prompt {number} is {dtype_name(row.dtype)} {tuple(row.shape)}: prompts are rows of whole numbers, "
                "[T] with T above 0"
            )
    if not rows:
        raise ValueError("there are no prompts: give one row of tokens or more")
    return rows, nn.utils.rnn.pad_sequence(rows, batch_first=True)  # with token 0, which nobody looks at


def tp_of(model: Decoder) -> Group | None:
    """The ranks that tensor parallelism has cut the model over: its head knows them. None for a whole model."""
    return None if model.head is None else getattr(model.head.out, "group", None)


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
    check_wish(n_new, temperature)
    if n_new == 0:
        return tokens[:, :0]
    cache = KVCache(model, tokens.shape[0], tokens.shape[1] + n_new - 1)  # nobody looks back at the last one
    logits = prefill(model, tokens, cache, counts)
    new = [chosen(logits, temperature, generator, tp_of(model))]
    while len(new) < n_new:
        logits = decode(model, new[-1], cache)
        new.append(chosen(logits, temperature, generator, tp_of(model)))
    return torch.stack(new, 1)


def check_wish(n_new: int, temperature: float) -> None:
    """ValueError for less than no tokens, and for a temperature below 0."""
    if n_new < 0 or temperature < 0:
        raise ValueError(f"n_new and temperature are 0 or more, got n_new={n_new}, temperature={temperature}")


def chosen(logits: Tensor, temperature: float, generator: torch.Generator | None, tp: Group | None) -> Tensor:
    """The next token of each row: the most probable one, or one that is drawn (`generate`).   [B, V] -> [B]"""
    if not temperature:
        return logits.argmax(-1)  # the same on every rank of tp: sums over it have the same bits everywhere
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    drawn = torch.multinomial((exact / temperature).softmax(-1), 1, generator=generator)[:, 0]
    return drawn if tp is None or tp.size == 1 else tp.broadcast(drawn)


def _rectangle(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    lengths = sorted({len(row) for row in rows})
    if len(lengths) != 1:
        raise ValueError(
            f"prompts are of {', '.join(map(str, lengths)) or 'no'} tokens, and here all rows of a batch have the same "
            "length: generate_rows(model, prompts, n_new) takes several"
        )
    return torch.tensor([list(row) for row in rows], device=device)


def check(model: Decoder, tokens: Tensor, cache: KVCache, counts: Sequence[int]) -> None:
    """ValueError, with the numbers and the mend, for tokens that do not fit the cache and models that drop numbers."""
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
