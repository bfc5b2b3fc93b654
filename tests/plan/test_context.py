"""Laws of attention over ranks: memory against a rehearsed rank, time against what the ring hides."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from labkit.parallel import blockwise_attention
from labkit.parallel.context import gathered_attention, ring_attention
from labkit.plan.laws import context
from labkit.plan.laws.context import crossover, exchange_s, fastest, hides_from, seconds, sent
from labkit.plan.machine.link import Link
from labkit.plan.model.context_memory import attend
from labkit.plan.model.cut_attention import FOR_ALL as ORDER, CutAttention, at_work, held_bytes
from labkit.plan.model.layer_rows import Terms
from labkit.plan.model.setting import Setting
from labkit.plan.model.sizes import Sizes
from labkit.probe.memory import MemoryProbe
from labkit.probe.rehearsal import run_fake
from tests.cases import cases

FAST, SLOW = Link("fast", 1e-6, 400e9), Link("slow", 5e-6, 5e9)
RATE = 400e12
LLAMA = CutAttention(2**17, 8, 64, 8, 128)
"""A layer with the heads of Llama 3 70B, a row of 128k tokens over 8 ranks."""


def highest(group, attention, key_heads, tokens):
    """Bytes at the highest moment of forward and backward of one attention."""
    shapes = [(1, heads, tokens, 8) for heads in (16, key_heads, key_heads, 16)]
    q, k, v, grad = (torch.zeros(shape, requires_grad=True) for shape in shapes)
    with MemoryProbe() as probe:
        attention(q, k, v, group).backward(grad.detach())
    return probe.peak.total


@cases("n", (2, 4))
@cases(("kind", "attention"), [("ring", ring_attention), ("gather", gathered_attention)])
def test_keys_and_gradients_that_are_held_are_those_of_the_law(n, kind, attention, monkeypatch):
    """Would catch a block of the ring that is kept for longer than its hop. What eight more key heads take is theirs
    alone: all else is the same (and scores are kept small beside them)."""
    monkeypatch.setattr(blockwise_attention, "TILE", 8)
    tokens = 32
    eight, sixteen = (run_fake(lambda group, k=k: highest(group, attention, k, tokens), n).value for k in (8, 16))
    law = [at_work(kind, CutAttention(n * tokens, n, 16, k, 8, word=4)) for k in (8, 16)]
    assert sixteen - eight == law[1] - law[0]


def test_ring_and_gather_send_the_same_and_ulysses_less_with_more_ranks():
    """Would catch (n-1) where a rank's tokens become fewer at the same time."""
    wide = replace(LLAMA, key_heads=64)
    assert sent("ring", LLAMA) == sent("gather", LLAMA)
    assert sent("ring", wide)[0] == 8 * sent("ring", LLAMA)[0]
    halves = [sum(sent("ulysses", replace(wide, n=n))) / (n - 1) * n**2 for n in (2, 4, 8)]
    assert halves == [halves[0]] * 3
    assert held_bytes(LLAMA) == 2 * held_bytes(replace(LLAMA, n=16))


@cases("link", (FAST, SLOW))
def test_hops_hide_from_the_length_on_that_the_formula_names(link):
    """Would catch a hop that is held against the scores of the whole row."""
    link = replace(link, alpha_s=0.0)
    tokens = hides_from(LLAMA, RATE, link)
    below, above = (replace(LLAMA, seq=8 * int(tokens * share)) for share in (0.9, 1.3))
    last = LLAMA.gradients / LLAMA.tokens / link.bytes_per_s
    assert seconds("ring", above, RATE, link)["waiting"] == pytest.approx(last * above.tokens)
    assert seconds("ring", below, RATE, link)["waiting"] > 1.1 * last * below.tokens


@cases("kind", ORDER)
@cases("word", (2, 4))
def test_latent_attention_counts_the_numbers_that_its_queries_and_keys_have_more(kind, word):
    """Would catch values that are as wide as keys, and a position's numbers that are left out. 128 numbers and 64 more
    for q and k are together as many as 160 for all, which is the reference."""
    latent, even = (
        CutAttention(2**15, 4, 16, 16, width, word=word, rope_width=rope_width)
        for width, rope_width in ((128, 64), (160, 0))
    )
    for law in (sent, at_work, exchange_s) if kind != "ulysses" else (sent, at_work):
        link = (FAST,) if law is exchange_s else ()
        assert law(kind, latent, *link) == law(kind, even, *link)
    assert (held_bytes(latent), latent.flops) == (held_bytes(even), even.flops)
    setting = Setting(1, 2**13, way={2: "half", 4: "fp32"}[word], cp=4, context=kind)
    tables = []
    for width, rope_width in ((128, 64), (160, 0)):
        t = Terms(
            Sizes(1, 2048, 16, 256, 2**15, head_width=width, q_lora=512, kv_lora=512, rope_width=rope_width), setting
        )
        values = 16 * 2**13 * width * word
        saved = (("query", values + 16 * 2**13 * rope_width * word),) * 2
        tables.append(attend(t, (*saved, ("value", values)), 16, 16))
    assert tables[0].saved == tables[1].saved


def test_the_best_way_changes_with_length_heads_and_link():
    """Would catch a table that knows one answer: short rows on a slow link wait least by ulysses where keys are many,
    long ones by the ring, and ulysses is not offered where heads do not come out even."""
    wide = replace(LLAMA, key_heads=64)
    table = crossover(wide, [2**13, 2**20], [FAST, SLOW], RATE)
    assert [seq for seq, _ in table] == [2**13, 2**20]
    assert table[0][1][1] == "ulysses"
    assert table[1][1][0] == fastest(replace(wide, seq=2**20), RATE, FAST) == "ring"
    assert fastest(replace(LLAMA, seq=2**13, n=16), RATE, SLOW) != "ulysses"


def test_the_tables_of_the_docstring_are_what_the_laws_give():
    """Would catch a law that was changed, and a table that was not."""
    lines = [line.split() for line in (context.__doc__ or "").splitlines()]
    numbers = {line[0]: [float(word) for word in line[1:] if word != "/"] for line in lines if line[:1] == ["32k"]}
    tables = [line for line in lines if line and line[0] in ("128k", "1M")]
    numbers |= {line[0]: [float(word) for word in line[1:] if word != "/"] for line in tables if "key" not in line}
    links = Link("", 1e-6, 400e9), Link("", 5e-6, 50e9)
    for name, seq in (("32k", 2**15), ("128k", 2**17), ("1M", 2**20)):
        layers = [(replace(LLAMA, seq=seq, key_heads=heads), link) for heads in (8, 64) for link in links]
        law = [1e3 * seconds(kind, layer, RATE, link)["waiting"] for layer, link in layers for kind in ORDER]
        assert numbers[name] == pytest.approx(law, rel=0.01, abs=0.005)
    for line, seq in zip((line for line in tables if "key" in line), (2**17, 2**20), strict=True):
        found = [float(word.strip(",")) for word in line[1:] if word[0].isdigit() and "." in word]
        layers = [replace(LLAMA, seq=seq, key_heads=heads) for heads in (8, 64)]
        law = [n for layer in layers for n in (held_bytes(layer), *(at_work(kind, layer) for kind in ORDER))]
        assert found == pytest.approx([n / 2**30 for n in law], rel=0.01)


@cases(
    ("make", "words"),
    [
        (lambda: sent("ulysses", replace(LLAMA, n=16)), "64 query heads and 8 key heads out over 16 ranks"),
        (lambda: sent("rings", LLAMA), "one of ring, gather, ulysses, halo, got 'rings'"),
        (lambda: replace(LLAMA, n=3), "rows of 131072 tokens do not cut over 3 ranks"),
        (lambda: replace(LLAMA, rows=0), "at least 1"),
    ],
)
def test_what_cannot_be_is_refused(make, words):
    """Would catch numbers for an attention that nobody can run."""
    with pytest.raises(ValueError, match=words):
        make()
