"""The axes of a picture: where points lie, which marks are drawn, and what happens at the edges."""

from __future__ import annotations

import math

from labkit.view.axes import Axes

LINEAR = Axes(100, 0, 300, 200, (0.0, 10.0), (0.0, 4.0))
LOG = Axes(100, 0, 300, 200, (1.0, 100.0), (0.01, 1.0), log_x=True, log_y=True)


def test_points_lie_where_both_scales_say():
    """Would catch an axis upside down, and a logarithm on the wrong one."""
    assert LINEAR.at(0, 0) == (100, 200)
    assert LINEAR.at(5, 4) == (200, 0)
    x, y = LOG.at(10, 0.1)
    assert math.isclose(x, 200)
    assert math.isclose(y, 100)


def test_what_lies_outside_is_drawn_at_the_edge():
    """Would catch lines across the neighbour's picture, and the logarithm of 0."""
    assert LINEAR.at(99, -5) == (300, 200)
    assert LOG.at(0, 0) == (100, 200)


def test_a_line_has_a_gap_where_it_is_not_finite():
    """Would catch `nan` in a path, which hides all of it."""
    path = LINEAR.path([(0, 1), (1, 1), (2, math.nan), (3, 2), (4, math.inf), (5, 1), (6, 1)], "#000")
    assert path.count("M") == 2
    assert "nan" not in path
    assert "inf" not in path
    assert LINEAR.path([(0, math.nan)], "#000") == ""


def test_marks_are_round_and_never_on_each_other():
    """Would catch a dozen powers of ten in one place."""
    said = "".join(LOG.frame("steps", lambda x: f"x{x:g}", lambda y: f"y{y:g}"))
    assert all(each in said for each in ("x1<", "x10<", "x100<", "y0.01<", "y1<", ">steps<"))
    crowded = "".join(LINEAR.frame("", lambda x: "a long word", str, [k / 10 for k in range(100)], []))
    assert crowded.count("a long word") < 4
