"""Attention in a sliding window over ranks, against a masked softmax of the whole row in one process in float64."""

from __future__ import annotations

import pytest
import torch

from labkit import Cluster, run_threads
from labkit.parallel import blockwise_attention, halo
from labkit.parallel.blockwise_attention import positions_of
from labkit.parallel.context import contiguous, documents_of, zigzag
from labkit.parallel.halo import WindowRule, halo_attention
from tests.cases import cases

SIZES = (1, 2, 3, 4)
LENGTH, WIDTH, ROWS = 12, 4, 2
WINDOWS = (*range(1, LENGTH + 2), 40)
"""From own keys alone to one more than the row has, and far beyond."""
RAGGED = {2: (7, 5), 3: (1, 9, 2), 4: (5, 0, 1, 6)}
"""Tokens of each rank: a rank with one, a halo that goes past it, and a rank with none."""
PACKED = documents_of((1, 6, 5))
OWN = torch.stack([PACKED, documents_of((4, 4, 4))])


def made(key_heads=2, dtype=torch.float64, length=LENGTH, heads=4):
    """Queries, keys, values and a gradient for the answer, of whole rows."""
    stream = torch.Generator().manual_seed(length + key_heads)
    shapes = [(ROWS, count, length, WIDTH) for count in (heads, key_heads, key_heads, heads)]
    return [torch.randn(shape, generator=stream, dtype=torch.float64).to(dtype) for shape in shapes]


def whole(tensors, window, documents=None):
    """The answer and the three gradients, in float64, by the definition: all scores, a mask, a softmax, autograd."""
    q, k, v, grad = (x.double() for x in tensors)
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    places = torch.arange(q.shape[2])
    distance = places[:, None] - places[None, :]
    seen = ((distance >= 0) & (distance < window)).expand(ROWS, 1, *distance.shape)
    if documents is not None:
        numbers = documents.expand(ROWS, -1)
        seen = seen & (numbers[:, None, :, None] == numbers[:, None, None, :])
    scores = torch.einsum("bhqw,bhkw->bhqk", q, keys) / WIDTH**0.5
    weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1)
    y = torch.einsum("bhqk,bhkw->bhqw", weights, values)
    return [y.detach(), *torch.autograd.grad(y, (q, k, v), grad)]


def parts_of(lengths):
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return tuple((range(end - length, end),) for length, end in zip(lengths, ends, strict=True))


def cut(tensors, window, parts, autocast=False, **options):
    """The same from a rank for each part, put together again; and the bytes that each sent, forward and backward."""

    def on_rank(group):
        places = positions_of(parts[group.rank])
        q, k, v, grad = (x[:, :, places].clone() for x in tensors)
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):  # a thread's own
            y = halo_attention(q, k, v, group, window, parts=parts, **options)
        forward = group.ledger.sent_bytes()
        grads = torch.autograd.grad(y, (q, k, v), grad)
        return [y.detach(), *grads], (forward, group.ledger.sent_bytes() - forward)

    pieces, n_bytes = zip(*run_threads(on_rank, len(parts)), strict=True)
    return [torch.cat(tensors, 2) for tensors in zip(*pieces, strict=True)], list(n_bytes)


def apart(ours, theirs):
    """The largest difference."""
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(ours, theirs, strict=True))


@cases("n", SIZES)
@cases("window", WINDOWS)
@cases("key_heads", (1, 2, 4))
def test_answer_and_gradients_are_those_of_one_process(n, window, key_heads):
    """Would catch a halo that is one token short or long, gradients that stay where they were made, positions that
    count from a rank's own first token, and query heads that meet another group's keys."""
    tensors = made(key_heads)
    found, _ = cut(tensors, window, contiguous(LENGTH, n))
    assert apart(found, whole(tensors, window)) < 1e-13


@cases("lengths", RAGGED.values())
@cases("window", WINDOWS)
def test_parts_of_different_lengths_take_what_reaches_past_a_short_one(lengths, window):
    """Would catch a halo from the neighbour alone, whose tokens are fewer than the window wants."""
    tensors = made()
    found, _ = cut(tensors, window, parts_of(lengths))
    assert apart(found, whole(tensors, window)) < 1e-13


@cases("n", (1, 3, 4))
@cases("window", (1, 3, 6, 12))
@cases("documents", (PACKED, OWN))
def test_a_window_ends_where_its_document_begins(n, window, documents):
    """Would catch documents of a rank's tokens in place of those of the row, and a halo of another document."""
    tensors = made()
    found, _ = cut(tensors, window, contiguous(LENGTH, n), documents=documents)
    assert apart(found, whole(tensors, window, documents)) < 1e-13


@cases("window", (1, 2, 3, 5, 9, 20))
def test_tiles_outside_the_window_are_left_out_and_change_nothing(window, monkeypatch):
    """Would catch a tile that is skipped though one of its pairs is in the window."""
    monkeypatch.setattr(blockwise_attention, "TILE", 2)
    tensors = made(length=20)
    found, _ = cut(tensors, window, parts_of((11, 9)))
    assert apart(found, whole(tensors, window)) < 1e-13


@cases("window", (1, 2, 3, 4, 7, 30))
def test_a_rule_says_of_each_pair_of_tiles_what_the_definition_says(window):
    """Would catch a mask where all or nothing is seen, which costs work, and one pair too many or too few."""
    rule, runs = WindowRule(window), [range(a, b) for a in range(0, 8) for b in range(a + 1, 9)]
    for queries in runs:
        for keys in runs:
            pairs = torch.tensor([[i - window < j <= i for j in keys] for i in queries])
            verdict = rule.between(queries, keys, torch.device("cpu"))
            if isinstance(verdict, bool):
                assert bool((pairs == verdict).all()), (queries, keys)
            else:
                assert torch.equal(verdict, pairs), (queries, keys)
                assert 0 < int(pairs.sum()) < pairs.numel(), (queries, keys)


@cases("n", SIZES)
@cases("window", (1, 5, 17, 48))
def test_sixteen_bits_are_rounded_once_where_a_term_leaves_its_rank(n, window):
    """Would catch scores and sums over keys in bf16. A gradient has a term of each rank, n at most, each rounded once,
    and the sum once: half a unit in the last place (2^-9 of it) each, of terms that may be larger than their sum."""
    tensors = made(dtype=torch.bfloat16, length=48)
    exact = whole(tensors, window)
    found, _ = cut(tensors, window, contiguous(48, n))
    for ours, theirs in zip(found, exact, strict=True):
        assert ours.dtype == torch.bfloat16
        limit = (n + 1) * 2**-9 * 2 * float(theirs.abs().max())
        assert float((ours.double() - theirs).abs().max()) <= limit


@cases("n", SIZES)
@cases("window", (1, 4, 13))
def test_single_precision_is_as_exact_as_it_can_be_under_autocast_too(n, window):
    """Would catch products of fp32 tensors that autocast turns into bf16 products inside the attention."""
    tensors = made(dtype=torch.float32)
    found, _ = cut(tensors, window, contiguous(LENGTH, n), autocast=True)
    assert found[0].dtype == torch.float32
    assert apart(found, whole(tensors, window)) < 1e-5


@cases("lengths", [(12,), (6, 6), (4, 4, 4), (3, 3, 3, 3), *RAGGED.values()])
@cases("window", WINDOWS)
@cases("dtype", (torch.float64, torch.float32, torch.bfloat16))
def test_bytes_are_the_tokens_that_other_ranks_see_and_no_others(lengths, window, dtype):
    """Would catch a halo of w tokens, one that goes to every later rank, keys that come a second time in backward and
    gradients in fp32. Counted pair by pair: a token goes to a rank once if a query there sees it."""
    tensors = made(key_heads=2, dtype=dtype)
    _, n_bytes = cut(tensors, window, parts_of(lengths))
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).tolist()
    moves = {
        (owner[j], owner[i], j)
        for i in range(LENGTH)
        for j in range(LENGTH)
        if i - window < j <= i and owner[i] != owner[j]
    }
    a_token = 2 * ROWS * 2 * WIDTH * dtype.itemsize
    ranks = range(len(lengths))
    law = [[a_token * sum(move[side] == rank for move in moves) for side in (0, 1)] for rank in ranks]
    assert [list(pair) for pair in n_bytes] == law


def test_gradients_can_be_asked_for_twice():
    """Would catch a backward that changes what forward has kept, the halo among it."""
    tensors, parts = made(), contiguous(LENGTH, 3)

    def on_rank(group):
        q, k, v, grad = (x[:, :, positions_of(parts[group.rank])].clone() for x in tensors)
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        y = halo_attention(q, k, v, group, 6)
        first = torch.autograd.grad(y, (q, k, v), grad, retain_graph=True)
        return all(map(torch.equal, first, torch.autograd.grad(y, (q, k, v), grad)))

    assert run_threads(on_rank, 3) == [True] * 3


def test_the_halo_is_on_its_way_before_own_keys_are_looked_at(monkeypatch):
    """Would catch communication that is started late or waited for early: nothing would hide."""
    events = {rank: [] for rank in range(3)}

    class Watched(WindowRule):
        """Notes which keys are looked at, on the rank that has the queries."""

        def between(self, queries, keys, device):
            events[queries[0] // 4].append("own" if keys[0] // 4 == queries[0] // 4 else "halo")
            return super().between(queries, keys, device)

    monkeypatch.setattr(halo, "WindowRule", Watched)

    def on_rank(group):
        q, k, v, grad = (x[:, :, positions_of(contiguous(LENGTH, 3)[group.rank])].clone() for x in made())
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        noted = events[group.rank]
        y = halo_attention(q, k, v, group.tapped(lambda event, peer, tag, x: noted.append(event)), 3)
        noted.append("then")
        torch.autograd.grad(y, (q, k, v), grad)

    run_threads(on_rank, 3)
    assert events[1] == ["send", "own", "recv", "halo", "then", "halo", "send", "own", "recv"]


@pytest.mark.slow
def test_processes_give_what_threads_give():
    """Would catch tensors that a real wire still reads while they are changed, and messages that pass each other."""
    tensors, lengths = made(dtype=torch.float32), (5, 1, 6)

    def on_rank(group, tensors, lengths, window):
        ends = [sum(lengths[: rank + 1]) for rank in range(group.size)]
        parts = tuple((range(end - length, end),) for length, end in zip(lengths, ends, strict=True))
        places = positions_of(parts[group.rank])
        q, k, v, grad = (x[:, :, places].clone() for x in tensors)
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        y = halo_attention(q, k, v, group, window, parts=parts)
        return [y.detach(), *torch.autograd.grad(y, (q, k, v), grad)]

    with Cluster(3, device="cpu", quiet=True) as cluster:
        for window in (1, 4, 12):
            pieces = [reply.value for reply in cluster.run(on_rank, tensors, lengths, window)]
            found = [torch.cat(tensors, 2) for tensors in zip(*pieces, strict=True)]
            assert apart(found, whole(tensors, window)) < 1e-5


def q_and_k(query_heads=4, key_heads=4, tokens=6):
    return torch.zeros(2, query_heads, tokens, WIDTH), torch.zeros(2, key_heads, tokens, WIDTH)


REFUSED = [
    (q_and_k(), 0, None, "at least 1.*got 0"),
    (q_and_k(), 2.0, None, r"whole number of keys.*got 2\.0"),
    (q_and_k(), True, None, "got True"),
    (q_and_k(4, 3), 3, None, "4 query heads cannot share 3 key heads"),
    ((q_and_k()[0], q_and_k(tokens=5)[1]), 3, None, r"got \(2, 4, 6, 4\)"),
    (q_and_k(), 3, zigzag(24, 4), "rank 0 has 0 to 2, 21 to 23, and the next token is 0.*contiguous"),
    (q_and_k(), 3, contiguous(24, 4)[::-1], "rank 0 has 18 to 23, and the next token is 0"),
    (q_and_k(), 3, contiguous(20, 4), r"parts have \[5, 5, 5, 5\]"),
    ((torch.zeros(4, 6, WIDTH), torch.zeros(4, 6, WIDTH)), 3, None, r"q \[B, H, T, W\]"),
]


@cases(("tensors", "window", "parts", "words"), REFUSED)
def test_what_does_not_fit_is_refused_with_the_numbers(tensors, window, parts, words):
    """Would catch an error from deep inside a product, and a rank that has sent before it refuses."""
    q, k = tensors
    with pytest.raises(ValueError, match=words):
        run_threads(lambda group: halo_attention(q, k, k, group, window, parts=parts) if group.rank == 0 else None, 4)
