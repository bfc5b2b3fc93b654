"""Workshops: the agendas are those of the plan, fit into their hours, and can be run in the order that they name."""

from __future__ import annotations

import json
import re
import symtable
from pathlib import Path

import nbformat
import pytest

from labkit.course.reading.glossary import plain
from labkit.course.workshops.workshop import PLANS, agenda, cells_of, timetable, workshop, workshops

NOTEBOOKS = Path(__file__).resolve().parents[3] / "notebooks"
LENGTHS = ["2h", "4h", "1d", "2d"]
WORDS_A_MINUTE, CELL_MINUTES, FOLDED_CELL_MINUTES, WIDGET_MINUTES = 150, 0.6, 0.2, 1.5
"""The pace of a practised learner for reading, running and playing; a class takes a third longer."""


def parts(length: str) -> list:
    """The parts of a workshop that have a lab."""
    return [part for part in workshop(length).parts if part.lab]


def names(cell: dict) -> tuple[set[str], set[str]]:
    """(names that a cell reads, names that it makes) in the notebook's namespace."""
    lines = "".join(cell["source"]).splitlines()
    if cell["cell_type"] != "code" or lines[0].startswith("%%"):
        return set(), set()
    code = "\n".join("" if line.startswith("%") else line for line in lines)
    scopes = [symtable.symtable(code, cell["id"], "exec")]
    made = {each.get_name() for each in scopes[0].get_symbols() if each.is_assigned() or each.is_imported()}
    read = set()
    while scopes:
        scope = scopes.pop()
        scopes += scope.get_children()
        top = scope.get_type() == "module"
        read |= {each.get_name() for each in scope.get_symbols() if each.is_referenced() and (top or each.is_global())}
    return read, made


def test_there_are_workshops_of_two_hours_half_a_day_a_day_and_two_days():
    """Would catch a length that the command line promises and nobody planned."""
    assert list(workshops()) == LENGTHS


@pytest.mark.parametrize("length", LENGTHS)
def test_the_agenda_in_the_repository_is_up_to_date(length):
    """Would catch a plan, or a lab, that changed without `python -m labkit.course.workshops.workshop notebooks`."""
    stored = nbformat.read(NOTEBOOKS / f"workshop_{length}.ipynb", 4)
    made = agenda(workshop(length), NOTEBOOKS)
    assert [(cell.id, cell.source) for cell in stored.cells] == [(cell.id, cell.source) for cell in made.cells]


@pytest.mark.parametrize(("length", "minutes"), [("2h", [120]), ("4h", [240]), ("1d", [480]), ("2d", [480, 480])])
def test_the_parts_fill_the_day(length, minutes):
    """Would catch a workshop that ends at six because a part was added."""
    days: dict[int, int] = {}
    for part in workshop(length).parts:
        days[part.day] = days.get(part.day, 0) + part.minutes
    assert list(days.values()) == minutes


def needs_minutes(cells: list[dict]) -> float:
    """Minutes to read these cells of a notebook, run them, and use each widget once.

    Of a cell whose source is folded, people read only its caption and its output."""
    words = sum(len(plain("".join(cell["source"])).split()) for cell in cells if cell["cell_type"] == "markdown")
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    folded = sum(cell["metadata"].get("jupyter", {}).get("source_hidden", False) for cell in code)
    widgets = sum("widget-view+json" in key for cell in code for out in cell["outputs"] for key in out.get("data", {}))
    running = (len(code) - folded) * CELL_MINUTES + folded * FOLDED_CELL_MINUTES
    return words / WORDS_A_MINUTE + running + widgets * WIDGET_MINUTES


@pytest.mark.parametrize("length", LENGTHS)
def test_every_part_leaves_a_third_more_than_reading_and_running_takes(length):
    """Would catch a lab that has grown, and a part for which nobody has the time."""
    for part in parts(length):
        if part.first:
            _, cells = cells_of(part, NOTEBOOKS)
            assert needs_minutes(cells) * 1.3 <= part.minutes, (part.title, needs_minutes(cells), part.minutes)


def test_a_folded_cell_takes_less_time_than_one_that_is_read():
    """Would catch a class that gets time to read what its pages fold."""
    shown = {"cell_type": "code", "source": ["x = 1"], "metadata": {}, "outputs": []}
    folded = {**shown, "metadata": {"jupyter": {"source_hidden": True}}}
    assert 0 < needs_minutes([folded]) < needs_minutes([shown])


@pytest.mark.parametrize("length", LENGTHS)
def test_a_part_uses_nothing_that_the_class_has_skipped(length):
    """Would catch a NameError in front of thirty people: a part that needs what a cell between two parts has made."""
    for lab in sorted({part.lab for part in parts(length) if part.first}):
        run = [cells_of(part, NOTEBOOKS) for part in parts(length) if part.lab == lab]
        everything = json.loads(run[0][0].read_text())["cells"]
        made_somewhere = set().union(*(names(cell)[1] for cell in everything))
        made: set[str] = set()
        for cell in (cell for _, cells in run for cell in cells):
            reads, makes = names(cell)
            missing = (reads & made_somewhere) - made - makes
            assert not missing, f"{run[0][0].name}, cell {cell['id']} needs {missing}"
            made |= makes


@pytest.mark.parametrize("length", LENGTHS)
def test_links_lead_to_cells_that_are_there(length):
    """Would catch a link to a lab, a cell or a guide that was renamed."""
    text = (NOTEBOOKS / f"workshop_{length}.ipynb").read_text()
    links = re.findall(r"\]\(([^)#]+)(?:#cell-id=([^)]+))?\)", text)
    assert len(links) > 2 * len(parts(length))
    for file, cell in links:
        assert (NOTEBOOKS / file).exists()
        assert not cell or cell in {each["id"] for each in json.loads((NOTEBOOKS / file).read_text())["cells"]}


def test_the_clock_begins_anew_on_the_second_day_and_the_present_part_is_marked():
    """Would catch a second day that starts at five in the afternoon, and a mark on the part before."""
    rows = timetable("2d", "08:30", now="09:05").rows()
    assert rows[0][0] == "day 1, 08:30 to 09:04"
    assert rows[1][0].startswith("▶ day 1, 09:04")
    second = next(row for row in rows if "day 2" in row[0])
    assert second[0] == "▶ day 2, 08:30 to 09:25"
    assert str(timetable("2h")).splitlines()[0] == ("09:00 to 09:20  Real processes from a cell  lab 00, c01 to c22")
    assert "<b>▶ day 1, 09:04" in timetable("2d", "08:30", now="09:05")._repr_html_()


def test_a_length_or_a_time_that_is_none_is_told():
    """Would catch a KeyError, and a table that breaks when it is shown."""
    with pytest.raises(ValueError, match="no workshop of '3h'; there are 2h, 4h, 1d, 2d"):
        workshop("3h")
    for start in ("9", "25:00", "09:61", "nine"):
        with pytest.raises(ValueError, match="looks like 09:00"):
            timetable("2h", start)


def test_a_part_of_a_lab_that_is_not_there_is_told(tmp_path):
    """Would catch an agenda that is written with a dead link."""
    with pytest.raises(ValueError, match="there is no lab 00"):
        agenda(workshop("2h"), tmp_path)
    lab = tmp_path / "00_small.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# 00 · Small", id="c01")]), lab)
    with pytest.raises(ValueError, match="00_small.ipynb has no cell c22"):
        agenda(workshop("2h"), tmp_path)


def test_the_plan_holds_no_part_that_is_not_read():
    """Would catch a misspelt table in the plan."""
    assert PLANS.read_text().count(".parts]]") == sum(len(each.parts) for each in workshops().values())
