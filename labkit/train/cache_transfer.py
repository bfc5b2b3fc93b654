"""The cache of a prompt on its way from ranks that run prompts to ranks that go on token by token.

Prefill is bound by arithmetic and decode by memory, and a long prompt holds up everybody whose next token waits behind
it. So the two phases run on ranks of their own, and the keys and values of a prompt travel once, layer by layer:

    send_cache, when the prefill is over          prefill_and_send, while it runs

    computes  | layer 0 | layer 1 | layer 2 |     | layer 0 | layer 1 | layer 2 |
    sends                                   |0|1|2|         |0|       |1|       |2|
    waited for                              <----->                             <->

    sent        a number for each row, then 2 K N W numbers a layer, N the tokens of all rows: 8 B + 2 L K N W w bytes
                both ways, in the same messages, so that `receive_cache` takes either. Padding stays at home
    memory      a copy of what is sent, until it is taken: of all layers, or of those that are under way
    waited for  all of it, L x, behind the prefill; while it runs max(0, x - (1 - a) p, L x - (L - a) p), if a layer
                takes p seconds to be computed and x to be sent, and its part is there when the share a of the layer is
                done: about a quarter, as keys and values are made first (labkit.plan.pocket.generation.exposed_s)

With tp on both sides each rank sends to the one that has the same heads.

Sources: Patel et al. (Splitwise), arXiv:2311.18677, section 4.3: layer by layer for long prompts, and at the end for
short ones, whose cache is small; phases on devices of their own: Zhong et al. (DistServe), arXiv:2401.09670.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from labkit.comm.group import Group, Work
from labkit.train.generate import prefill
from labkit.train.gpt import GPT
from labkit.train.kv_cache import KVCache, places


def send_cache(cache: KVCache, group: Group, to: int) -> None:
    """Send what is kept to member `to`, which goes on from there; return when all of it is taken.

    Sends 8 B + 2 L K N W w bytes for N tokens in B rows."""
    works = [_send_lengths(cache.lengths, group, to)]
    works += [_send_layer(cache, layer, cache.lengths, group, to) for layer in range(len(cache.layers))]
    for work in works:
        work.wait()


def prefill_and_send(
    model: GPT, tokens: Tensor, cache: KVCache, group: Group, to: int, counts: Sequence[int] | None = None
) -> tuple[Tensor, list[Work]]:
    """Run a prompt as `prefill` does, and send each layer's keys and values while the next layer computes.

    Returns the logits [B, V] and what is under way: wait for each before the cache grows. What the cache had before is
    sent, too. Sends what `send_cache` sends, in the same messages. ValueError as `prefill`; nothing is sent then."""
    works: list[Work] = []

    def send(layer: int) -> None:
        come = [tokens.shape[1]] * cache.n_rows if counts is None else counts
        lengths = [kept + count for kept, count in zip(cache.lengths, come, strict=True)]
        if layer == 0:
            works.append(_send_lengths(lengths, group, to))
        works.append(_send_layer(cache, layer, lengths, group, to))

    return prefill(model, tokens, cache, counts, send), works


def receive_cache(cache: KVCache, group: Group, source: int) -> None:
    """Take what member `source` sends in either way; what was in the cache is forgotten.

    Both caches are of the same model. ValueError, before anything is changed, for other rows or heads, or no room for
    the tokens."""
    lengths = [int(length) for length in group.recv(source)]
    layers = [group.recv(source) for _ in cache.layers]
    rows, heads, capacity, width = cache.layers[0][0].shape
    if (len(lengths), *layers[0].shape[2:]) != (rows, heads, width) or max(lengths) > capacity:
        raise ValueError(
            f"{len(lengths)} rows of up to {max(lengths)} tokens came, with {layers[0].shape[2]} key heads of "
            f"{layers[0].shape[3]}, and this cache has room for {rows} rows of {capacity} tokens with {heads} of "
            f"{width}: cut both models alike, and make room for all tokens"
        )
    row, place = places(lengths, cache.layers[0][0].device)
    for kept, came in zip(cache.layers, layers, strict=True):
        for slot, theirs in zip(kept, came, strict=True):
            slot.transpose(1, 2)[row, place] = theirs.to(slot.dtype)
    cache.lengths = lengths


def _send_lengths(lengths: Sequence[int], group: Group, to: int) -> Work:
    return group.send(torch.tensor(lengths, device=group.device), to)


def _send_layer(cache: KVCache, layer: int, lengths: Sequence[int], group: Group, to: int) -> Work:
    """Keys and values of the tokens that are there, row after row.   [2, N, K, W]"""
    row, place = places(lengths, cache.layers[0][0].device)
    return group.send(torch.stack([kept.transpose(1, 2)[row, place] for kept in cache.layers[layer]]), to)
