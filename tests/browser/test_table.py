"""The table of steps (labs.py) has every widget that the labs show."""

from __future__ import annotations

import ast
from pathlib import Path

import nbformat
import pytest

from labkit.course.widgets.twin import VIEW
from tests.browser.labs import LABS
from tests.browser.shortcuts import SHORTCUTS

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS, COURSE = ROOT / "notebooks", ROOT / "labkit/course"
OF_THE_EXERCISES = {"HintPanel", "ProgressPanel"}  # test_journey.py plays them
OF_NO_LAB = {"MockInterviewPanel", "WhatBreaksPanel"}  # test_interview.py plays them


SHARED = {"Explorer", "FilmPlayer", "Recorded"}
"""Classes that widgets are made from, and that no cell shows."""


def widgets() -> set[str]:
    """The names of all classes of widgets that a cell shows: those with a twin."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in COURSE.rglob("*.py")]
    classes = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    bases = {node.name: {base.id for base in node.bases if isinstance(base, ast.Name)} for node in classes}
    return {name for name in bases if bases[name] & (SHARED | {"Twin"})} - SHARED


def test_the_table_has_all_labs():
    """Would catch a new lab that nobody opens in a browser."""
    assert [lab.stem for lab in LABS] == sorted(path.stem for path in NOTEBOOKS.glob("[0-9]*.ipynb"))


@pytest.mark.parametrize("lab", LABS, ids=str)
def test_the_table_has_every_widget_of_a_lab_by_its_cell_and_its_class(lab):
    """Would catch a widget that nobody touches, and one that the table calls by another name."""
    cells = [cell for cell in nbformat.read(NOTEBOOKS / f"{lab}.ipynb", 4).cells if cell.cell_type == "code"]
    shows = {cell.id for cell in cells if any(VIEW in output.get("data", {}) for output in cell.outputs)}
    kinds = {shown.cell: shown.kind for shown in lab.shown if shown.kind}
    assert set(kinds) == shows
    sources = {cell.id: cell.source for cell in cells}
    assert [cell for cell, kind in kinds.items() if f"{kind}(" not in sources[cell]] == []


def test_labs_have_each_kind_of_widget():
    """Would catch a new kind of widget that nobody sees in a browser, and a shortcut for nothing."""
    kinds = {shown.kind for lab in LABS for shown in lab.shown if shown.kind}
    assert kinds | OF_THE_EXERCISES | OF_NO_LAB == widgets() | {"Predict"}
    visited = {lab.number for lab in LABS if lab.touched}
    assert {cell for cell in SHORTCUTS if cell[:2] not in visited} <= {cell for lab in LABS for cell in lab.short}
