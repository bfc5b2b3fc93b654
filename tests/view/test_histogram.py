"""The gradient histogram: what formats make of gradients, by count and by rounding, and what the controls do."""

from __future__ import annotations

import pytest
import torch
from matplotlib.colors import to_hex

from labkit.course.topics.gradient_histogram import ALL, GradientHistogram
from labkit.probe.grads import gradient_statistics
from labkit.train.formats import BF16, E4M3, E5M2, FORMATS, FP16, round_to
from labkit.view.histogram import FILLS, KINDS, edges, fates, histogram
from tests.cases import cases
from tests.view import page

DRAW = torch.Generator().manual_seed(0)
GRADIENTS = {
    "embedding": torch.randn(4000, generator=DRAW) * 1e-6 * (torch.rand(4000, generator=DRAW) > 0.5),
    "block": torch.exp(3 * torch.randn(9000, generator=DRAW)) * 1e-8,
    "unused": None,
}
TABLE = gradient_statistics(GRADIENTS)
FLOATS = [each for each in FORMATS.values() if not each.integer]


@cases("format", FLOATS)
@cases("log2_scale", [0, 12, 30])
def test_what_becomes_zero_is_what_rounding_makes_zero(format, log2_scale):
    """Would catch an underflow line that is off by one power of two."""
    everything = torch.cat([each for each in GRADIENTS.values() if each is not None]).double() * 2.0**log2_scale
    held = round_to(everything, format)
    of = fates(TABLE, format, log2_scale)
    n = everything.numel()
    assert of.zero == pytest.approx((held == 0).sum().item() / n, abs=1e-12)
    low = ((held != 0) & (everything.abs() < format.smallest_normal)).sum().item() / n
    assert of.subnormal == pytest.approx(low, abs=1e-12)
    assert of.zero + of.subnormal + of.normal + of.over == pytest.approx(1)


def test_the_edges_of_fp16_and_bf16():
    """Would catch half of the smallest number taken for the smallest."""
    assert edges(FP16) == (-25, -14, 15)
    assert edges(BF16) == (-134, -126, 127)
    assert edges(E4M3) == (-10, -6, 8)
    assert edges(E5M2) == (-17, -14, 15)


def test_what_is_not_finite_or_too_large_is_over():
    """Would catch an infinite gradient that is counted nowhere."""
    table = gradient_statistics({"w": torch.tensor([1.0, torch.inf, torch.nan, 0.0])})
    of = fates(table, FP16)
    assert (of.zero, of.normal, of.over) == (0.25, 0.25, 0.5)
    assert fates(table, FP16, 16).over == 0.75
    page.check(histogram(table))


@cases("format", [FP16, BF16, E4M3])
@cases("log2_scale", [0, 32])
def test_the_picture_is_whole_at_any_scale(format, log2_scale):
    """Would catch bars that leave the page, and words on words in the lanes."""
    page.check(histogram(TABLE, format, log2_scale, span=(-40, 20)))
    page.check(histogram(TABLE, format, log2_scale, "block"))


def test_bars_are_shares_by_power_of_two_in_the_colour_of_what_becomes_of_them():
    """Would catch bars that are counts of another layer, and an edge that is off by one power of two."""
    chart = histogram(TABLE, FP16, 4, "block")
    counts = dict(TABLE["block"].histogram)
    bars = {round(bar.get_x() - 0.05): bar for bar in chart.axes[0].patches}
    assert {power: bar.get_height() for power, bar in bars.items()} == pytest.approx(
        {power + 4: count / 9000 for power, count in counts.items()}
    )
    lowest, normal, _ = edges(FP16)
    for power, bar in bars.items():
        kind = "zero" if power < lowest else "subnormal" if power < normal else "normal"
        assert bar.get_gid().endswith(kind)
        assert to_hex(bar.get_facecolor()).upper() == FILLS[KINDS.index(kind)]


def test_it_says_the_shares():
    """Would catch the shares of one layer under the name of all."""
    picture = histogram(TABLE, FP16, 16)
    of = fates(TABLE, BF16, 16)
    assert "all: 13,000 gradients times 2^16, as fp16 holds them" in picture.label
    assert f"bf16: {of.zero:.1%} zero" in picture.label
    one = histogram(TABLE, E5M2, 0, "block")
    assert "block: 9,000 gradients, as fp8_e5m2 holds them".replace("fp8_", "") in one.label
    assert "0.0% were zero before" in page.words(one)
    assert "beyond this page" in page.words(histogram(TABLE, FP16, 30, span=(-40, 0)))


def test_every_format_of_the_page_has_its_line():
    """Would catch a line that stands where the format still holds numbers."""
    chart = histogram(TABLE, FP16, span=(-40, 20))
    drawn = page.texts(chart)
    assert sorted(each for each in drawn if each in ("becomes zero in fp16", "e5m2", "e4m3fn", "bf16")) == [
        "becomes zero in fp16", "bf16", "e4m3fn", "e4m3fn", "e5m2", "e5m2",
    ]  # fmt: skip
    lines_at = {line.get_xdata()[0] for line in chart.axes[0].get_lines()}
    assert lines_at == {edges(each)[0] for each in (FP16, E5M2, E4M3)}


def test_only_zeros_and_nothing_have_a_picture():
    """Would catch the maximum of no bars."""
    page.check(histogram(gradient_statistics({"w": torch.zeros(5)})))
    page.check(histogram(gradient_statistics({"w": None})))
    with pytest.raises(ValueError, match="lower exponent to the higher"):
        histogram(TABLE, span=(3, 3))
    with pytest.raises(KeyError, match="no layer"):
        histogram(TABLE, layer="head")


def test_the_controls_move_the_gradients_and_not_the_page():
    """Would catch an axis that follows the gradients, on which nothing seems to move."""
    explorer = GradientHistogram(TABLE)
    before = explorer.static()
    explorer.scale.value = 12
    assert "times 2^12" in explorer.shown.value
    marks = [[each for each in page.texts(picture) if each.startswith("2^")] for picture in (before, explorer.static())]
    assert marks[0] == marks[1]
    explorer.format.value = "bf16"
    assert "as bf16 holds them" in explorer.shown.value
    assert [each for each, _ in explorer.layer.options] == [ALL, "embedding", "block"]
    explorer.layer.value = "block"
    assert "block: 9,000 gradients" in explorer.shown.value


def test_what_cannot_be_shown_is_refused():
    """Would catch an empty menu of layers, and a format without an exponent."""
    with pytest.raises(ValueError, match="run a backward pass first"):
        GradientHistogram(gradient_statistics({"w": None}))
    with pytest.raises(ValueError, match="format must be one of"):
        GradientHistogram(TABLE, format="int8")
