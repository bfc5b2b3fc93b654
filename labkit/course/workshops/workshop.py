"""Workshops from two hours to two days: an agenda is a notebook that leads through the labs, with times.

The schedules are in `workshops.toml`; the agendas are made from it and from the labs, and lie beside them:

    python -m labkit.course.workshops.workshop notebooks        # writes them again
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from html import escape
from pathlib import Path
from typing import Any

import nbformat

from labkit.plan.text_columns import in_columns

PLANS = Path(__file__).with_name("workshops.toml")


@dataclass(frozen=True)
class WorkshopPart:
    """A part of a workshop: minutes with cells `first` to `last` of a lab (or all of it), or a break."""

    minutes: int
    title: str
    day: int = 1
    lab: str = ""
    first: str = ""
    last: str = ""
    see: str = ""
    ask: str = ""


@dataclass(frozen=True)
class Workshop:
    """A workshop: its length ("2h", "4h", "1d", "2d"), its title, and its parts in order."""

    length: str
    title: str
    opening: str
    parts: tuple[WorkshopPart, ...]

    def clock(self, start: str = "09:00") -> Iterator[tuple[datetime, datetime, WorkshopPart]]:
        """Yield (begin, end, part) for each part, if every day begins at `start`. ValueError for an invalid time."""
        begins = _time(start)
        day = self.parts[0].day
        for part in self.parts:
            if part.day != day:
                begins, day = _time(start), part.day
            ends = begins + timedelta(minutes=part.minutes)
            yield begins, ends, part
            begins = ends


@dataclass(frozen=True)
class Timetable:
    """A workshop by the clock, as a table; the part at the time `now` ("10:40") is marked, on each day that has it."""

    workshop: Workshop
    start: str = "09:00"
    now: str = ""

    def rows(self) -> list[tuple[str, str, str]]:
        """(day and time, title, cells) of each part; a ▶ stands before the present one."""
        now = _time(self.now) if self.now else None
        days = self.workshop.parts[-1].day > 1
        return [
            (
                "▶ " * (now is not None and begins <= now < ends)
                + f"day {part.day}, " * days
                + f"{begins:%H:%M} to {ends:%H:%M}",
                part.title,
                f"lab {part.lab}, {f'{part.first} to {part.last}' if part.first else 'a choice'}" if part.lab else "",
            )
            for begins, ends, part in self.workshop.clock(self.start)
        ]

    def __str__(self) -> str:
        return "\n".join(in_columns(self.rows(), left=(1, 2)))

    def _repr_html_(self) -> str:
        lines = (
            "".join(
                f"<td style='text-align:left'>{f'<b>{escape(cell)}</b>' if '▶' in row[0] else escape(cell)}</td>"
                for cell in row
            )
            for row in self.rows()
        )
        return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def workshops() -> dict[str, Workshop]:
    """All workshops by length: "2h", "4h", "1d", "2d"."""
    plans = tomllib.loads(PLANS.read_text())
    return {
        length: Workshop(length, plan["title"], plan["opening"], tuple(WorkshopPart(**part) for part in plan["parts"]))
        for length, plan in plans.items()
    }


def workshop(length: str) -> Workshop:
    """The workshop of this length. ValueError, with all lengths, if there is none."""
    by_length = workshops()
    if length not in by_length:
        raise ValueError(f"there is no workshop of {length!r}; there are {', '.join(by_length)}")
    return by_length[length]


def timetable(length: str, start: str = "09:00", now: str = "") -> Timetable:
    """The workshop of this length by the clock; with `now`, such as "10:40", or "now", the present part is marked."""
    table = Timetable(workshop(length), start, f"{datetime.now():%H:%M}" if now == "now" else now)
    table.rows()  # raises for an invalid time now, and not when the table is shown
    return table


def cells_of(part: WorkshopPart, folder: Path) -> tuple[Path, list[dict[str, Any]]]:
    """The lab's notebook in `folder`, and the cells of this part. ValueError if the lab or a cell does not exist."""
    notebooks = sorted(folder.glob(f"{part.lab}_*.ipynb"))
    if not notebooks:
        raise ValueError(f"{part.title}: there is no lab {part.lab} in {folder}")
    cells = json.loads(notebooks[0].read_text())["cells"]
    ids = [cell["id"] for cell in cells]
    missing = [id for id in (part.first, part.last) if id and id not in ids]
    if missing:
        raise ValueError(f"{part.title}: {notebooks[0].name} has no cell {', '.join(missing)}")
    first = ids.index(part.first) if part.first else 0
    last = ids.index(part.last) if part.last else len(ids) - 1
    return notebooks[0], cells[first : last + 1]


def agenda(plan: Workshop, folder: Path) -> nbformat.NotebookNode:
    """The notebook of a workshop: its table, and for each part the place, what to have seen, and what to ask."""
    cells = [
        nbformat.v4.new_markdown_cell(
            f"# {plan.title}\n\n{plan.opening}\n\nThe table has the times; run it again in the middle and it marks "
            "where you should be. Each part below opens a lab at the cell where it begins. Run the lab from its "
            "first cell all the same (the set-up is there), and stop at the cell where the part ends: the rest is for "
            "the evening. For whoever leads: [what goes wrong, and what a class needs](workshop.md)."
        ),
        nbformat.v4.new_code_cell('start = "09:00"'),
        nbformat.v4.new_code_cell(
            f'from labkit.course.workshops.workshop import timetable\n\ntimetable("{plan.length}", start, now="now")'
        ),
        nbformat.v4.new_markdown_cell("Does this machine do what the labs need? Everybody runs this before the start."),
        nbformat.v4.new_code_cell("import labkit\n\nlabkit.room(4)\nlabkit.doctor()"),
    ]
    for number, part in enumerate(plan.parts, 1):
        cells.append(nbformat.v4.new_markdown_cell("\n\n".join(_told(number, part, folder))))
    cells[1].metadata["tags"] = ["parameters"]
    for place, cell in enumerate(cells):
        cell.id = f"{plan.length}-{place:02}"
    for place in (2, 4):
        cells[place].metadata["tags"] = ["nbval-ignore-output"]
    notebook = nbformat.v4.new_notebook(cells=cells)
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    return notebook


def write(folder: Path) -> list[Path]:
    """Write all agendas beside the labs, as `workshop_2h.ipynb` and so on. Returns their paths."""
    paths = []
    for plan in workshops().values():
        paths.append(folder / f"workshop_{plan.length}.ipynb")
        nbformat.write(agenda(plan, folder), paths[-1])
    return paths


def _told(number: int, part: WorkshopPart, folder: Path) -> Iterator[str]:
    """The paragraphs about one part."""
    yield f"## {number} · {part.title}\n\n**{part.minutes} minutes**" + f" · day {part.day}" * (part.day > 1)
    if part.lab:
        path, cells = cells_of(part, folder)
        title = "".join(json.loads(path.read_text())["cells"][0]["source"]).splitlines()[0].removeprefix("# ")
        begin, end = cells[0]["id"], cells[-1]["id"]
        code = sum(cell["cell_type"] == "code" for cell in cells)
        links = [f"[{id}]({path.name}#cell-id={id})" for id in (begin, end)]
        where = f"from cell {links[0]} to cell {links[1]}" if part.first else f"from {links[0]} on, what you choose"
        yield f"[{title}]({path.name}), {where}; {code} cells to run."
    if part.see:
        yield f"**By then everybody has seen** {part.see}."
    if part.ask:
        yield f"**Ask the room:** {part.ask}"


def _time(text: str) -> datetime:
    if not re.fullmatch(r"([01]?\d|2[0-3]):[0-5]\d", text):
        raise ValueError(f"a time of the day looks like 09:00, got {text!r}")
    return datetime.strptime(text, "%H:%M")


if __name__ == "__main__":
    print(*write(Path(sys.argv[1])), sep="\n")
