"""Prompts of several lengths in one batch: each row gets what it would get alone; what padding and room cost."""

from __future__ import annotations

import copy

import pytest
import torch

from labkit import run_threads
from labkit.parallel.contexts import Context
from labkit.parallel.tensor_plan import GPT_PLAN, split
from labkit.plan.model.shape import ModelShape
from labkit.plan.pocket.generation import RowsOfCache
from labkit.train.generate import decode, generate, generate_rows, prefill, sent_bytes
from labkit.train.kv_cache import KVCache
from tests.cases import cases
from tests.train.test_generate import EXPERTS, LEARNED, ROTARY, apart, plan_of, stirred

LENGTHS = (4, 1, 6, 4)
"""A row that is the longest, one of a single token, and two that are equal."""


def rows_of(lengths=LENGTHS, vocab=24):
    stream = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(vocab, (length,), generator=stream) for length in lengths]


def alone(model, rows, n_new):
    """Each prompt by itself, from whole forwards without any cache: its tokens, and the logits of its new ones."""
    tokens, logits = [], []
    for row in rows:
        text, scores = row[None], []
        for _ in range(n_new):
            scores.append(model(text)[0, -1].detach())
            text = torch.cat([text, scores[-1].argmax(-1)[None, None]], 1)
        tokens.append(text[0])
        logits.append(torch.stack(scores))
    return tokens, logits


def together(model, rows, tokens, pad=0, capacity=None):
    """The logits of the same new tokens, in one batch with a cache: [rows] of [new, V]."""
    counts = [len(row) for row in rows]
    padded = torch.full((len(rows), max(counts)), pad)
    for place, row in enumerate(rows):
        padded[place, : len(row)] = row
    cache = KVCache(model, len(rows), capacity)
    logits = [prefill(model, padded, cache, counts)]
    while len(logits) < len(tokens[0]) - counts[0]:
        last = torch.stack([text[kept] for text, kept in zip(tokens, cache.lengths, strict=True)])
        logits.append(decode(model, last, cache))
    return list(torch.stack(logits, 1))


def held_apart(config, n, n_new, lengths=LENGTHS):
    """Tokens and logits of n ranks, in one batch, against those of each prompt alone in one process."""
    model, rows = stirred(config), rows_of(lengths)
    want, logits = alone(model, rows, n_new)

    def rank(group):
        mine = copy.deepcopy(model)
        if n > 1:
            split(mine, plan_of(config), group)
        room = max(lengths) + n_new - 1
        return generate_rows(mine, rows, n_new), [together(mine, rows, want, pad, room) for pad in (0, 23)]

    for tokens, scores in run_threads(rank, n):
        assert [text.tolist() for text in tokens] == [text.tolist() for text in want]
        assert all(apart(mine, logits) < 1e-12 for mine in scores)


def test_rows_of_several_lengths_get_the_tokens_that_each_gets_alone():
    """Would catch a token that looks at padding, or stands behind the longest row and not behind its own."""
    held_apart(ROTARY, n=2, n_new=3)


@pytest.mark.rest
@cases("config", [LEARNED, ROTARY, EXPERTS])
@cases(("n", "lengths"), [(1, (2, 1, 7, 7, 3)), (2, (1, 7)), (3, (2, 1, 7, 7, 3)), (4, (5, 5, 2)), (4, (3,))])
def test_on_any_number_of_ranks_every_prompt_is_as_alone(config, n, lengths):
    """Would catch what the small one catches, with learned positions, experts and other cuts; the last places of the
    table, too: rows of 7 tokens get 6 more of 13."""
    held_apart(config, n, n_new=6, lengths=lengths)


@pytest.mark.rest
@cases("config", [LEARNED, ROTARY])
def test_parts_of_prompts_may_have_several_lengths_too(config):
    """Would catch a second part that is written where the longest row ends, and a mask that begins at one place for
    all rows."""
    model, rows = stirred(config), rows_of((6, 3, 5))
    cuts = [(4, 2), (1, 2), (2, 3)]
    cache = KVCache(model, 3, 6)
    for part in range(2):
        pieces = [row.split(cut)[part] for row, cut in zip(rows, cuts, strict=True)]
        counts = [len(piece) for piece in pieces]
        logits = prefill(model, torch.nn.utils.rnn.pad_sequence(pieces, batch_first=True), cache, counts)
    assert cache.lengths == [6, 3, 5]
    assert apart(logits, [model(row[None])[0, -1] for row in rows]) < 1e-12


@pytest.mark.rest
def test_padding_may_stand_where_the_table_of_positions_has_ended():
    """Would catch a short part of a full row whose padding asks for a position that the model does not have."""
    model, rows = stirred(LEARNED), rows_of((13, 4))
    cache = KVCache(model, 2)
    prefill(model, torch.stack([rows[0][:12], rows[0][:12]]), cache, [12, 1])
    cache.lengths[1] = 0  # the second row starts anew
    logits = prefill(model, torch.stack([rows[0][12:].repeat(4), rows[1]]), cache, [1, 4])
    assert apart(logits, [model(row[None])[0, -1] for row in rows]) < 1e-12


@pytest.mark.rest
def test_a_cache_of_another_dtype_and_a_context_parallel_model_take_rows_of_several_lengths():
    """Would catch numbers that are not rounded on their way into the cache, and a ring in the place of whole rows."""
    model, rows = stirred(ROTARY), rows_of()
    want, logits = alone(model, rows, 2)
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    cache = KVCache(model, len(rows), dtype=torch.float32)
    assert 0 < apart(prefill(model, padded, cache, LENGTHS), [scores[0] for scores in logits]) < 1e-3

    def rank(group):
        mine = copy.deepcopy(model)
        Context("ring", group).into_(mine)
        return generate_rows(mine, rows, 2)

    for tokens in run_threads(rank, 2):
        assert [text.tolist() for text in tokens] == [text.tolist() for text in want]


@cases("page", [1, 4, 16])
def test_used_bytes_are_those_of_tokens_and_pages_waste_less_than_a_page_a_row(page):
    """Would catch room that is counted as used, pages that two rows share, and a page too many for a full one."""
    model, rows = stirred(LEARNED).float(), rows_of()
    cache = KVCache(model, len(rows), max(LENGTHS))
    prefill(model, torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), cache, LENGTHS)
    law = RowsOfCache.of(ModelShape.of(LEARNED), LENGTHS, word=4, page=page)
    token = 2 * 2 * 48 * 4
    assert (cache.n_bytes, cache.used_bytes) == (law.padded, law.used) == (4 * 6 * token, 15 * token)
    assert law.paged == token * {1: 15, 4: 4 + 4 + 8 + 4, 16: 4 * 16}[page]
    assert law.used <= law.paged < law.used + len(rows) * page * token


@pytest.mark.rest
@cases("n", [1, 2, 4])
def test_padding_is_sent_as_tokens_are(n):
    """Would catch a law that counts the tokens of prompts where padding runs with them, and a gather of other rows."""
    model, rows = stirred(LEARNED), rows_of()

    def rank(group):
        mine = split(copy.deepcopy(model), GPT_PLAN, group)
        group.ledger.clear()
        generate_rows(mine, rows, 2)
        return group.ledger.sent_bytes()

    law = sent_bytes(LEARNED, 4, 6, n, 8) + sent_bytes(LEARNED, 4, 1, n, 8)
    assert run_threads(rank, n) == [law] * n


def test_rows_are_drawn_from_their_own_scores_and_lists_will_do():
    """Would catch a draw from another row's scores, and prompts of one length that come out in another way."""
    model = stirred(LEARNED)
    drawn = generate_rows(model, [[1, 2], [3]], 4, temperature=1e-9, generator=torch.Generator().manual_seed(1))
    assert [text.tolist() for text in drawn] == [text.tolist() for text in generate_rows(model, [[1, 2], [3]], 4)]
    assert torch.equal(torch.stack(generate_rows(model, [[1, 2], [3, 4]], 3)), generate(model, [[1, 2], [3, 4]], 3))
    assert [text.tolist() for text in generate_rows(model, [[1, 2], [3]], 0)] == [[1, 2], [3]]


@cases(
    ("call", "told"),
    [
        (lambda m: generate_rows(m, [], 2), "there are no prompts"),
        (lambda m: generate_rows(m, [[1], []], 2), r"prompt 1 is .* \(0,\)"),
        (lambda m: generate_rows(m, [[1], [[2]]], 2), r"prompt 1 is int64 \(1, 1\)"),
        (lambda m: generate_rows(m, [[1.5]], 2), r"prompt 0 is float32 \(1,\)"),
        (lambda m: generate_rows(m, [[1], [2, 3]], -1), "got n_new=-1"),
        (lambda m: generate_rows(m, [[1], [2] * 5], 10), "14 tokens a row is longer than seq=13"),
        (
            lambda m: prefill(m, torch.ones(2, 3, dtype=torch.int64), KVCache(m, 2), [3]),
            r"of the 3 tokens .* got \[3\]",
        ),
        (lambda m: prefill(m, torch.ones(2, 3, dtype=torch.int64), KVCache(m, 2), [3, 0]), r"got \[3, 0\]"),
        (lambda m: prefill(m, torch.ones(2, 3, dtype=torch.int64), KVCache(m, 2), [4, 1]), r"got \[4, 1\]"),
        (
            lambda m: prefill(m, torch.ones(2, 3, dtype=torch.int64), KVCache(m, 2, 2), [2, 3]),
            "row 1: 0 tokens are kept and 3 come, but there is room for 2",
        ),
        (lambda m: RowsOfCache.of(ModelShape.of(LEARNED), []), "got 0 rows"),
        (lambda m: RowsOfCache.of(ModelShape.of(LEARNED), [3], page=0), "page=0"),
        (lambda m: RowsOfCache.of(ModelShape.of(LEARNED), [3, 0]), "tokens=0"),
    ],
)
def test_what_is_no_batch_of_rows_is_refused_with_its_numbers(call, told):
    """Would catch counts that cut off a row in silence, and rows without a token, which have no next one."""
    with pytest.raises(ValueError, match=told):
        call(stirred(LEARNED))
