"""The cube of a layout: every rank in its place, its three groups lit, and long axes cut with a count."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given, settings, strategies as st

from labkit import Layout
from labkit.course.topics.cube_explorer import CubeExplorer
from labkit.plan.partition.layout import AXES
from labkit.view.cube import CHOSEN, COLOURS, DASHES, cube

from .page import SVG, check, texts, words

sizes = st.integers(1, 12)


def boxes(picture) -> dict[int, tuple[str, ET.Element]]:
    """rank -> (what the pointer is told, its box)."""
    found = {}
    for group in ET.fromstring(str(picture)).iter(SVG + "g"):
        said = group.findtext(SVG + "title") or ""
        if match := re.match(r"rank (\d+):", said):
            found[int(match[1])] = (said, group.find(SVG + "rect"))
    return found


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 2), (4, 4, 2), (1, 8, 1), (8, 1, 1), (1, 1, 8), (3, 2, 5)])
def test_a_small_layout_is_drawn_whole_with_numbers_coordinates_and_groups(sizes):
    """Would catch a rank in another's place, and a group that is lit in another axis' colour."""
    layout = Layout(*sizes)
    rank = layout.size // 2
    picture = cube(layout, rank)
    check(picture)
    found = boxes(picture)
    assert sorted(found) == list(range(layout.size))
    for each, (said, node) in found.items():
        at = layout.coords(each)
        assert f"dp {at['dp']}, pp {at['pp']}, tp {at['tp']}" in said
        axes = [axis for axis in AXES if each in layout.ranks(axis, rank)]
        if each == rank:
            assert node.get("fill") == CHOSEN
            assert "the chosen rank" in said
        elif axes:
            assert node.get("fill") == COLOURS[axes[0]]
            assert node.get("stroke-dasharray", "") == DASHES[axes[0]]
            assert f"in the {axes[0]} group of rank {rank}" in said
        else:
            assert node.get("fill") not in {*COLOURS.values(), CHOSEN}
    drawn = texts(picture)
    for each in range(layout.size):
        at = layout.coords(each)
        assert f"{at['dp']},{at['pp']},{at['tp']}" in drawn


@settings(max_examples=60)
@given(sizes, sizes, sizes, st.data())
def test_no_box_covers_another_whatever_the_layout(dp, pp, tp, data):
    """Would catch ranks that hide behind each other where the cube is deep, and a group that is left out."""
    layout = Layout(dp, pp, tp)
    rank = data.draw(st.integers(0, layout.size - 1))
    picture = cube(layout, rank)
    check(picture)
    found = boxes(picture)
    assert rank in found
    spots = [tuple(float(node.get(k)) for k in ("x", "y", "width", "height")) for _, node in found.values()]
    for k, (x, y, w, h) in enumerate(spots):
        for a, b, c, d in spots[:k]:
            assert not (x < a + c and a < x + w and y < b + d and b < y + h)
    if len(found) < layout.size:
        assert f"{len(found):,} of {layout.size:,} ranks are drawn" in words(picture)
    for axis in AXES:
        group = layout.ranks(axis, rank)
        assert group[0] in found
        assert group[-1] in found


@pytest.mark.parametrize(("sizes", "rank"), [((8, 4, 8), 101), ((128, 16, 8), 9000), ((2048, 64, 8), 1_000_000)])
def test_a_large_layout_is_cut_and_says_so(sizes, rank):
    """Would catch a million boxes, a chosen rank that is left out, and numbers that run over the page."""
    layout = Layout(*sizes)
    picture = cube(layout, rank)
    check(picture)
    assert len(boxes(picture)) <= 130
    assert re.search(rf"of {layout.size:,} ranks are drawn: ", words(picture))
    d, p, t = layout.coords(rank).values()
    assert f"rank {rank} is dp {d}, pp {p}, tp {t}: ({d} x {layout.pp} + {p}) x {layout.tp} + {t} = {rank}" in texts(
        picture
    )


def test_the_legend_names_each_groups_ranks_and_how_it_is_drawn():
    """Would catch three colours that only colour tells apart."""
    said = texts(cube(Layout(2, 2, 2), 5))
    assert "tp group (solid), 2 ranks: 4, 5" in said
    assert "pp group (dashed), 2 ranks: 5, 7" in said
    assert "dp group (dotted), 2 ranks: 1, 5" in said
    assert "dp group (dotted), rank 3 alone" in texts(cube(Layout(1, 2, 2), 3))
    for drawn in (("tp", "pp", "dp"), ("tp", "pp", "dp_shard", "dp_replicate")):  # dp as one, and cut in two
        assert len({DASHES[axis] for axis in drawn}) == len(drawn)


def test_a_rank_outside_the_layout_is_refused():
    """Would catch a cube of somebody else's groups."""
    with pytest.raises(ValueError, match="0 to 7, got 8"):
        cube(Layout(2, 2, 2), 8)


def test_the_explorer_follows_its_sliders_and_keeps_the_rank_inside():
    """Would catch a rank that a smaller layout does not have, and a picture of the layout before."""
    explorer = CubeExplorer(Layout(2, 2, 2), 7)
    assert explorer.shown.value == str(cube(Layout(2, 2, 2), 7))
    explorer.sizes["dp"].value = 1
    assert explorer.layout_ == Layout(1, 2, 2)
    assert explorer.rank.value == 3
    assert explorer.shown.value == str(cube(Layout(1, 2, 2), 3)) == str(explorer.static())
    explorer.rank.value = 0
    assert "rank 0 is dp 0" in explorer.shown.value
    assert CubeExplorer(Layout(64, 1, 1)).sizes["dp"].max == 64
    with pytest.raises(ValueError, match="0 to 3, got 4"):
        CubeExplorer(Layout(2, 2), 4)
    assert all(each.description for each in (*explorer.sizes.values(), explorer.rank))


def test_the_explorer_leaves_a_static_picture():
    """Would catch an export that shows nothing."""
    explorer = CubeExplorer(Layout(2, 2, 2), 5)
    bundle = explorer._repr_mimebundle_()
    data = bundle[0] if isinstance(bundle, tuple) else bundle
    assert data["image/svg+xml"] == str(cube(Layout(2, 2, 2), 5))
