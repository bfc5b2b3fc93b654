"""The picture of compute, wire and waiting: its numbers, its scale, and that nothing runs over the edge."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
from hypothesis import given, settings, strategies as st
from matplotlib.colors import to_hex

from labkit.comm.ledger import Transfer
from labkit.probe.intervals import union
from labkit.probe.recording import Recording
from labkit.probe.rows import OperationSpan, ProgramSpan, RankTimeline
from labkit.view.overlap import (
    BUBBLE,
    COMPUTE,
    EXPOSED,
    LANE,
    MOST_BARS,
    MOST_RANKS,
    TOP,
    WIRE,
    _joined,
    overlap,
)
from labkit.view.svg import WIDTH
from labkit.view.units import seconds_text

from . import page

SVG = "{http://www.w3.org/2000/svg}"


def meets(seq, t0, t1):
    return OperationSpan(seq, "all_reduce", "world", (0, 1), None, 0, seq, t0, t1, True, False, seq)


def two_ranks(**more):
    """Rank 0 waits from 20 to 80 ms for rank 1, which comes at 60 ms."""
    named = (ProgramSpan("step", 0.0, 0.1), ProgramSpan("forward", 0.0, 0.02))
    rows = []
    for rank, came, spans in ((0, 0.02, named), (1, 0.06, ())):
        sent = (Transfer("all_reduce", "world", None, 64, came, 0.08),)
        rows.append(RankTimeline(rank, 0.0, 0.1, spans, (meets(0, came, 0.08),), sent, **more))
    return Recording.of([Recording((row,)) for row in rows])


def texts(picture) -> list[str]:
    """All text of a picture; parsing it proves that it is well-formed."""
    return [node.text or "" for node in ET.fromstring(str(picture)).iter(SVG + "text")]


def fits(picture):
    """Nothing leaves the page, and nothing is too small to read."""
    root = ET.fromstring(str(picture))
    assert picture.width <= 800
    for node in root.iter(SVG + "rect"):
        x, y = float(node.get("x")), float(node.get("y"))
        assert x >= 0
        assert y >= 0
        assert x + float(node.get("width")) <= WIDTH + 0.1
        assert y + float(node.get("height")) <= picture.height
    for node in root.iter(SVG + "text"):
        size = float(node.get("font-size", 13))
        wide = 0.56 * size * len(node.text or "")
        start = float(node.get("x")) - wide * {"middle": 0.5, "end": 1.0}.get(node.get("text-anchor"), 0.0)
        assert size >= 9
        assert start >= -2, node.text
        assert start + wide <= WIDTH + 2, node.text
        assert float(node.get("y")) <= picture.height


def test_each_rank_has_its_seconds_and_shares_written_out():
    """Would catch a picture that only a ruler can read, and shares of another rank."""
    picture = overlap(two_ranks())
    said = texts(picture)
    assert "compute 40 ms (40%) · exposed 20 ms (20%) · bubble 40 ms (40%) · wire 0 of 20 ms hidden (0%)" in said
    assert "compute 80 ms (80%) · exposed 20 ms (20%) · bubble 0 (0%) · wire 0 of 20 ms hidden (0%)" in said
    assert said[:2] == ["2 ranks, 100 ms", "compute 60%, exposed 20%, bubble 20%; 0% of the communication hidden"]
    assert picture.label == ": ".join(said[:2])
    assert {"rank 0", "rank 1", "compute", "wire", "waiting", "spans", "0", "50 ms", "100 ms"} <= set(said)
    assert "forward" in said
    assert "step" not in said, "a span that holds another would hide it"
    fits(picture)


def test_bars_stand_where_and_as_long_as_they_were_on_one_scale():
    """Would catch each rank drawn to its own scale, and lanes that are told apart by colour alone."""
    chart = overlap(two_ranks())
    found = page.boxes(chart)
    late = found["rank 0 waits for a rank: 40 ms from 20 ms"]
    exposed = found["rank 0 waits: 20 ms from 60 ms"]
    wire = found["rank 0 on the wire: 20 ms from 60 ms"]
    first = found["rank 1 computes: 60 ms from 0"]
    assert [box.get_x() for box in (late, exposed, wire, first)] == pytest.approx([0.02, 0.06, 0.06, 0])
    assert [box.get_width() for box in (late, exposed, wire, first)] == pytest.approx([0.04, 0.02, 0.02, 0.06])
    colours = [to_hex(box.get_facecolor()).upper() for box in (late, exposed, wire, first)]
    assert colours == [BUBBLE, EXPOSED, WIRE, COMPUTE]
    assert len({box.get_y() for box in (exposed, wire, first)}) == 3
    assert exposed.get_height() == late.get_height() / 2
    assert exposed.get_y() + exposed.get_height() == late.get_y() + late.get_height()
    assert chart.axes[0].get_xlim() == (0, pytest.approx(0.1))
    lanes = dict(
        zip(chart.axes[0].get_yticks(), (mark.get_text() for mark in chart.axes[0].get_yticklabels()), strict=True)
    )
    at = {lanes[min(lanes, key=lambda y: abs(y - box.get_y() - LANE / 2))] for box in (late, exposed)}
    assert at == {"waiting"}


def test_a_silent_run_a_host_that_only_hands_over_and_a_title_are_said():
    """Would catch 0% hidden where there was nothing to hide, and numbers of the host sold as the device's."""
    quiet = Recording(
        (RankTimeline(0, 5.0, 6.0, (ProgramSpan("work", 5.0, 6.0), ProgramSpan("work", 5.1, 5.2, "gpu"))),)
    )
    picture = overlap(quiet, "my step")
    assert picture.label == "my step, 1 s: compute 100%, exposed 0%, bubble 0%; no communication"
    assert "compute 1 s (100%) · exposed 0 (0%) · bubble 0 (0%) · no communication" in texts(picture)
    assert texts(picture).count("work") == 1
    assert overlap(quiet).label.startswith("1 rank, 1 s")
    assert "as the host saw it" in overlap(two_ranks(queued=True)).label
    with pytest.raises(ValueError, match="no shares"):
        overlap(Recording((RankTimeline(0, 1.0, 1.0),)))


def test_many_ranks_and_many_bars_stay_on_the_page_and_the_picture_says_what_is_missing():
    """Would catch a page of a megabyte, and ranks that vanish without a word."""
    n_spans = 4 * MOST_BARS
    entries = tuple(meets(k, k / n_spans, (k + 0.5) / n_spans) for k in range(n_spans))
    crowd = [
        Recording((RankTimeline(rank, 0.0, 1.0, (), entries if rank < 2 else ()),)) for rank in range(MOST_RANKS + 3)
    ]
    picture = overlap(Recording.of(crowd))
    fits(picture)
    assert f"the first {MOST_RANKS} ranks are drawn; 3 are not, and are in the numbers above" in texts(picture)
    assert len(str(picture)) < 1_000_000
    assert picture.height == pytest.approx(TOP + MOST_RANKS * (4 * LANE + 8) + 48)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1e-3)), max_size=2 * MOST_BARS), st.floats(1e-6, 1e-2))
def test_bars_that_run_together_still_tell_the_seconds_that_they_cover(starts, least):
    """Would catch gaps that are counted as compute when they are drawn over, and bars that are dropped."""
    spans = union((a, a + wide) for a, wide in starts)
    joined = _joined(spans, least)
    assert len(joined) <= MOST_BARS
    assert sum(took for _, _, took in joined) == pytest.approx(sum(b - a for a, b in spans))
    assert [a for a, _, _ in joined[:1]] == [a for a, _ in spans[:1]]
    assert [b for _, b, _ in joined[-1:]] == [b for _, b in spans[-1:]]
    assert all(second[0] - first[1] >= least for first, second in zip(joined, joined[1:], strict=False))


def test_a_narrow_span_is_named_by_its_letter_and_a_wide_one_in_full():
    """Would catch names that run into each other, and a forward that cannot be told from a backward."""
    spans = (
        ProgramSpan("stage", 0.0, 0.1, "forward"),
        ProgramSpan("stage", 0.1, 0.13, "backward"),
        ProgramSpan("stage", 0.13, 1.0, "backward"),
        ProgramSpan("stage", 1.0, 1.0),
    )
    said = texts(overlap(Recording((RankTimeline(0, 0.0, 1.0, spans),))))
    assert "backward stage" in said
    assert "F stage" in said
    assert "B" in said
    assert seconds_text(1.0) in said
