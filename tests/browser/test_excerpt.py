"""What a cell needs is found by names, and by nothing else."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tests.browser.excerpt import excerpt, needed, taken_and_given
from tests.browser.labs import LABS

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


@pytest.mark.parametrize(
    ("source", "taken", "given"),
    [
        ("import a.b, c as d\nfrom e import f", "", "a d f"),
        ("n = n + 1", "n", "n"),
        ("n += 1", "n", "n"),
        ("a = 1\nb = a", "", "a b"),
        ("b = a\na = 1", "a", "a b"),
        ("for k in ks:\n    print(k)", "ks print", "k"),
        ("for k in k:\n    pass", "k", "k"),
        ("x = [k * n for k in ks]", "ks n", "x"),
        ("def f(x, y=d):\n    z = x\n    return z + n", "d n", "f"),
        ("def f():\n    return g()\ndef g():\n    return 1", "", "f g"),
        ("class C(B):\n    k = n\n    def m(self):\n        return k", "B n", "C"),
        ("with open(p) as file:\n    print(file)", "open p print", "file"),
        ("try:\n    f()\nexcept E as error:\n    kept = error", "E f", "kept"),
        ("%load_ext labkit\n!ls\ngroup.x = (y := 2)", "group", "y"),
        ("f = lambda x: x + late\nlate = 2", "", "f late"),
        ("a[i] = b", "a b i", ""),
    ],
)
def test_a_cell_takes_what_it_uses_before_it_makes_it(source, taken, given):
    """Would catch a name that a cell makes itself and another cell is run for, and one that nobody is run for."""
    assert taken_and_given(source) == (set(taken.split()), set(given.split()))


def test_needed_are_the_last_cells_above_that_define_a_name_and_what_those_need():
    """Would catch a definition that was replaced in between, one that comes later, and a chain that breaks off."""
    sources = ["n = 1", "m = 5", "n = n + 1", "def f():\n    return n + late", "late = m", "f()", "n = 7"]
    assert needed(sources, {5}) == {0, 1, 2, 3, 4, 5}
    assert needed(sources, {2}) == {0, 2}
    assert needed(sources, {6}) == {6}


def test_an_excerpt_keeps_outputs_and_order_takes_other_sources_and_knows_its_cells():
    """Would catch stored outputs that get lost, a number that says that a cell has run, a folded source whose number
    nobody would ever see, and a cell that is gone."""
    folded = {"jupyter": {"outputs_hidden": True, "source_hidden": True}}
    printed = new_output("stream", name="stdout", text="1")
    cells = [
        new_code_cell("n = slow()", id="a"),
        new_markdown_cell("# n"),
        new_code_cell("def slow():\n    return 1", id="b"),
        new_code_cell("print(n)", id="c", execution_count=3, outputs=[printed], metadata=folded),
    ]
    part = excerpt(new_notebook(cells=cells), ["c"], {"a": "n = 1"})
    assert [(cell.id, cell.source, cell.execution_count) for cell in part.cells] == [
        ("a", "n = 1", None),
        ("c", "print(n)", None),
    ]
    assert part.cells[1].outputs == [printed]
    assert part.cells[1].metadata == {"jupyter": {"outputs_hidden": True}}
    with pytest.raises(ValueError, match="called d, e"):
        excerpt(new_notebook(cells=cells), ["c", "e"], {"d": ""})


def test_the_steps_on_a_prediction_name_the_question_that_its_lab_asks():
    """Would catch a question of a lab that was changed, minutes before a browser does."""
    unasked = []
    for lab in LABS:
        notebook = nbformat.read(NOTEBOOKS / f"{lab}.ipynb", as_version=4)
        sources = {cell.id: cell.source for cell in notebook.cells}
        for shown in lab.shown:
            words = [step.words[0] for step in shown.steps if step.act.__name__ == "predict"]
            unasked += [(lab.stem, shown.cell, word) for word in words if word not in sources[shown.cell]]
    assert unasked == []
