"""A notebook as a page of the site: its title, its place, what it asks, and what belongs to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import nbformat

from labkit.course.export.exercise_page import ExercisePage, exercise_page
from labkit.course.export.gallery import Lab, gallery
from labkit.course.export.predictions import Group, groups
from labkit.course.server.labs import number_of

VIEW = "application/vnd.jupyter.widget-view+json"


@dataclass(frozen=True)
class Page:
    """A stored run as a page: `number` is "" if it is no lab, `exercises` is None if none belong to it."""

    number: str
    title: str
    path: Path
    cells: Sequence[Any]
    groups: Sequence[Group]

    @property
    def file(self) -> str:
        """Its place on the site."""
        return f"{self.path.stem}.html"

    @property
    def name(self) -> str:
        """The text of links to this page."""
        return f"{self.number} {self.title}".strip()

    @property
    def command(self) -> str:
        """The command that opens the same notebook in JupyterLab."""
        return f"labkit lab {self.number or self.path.stem}"

    @property
    def opening(self) -> str:
        """The first paragraph below the title, as Markdown."""
        return str(self.cells[0].source).partition("\n")[2].strip().split("\n\n")[0]

    @property
    def lab(self) -> Lab | None:
        """What the index says of it; None for a notebook that is none of labkit's labs."""
        return gallery().get(self.number)

    @property
    def picture(self) -> Path | None:
        """Its picture in the index, if there is one beside the notebooks."""
        path = self.path.resolve().parents[1] / "docs" / "labs" / f"{self.number}.svg"
        return path if path.is_file() else None

    @property
    def n_widgets(self) -> int:
        """The number of its outputs that are widgets."""
        outputs = [output for cell in self.cells for output in cell.get("outputs", ())]
        return sum(VIEW in output.get("data", {}) for output in outputs)

    @property
    def n_films(self) -> int:
        """The number of its outputs that have a film, which the page plays."""
        outputs = [output for cell in self.cells for output in cell.get("outputs", ())]
        return sum("film" in output.get("metadata", {}).get("labkit", {}) for output in outputs)

    @property
    def n_questions(self) -> int:
        """The number of predictions that it asks for."""
        return sum(cell.question is not None for group in self.groups for cell in group.cells)

    @cached_property
    def exercises(self) -> ExercisePage | None:
        """The page of its exercises."""
        return exercise_page(self.number, self.title, self.file)


def page_of(path: Path) -> Page:
    """The page of a notebook. ValueError if it holds no run, has no title, or answers what it has not asked."""
    notebook = nbformat.read(path, as_version=4)
    if not any(cell.get("outputs") for cell in notebook.cells):
        raise ValueError(f"{path.name} holds no outputs, and a page shows a run: run it first (make notebooks)")
    heading = notebook.cells[0].source.partition("\n")[0]
    _, dot, title = heading.removeprefix("# ").partition(" · ")
    if not (heading.startswith("# ") and dot):
        raise ValueError(f"{path.name} begins with {heading!r}, and its title should look like '# 03 · Collectives'")
    return Page(number_of(path.name), title, path, notebook.cells, groups(notebook.cells))
