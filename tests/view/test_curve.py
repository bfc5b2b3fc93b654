"""Numbers over steps."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET

import pytest

from labkit.view.curve import curve
from labkit.view.units import bytes_text, number_text
from tests.view.page import check, line_of


def test_a_curve_shows_its_last_value_and_says_both_ends():
    """Would catch a picture without numbers, and one that cannot be read aloud."""
    picture = curve({"loss": [(0, 5.5), (1, 4.25), (2, 3.04)]}, "loss of a run")
    ET.fromstring(str(picture))
    assert ">3.04<" in str(picture)
    assert "5.5 at step 0, 3.04 at 2" in picture.label


def test_what_is_not_finite_leaves_a_gap_and_does_not_break_the_axes():
    """Would catch a NaN in a path, which browsers drop whole."""
    chart = curve({"loss": [(0, 3.0), (1, math.nan), (2, math.inf), (3, 2.0), (4, 1.0)]})
    steps, values = line_of(chart, "loss")
    assert steps == [0, 1, 2, 3, 4]
    assert values == pytest.approx([3, math.nan, math.nan, 2, 1], nan_ok=True)
    assert "nan" not in str(chart)
    low, high = chart.axes[0].get_ylim()
    assert low < 1 < 3 < high


def test_series_differ_in_more_than_colour():
    """Would catch two curves that a colour-blind reader cannot tell apart."""
    drawn = str(curve({"one": [(0, 1.0), (9, 2.0)], "two": [(0, 2.0), (9, 1.0)]}))
    assert len(set(re.findall(r'stroke-dasharray="([^"]+)" ?/?>?', drawn))) >= 2


@pytest.mark.parametrize("series", [{}, {"a": []}, {"a": [(0, math.nan)]}])
def test_nothing_to_draw_is_refused(series):
    """Would catch a division by zero in the axes."""
    with pytest.raises(ValueError, match="no series holds a finite value"):
        curve(series)


@pytest.mark.parametrize("values", [[1.0], [2.0, 2.0], [0.0, 0.0], [-3.0, 4.0], [1e-9, 2e-9], [1e12, 3e12]])
def test_any_range_has_axes(values):
    """Would catch axes that need two different values."""
    picture = curve({"x": list(enumerate(values))})
    assert str(picture).count("<text") >= 4


@pytest.mark.parametrize(
    ("title", "named"),
    [
        ("loss of a run", "loss"),
        ("GB/s of x, on this machine", "GB/s of x"),
        ("% that 4 devices wait", "% that 4 devices wait"),
    ],
)
def test_both_axes_have_names(title, named):
    """Would catch numbers upward that are of nobody knows what, and a caller's own name that is not taken."""
    assert f">{named}</text>" in str(curve({"x": [(0, 1.0), (9, 2.0)]}, title))
    drawn = str(curve({"x": [(0, 1.0), (9, 2.0)]}, title, "rows", "MB at the peak"))
    assert ">rows</text>" in drawn
    assert ">MB at the peak</text>" in drawn


def test_numbers_at_close_ends_do_not_lie_on_each_other():
    """Would catch 19.9 on 18.2, which nobody can read."""
    check(curve({name: [(0, 5.0), (1, 1 + k / 100)] for k, name in enumerate("abc")}, "ends that are close"))


def test_no_number_lies_on_the_axis_across():
    """A bug: of two series that end at 0 the second number stood on the axis, below the first."""
    drawn = curve({"trained": [(0, 85.0), (8, 3.58e-5)], "least": [(0, 85.0), (8, 0.0)]}, "loss", "rank")
    drawn.canvas.draw()
    plot = drawn.axes[0].get_window_extent()
    ends = [words.get_window_extent() for words in drawn.texts if words.get_text() in ("0", number_text(3.58e-5))]
    assert len(ends) == 2
    assert all(end.y0 > plot.y0 or end.x0 > plot.x1 for end in ends)


def test_an_axis_of_powers_is_written_as_what_they_stand_for():
    """Would catch "log2 of the bytes": a number that no reader has in mind."""
    picture = curve({"rate": [(10, 1.0), (20, 2.0)]}, "GB/s", "bytes", x_text=lambda log2: bytes_text(2**log2))
    assert "1 at bytes 1,024 B, 2 at 1 MiB" in repr(picture)
    assert "1 MiB" in [mark.get_text() for mark in picture.axes[0].get_xticklabels()]
