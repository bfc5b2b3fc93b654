"""Every picture that the labs store, drawn in columns as wide as JupyterLab's: its words keep apart and keep inside.

A picture is measured as Chromium draws it, in whatever font it has: the ink of each text, from its baseline, and not
the line box, which is taller than the letters. Two texts may touch by `TOLERANCE` of the picture's own units.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import Browser

ROOT = Path(__file__).resolve().parents[2]
DRAWING = re.compile(r"<svg\b.*?</svg>", re.DOTALL)
BESIDE_THE_OUTPUT = 432 + 20
"""Pixels of JupyterLab's window that are no output: side bar, prompt and margins as it opens, and an output's padding."""
WINDOWS = (800, 1200)
TOLERANCE = 1.0
MEASURE = (Path(__file__).parent / "ink.js").read_text(encoding="utf-8")

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(300)]


def stored() -> dict[str, str]:
    """Each distinct drawing of the labs' outputs -> the notebook and the cell that hold it first."""
    places: dict[str, str] = {}
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for cell in nbformat.read(path, 4).cells:
            for output in cell.get("outputs", ()):
                for kind in ("text/html", "image/svg+xml"):
                    for drawing in DRAWING.findall(output.get("data", {}).get(kind, "")):
                        places.setdefault(drawing, f"{path.stem[:2]} {cell.id}")
    return places


def complaints(browser: Browser, drawings: Iterable[str], window: int) -> list[list[str]]:
    """What is wrong with each of these drawings in a JupyterLab whose window is that many pixels wide."""
    page = browser.new_page(viewport={"width": window, "height": 1000})
    try:
        page.set_content("<!doctype html><meta charset=utf-8><body style='margin:0'></body>")
        arguments = {"drawings": list(drawings), "column": window - BESIDE_THE_OUTPUT, "tolerance": TOLERANCE}
        return page.evaluate(MEASURE, arguments)
    finally:
        page.close()


@pytest.mark.parametrize("window", WINDOWS)
def test_the_words_of_every_stored_picture_keep_apart_and_keep_inside(browser, window):
    """Would catch a legend whose numbers run together, a title that leaves the page, a word wider than its box."""
    places = stored()
    assert len(places) > 200, "the labs' pictures were not found"
    found = zip(places.values(), complaints(browser, places, window), strict=True)
    broken = [f"{place}: {complaint}" for place, some in found for complaint in some]
    assert not broken, "\n".join(["", *broken])
