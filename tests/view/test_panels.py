"""Panels: each stays in the room that it says it takes, whatever it is put together from."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from labkit.view.panels import (
    PROSE,
    Column,
    Panel,
    below,
    beside,
    legend,
    over,
    page,
    paragraph,
    phrase,
    rule,
    sample,
    space,
    table,
    tile,
)
from labkit.view.svg import INK, PALETTE, Picture, width_of
from tests.view.page import SVG, check, places, told

SENTENCE = "a sentence that says in a few words what a picture shows, and why it is of use"
PANELS = {
    "phrase": phrase("12 ms"),
    "wide phrase": phrase("12 ms", 12, True, "end", 90),
    "paragraph": paragraph(SENTENCE, 200),
    "tile": tile(40, 20, PALETTE[0], "8", "eight"),
    "rule": rule(120),
    "sample": sample(30, 3, "4 2"),
    "legend": legend({"kept": PALETTE[0], "refused": "none"}),
    "below": below(phrase("a"), tile(40, 20), rule(60), gap=5),
    "beside": beside(phrase("a"), tile(40, 20), space(9, 50), tile(4, 4), gap=5),
    "beside, from the top": beside(phrase("a"), tile(40, 20), tile(4, 90), gap=5, top=True),
    "over": over(tile(90, 50), phrase("in it").padded(8, 4, 8, 4)),
    "table": table(
        [Column("name"), Column("bytes", "end"), Column("share", "middle", 60)],
        [("ring", "1,024 B", tile(30, 9)), (phrase("all", bold=True), "9 B", "10%")], lead=4, width=400, total=True,
    ),
}  # fmt: skip


def extents(panel: Panel, left: float, top: float) -> list[tuple[float, float, float, float]]:
    """(left, top, right, bottom) of everything that a panel draws at a place, words as wide as those of sentences."""
    found = []
    for node in ET.fromstring(str(Picture(panel.draw(left, top), 900, "panel", 900))).iter():
        at = {key: float(node.get(key, 0)) for key in ("x", "y", "x1", "y1", "x2", "y2", "width", "height")}
        if node.tag == SVG + "rect":
            found.append((at["x"], at["y"], at["x"] + at["width"], at["y"] + at["height"]))
        elif node.tag == SVG + "line":
            found.append((at["x1"], at["y1"], at["x2"], at["y2"]))
        elif node.tag == SVG + "text":
            size = float(node.get("font-size", 13))
            wide = PROSE * width_of(node.text or "", size, node.get("font-weight") == "600")
            start = at["x"] - wide * {"middle": 0.5, "end": 1.0}.get(node.get("text-anchor", ""), 0.0)
            found.append((start, at["y"] - 0.76 * size, start + wide, at["y"] + 0.24 * size))
    return found


@pytest.mark.parametrize("name", PANELS)
def test_what_a_panel_draws_lies_in_the_room_that_it_takes(name):
    """Would catch words that reach into the panel beside them, and a row that is lower than what stands in it."""
    panel = PANELS[name]
    found = extents(panel, 50, 70)
    assert found
    for left, top, right, bottom in found:
        assert left >= 50 - 0.01
        assert top >= 70 - 0.01
        assert right <= 50 + panel.width + 0.01
        assert bottom <= 70 + panel.height + 0.01


def test_panels_stand_beside_and_below_one_another_with_their_gap():
    """Would catch a gap that is counted once too often, and panels that are centred where their tops should meet."""
    small, large = tile(10, 10), tile(30, 40)
    assert extents(beside(small, large, gap=5), 0, 0) == [(0, 15, 10, 25), (15, 0, 45, 40)]
    assert extents(beside(small, large, gap=5, top=True), 0, 0) == [(0, 0, 10, 10), (15, 0, 45, 40)]
    assert extents(below(small, large, gap=5), 0, 0) == [(0, 0, 10, 10), (0, 15, 30, 55)]
    assert extents(small.padded(1, 2, 3, 4), 0, 0) == [(1, 2, 11, 12)]
    sizes = [(panel.width, panel.height) for panel in (below(small, large, gap=5), small.padded(1, 2, 3, 4), below())]
    assert sizes == [(30, 55), (14, 16), (0, 0)]


def test_the_words_of_a_column_start_end_or_have_their_middle_at_one_place():
    """Would catch numbers whose digits do not stand below each other."""
    columns = [Column("a"), Column("bytes", "end"), Column("share", "middle")]
    drawn = page(
        "a table", table(columns, [("x", "1", "5%"), ("yy", "1,000", "50%")], width=300), label="a table of two rows"
    )
    at: dict[str, set[str]] = {}
    for node in ET.fromstring(str(drawn)).iter(SVG + "text"):
        at.setdefault(node.get("text-anchor", "start"), set()).add(node.get("x", ""))
    assert [len(at[anchor]) for anchor in ("start", "middle", "end")] == [1, 1, 1]
    check(drawn)


def test_a_table_is_as_wide_as_it_is_told_and_its_columns_as_their_widest_cell():
    """Would catch columns that run into each other where a name is long."""
    rows = [("short", "1"), ("a name that is long", "1,000,000")]
    natural = table([Column(), Column("n", "end")], rows)
    assert natural.width == pytest.approx(width_of(rows[1][0]) + 16 + width_of(rows[1][1]))
    assert table([Column(), Column("n", "end")], rows, width=500).width == pytest.approx(500)
    assert table([Column(width=99), Column(width=20)], rows, gap=1).width == 120
    summed = table([Column("a"), Column("b")], [("1", "2"), ("3", "4")], total=True)
    drawn = ET.fromstring(str(page("a title", summed, label="a table with a sum")))
    bold = [node.get("font-weight") for node in drawn.iter(SVG + "text")]
    assert bold == ["600", "600", "600", None, None, "600", "600"]


def test_a_paragraph_has_lines_of_its_width_and_an_ellipsis_where_it_is_cut():
    """Would catch a reason that is cut in the middle without a sign of it."""
    whole, cut = (
        page("a title", paragraph(SENTENCE, 200, most=most), label="a paragraph of words") for most in (None, 2)
    )
    lines, two = ([words for *_, words in places(picture)][1:] for picture in (whole, cut))
    assert " ".join(lines) == SENTENCE
    assert all(PROSE * width_of(line) <= 200 for line in lines)
    assert len(two) == 2
    assert two[1].endswith(" …")


def test_words_for_the_pointer_are_escaped_and_dark_letters_are_dark():
    """Would catch a drawing that breaks at a "<", and white letters on a pale box of a dark page."""
    picture = page("a title", over(tile(60, 20, PALETTE[0]), phrase("1").dark()).told("1 < 2 & 3"), label="a box, told")
    assert told(picture) == ["1 < 2 & 3"]
    assert f'<g fill="{INK}"><text' in str(picture)


def test_the_words_beside_a_title_keep_apart_from_it():
    """Would catch a long title below the points at its right."""
    check(page("a title " * 20, phrase("words"), aside="12 minutes", label="a title and the minutes beside it"))
