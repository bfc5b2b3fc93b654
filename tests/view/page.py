"""What holds for every picture: it is well-formed, says in words what it shows, and its words are whole and apart."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from matplotlib.patches import Rectangle

SVG = "{http://www.w3.org/2000/svg}"
LEAST = 11
"""The smallest words, at the 800 units of a page's width."""


def words(picture) -> str:
    """All text of a picture, what the pointer is told included."""
    return " ".join(ET.fromstring(str(picture)).itertext())


def texts(picture) -> list[str]:
    """The words that are drawn."""
    return [node.text or "" for node in ET.fromstring(str(picture)).iter(SVG + "text")]


def told(picture) -> list[str]:
    """What the pointer is told."""
    return [node.text or "" for node in ET.fromstring(str(picture)).iter(SVG + "title")]


def boxes(chart) -> dict[str, Rectangle]:
    """What the pointer is told -> the box of a chart that tells it; its place and size are in the units of its axes."""
    patches = [patch for axes in chart.axes for patch in axes.patches]
    return {patch.get_gid(): patch for patch in patches if patch.get_gid() and isinstance(patch, Rectangle)}


def dots(chart) -> dict[str, tuple[float, float]]:
    """What the pointer is told -> the point of a chart that tells it."""
    found = [line for axes in chart.axes for line in axes.get_lines() if line.get_gid()]
    return {line.get_gid(): (line.get_xdata()[0], line.get_ydata()[0]) for line in found}


def line_of(chart, label: str) -> tuple[list[float], list[float]]:
    """The (x, y) of the line that the legend calls so."""
    found = [line for axes in chart.axes for line in axes.get_lines() if line.get_label() == label]
    line = max(found, key=lambda line: len(line.get_xdata()))
    return list(line.get_xdata()), list(line.get_ydata())


def places(picture) -> list[tuple[float, float, float, float, str]]:
    """(left, top, right, bottom, words) of all text, a little narrower than it is drawn: touching is no overlap."""
    out = []
    for node in ET.fromstring(str(picture)).iter(SVG + "text"):
        said, size = node.text or "", float(node.get("font-size", 13))
        wide = 0.5 * size * len(said)
        left = float(node.get("x")) - wide * {"middle": 0.5, "end": 1.0}.get(node.get("text-anchor"), 0.0)
        bottom = float(node.get("y"))
        out.append((left, bottom - 0.7 * size, left + wide, bottom, said))
    return out


def check(picture) -> None:
    """Nothing leaves the page, nothing is too small, no words lie on others, and it can be heard as well as seen."""
    root = ET.fromstring(str(picture))
    assert root.get("role") == "img"
    assert root.get("aria-label") == picture.label
    assert len(picture.label) > 15
    assert picture.width <= 800
    assert " id=" not in str(picture)
    assert "<script" not in str(picture)
    for node in root.iter(SVG + "text"):
        assert float(node.get("font-size", 13)) >= LEAST, node.text
    for node in root.iter(SVG + "rect"):
        x, y = float(node.get("x")), float(node.get("y"))
        assert x >= -0.5
        assert y >= -0.5
        assert x + float(node.get("width")) <= picture.width + 0.5
        assert y + float(node.get("height")) <= picture.height + 0.5
    found = places(picture)
    for left, top, right, bottom, said in found:
        assert left >= 0, said
        assert top >= 0, said
        assert right <= picture.width, said
        assert bottom <= picture.height, said
    for k, (left, top, right, bottom, said) in enumerate(found):
        for left2, top2, right2, bottom2, other in found[k + 1 :]:
            meets = left < right2 and left2 < right and top < bottom2 and top2 < bottom
            assert not meets, f"{said!r} lies on {other!r}"
