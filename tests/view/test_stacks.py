"""Bars of named parts: their lengths are their numbers, on one scale, and the limit lies on that scale too."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from labkit.view.stacks import stacks
from tests.view.page import SVG, check, texts, told

PLAN = {"on paper": {"state": 1.0, "activations": 3.0}, "needed": {"state": 1.0, "activations": 4.0, "other": 1.0}}


def boxes(picture) -> dict[str, tuple[float, float, str]]:
    """What the pointer is told of a part -> (its left edge, its width, its colour)."""
    found = {}
    for group in ET.fromstring(str(picture)).iter(SVG + "g"):
        title, rect = group.find(SVG + "title"), group.find(SVG + "rect")
        if title is not None and rect is not None:
            found[title.text] = (float(rect.get("x")), float(rect.get("width")), rect.get("fill"))
    return found


def test_parts_follow_one_another_on_one_scale_with_a_colour_for_each_name():
    """Would catch a second bar on a scale of its own, a gap, and a part whose colour changes from bar to bar."""
    picture = stacks(PLAN, "a plan")
    check(picture)
    found = boxes(picture)
    unit = found["on paper, state: 1"][1]
    assert found["needed, activations: 4"][1] == pytest.approx(4 * unit, rel=1e-3)
    left, wide, _ = found["on paper, state: 1"]
    assert found["on paper, activations: 3"][0] == pytest.approx(left + wide, abs=0.1)
    assert found["on paper, activations: 3"][2] == found["needed, activations: 4"][2] != found["needed, state: 1"][2]
    assert {"4", "6"} <= set(texts(picture))
    assert len(told(picture)) == 5


def test_the_limit_lies_on_the_scale_of_the_bars():
    """Would catch a bar that ends before the line though it does not fit."""
    for cap in (2.0, 5.0, 40.0):
        picture = stacks(PLAN, limit=("cap", cap), words=lambda number: f"{number:g} MB")
        check(picture)
        x = float(re.search(r'<line x1="([\d.]+)"[^>]*stroke-dasharray="9 4"', str(picture))[1])
        left, unit, _ = boxes(picture)["needed, state: 1 MB"]
        assert x == pytest.approx(left + cap * unit, rel=1e-3)
        assert f"cap: {cap:g} MB" in texts(picture)
        assert picture.label.endswith(f"cap {cap:g} MB")


def test_a_number_that_the_limit_would_cross_stands_under_the_pointer_alone():
    """Would catch a dashed line through a number in the middle of its box."""
    shown = [texts(stacks({"a": {"b": 4000.0}, "c": {"d": 900.0}}, limit=("cap", cap))) for cap in (2000.0, 3200.0)]
    assert [words.count("4,000") for words in shown] == [1, 2]  # the total, and the number in the box


@pytest.mark.parametrize("wholes", [{}, {"a": {}}, {"a": {"b": -1.0}}, {"a": {"b": 0.0}}, {"a": {"b": float("nan")}},
                                    {"a": dict.fromkeys("bcdefghi", 1.0)}])  # fmt: skip
def test_what_is_no_picture_is_refused(wholes):
    """Would catch a bar that goes to the left, and a ninth part in the colour of the first."""
    with pytest.raises(ValueError, match="parts"):
        stacks(wholes)
