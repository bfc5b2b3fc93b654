"""Pictures that labs store: what was measured lies where the law beside it says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from labkit.plan.machine.collectives import Line, fit, seconds
from labkit.view.units import parsed, value_text

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
Points = list[tuple[float, float]]


def measured(lab: str, cell: str) -> dict[str, Points]:
    """The dots of a stored chart of times, by name: (bytes, seconds). They come after the curves, in its words."""
    (stored,) = (
        each
        for path in NOTEBOOKS.glob(f"{lab}*_*.ipynb")
        for each in json.loads(path.read_text())["cells"]
        if each["id"] == cell
    )
    label = re.search(r'aria-label="([^"]*)"', "".join(stored["outputs"][0]["data"]["text/html"]))
    assert label, f"cell {cell} of lab {lab} stores no chart"
    points = {}
    for series in label[1].split("; ")[1:]:
        pairs = re.findall(r"([\d.,]+ [KMG]?i?B) in ([\d.]+ \w+)", series)
        points[series.partition(":")[0]] = [(parsed(size, "B"), parsed(time, "s")) for size, time in pairs]
    return points


@pytest.mark.parametrize(
    ("lab", "cell", "n_dots", "largest"), [("00", "c24", 6, 2**22), ("01", "01-40", 15, 2**24), ("03", "c20", 6, 2**22)]
)
def test_measured_times_lie_on_the_line_that_is_fitted_to_them(lab, cell, n_dots, largest):
    """Would catch a picture that was stored while the machine was busy: dots 3 times above their fit. In lab 01b the
    line follows the sizes that fit into a cache, and its text says that the larger ones may lie above."""
    dots = measured(lab, cell)["measured"]
    link = fit(dots)
    assert len(dots) == n_dots
    assert [size for size, time in dots if size <= largest and not 1 / 1.6 < time / link.seconds(size) < 1.6] == []


def test_ring_and_tree_cross_in_lab_03_as_its_text_says():
    """Would catch a ring that is slowest at all sizes below a text that promises the opposite."""
    dots, link = measured("03", "c22"), Line(10e-3, 1 / 20e6)
    for name in ("ring", "tree"):
        for size, time in dots[name]:
            assert abs(time / seconds(name, "all_reduce", 4, size, link) - 1) < 0.25, (name, size)
    ring, tree = dict(dots["ring"]), dict(dots["tree"])
    assert [tree[size] < ring[size] for size in sorted(ring)] == [True, True, True, False, False]


def test_the_wires_of_lab_03_differ_as_their_law_says():
    """Would catch a stored ratio of 3 beside a law of 9."""
    (path,) = NOTEBOOKS.glob("03_*.ipynb")
    (stored,) = (each for each in json.loads(path.read_text())["cells"] if each["id"] == "03-53-answer")
    words = "".join(stored["outputs"][0]["data"]["text/plain"])
    law, ratio = (float(number) for number in re.findall(r"(?:law|measured) ([\d.]+) times", words))
    assert abs(ratio / law - 1) < 0.25


def test_a_static_page_asks_and_answers_what_the_stored_pictures_show():
    """Would catch a question, a title or a number that was changed in a picture, and not in what a static page asks."""
    wrong = []
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        for cell in json.loads(path.read_text())["cells"]:
            for output in cell.get("outputs", ()):
                kept = output.get("metadata", {}).get("labkit", {})
                drawn = "".join(output.get("data", {}).get("text/plain", ()))
                words = kept.get("question", kept.get("title"))
                numbers = [kept[origin] for origin in ("law", "measured", "rehearsed") if kept.get(origin) is not None]
                if words and (
                    words not in drawn or any(value_text(number, kept["unit"]) not in drawn for number in numbers)
                ):
                    wrong.append((path.stem, cell["id"], words, numbers))
    assert wrong == []


COINCIDENCES = {("10", "10-26")}
"""Predictions below a picture that happens to show the same number: a pipeline of 4 micro-batches stands above the
question after how many a rank holds."""


def told(output: dict[str, Any]) -> str:
    """What a stored output says in words."""
    return "".join(output.get("text", ())) + "".join(output.get("data", {}).get("text/plain", ()))


def forms(law: float, unit: str) -> Iterator[re.Pattern[str]]:
    """Texts that give a law's number away. One of less than four digits may stand for anything without its unit."""
    for text in value_text(law, unit).split(" = "):
        number, _, its_unit = text.partition(" ")
        n_digits = len(re.sub(r"\D", "", number).lstrip("0"))
        behind = rf"\s*{re.escape(its_unit)}" if n_digits < 4 else ""
        yield re.compile(rf"(?<![\d.,]){re.escape(number)}(?!\d|[.,]\d){behind}")


def test_no_answer_stands_above_its_question():
    """Would catch a picture, a printed line or a sentence that says the number before a learner is asked for it."""
    spoiled, n_laws = [], 0
    for path in sorted(NOTEBOOKS.glob("[0-9]*.ipynb")):
        above, asked = "", dict[str, tuple[str, str]]()
        for cell in json.loads(path.read_text())["cells"]:
            source = "".join(cell["source"])
            for name in re.findall(r"^(\w+) = Predict\(", source, re.MULTILINE):
                asked[name] = cell["id"], above
            for output in cell.get("outputs", ()):
                kept = output.get("metadata", {}).get("labkit", {})
                overlaid = re.search(r"^\s*(\w+)\.overlay\(", source, re.MULTILINE)
                if overlaid and kept.get("law") is not None:
                    question, before = asked[overlaid[1]]
                    n_laws += 1
                    if any(form.search(before) for form in forms(kept["law"], kept["unit"])):
                        spoiled.append((path.stem[:2], question))
            above += "".join(["\n", *map(told, cell.get("outputs", ()))])
            above += f"\n{source}" if cell["cell_type"] == "markdown" else ""
    assert n_laws > 50
    assert set(spoiled) == COINCIDENCES
