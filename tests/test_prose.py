"""Numbers in the prose of the labs agree with what is stored beside them.

A number with a unit or a fraction, such as "1.7 times" or 38.2 GB, has to stand in a cell or an output near it, to the
digits that the prose gives. What comes from elsewhere (a paper, a data sheet, a claim) stands in quotes or in FACTS.
So whoever executes a lab anew, and gets other numbers, sees which sentences are no longer true.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

LABS = sorted((Path(__file__).resolve().parent.parent / "notebooks").glob("[0-9]*.ipynb"))
BEFORE, BEHIND = 9, 7
"""Cells before and behind a sentence in which its numbers may stand."""
NOT_PROSE = re.compile(
    r'`[^`]*`|```.*?```|\$[^$]*\$|\]\([^)]*\)|"[^"]*"|“[^”]*”|arXiv:\S+|https?://\S+|\d+ (?:minutes|hours)\b', re.DOTALL
)
NUMBER = re.compile(
    r"(?<![\w.,\-/^_{\[(#])(?P<value>\d{1,3}(?:,\d{3})+|\d+)(?P<fraction>\.\d+)?"
    r"(?P<unit>\s?(?:%|[TGMK]i?B\b|[mun]?s\b|times\b|[GT]?flops?\b|tokens\b|bytes\b|bits\b|days\b)"
    r"|\s[mb]illion\b)?"
)
STORED = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?(?:e[+-]?\d+)?")
SCALES = MappingProxyType({"%": (1, 100), "n": (1, 1e-6, 1e-9)})
OTHERWISE = (1, 1e3, 1e-3)
"""By the last letter of a number: a percentage may stand beside it as a share, a million or billion as what it is, and
a number of bytes or seconds in a unit that is a thousand times larger or smaller."""
FACTS = frozenset(
    {
        ("01-16", "128 tokens"), ("01-36", "1.76"), ("01-36", "1.98"), ("01-36", "3.35 TB"), ("01-36", "30 TB"),
        ("01-36", "50 MB"), ("01-36", "67 Tflop"), ("01-36", "0.06 TB"), ("01-36", "80 GB"), ("01-36", "256 KiB"),
        ("02-30", "16,384 times"), ("04-31", "33%"), ("04-35", "31 GB"),
        ("04-35", "6.5 GB"), ("04-38", "31 GB"), ("05b-22", "12 bytes"),
        ("06-90", "25 MB"), ("07-10", "80 GB"), ("07-18", "7.25 bytes"),
        ("08-00", "70 billion"), ("08-31", "6.7 billion"), ("08-46", "60 GB"), ("08-48", "60 GB"),
        ("09-50", "10.7 GB"), ("10-45", "65 billion"), ("11-06", "50 million"),
        ("11-29", "12 bytes"), ("12-16", "4,096 tokens"), ("12-22", "35 GB"), ("12-22", "4.4 GB"),
        ("12-25", "450 GB"),
        ("13-15", "12.5 MB"), ("13-81", "0.5"), ("14-32", "112 GB"),
        ("14-10", "6%"), ("14-40", "12,288 tokens"), ("15-00", "80 GB"), ("15-78", "40 ms"),
        ("17-00", "70 billion"), ("17-76", "16 bytes"), ("18-11", "90%"), ("18-24", "12 bytes"),
        ("19-38f", "1.56 times"), ("19-38f", "0.12 times"), ("19-44", "14.3"), ("15-63", "2.9"),
        ("23-09", "3.1"), ("23-09", "2.4"), ("23-34", "65,536 times"), ("23-48", "1.3"),
    }
)  # fmt: skip
"""(cell, number): numbers of papers, data sheets and questions, which no run of the lab finds."""


def told(text: str) -> Iterator[tuple[str, float, float]]:
    """(as it is written, its value, half of its last digit) of each number in prose that has a unit or a fraction."""
    for match in NUMBER.finditer(NOT_PROSE.sub(" ", text)):
        fraction = match["fraction"] or ""
        if fraction or match["unit"]:
            half = 0.5 * 10.0 ** -max(0, len(fraction) - 1)
            yield match[0].strip(), float(match["value"].replace(",", "") + fraction), half


def stored(cells: Sequence[dict[str, Any]]) -> list[float]:
    """All numbers in the code and the outputs of these cells, in order."""
    texts = []
    for cell in cells:
        if cell["cell_type"] == "code":
            texts.append("".join(cell["source"]))
            for output in cell["outputs"]:
                data = output.get("data", {})
                shown = [data[kind] for kind in ("text/plain", "text/html", "image/svg+xml") if kind in data]
                texts += [re.sub(r"<[^>]*>", " ", "".join(part)) for part in (output.get("text", ""), *shown)]
    return sorted({float(number.replace(",", "")) for text in texts for number in STORED.findall(text)})


def is_near(value: float, half: float, numbers: Sequence[float], scales: Sequence[float]) -> bool:
    """True if one of the numbers, in one of the scales, is this value to its last digit."""
    for scale in scales:
        place = bisect_left(numbers, (value - half) / scale * (1 - 1e-9))
        if place < len(numbers) and numbers[place] <= (value + half) / scale * (1 + 1e-9):
            return True
    return False


def strays(cells: Sequence[dict[str, Any]]) -> set[tuple[str, str]]:
    """(cell, number) of each number in prose that stands in no cell near it."""
    missing = set()
    for place, cell in enumerate(cells):
        if cell["cell_type"] == "markdown":
            numbers = stored(cells[max(0, place - BEFORE) : place + BEHIND])
            for words, value, half in told("".join(cell["source"])):
                if not is_near(value, half, numbers, SCALES.get(words[-1], OTHERWISE)):
                    missing.add((cell["id"], words))
    return missing


@pytest.mark.parametrize("path", LABS, ids=lambda path: path.stem[:2])
def test_numbers_of_the_prose_stand_beside_it(path: Path):
    """A bug: "the sums hardly shrink", where the cell above had them grow from 73 to 242."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    mine = {cell["id"] for cell in cells}
    facts = {fact for fact in FACTS if fact[0] in mine}
    missing = strays(cells)
    assert missing - FACTS == set(), "no cell near these shows them: mend the prose, or name the fact in FACTS"
    assert facts - missing == set(), "FACTS names what the cells show by now, or nobody says any more"


def test_a_number_that_no_cell_shows_is_found():
    """Would catch a check that finds every number somewhere."""
    cells = [
        {"id": "a", "cell_type": "markdown", "source": ['It takes 1.7 times as long, 38.2 GB, 41%, and "3.5 times".']},
        {"id": "b", "cell_type": "code", "source": ["1 / 3"], "outputs": [{"text": ["38,234 MB, 0.412, 1.85"]}]},
    ]
    assert strays(cells) == {("a", "1.7 times")}
