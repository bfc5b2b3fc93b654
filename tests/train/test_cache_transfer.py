"""The cache between ranks: what comes goes on as one process would, sent at the end or while the prompt is run."""

from __future__ import annotations

import copy
import time

import pytest
import torch

from labkit import Cluster, Links, run_threads
from labkit.comm.mesh import Mesh
from labkit.parallel.tensor_plan import GPT_PLAN, split
from labkit.plan.partition.layout import Layout
from labkit.train.cache_transfer import prefill_and_send, receive_cache, send_cache
from labkit.train.generate import decode, prefill
from labkit.train.gpt import GPT, GPTConfig
from labkit.train.kv_cache import KVCache
from tests.cases import cases
from tests.train.test_generate import LEARNED, ROTARY, apart, prompt_of, stirred, whole
from tests.train.test_generate_rows import LENGTHS, alone, rows_of

AT_END, BY_LAYER = "send_cache", "prefill_and_send"


def filled(way, model, tokens, cache, group, to, counts=None):
    """The logits of a prompt whose cache has been sent, and the bytes that it took."""
    group.ledger.clear()
    if way == AT_END:
        logits, works = prefill(model, tokens, cache, counts), []
        send_cache(cache, group, to)
    else:
        logits, works = prefill_and_send(model, tokens, cache, group, to, counts)
    for work in works:
        work.wait()
    return logits, group.ledger.sent_bytes(axis=group.axis)  # without those of sums over tp


@cases("way", [AT_END, BY_LAYER])
@cases("n", [1, 2])
def test_a_prompt_is_run_on_some_ranks_and_goes_on_on_others(way, n):
    """Would catch keys that arrive as values, a cache that is sent with its empty room, heads of another rank, and a
    layer that is sent before its keys are there."""
    model, prompt = stirred(ROTARY), prompt_of(3, 4)
    want, logits = whole(model, prompt, n_new=4)

    def rank(world):
        tp = Mesh.connect(Layout(dp=2, tp=n), world).tp
        mine = split(copy.deepcopy(model), GPT_PLAN, tp)
        cache = KVCache(mine, 3)
        if world.rank < n:
            return filled(way, mine, prompt, cache, world, world.rank + n)
        decode(mine, prompt[:, 0], cache)  # of another batch, to be forgotten
        receive_cache(cache, world, world.rank - n)
        return [decode(mine, want[:, t], cache) for t in range(4, 7)]

    outs = run_threads(rank, 2 * n)
    for (first, sent), rest in zip(outs[:n], outs[n:], strict=True):
        assert apart([first, *rest], logits) < 1e-12
        assert sent == 8 * 3 + 2 * 2 * 3 * (12 // n) * 4 * 4 * 8


@pytest.mark.rest
@cases("config", [LEARNED, ROTARY])
@cases("parts", [1, 2])
def test_both_ways_bring_the_same_bits_and_bytes_also_for_rows_of_several_lengths(config, parts):
    """Would catch padding that is sent, a part of a prompt without the parts before it, and a place that is counted
    from the longest row."""
    model, rows = stirred(config), rows_of()
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    want, logits = alone(model, rows, 3)

    def rank(group, way):
        own = copy.deepcopy(model)  # a model holds its cache while it runs: ranks in threads must not share one
        cache = KVCache(own, len(rows))
        if group.rank == 0:
            counts = list(LENGTHS)
            if parts == 2:  # the first token of each row is there before, but for that of the row which has no other
                prefill(own, tokens[:, :1], cache)
                cache.lengths = [length - (length == counts[row]) for row, length in enumerate(cache.lengths)]
                rest = [row[kept:] for row, kept in zip(rows, cache.lengths, strict=True)]
                counts = [len(row) for row in rest]
                last = torch.nn.utils.rnn.pad_sequence(rest, batch_first=True)
                return filled(way, own, last, cache, group, 1, counts)
            return filled(way, own, tokens, cache, group, 1, counts)
        receive_cache(cache, group, 0)
        kept = [[x[row, :, :length] for x in layer] for layer in cache.layers for row, length in enumerate(LENGTHS)]
        assert cache.lengths == list(LENGTHS)
        steps = []
        for _ in range(2):
            last = torch.stack([text[length] for text, length in zip(want, cache.lengths, strict=True)])
            steps.append(decode(own, last, cache))
        return kept, torch.stack(steps, 1)

    outs = {way: run_threads(lambda group, way=way: rank(group, way), 2) for way in (AT_END, BY_LAYER)}
    for (first, sent), (_, steps) in outs.values():
        assert apart(first, [scores[0] for scores in logits]) < 1e-12
        assert apart(steps, [scores[1:] for scores in logits]) < 1e-12
        assert sent == 8 * 4 + 2 * 2 * 48 * sum(LENGTHS) * 8
    for one, other in zip(*(out[1][0] for out in outs.values()), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_layer_is_on_its_way_before_the_next_one_computes():
    """Would catch a cache that is sent when the prefill is over, though it comes in the messages of layers."""
    model, prompt, events = stirred(LEARNED), prompt_of(3, 4), []

    def rank(group):
        cache = KVCache(model, 3)
        if group.rank == 1:
            return receive_cache(cache, group, 0)
        told = group.tapped(lambda event, peer, tag, x: events.append(tuple(x.shape)))
        hooks = [b.mlp.register_forward_hook(lambda *_, i=i: events.append(i)) for i, b in enumerate(model.blocks)]
        for work in prefill_and_send(model, prompt, cache, told, 1)[1]:
            work.wait()
        for hook in hooks:
            hook.remove()

    run_threads(rank, 2)
    part = (2, 12, 12, 4)  # keys and values of 3 rows of 4 tokens, 12 heads of 4
    assert events == [(3,), part, 0, part, 1]


def test_a_cache_that_does_not_fit_is_refused_and_leaves_the_old_one():
    """Would catch rows of another batch that are cut off in silence."""
    model = stirred(LEARNED)

    def rank(group):
        cache = KVCache(model, 3)
        if group.rank == 0:
            prefill(model, prompt_of(3, 4), cache)
            for _ in range(3):
                send_cache(cache, group, 1)
            return
        others = KVCache(model, 2), KVCache(model, 3, 2), KVCache(GPT(GPTConfig(2, 24, 6, 24, 13), seed=0), 3)
        for other, room in zip(others, ("2 rows of 13", "3 rows of 2", "3 rows of 13 tokens with 6 of 4"), strict=True):
            told = f"3 rows of up to 4 tokens came, with 12 key heads of 4, and this cache has room for {room}"
            with pytest.raises(ValueError, match=told):
                receive_cache(other, group, 0)
            assert other.lengths == [0] * other.n_rows

    run_threads(rank, 2)


@pytest.mark.rest
@cases(
    ("tokens", "counts", "told"),
    [
        (torch.ones(3, 14, dtype=torch.int64), None, "0 tokens are kept and 14 come"),
        (torch.ones(2, 4, dtype=torch.int64), None, r"got \(2, 4\)"),
        (torch.ones(3, 4, dtype=torch.int64), [4, 4], r"got \[4, 4\]"),
        (torch.full((3, 4), 99), None, "vocabulary"),
    ],
)
def test_a_prompt_that_is_refused_sends_nothing(tokens, counts, told):
    """Would catch a message that nobody waits for: the next receive would take it for its own."""
    model = stirred(LEARNED)

    def rank(group):
        if group.rank == 0:
            with pytest.raises(ValueError, match=told):
                prefill_and_send(model, tokens, KVCache(model, 3), group, 1, counts)
        return group.ledger.sent_bytes()

    assert run_threads(rank, 2) == [0, 0]


@pytest.mark.rest
def test_processes_on_a_shaped_link_bring_the_same_words_and_bytes_both_ways():
    """Would catch tensors that change while they are on their way, which only a wire between processes shows; and a
    link that is faster than it says."""
    config = GPTConfig(n_layer=4, d_model=48, n_head=12, vocab=24, seq=40, position="rotary")
    model, prompt = stirred(config), prompt_of(2, 32)
    want, _ = whole(model, prompt, n_new=3)
    n_bytes = 2 * 4 * 2 * 12 * 32 * 4 * 8 + 8 * 2

    def rank(group, way):
        cache = KVCache(model, 2)
        if group.rank == 1:
            receive_cache(cache, group, 0)
            return torch.stack([decode(model, want[:, 32 + t], cache).argmax(-1) for t in range(2)], 1)
        begin = time.monotonic()
        _, sent = filled(way, model, prompt, cache, group, 1)
        return time.monotonic() - begin, sent

    with Cluster(2, device="cpu", quiet=True, links=Links.uniform(2, bytes_per_s=n_bytes / 0.2)) as cluster:
        for way in (AT_END, BY_LAYER):
            (seconds, sent), tokens = (reply.value for reply in cluster.run(rank, way))
            assert sent == n_bytes
            assert torch.equal(tokens, want[:, 33:])
            assert seconds > 0.19
