"""Laws of attention in a window over ranks: bytes against the ledger, seconds against simulated links, memory."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from labkit import run_threads
from labkit.parallel import blockwise_attention
from labkit.parallel.blockwise_attention import Answers, Queries
from labkit.parallel.context import contiguous, ring_attention
from labkit.parallel.halo import halo_attention
from labkit.plan.job.recipe import Recipe, check
from labkit.plan.laws import context, halo
from labkit.plan.laws.halo import (
    at_work,
    exchange_s,
    halo_of,
    held_bytes,
    hides_from,
    pays_below,
    readers_of,
    seconds,
    sent,
    unhidden_s,
    window_flops,
)
from labkit.plan.machine.link import Link
from labkit.plan.machine.topology import Links
from labkit.plan.model.cut_attention import CutAttention
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout
from labkit.probe.memory import MemoryProbe
from labkit.probe.rehearsal import run_fake
from tests.cases import cases
from tests.simulated import simulate

MISTRAL = CutAttention(2**17, 8, 32, 8, 128)
SMALL = CutAttention(12, 4, 4, 2, 8, rows=2, word=4)
ALPHA, SPEED = 1e-3, 1e6
LINK = Link("a link", ALPHA, SPEED)
LOOK, GIVE = Queries.look, Answers.give
WINDOWS = (1, 2, 3, 4, 5, 7, 9, 10, 11, 12, 13, 50)


def tensors_of(layer):
    """This rank's queries, keys and values, of ones, and a gradient for the answer."""
    heads = (layer.heads, layer.key_heads, layer.key_heads, layer.heads)
    dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[layer.word]
    return [torch.ones(layer.rows, count, layer.seq // layer.n, layer.width, dtype=dtype) for count in heads]


def attend(group, layer, window):
    """Forward and backward of a halo; the bytes sent in each, and the seconds of each."""
    *inputs, grad = tensors_of(layer)
    q, k, v = (x.requires_grad_() for x in inputs)
    group.barrier()
    started = time.perf_counter()
    y = halo_attention(q, k, v, group, window)
    forward, ahead = group.ledger.sent_bytes(), time.perf_counter()
    group.barrier()
    turned = time.perf_counter()
    torch.autograd.grad(y, (q, k, v), grad)
    return (forward, group.ledger.sent_bytes() - forward), (ahead - started, time.perf_counter() - turned)


@cases("n", (1, 2, 3, 4))
@cases("window", WINDOWS)
@cases("word", (2, 4, 8))
def test_bytes_are_those_of_the_ledger_on_each_rank(n, window, word):
    """Would catch a law for a rank in the middle that is told of the first and the last, and gradients in fp32."""
    layer = replace(SMALL, n=n, word=word)
    found = [n_bytes for n_bytes, _ in run_threads(lambda group: attend(group, layer, window), n)]
    assert found == [sent(layer, window, rank) for rank in range(n)]
    assert sent(layer, window) == tuple(max(column) for column in zip(*found, strict=True))


def test_the_busiest_rank_sends_w_less_one_keys_and_values_whatever_the_row():
    """Would catch a halo that grows with the row: 2 (w-1) K W numbers of 2 bytes, and a ring (n-1) T/n of them."""
    for seq in (2**15, 2**17, 2**20):
        layer = replace(MISTRAL, seq=seq)
        assert sent(layer, 4096) == (2 * 4095 * 8 * 128 * 2,) * 2
        assert context.sent("ring", layer)[0] == 2 * (seq - seq // 8) * 8 * 128 * 2


@cases("n", (1, 2, 4, 6))
def test_a_ring_sends_no_more_forward_from_the_window_on_that_the_law_names(n):
    """Would catch T - T/n without the query's own key, and a halo that sends more than there is."""
    layer = replace(SMALL, n=n)
    ring, first = context.sent("ring", layer), pays_below(layer)
    assert first - 1 == layer.seq - layer.seq // n
    for window in WINDOWS:
        assert (sent(layer, window)[0] < ring[0]) == (window < first)
        assert sent(layer, window)[0] <= ring[0]
        assert sent(layer, window)[1] <= ring[1]


@cases("lengths", [(12,), (4, 4, 4), (5, 0, 1, 6), (0, 2)])
@cases("window", (1, 3, 8, 20))
def test_what_one_rank_lacks_another_gives(lengths, window):
    """Would catch two sides of a message that name other tokens: a rank would wait for what nobody sends."""
    ranks = range(len(lengths))
    wanted = {(owner, rank, run) for rank in ranks for owner, run in halo_of(lengths, rank, window)}
    given = {(rank, reader, run) for rank in ranks for reader, run in readers_of(lengths, rank, window)}
    assert wanted == given
    for rank in ranks:
        tokens = sum(len(run) for _, run in halo_of(lengths, rank, window))
        assert tokens == (min(window - 1, sum(lengths[:rank])) if lengths[rank] else 0)


@cases("n", (2, 4))
@cases("window", (1, 2, 4, 6, 12))
def test_seconds_of_the_exchange_are_those_of_simulated_links(n, window):
    """Would catch messages to several ranks that are counted one after the other, and a port that has no end."""
    layer, links = replace(SMALL, n=n), Links.uniform(n, alpha_s=ALPHA, bytes_per_s=SPEED)
    spent = [both for _, both in simulate(lambda group: attend(group, layer, window), links)]
    law = exchange_s(layer, window, LINK)
    assert max(ahead for ahead, _ in spent) == pytest.approx(law, abs=1e-7)
    assert max(behind for _, behind in spent) == pytest.approx(law, abs=1e-7)


@cases("rate", (1e6, 1e7, 1e9))
@cases("window", (2, 4))
def test_own_keys_hide_the_halo_as_far_as_the_law_says(rate, window, monkeypatch):
    """Would catch an exchange that is waited for before own keys are looked at, and gradients of the halo that are made
    last. A look takes the seconds of the pairs in the window at `rate` flop/s."""
    layer, tokens = SMALL, SMALL.seq // SMALL.n

    def taking(method, passes):
        def slowed(self, kv, part):
            (keys,), (queries,) = part, [run for _, run in self.tiles]
            pairs = sum(i - window < j <= i for i in queries for j in keys)
            time.sleep(passes * pairs * 2.0 * layer.rows * layer.heads * layer.pair / rate)
            return method(self, kv, part)

        return slowed

    monkeypatch.setattr(Queries, "look", taking(LOOK, 1))
    monkeypatch.setattr(Answers, "give", taking(GIVE, context.BACKWARD))
    links = Links.uniform(layer.n, alpha_s=ALPHA, bytes_per_s=SPEED)
    spent = [both for _, both in simulate(lambda group: attend(group, layer, window), links)]
    computed, waits = sum(window_flops(layer, window)) / rate, unhidden_s(layer, window, rate, LINK)
    assert tokens >= window - 1, "a halo of one rank"
    assert max(ahead for ahead, _ in spent) == pytest.approx(computed + waits[0], abs=1e-7)
    assert max(behind for _, behind in spent) == pytest.approx(context.BACKWARD * computed + waits[1], abs=1e-7)
    step = seconds(layer, window, rate, LINK)
    assert step.total == pytest.approx((1 + context.BACKWARD) * computed + sum(waits))


@cases("n", (1, 2, 3, 4))
@cases("window", WINDOWS)
def test_flops_are_those_of_the_pairs_in_the_window(n, window):
    """Would catch a triangle that is counted whole, and a halo's pairs that are counted with own keys."""
    layer = replace(SMALL, n=n)
    begin = layer.seq - layer.seq // n
    places = range(begin, layer.seq)
    own = sum(begin <= j for i in places for j in range(max(0, i - window + 1), i + 1))
    together = sum(len(range(max(0, i - window + 1), i + 1)) for i in places)
    a_pair = 4 * layer.rows * layer.heads * layer.width
    assert window_flops(layer, window) == (own * a_pair, (together - own) * a_pair)


@cases("window", (64, 1024))
def test_a_halo_hides_from_the_length_on_that_the_formula_names(window):
    """Would catch own keys that are counted as if each query saw w of them. Exact but for a token in the window."""
    link, rate = Link("", 0.0, 50e9), 400e12
    tokens = hides_from(MISTRAL, window, rate, link)
    shorter, longer = (replace(MISTRAL, seq=8 * round(tokens * share)) for share in (0.98, 1.02))
    assert longer.seq // 8 >= window
    assert unhidden_s(longer, window, rate, link)[0] == 0 < unhidden_s(shorter, window, rate, link)[0]


@cases("window", WINDOWS)
@cases("word", (2, 4))
def test_what_autograd_keeps_is_that_of_the_law(window, word):
    """Would catch a halo that is kept twice, or fetched again though the law has it kept."""
    layer = replace(SMALL, word=word)

    def kept(group):
        *inputs, _ = tensors_of(layer)
        q, k, v = (x.requires_grad_() for x in inputs)
        storages = {}

        def note(x):
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            y = halo_attention(q, k, v, group, window)
        assert y.grad_fn is not None
        return sum(storages.values())

    found = run_threads(kept, layer.n)
    assert found == [held_bytes(layer, window, rank) for rank in range(layer.n)]
    assert max(found) == held_bytes(layer, window)


@cases(("rank", "window"), [(0, 9), (1, 9), (1, 60), (2, 1)])
def test_keys_and_gradients_at_work_are_those_of_the_law(rank, window, monkeypatch):
    """Would catch wide gradients of a halo that stay, and blocks that are held twice. What eight more key heads take is
    theirs alone: all else is the same (and scores are kept small beside them)."""
    monkeypatch.setattr(blockwise_attention, "TILE", 8)

    def highest(group, layer):
        *inputs, grad = tensors_of(layer)
        q, k, v = (x.requires_grad_() for x in inputs)
        with MemoryProbe() as probe:
            halo_attention(q, k, v, group, window).backward(grad)
        return probe.peak.total

    eight, sixteen = (CutAttention(96, 3, 16, key_heads, 8, word=4) for key_heads in (8, 16))
    found = [run_fake(lambda group, cut=cut: highest(group, cut), 3, rank).value for cut in (eight, sixteen)]
    # of what is kept, q, k and v were there before, and y has as many heads as before: the halo remains
    law = [sent(cut, window, rank)[1] + at_work(cut, window, rank) for cut in (eight, sixteen)]
    assert found[1] - found[0] == law[1] - law[0]


def test_a_window_of_the_whole_row_is_what_a_ring_gives():
    """Would catch a window that ends one key early, in the mechanism and in the bytes: both against the ring's."""
    layer = replace(SMALL, n=3)
    stream = torch.Generator().manual_seed(0)
    shapes = [(2, heads, layer.seq, 8) for heads in (4, 2, 2)]
    rows = [torch.randn(shape, generator=stream, dtype=torch.float64) for shape in shapes]

    def both(group):
        (own,) = contiguous(layer.seq, 3)[group.rank]
        q, k, v = (x[:, :, own.start : own.stop] for x in rows)
        ring = ring_attention(q, k, v, group, parts=contiguous(layer.seq, 3))
        before = group.ledger.sent_bytes()
        ours = halo_attention(q, k, v, group, layer.seq)
        return float((ring - ours).abs().max()), before, group.ledger.sent_bytes() - before

    found = run_threads(both, 3)
    assert max(difference for difference, _, _ in found) < 1e-14
    assert found[0][1] == found[0][2], "rank 0 sends as much as in a ring"
    assert [ours for _, _, ours in found] == [2 * sent(layer, layer.seq, rank)[0] for rank in range(3)]


def test_the_tables_of_the_docstring_are_what_the_laws_give():
    """Would catch a law that was changed, and a table that was not."""
    link = Link("", 5e-6, 50e9)
    lines = {line.split()[0]: line for line in (halo.__doc__ or "").splitlines() if line.split()}
    for name, seq in (("32k", 2**15), ("128k", 2**17), ("1M", 2**20)):
        layer = replace(MISTRAL, seq=seq)
        numbers = [float(word.strip(",")) for word in lines[name].split()[1:]]
        n_bytes = [sent(layer, 4096)[0], context.sent("ring", layer)[0]]
        spent = [exchange_s(layer, 4096, link), context.exchange_s("ring", layer, link)[0]]
        assert numbers == pytest.approx([*(b / 2**20 for b in n_bytes), *(1e3 * s for s in spent)], rel=0.01)


def test_what_cannot_be_is_refused_with_the_numbers():
    """Would catch a law of a rank that is none, and a halo for a model whose queries see all keys, or some of whose
    blocks do."""
    with pytest.raises(ValueError, match="at least 1.*got 0"):
        sent(SMALL, 0)
    with pytest.raises(ValueError, match="one of 0 to 3, got 4"):
        sent(SMALL, 2, 4)
    shape = ModelShape.gpt(4, 64, 4, 256, 96)
    for some, words in ((shape, "4 of n_layer=4"), (shape.changed(window=8, n_windowed=3), "1 of n_layer=4")):
        with pytest.raises(ValueError, match=f"{words} blocks have none.*context='ring'.*window="):
            check(some, Recipe(context="halo"), Layout(cp=2))
    check(shape.changed(window=8, n_windowed=4), Recipe(context="halo"), Layout(cp=2))
    with pytest.raises(ValueError, match="window=0: take ring"):
        context.seconds("halo", SMALL, 1e12, LINK)
