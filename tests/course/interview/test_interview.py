"""Lab 17, the interview room: its links lead somewhere, and it asks of every lab."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

from labkit.course.numbers import number_of
from labkit.course.reading.glossary import plain
from labkit.course.whiteboard.derivations import DERIVATIONS
from tests.cases import cases

NOTEBOOKS = Path(__file__).resolve().parents[3] / "notebooks"
ROOM = NOTEBOOKS / "17_interview_room.ipynb"


@cache
def ids(name: str) -> frozenset[str]:
    """The ids of the cells of a notebook."""
    return frozenset(cell["id"] for cell in json.loads((NOTEBOOKS / name).read_text())["cells"])


def prose() -> str:
    """All markdown of the lab."""
    cells = json.loads(ROOM.read_text())["cells"]
    return plain("\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"))


def links() -> list[tuple[str, str, str]]:
    """(words, file, cell) of each link."""
    found = re.findall(r"\[([^\]]+)\]\(([^)#]+)(?:#cell-id=([^)]+))?\)", prose())
    return [(words, file, cell) for words, file, cell in found if not file.startswith("https:")]


def test_every_link_leads_to_a_cell_and_says_which():
    """Would catch a cell that was renamed, and a link whose words name another cell than it opens."""
    assert len(links()) > 40
    for words, file, cell in links():
        assert (NOTEBOOKS / file).exists(), file
        if cell:
            assert cell in ids(file), (file, cell)
            assert words == cell, (words, cell)
            assert file.startswith(cell[:2]), (file, cell)


@cases("lab", [f"{number:02}" for number in range(17)])
def test_the_lab_sends_the_learner_to_every_lab_before(lab):
    """Would catch a topic that interviews ask about and that the room forgets."""
    assert any(file.startswith(lab) for _, file, _ in links())


def test_every_derivation_names_a_lab_that_is_there():
    """Would catch "lab 18 measures it"."""
    there = {number_of(path.name) for path in NOTEBOOKS.glob("[0-9]*.ipynb")}
    assert {each.lab for each in DERIVATIONS} <= there
