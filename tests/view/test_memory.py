"""Pictures of memory: that every number is there, that heights are bytes, and that the peak is not lost in columns."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from matplotlib.patches import StepPatch

from labkit.plan.breakdown import KINDS, Breakdown, Item
from labkit.probe.storages import MemorySample
from labkit.view.memory import COLUMNS, beside, over_time
from labkit.view.units import bytes_text

from . import page

SVG = "{http://www.w3.org/2000/svg}"
STEP = (
    MemorySample(10.0, "", "", (4096, 0, 0, 0, 0)),
    MemorySample(10.1, "forward", "0", (4096, 0, 0, 2048, 0)),
    MemorySample(10.2, "backward", "0", (4096, 4096, 0, 2048, 512)),
    MemorySample(10.3, "", "", (4096, 4096, 0, 0, 0)),
    MemorySample(10.4, "step", "", (4096, 4096, 8192, 0, 0)),
)


def words(picture) -> list[str]:
    """All text of a picture; parsing it proves that it is well-formed."""
    return [each for each in ET.fromstring(str(picture)).itertext() if each]


def bands(chart) -> dict[str, Any]:
    """Kind -> the band that is drawn of it: `values` and `baseline`, slice by slice."""
    return {patch.get_label(): patch.get_data() for patch in chart.axes[0].patches if isinstance(patch, StepPatch)}


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
    chart = over_time(STEP)
    found = bands(chart)
    parameters, gradients, optimizer = (found[name] for name in KINDS[:3])
    assert max(parameters.values) == 4096
    assert max(gradients.values) == 8192
    assert max(optimizer.values) == 16384
    assert list(gradients.baseline) == list(parameters.values)
    assert chart.axes[0].get_ylim() == (0, pytest.approx(1.06 * 16384))
    assert chart.axes[0].get_xlim() == (0, pytest.approx(0.4, rel=0.02))


@settings(max_examples=10, deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 1 << 40)] * len(KINDS)), min_size=1, max_size=3 * COLUMNS))
def test_the_highest_moment_is_drawn_at_its_full_height(rows):
    """Would catch columns that average: a peak of a microsecond is what runs out of memory."""
    moments = [MemorySample(0.001 * k, "forward", "m", row) for k, row in enumerate(rows)]
    peak = max(sum(row) for row in rows)
    chart = over_time(moments)
    assert f"peak {bytes_text(peak)}" in chart.label
    assert max((max(band.values) for band in bands(chart).values()), default=0) == peak


def test_the_curve_ends_where_the_words_say_it_does():
    """Would catch "at the end: 0 B" under a curve that ends high, since a column shows the highest of its moments."""
    chart = over_time((*STEP, MemorySample(10.400001, "", "", (0, 0, 0, 0, 0))))
    assert "at the end: all of it is freed" in words(chart)
    assert [band.values[-1] for band in bands(chart).values()] == [0] * 5


def test_a_share_of_the_peak_never_reaches_its_bytes():
    """Would catch "264 B0.0466%": a tiny share with so many digits that it runs into the number before it."""
    said = words(over_time([MemorySample(0.0, "forward", "", (1 << 30, 264, 0, 0, 0)), STEP[0]]))
    assert "<0.1%" in said
    assert max(len(each) for each in said if re.fullmatch(r"[<\d.]+%", each)) <= 5


def test_a_cap_is_a_line_with_its_number_also_far_above_the_peak():
    """Would catch a cap outside the picture."""
    chart = over_time(STEP, cap_bytes=1 << 20)
    assert "cap 1 MiB" in words(chart)
    assert any(list(line.get_ydata()) == [1 << 20] * 2 for line in chart.axes[0].get_lines())
    assert chart.axes[0].get_ylim()[1] > 1 << 20
    assert "1,048,576" in chart.label


def test_predicted_and_measured_stand_on_one_scale_with_every_number():
    """Would catch two bars that are both as long as the page, and an item that only one side has."""
    predicted = Breakdown([Item("parameters", 40_000, "B", "4 N"), Item("optimizer", 80_000, "B", "8 N")])
    measured = Breakdown.of({"parameters": 40_000, "optimizer": 90_000, "other": 30_000})
    picture = beside(predicted, measured, "AdamW")
    said = " ".join(words(picture))
    for part in ("80,000 B", "90,000 B", "30,000 B", "exact", "11.1% below", "120,000 B", "160,000 B", "AdamW"):
        assert part in said
    wide = {hover.split(":")[0]: box.get_width() for hover, box in page.boxes(picture).items()}
    assert wide == {
        "predicted parameters": 40_000, "predicted optimizer": 80_000,
        "measured parameters": 40_000, "measured optimizer": 90_000, "measured other": 30_000,
    }  # fmt: skip
    assert picture.axes[0].get_xlim() == (0, 160_000)


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
    assert "0 B" in words(over_time([MemorySample(0.0, "", "", (0,) * len(KINDS))]))


def test_the_peak_is_explained_in_words_with_the_cap_and_what_stays():
    """Would catch a peak that one has to read off a scale, and "below" for what is above."""
    said = words(over_time(STEP[:4], cap_bytes=1 << 20))
    assert "most of it: parameters, 4,096 B" in said
    assert "at the end: 8,192 B, 76.2% of it" in said  # of 10,752
    assert f"{bytes_text((1 << 20) - 10752)} below the cap" in said
    assert "752 B above the cap" in words(over_time(STEP[:4], cap_bytes=10_000))


def test_a_phase_too_short_for_its_name_has_its_first_letter_or_nothing():
    """Would catch names of three pixels."""
    moments = [MemorySample(t / 100, "forward" if t < 5 else "backward", "", (8, 0, 0, 0, 0)) for t in range(101)]
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
