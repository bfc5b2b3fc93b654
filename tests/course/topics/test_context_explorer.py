"""The explorer of attention over ranks: what its pictures say, and what its controls do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from labkit.course.topics.context_explorer import VIEWS, ContextExplorer
from labkit.course.topics.context_picture import LENGTHS, LINKS, crossovers, three_ways, tokens_text
from labkit.course.topics.zigzag_picture import orders, scores, slowest, work
from labkit.parallel.blockwise_attention import Rule
from labkit.parallel.context import contiguous, zigzag
from labkit.plan.laws.context import fastest, seconds, sent
from labkit.plan.machine.link import link_of
from labkit.plan.model.cut_attention import FOR_ALL, CutAttention, at_work
from labkit.view.units import binary_text, seconds_text
from tests.cases import cases
from tests.view import page

LLAMA = CutAttention(2**17, 8, 64, 8, 128)
RATE = 400e12


@cases("link", ("nvlink", "ethernet"))
@cases("layer", [LLAMA, replace(LLAMA, n=2, seq=2**13), replace(LLAMA, n=64, seq=2**20), replace(LLAMA, key_heads=64)])
def test_the_picture_is_whole_and_says_what_the_law_says(layer, link):
    """Would catch a picture that fails where ulysses cannot be, bytes in another column, and a line of another law."""
    link = link_of(link)
    picture = three_ways(layer, link, RATE)
    page.check(picture)
    assert "nan" not in str(picture)
    drawn = page.texts(picture)
    for kind in FOR_ALL:
        if not layer.possible(kind):
            assert any(f"{layer.n} ranks do not divide {layer.heads} heads" in words for words in drawn)
            continue
        row = drawn[drawn.index(kind) + 1 :]
        waits = seconds(kind, layer, RATE, link)["waiting"]
        assert row[:3] == [*map(binary_text, sent(kind, layer)), seconds_text(waits)]
        assert row[3] == binary_text(at_work(kind, layer))
        at, seen = page.line_of(picture, kind)
        assert tuple(at) == LENGTHS
        assert seen[-1] == seconds(kind, replace(layer, seq=LENGTHS[-1]), RATE, link)["waiting"]
    assert f"{fastest(layer, RATE, link)} waits least" in picture.label


def test_the_map_has_the_winner_of_each_length_and_link():
    """Would catch a map with rows and columns exchanged, or of one attention for all."""
    layers = [LLAMA, replace(LLAMA, key_heads=64)]
    picture = crossovers(layers, RATE)
    page.check(picture)
    for layer, axes in zip(layers, picture.axes, strict=True):
        for box in axes.patches:
            told = box.get_gid()
            seq, name = LENGTHS[int(box.get_x())], LINKS[int(box.get_y())]
            best = fastest(replace(layer, seq=seq), RATE, link_of(name))
            assert told.startswith(f"{tokens_text(seq)} tokens on {name}: {best} waits least")
        assert len(axes.patches) == len(LENGTHS) * len(LINKS)


@cases("n", (2, 3, 8))
@cases("order", (contiguous, zigzag))
def test_work_is_what_the_mechanism_masks(n, order):
    """Would catch work that is counted by another mask than the one that attention uses."""
    parts, rule = order(6 * n, n), Rule(causal=True, documents=None)

    def seen(rank, source):
        pairs = [(mine, keys) for mine in parts[rank] for keys in parts[source]]
        masks = [(mine, keys, rule.between(mine, keys, torch.device("cpu"))) for mine, keys in pairs]
        return sum(int((torch.ones(len(mine), len(keys)) * torch.as_tensor(mask)).sum()) for mine, keys, mask in masks)

    assert work(parts) == [[seen(rank, (rank - hop) % n) for rank in range(n)] for hop in range(n)]
    assert sum(map(sum, work(parts))) == scores((range(6 * n),), (range(6 * n),)) == 6 * n * (6 * n + 1) // 2


@cases("n", (2, 3, 4, 8))
def test_zigzag_is_level_and_order_is_not(n):
    """Would catch a picture in which both orders look alike, and words that leave the page."""
    ways = {"in order": contiguous(64 * n, n), "zigzag": zigzag(64 * n, n)}
    picture = orders(ways)
    page.check(picture)
    assert slowest(ways["zigzag"]) == 1
    assert slowest(ways["in order"]) == pytest.approx(2 - 1 / n, rel=0.02)
    assert f"{slowest(ways['in order']):.2f} times as long" in picture.label
    told = page.told(picture)
    assert sum("rank 0" in words and "queries" in words for words in told) == 3 + 2 * n + 1
    assert sum("half" in words for words in told) == 4 * n


def test_the_controls_move_the_picture():
    """Would catch a slider without a picture, and a second view that keeps the first."""
    explorer = ContextExplorer()
    assert "128k tokens, 64 heads, 8 for keys, over 8 ranks: ring waits least" in explorer.shown.value
    explorer.link.value = "ethernet"
    assert "ulysses waits least" in explorer.static().label
    explorer.ranks.value = 16
    assert "not possible" in explorer.shown.value
    explorer.seq.value = 2**20
    assert "1M tokens" in explorer.static().label
    explorer.rate.value = "1e12"
    assert "at 1 Tflop/s" in explorer.static().label
    explorer.ranks.value = 4
    explorer.view.value = VIEWS[1]
    assert "4 ranks, causal: who computes which scores" in explorer.static().label


def test_nonsense_is_told_and_the_picture_stays():
    """Would catch a slider that empties the page, a division by zero, and a start that the sliders cannot show."""
    explorer = ContextExplorer(heads=8)
    before = explorer.shown.value
    for control, odd, words in (
        (explorer.key_heads, 16, "8 query heads cannot share 16 key heads"),
        (explorer.rate, "0", "say flop/s above 0"),
        (explorer.rate, "fast", "is not a number of flop/s"),
    ):
        sound, control.value = control.value, odd
        assert words in explorer.message.value
        assert explorer.shown.value == before
        control.value = sound
    assert explorer.message.value == ""
    explorer.ranks.value = 16
    explorer.view.value = VIEWS[1]
    assert "16 ranks are too many" in explorer.message.value
    with pytest.raises(ValueError, match="link is one of nvlink, .*, got 'string'"):
        ContextExplorer(link="string")
    with pytest.raises(ValueError, match="9 ranks are too many"):
        orders({"a": contiguous(18, 9), "b": zigzag(18, 9)})
    with pytest.raises(ValueError, match="two orders of the same ranks"):
        orders({"a": contiguous(8, 2)})
