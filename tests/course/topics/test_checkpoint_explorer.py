"""The checkpoint explorer: what its picture says, and what its controls do."""

from __future__ import annotations

import pytest

from labkit.course.topics.checkpoint_explorer import CheckpointExplorer
from labkit.course.topics.checkpoint_picture import segments
from labkit.plan.pocket.segments import Stack
from tests.cases import cases
from tests.counting import lines
from tests.view import page

MIB = 2**20
STACK = Stack(36, MIB, MIB)
DOTS = {2: 19 * MIB, 6: 11 * MIB, 18: 19 * MIB}


@cases(("length", "cap"), [(1, None), (5, 24 * MIB), (6, 10**15), (36, 1)])
@cases("ratio", [1, 16])
def test_the_picture_is_whole_for_any_length_and_cap(length, cap, ratio):
    """Would catch words that leave the page or lie on each other, at both ends of the axis."""
    page.check(segments(Stack(36, ratio * MIB, MIB), length, DOTS if ratio == 1 else None, cap))


@pytest.mark.parametrize("n_layer", [1, 2, 128])
def test_one_layer_and_very_many_have_a_picture(n_layer):
    """Would catch the logarithm of one layer, and marks of the axis on top of each other."""
    page.check(segments(Stack(n_layer, 3e9, 1e8), n_layer))
    page.check(segments(Stack(n_layer, 7, 900), 1))


def test_it_says_the_lowest_point_the_chosen_one_and_the_flops():
    """Would catch the bytes of another length, and flops of a forward that is not run."""
    words = page.words(segments(STACK, 4, DOTS, 24 * MIB))
    assert "36 layers in 9 segments of at most 4: 12 MiB held at most" in words
    assert "lowest at k = 6: 11 MiB" in words
    assert "cap 24 MiB" in words
    assert "at most 1.3 of the plain one's; 68 layer forwards instead of 36" in words
    assert "measured with segments of 6: 11,534,336 B" in words
    plain = page.words(segments(STACK, 36))
    assert "at most 1 of the plain one's; 36 layer forwards instead of 36" in plain
    assert "again" not in plain
    assert "measured" not in plain


def test_a_dot_lies_on_the_curve_where_the_law_is_exact():
    """Would catch a dot that is drawn on another scale than the line."""
    chart = segments(STACK, 6, DOTS)
    lengths, held = page.line_of(chart, "held at most")
    assert held == pytest.approx([STACK.curve_bytes(length) for length in lengths])
    assert (lengths[0], lengths[-1]) == pytest.approx((1, 36))
    points = page.dots(chart)
    assert {point for hover, point in points.items() if hover.startswith("measured")} == {*DOTS.items()}
    assert (6, STACK.peak_bytes(6)) in points.values()
    for length, n_bytes in DOTS.items():
        assert STACK.curve_bytes(length) == pytest.approx(n_bytes)


def test_a_length_that_the_stack_does_not_have_is_refused():
    """Would catch a dot beyond the axis."""
    with pytest.raises(ValueError, match="1 to 36 long, not 40"):
        segments(STACK, 6, {40: 1})
    with pytest.raises(ValueError, match="1 to 36 long, not 0"):
        segments(STACK, 0)


def test_the_sliders_move_the_picture_and_dots_stay_with_their_stack():
    """Would catch a measurement of one model beside the law of another."""
    explorer = CheckpointExplorer(STACK, DOTS, 24 * MIB)
    assert explorer.length.value == 6
    assert explorer.stack == STACK
    assert "cap 24 MiB" in explorer.shown.value
    assert "19,922,944 B measured" in explorer.static().label
    explorer.length.value = 5
    assert "8 segments of at most 5" in explorer.shown.value
    assert explorer.message.value == "36 layers in 8 segments of 4 or 5"
    explorer.ratio.value = 16
    assert "measured" not in explorer.shown.value
    assert "lowest at k = 1.5" in explorer.shown.value
    explorer.layers.value = 4
    assert explorer.length.max == explorer.length.value == 4
    assert "4 layers in 1 segment of at most 4" in explorer.shown.value
    explorer.layers.value, explorer.ratio.value = 36, 1
    assert "measured" in explorer.shown.value
    explorer.cap.value = ""
    assert "cap" not in explorer.shown.value


def test_a_redraw_is_little_work_also_for_many_layers():
    """Would catch a picture that grows with the square of the layers."""
    explorer = CheckpointExplorer(Stack(128, MIB, MIB))

    def move():
        explorer.length.value = 64

    assert lines(move) < 600_000
