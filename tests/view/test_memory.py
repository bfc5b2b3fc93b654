"""Pictures of memory: that every number is there, that heights are bytes, and that the peak is not lost in columns."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given, settings, strategies as st

from labkit.plan.breakdown import KINDS, Breakdown, Item
from labkit.probe.storages import Moment
from labkit.view.memory import BOTTOM, COLOURS, COLUMNS, LEFT, RIGHT, TOP, beside, over_time
from labkit.view.svg import WIDTH
from labkit.view.units import bytes_text

SVG = "{http://www.w3.org/2000/svg}"
STEP = (
    Moment(10.0, "", "", (4096, 0, 0, 0, 0)),
    Moment(10.1, "forward", "0", (4096, 0, 0, 2048, 0)),
    Moment(10.2, "backward", "0", (4096, 4096, 0, 2048, 512)),
    Moment(10.3, "", "", (4096, 4096, 0, 0, 0)),
    Moment(10.4, "step", "", (4096, 4096, 8192, 0, 0)),
)


def words(picture) -> list[str]:
    """All text of a picture; parsing it proves that it is well-formed."""
    return [each for each in ET.fromstring(str(picture)).itertext() if each]


def bands(picture) -> dict[str, list[tuple[float, float]]]:
    """fill -> the points of the band of this colour."""
    found = {}
    for node in ET.fromstring(str(picture)).iter(SVG + "path"):
        x, y, points = 0.0, 0.0, []
        for letter, numbers in re.findall(r"([MVH])([-\d. ]+)", node.get("d", "")):
            first, *rest = map(float, numbers.split())
            x, y = (first, rest[0]) if letter == "M" else (x, first) if letter == "V" else (first, y)
            points.append((x, y))
        found[node.get("fill", "")] = points
    return found


def test_the_peak_is_named_with_its_place_and_all_its_numbers():
    """Would catch a picture from which nobody can tell why memory ran out, and a peak that is the last moment."""
    said = words(over_time(STEP[:4], title="a step"))
    assert "a step: peak 10.5 KiB at 200 ms, in backward of 0" in said
    for name, n_bytes in zip(KINDS, STEP[2].bytes, strict=True):
        assert name in said
        assert bytes_text(n_bytes) in said
    assert "38.1%" in said
    assert {"forward", "backward"} <= set(said)


def test_heights_are_bytes_on_one_scale():
    """Would catch bands that are not stacked, or each drawn to its own height."""
    picture = over_time(STEP)
    tall = (BOTTOM - TOP) / (1.06 * 16384)
    found = bands(picture)
    parameters, gradients, optimizer = (found[COLOURS[k]] for k in range(3))
    assert min(y for _, y in parameters) == pytest.approx(BOTTOM - 4096 * tall, abs=0.1)
    assert min(y for _, y in gradients) == pytest.approx(BOTTOM - 8192 * tall, abs=0.1)
    assert min(y for _, y in optimizer) == pytest.approx(BOTTOM - 16384 * tall, abs=0.1)
    assert all(LEFT - 0.1 <= x <= RIGHT + 0.1 and TOP - 0.1 <= y <= BOTTOM + 0.1 for p in found.values() for x, y in p)


@settings(max_examples=30)
@given(st.lists(st.tuples(*[st.integers(0, 1 << 40)] * len(KINDS)), min_size=1, max_size=3 * COLUMNS))
def test_the_highest_moment_is_drawn_at_its_full_height(rows):
    """Would catch columns that average: a peak of a microsecond is what runs out of memory."""
    moments = [Moment(0.001 * k, "forward", "m", row) for k, row in enumerate(rows)]
    peak = max(sum(row) for row in rows)
    picture = over_time(moments)
    assert f"{bytes_text(peak)}" in " ".join(words(picture))
    ys = [y for points in bands(picture).values() for _, y in points]
    if peak:
        assert min(ys) == pytest.approx(BOTTOM - peak * (BOTTOM - TOP) / (1.06 * peak), abs=0.2)


def test_the_curve_ends_where_the_words_say_it_does():
    """Would catch "at the end: 0 B" under a curve that ends high, since a column shows the highest of its moments."""
    freed = (*STEP, Moment(10.400001, "", "", (0, 0, 0, 0, 0)))
    picture = over_time(freed)
    assert "at the end: all of it is freed" in words(picture)
    for points in bands(picture).values():
        above = [y for x, y in points if x > RIGHT - 1]
        assert min(above) == pytest.approx(BOTTOM, abs=0.1)


def test_a_share_of_the_peak_never_reaches_its_bytes():
    """Would catch "264 B0.0466%": a tiny share with so many digits that it runs into the number before it."""
    said = words(over_time([Moment(0.0, "forward", "", (1 << 30, 264, 0, 0, 0)), STEP[0]]))
    assert "<0.1%" in said
    assert max(len(each) for each in said if re.fullmatch(r"[<\d.]+%", each)) <= 5


def test_a_cap_is_a_line_with_its_number_also_far_above_the_peak():
    """Would catch a cap outside the picture."""
    picture = over_time(STEP, cap_bytes=1 << 20)
    assert "cap 1 MiB" in words(picture)
    ys = [float(node.get("y1", "0")) for node in ET.fromstring(str(picture)).iter(SVG + "line")]
    assert min(ys) >= TOP - 8
    assert "1,048,576" in picture.label


def test_predicted_and_measured_stand_on_one_scale_with_every_number():
    """Would catch two bars that are both as long as the page, and an item that only one side has."""
    predicted = Breakdown([Item("parameters", 40_000, "B", "4 N"), Item("optimizer", 80_000, "B", "8 N")])
    measured = Breakdown.of({"parameters": 40_000, "optimizer": 90_000, "other": 30_000})
    picture = beside(predicted, measured, "AdamW")
    said = " ".join(words(picture))
    for part in ("80,000 B", "90,000 B", "30,000 B", "exact", "11.1% below", "120,000 B", "160,000 B", "AdamW"):
        assert part in said
    drawn = {node[0].text: float(node[1].get("width", "0")) for node in _titled(picture)}
    wide = {title.split(":")[0]: each for title, each in drawn.items()}
    assert wide["measured optimizer"] / wide["predicted optimizer"] == pytest.approx(90 / 80, rel=1e-3)
    assert wide["measured parameters"] == pytest.approx(wide["predicted parameters"])
    right = max(
        float(n.get("x", "0")) + float(n.get("width", "0")) for n in ET.fromstring(str(picture)).iter(SVG + "rect")
    )
    assert right <= WIDTH


def _titled(picture) -> list[ET.Element]:
    return [g for g in ET.fromstring(str(picture)).iter(SVG + "g") if len(g) > 1 and g[0].tag == SVG + "title"]


def test_what_cannot_be_drawn_is_refused():
    """Would catch a division by nothing, and bytes beside seconds."""
    with pytest.raises(ValueError, match="at least one moment"):
        over_time([])
    with pytest.raises(ValueError, match="in B, the measurement in s"):
        beside(Breakdown.of({"a": 1}), Breakdown.of({"a": 1}, "s"))
    with pytest.raises(ValueError, match="none below 0"):
        beside(Breakdown.of({"a": -1}), Breakdown.of({"a": 1}))
    with pytest.raises(ValueError, match="bars need items"):
        beside(Breakdown([]), Breakdown([]))
    assert "0 B" in words(over_time([Moment(0.0, "", "", (0,) * len(KINDS))]))


def test_the_peak_is_explained_in_words_with_the_cap_and_what_stays():
    """Would catch a peak that one has to read off a scale, and "below" for what is above."""
    said = words(over_time(STEP[:4], cap_bytes=1 << 20))
    assert "most of it: parameters, 4,096 B" in said
    assert "at the end: 8,192 B, 76.2% of it" in said  # of 10,752
    assert f"{bytes_text((1 << 20) - 10752)} below the cap" in said
    assert "752 B above the cap" in words(over_time(STEP[:4], cap_bytes=10_000))


def test_a_phase_too_short_for_its_name_has_its_first_letter_or_nothing():
    """Would catch names of three pixels."""
    moments = [Moment(t / 100, "forward" if t < 5 else "backward", "", (8, 0, 0, 0, 0)) for t in range(101)]
    picture = over_time(moments)
    sizes = {
        node.text: float(node.get("font-size", "13"))
        for node in ET.fromstring(str(picture)).iter(SVG + "text")
        if node.text
    }
    assert "forward" not in sizes
    assert sizes["F"] >= 11
    assert sizes["backward"] >= 11
    assert {"0 B", "4 B", "8 B"} <= set(sizes)
