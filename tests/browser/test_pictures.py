"""Every picture that the labs store, in columns as wide as JupyterLab's: its words keep apart, and inside.

What is measured is the ink of each text as Chromium draws it, in whatever font it has, and not the box of its line,
which is taller than its letters. `tests/browser/ink.js` has the rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import Browser

from labkit.course.capstone.score_plot import Mark, plane
from labkit.plan.breakdown import Breakdown, Item
from labkit.plan.machine.hardware import Hardware
from labkit.probe.gather import COMING, FORWARD, SHARDED, WHOLE, Change, GatherFilm
from labkit.probe.storages import MemorySample
from labkit.view.bars import compare
from labkit.view.curve import curve
from labkit.view.gather import gather_film
from labkit.view.memory import over_time
from labkit.view.overlap import overlap
from labkit.view.roofline import roofline
from labkit.view.svg import Picture
from tests.view.test_gather import hand_made
from tests.view.test_overlap import two_ranks
from tests.view.test_roofline import ops

ROOT = Path(__file__).resolve().parents[2]
DRAWING = re.compile(r"<svg\b(?:[^<]+|<(?!/?svg\b)|<svg\b.*?</svg>)*</svg>", re.DOTALL)
BESIDE_THE_OUTPUT = 432 + 20
"""Pixels of JupyterLab's window that are no output, as it opens: side bar, prompt, margins, an output's padding."""
WINDOWS = (800, 1200)
TOLERANCE = 1.0
"""So far, in its own units, may two texts of a picture reach into each other, or one out of its box."""

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(600)]


@cache
def stored() -> dict[str, str]:
    """Each distinct drawing of the labs' outputs -> the notebook and the cell that hold it first."""
    places: dict[str, str] = {}
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for cell in nbformat.read(path, 4).cells:
            for output in cell.get("outputs", ()):
                for kind in ("text/html", "image/svg+xml"):
                    for drawing in DRAWING.findall(output.get("data", {}).get(kind, "")):
                        places.setdefault(drawing, f"{path.stem} {cell.id}")
    return places


def complaints(browser: Browser, drawings: Iterable[str], window: int) -> list[list[str]]:
    """What is wrong with each of these drawings in a JupyterLab whose window is that many pixels wide."""
    page = browser.new_page(viewport={"width": window, "height": 1000})
    try:
        page.set_content("<!doctype html><meta charset=utf-8><body style='margin:0'></body>")
        rules = (Path(__file__).parent / "ink.js").read_text(encoding="utf-8")
        column = window - BESIDE_THE_OUTPUT
        found: list[list[str]] = page.evaluate(
            rules, {"drawings": list(drawings), "column": column, "tolerance": TOLERANCE}
        )
        return found
    finally:
        page.close()


@pytest.mark.parametrize("window", WINDOWS)
def test_the_words_of_every_stored_picture_keep_apart_and_keep_inside(browser, window):
    """Would catch a legend whose numbers run together, a title that leaves the page, a line through a name."""
    places = stored()
    assert len(places) > 200, "the labs' pictures were not found"
    found = zip(places.values(), complaints(browser, places, window), strict=True)
    broken = [f"{place}: {complaint}" for place, some in found for complaint in some]
    assert not broken, "\n".join(["", *broken])


def in_other_states() -> list[Picture]:
    """Pictures that change with a control or with what was measured, in states that no lab stores."""
    one_by_one, shards = hand_made(4), (20 << 10, 0, 0, 0, 0)
    changes = (Change(0.01, 0, COMING), Change(0.03, 0, WHOLE, FORWARD), Change(0.04, 1, COMING),
               Change(0.05, 0, SHARDED), Change(0.06, 1, WHOLE, FORWARD))  # fmt: skip
    prefetched = GatherFilm(("a", "b"), (40 << 10, 40 << 10), 4, changes, ((0.0, shards),), 0.1)
    films = (one_by_one, prefetched)
    moments = [
        MemorySample(0.0, "forward", "", (1 << 30, 264, 0, 0, 0)),
        MemorySample(1.0, "step", "", (1 << 31, 264, 0, 0, 0)),
    ]
    early = {"a": [(0, 5.5), (9, 3.0)], "b": [(0, 5.5), (9, 5.4)], "c": [(0, 5.53)], "d": [(0, 5.5), (9, 3.01)]}
    formula = "as long as a formula is that says all that it is made of, and where"
    saved = Breakdown([Item("compute", 3.0, "s", formula), Item("overlap", -2.0, "s", formula)])
    marks = [Mark("pipeline", 0.8, 2e6), Mark("pipeline", 0.82, 2.1e6, "law"), Mark("replicas", 1.0, 1e7, "law")]
    devices = [Hardware.preset(name) for name in ("v100", "b200", "h200")]
    seen = {each.name: 1.5 * each.seconds(devices[0], "fp16") for each in ops() if each.flops}
    return [
        *(roofline(device, ops(), "fp16", seen) for device in devices),
        *(gather_film(film, moment) for film in films for moment in range(len(film.changes) + 1)),
        over_time(moments, cap_bytes=1 << 31),
        overlap(two_ranks(queued=True), "one bucket for all, as brought by somebody who likes long titles, " * 2),
        curve(early, "loss"),
        compare(law=saved, measured=saved, title="a step"),
        plane(marks, 3.9e6, "the slow link: predicted and measured; the cap is that of home"),
    ]


@pytest.mark.parametrize("window", WINDOWS)
def test_a_picture_keeps_its_words_apart_in_every_state(browser, window):
    """Would catch a cursor that crosses a label at the one moment at which nobody has looked."""
    made = in_other_states()
    found = zip(made, complaints(browser, map(str, made), window), strict=True)
    broken = [f"{picture.label[:60]}: {complaint}" for picture, some in found for complaint in some]
    assert not broken, "\n".join(["", *broken])


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_words_of_the_picture_in_readme_keep_apart(browser, theme):
    """Would catch three pictures on one page that reach into each other."""
    made = (ROOT / f"docs/first_{theme}.svg").read_text(encoding="utf-8")
    (broken,) = complaints(browser, [made], 800 + BESIDE_THE_OUTPUT)
    assert not broken, "\n".join(["", *broken])


GOOD = (
    '<text x="4" y="20">a title</text><g><rect x="4" y="30" width="60" height="20" fill="#fff" stroke="#000"/>'
    '<text x="34" y="44" text-anchor="middle">12 ms</text></g><line x1="4" y1="60" x2="200" y2="60" stroke="#000"/>'
    '<line x1="34" y1="70" x2="34" y2="110" stroke="#000"/><rect x="4" y="76" width="60" height="20" fill="#fff"/>'
    '<text x="10" y="90">hidden</text><line x1="0" y1="120" x2="200" y2="120" stroke="#000" stroke-dasharray="1 5"/>'
    '<text x="100" y="124">read through dots</text>'
)


BAD = (
    ('<text x="100" y="90">264 B</text><text x="120" y="90">0.0466%</text>', '"264 B" and "0.0466%" overlap'),
    ('<text x="180" y="20">compute 49%, exposed 51%</text>', "leaves the picture"),
    ('<text x="100" y="149">gypsy</text>', "leaves the picture"),
    ('<g><rect x="100" y="70" width="30" height="20"/><text x="100" y="84">too long</text></g>', "leaves its box"),
    ('<text x="100" y="90">a label</text><line x1="120" y1="70" x2="120" y2="100" stroke="#000"/>', "a line crosses"),
    ('<circle cx="120" cy="90" r="5" stroke="#000"/><text x="100" y="92">a label</text>', "a circle crosses"),
    ('<text x="260" y="112" transform="rotate(-90 260 112)">upright</text><text x="250" y="90">flat</text>', "overlap"),
)
"""What must be told, beside the good drawing, and in which words."""


def test_bad_drawings_are_told_and_a_good_one_is_not(browser):
    """Would catch rules that let everything pass, and rules that complain about everything."""
    page = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 300 150" style="width:100%" font-size="13">{}</svg>'
    drawings = [page.format(GOOD + bad) for bad in ("", *(bad for bad, _ in BAD))]
    wide = page.format(GOOD).replace("width:100%", "width:500px")
    passed, *told, too_wide = complaints(browser, [*drawings, wide], 800)
    assert passed == []
    for (bad, complaint), some in zip(BAD, told, strict=True):
        assert len(some) == 1, bad
        assert complaint in some[0]
    assert too_wide == ["500 px wide in a column of 348 px"]
