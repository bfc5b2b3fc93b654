"""A reader of a lab meets every name before it is used: nothing that a visible cell needs comes from a folded one.

JupyterLab shows a folded cell (`jupyter.source_hidden`) as its caption. So it may check and draw, and nothing else may
hang on it: what a visible cell calls is imported, assigned or defined in a visible cell above it, or in itself. And no
folded cell only prints what its check has shown: a sentence without a number of the run stands in markdown below it.
What a lab takes from deep inside labkit has a public name.
"""

from __future__ import annotations

import ast
import builtins
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.browser.excerpt import taken_and_given, tree_of
from tests.test_house import own_private_names

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
LABS = [*sorted(NOTEBOOKS.glob("[0-9]*.ipynb")), NOTEBOOKS / "ten_minutes.ipynb"]
KNOWN = {*dir(builtins), "display", "get_ipython"}
"""What every cell has: Python's own names, and two of IPython's."""
OF_A_RANK = {"group", "rank", "n_ranks", "torch"}
"""What a cell with %%ranks has besides (labkit/launch/magic.py). Its own names stay on the ranks, apart from the
notebook's."""


def unseen_names(cells: Sequence[dict[str, Any]]) -> list[str]:
    """Each name that a visible cell takes from no visible cell, and each function or class that it takes from a folded
    one, with the id of its cell."""
    faults = []
    seen = {False: set(KNOWN), True: KNOWN | OF_A_RANK}  # names of the notebook, and those on the ranks
    defined: dict[bool, dict[str, str]] = {False: {}, True: {}}  # {function or class: the folded cell that defines it}
    for cell in code_cells(cells):
        source = "".join(cell["source"])
        on_ranks = source.startswith("%%ranks")
        taken, given = taken_and_given(source)
        if is_folded(cell):
            defined[on_ranks] |= dict.fromkeys(given & definitions(source), cell["id"])
            continue
        for name in sorted(taken):
            if name in defined[on_ranks]:
                faults.append(f"{cell['id']} uses {name}, which the folded cell {defined[on_ranks][name]} defines")
            elif name not in seen[on_ranks]:
                faults.append(f"{cell['id']} uses {name}, which no visible cell above imports, assigns or defines")
        seen[on_ranks] |= given
        for name in given:
            defined[on_ranks].pop(name, None)
    return faults


def printed_conclusions(cells: Sequence[dict[str, Any]]) -> list[str]:
    """The ids of folded cells that print texts which were written beforehand, and nothing of what has run."""
    faults = []
    for cell in code_cells(cells):
        calls = [node for node in ast.walk(tree_of("".join(cell["source"]))) if isinstance(node, ast.Call)]
        prints = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]
        if is_folded(cell) and prints and all(isinstance(part, ast.Constant) for call in prints for part in call.args):
            faults.append(f"{cell['id']} prints a conclusion: write it in markdown below the check")
    return faults


def private_names(cells: Sequence[dict[str, Any]]) -> list[str]:
    """The names with an underscore in front, of labkit's own, that a cell takes, with the id of the cell.

    A cell that only shows their source, by `labkit.show`, does not need them."""
    ours = {name for name in own_private_names() if name.startswith("_") and not name.startswith("__")}
    return [
        f"{cell['id']} takes {node.attr} from inside labkit: give it a public name"
        for cell in code_cells(cells)
        if "labkit.show" not in "".join(cell["source"])
        for node in ast.walk(tree_of("".join(cell["source"])))
        if isinstance(node, ast.Attribute) and node.attr in ours
    ]


def code_cells(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cells of code among these."""
    return [cell for cell in cells if cell["cell_type"] == "code"]


def is_folded(cell: dict[str, Any]) -> bool:
    """Whether a reader sees only the caption of this cell of code."""
    return bool(cell["metadata"].get("jupyter", {}).get("source_hidden", False))


def definitions(source: str) -> set[str]:
    """The names of all functions and classes of a cell."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(tree_of(source)) if isinstance(node, kinds)}


@pytest.mark.parametrize("path", LABS, ids=lambda path: path.stem)
def test_every_name_of_a_visible_cell_is_seen_before(path: Path) -> None:
    """Would catch a helper that a reader looks for in vain, because its import or its definition is folded."""
    faults = unseen_names(json.loads(path.read_text(encoding="utf-8"))["cells"])
    assert faults == [], "\n".join(faults)


@pytest.mark.parametrize("path", LABS, ids=lambda path: path.stem)
def test_a_conclusion_stands_in_markdown(path: Path) -> None:
    """Would catch a check that says what it has shown in the voice of the program, where nobody reads the reason."""
    faults = printed_conclusions(json.loads(path.read_text(encoding="utf-8"))["cells"])
    assert faults == [], "\n".join(faults)


@pytest.mark.parametrize("path", LABS, ids=lambda path: path.stem)
def test_what_a_lab_needs_has_a_public_name(path: Path) -> None:
    """Would catch a lab that calls what the package may rename on any day."""
    faults = private_names(json.loads(path.read_text(encoding="utf-8"))["cells"])
    assert faults == [], "\n".join(faults)


def notebook(*sources: str) -> list[dict[str, Any]]:
    """Cells `c0`, `c1` and so on of code; a source that begins with `#` is folded, as every caption does."""
    return [
        {"cell_type": "code", "id": f"c{place}", "source": [source], "metadata": metadata(source)}
        for place, source in enumerate(sources)
    ]


def metadata(source: str) -> dict[str, Any]:
    """That of a cell with this source."""
    return {"jupyter": {"source_hidden": True}} if source.startswith("#") else {}


@pytest.mark.parametrize(
    ("sources", "faults"),
    [
        (["import torch", "torch.ones(3)"], []),
        (["# Import.\nimport torch", "torch.ones(3)"], ["c1 uses torch"]),
        (["torch.ones(3)", "import torch"], ["c0 uses torch"]),
        (["# Set.\nn = 3", "f'{n}'"], ["c1 uses n"]),
        (["# Set.\nn = 3", "[n for k in range(3)]"], ["c1 uses n"]),
        (["# Set.\nn = 3", "[n for n in range(3)]"], []),
        (["# Set.\nn = 3", "def f(k):\n    return n"], ["c1 uses n"]),
        (["# Set.\nn = 3", "def f(n):\n    return n"], []),
        (["# Set.\nn = 3", "def f(k=n):\n    return k"], ["c1 uses n"]),
        (["# Set.\nn = 3", "f = lambda: n"], ["c1 uses n"]),
        (["# Set.\nn = 3", "class A(n.B):\n    pass"], ["c1 uses n"]),
        (["def f():\n    return n\nn = 3"], []),
        (["# Set.\nn = 3", "# Draw.\nprint(n)"], []),
        (["n = 3", "# Set.\nn = 4", "print(n)"], []),
        (["def f():\n    return 1", "# Define.\ndef f():\n    return 2", "f()"], ["c2 uses f"]),
        (["# Define.\ndef f():\n    return 2", "def f():\n    return 1", "f()"], []),
        (["# Define.\nif True:\n    class A:\n        pass", "A()"], ["c1 uses A"]),
        (["%load_ext labkit\nimport torch", "%%ranks\nx = group.size, rank, n_ranks, torch", "%%ranks 0\nx"], []),
        (["x = 1", "%%ranks\nx"], ["c1 uses x"]),
        (["%%ranks\nx = 1", "x"], ["c1 uses x"]),
    ],
)
def test_a_name_that_a_visible_cell_takes_from_a_folded_one_is_found(sources: list[str], faults: list[str]) -> None:
    """Would catch a rule that overlooks a way to use a name, and one that cries wolf: the labs above hang on it."""
    assert [fault.partition(",")[0] for fault in unseen_names(notebook(*sources))] == faults


def test_a_folded_cell_that_prints_only_what_was_written_beforehand_is_found() -> None:
    """Would catch a rule that forbids the number of a run, or the print of a visible cell."""
    sources = (
        "print('hello')",
        "# Check.\nassert n\nprint('so the ring is best')",
        "# Check.\nassert n\nprint(f'{n} bytes, by the law')",
        "# Draw.\nprint('n  law')\nfor k in n:\n    print(k, law)",
        "# Check.\nassert n",
        "# Check.\nfor k in n:\n    print('right')",
    )
    told = printed_conclusions(notebook(*sources))
    assert [fault.partition(" ")[0] for fault in told] == ["c1", "c5"]


def test_a_private_name_of_labkit_is_found() -> None:
    """Would catch a rule that takes a private name of torch's, or a public one, for labkit's."""
    sources = (
        "labkit.DDP._reduce",
        "torch._int_mm(a, b)",
        "labkit.DDP.finish",
        "x.__class__",
        "# Draw.\nsync._hooks",
        "labkit.show(DDP._reduce)",
    )
    assert [fault.partition(" from")[0] for fault in private_names(notebook(*sources))] == [
        "c0 takes _reduce",
        "c4 takes _hooks",
    ]
