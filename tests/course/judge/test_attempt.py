"""Attempts as text: what is shipped of a notebook, and what is said where nothing can be."""

from __future__ import annotations

import functools
import linecache
import types
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from nbformat.v4 import new_code_cell, new_notebook

from labkit.course.judge.attempt import Attempt, attempt_in, attempt_of, blocks_of


def cell(text: str, name: str = "ipykernel_cell_1") -> dict[str, Any]:
    """Run a text as a kernel runs a cell: its lines can be found, its functions are of __main__."""
    file = f"<{name}>"
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, file, "exec"), space)
    return space


def ran(attempt: Attempt) -> dict[str, Any]:
    """What an attempt defines when it is run by itself."""
    space: dict[str, Any] = {"__name__": "attempt"}
    exec(attempt.before, space)
    exec(attempt.source, space)
    return space


def test_an_attempt_brings_what_it_uses_and_nothing_else() -> None:
    """A NameError in the judge for what stands in the notebook, or the whole notebook on the way."""
    space = cell("""
import math as m
import torch
from torch import Tensor

HALF = 0.5
WIDE = torch.float64
UNUSED = 3

def scaled(x):
    return other(x) * HALF

def other(x):
    return x.to(WIDE) if x is not None else scaled(x)

def mine(x: Tensor) -> Tensor:
    return scaled(x) + m.pi
""")
    attempt = attempt_of(space["mine"])
    assert "UNUSED" not in attempt.before
    given = torch.ones(2)
    assert torch.equal(ran(attempt)["mine"](given), space["mine"](given))


def test_lines_are_those_of_the_cell() -> None:
    """ "line 3 of the attempt", which is line 9 of what one sees."""
    attempt = attempt_of(cell("\n\n\ndef mine(x):\n    return x\n")["mine"])
    assert attempt.source.splitlines()[3] == "def mine(x):"


def test_a_local_name_is_not_taken_for_a_global_of_the_notebook() -> None:
    """A refusal because the notebook happens to have a tensor called x."""
    space = cell("def mine(x):\n    y = [x for x in range(3)]\n    return y\n")
    space["x"] = space["y"] = torch.ones(3)
    assert attempt_of(space["mine"]).before.strip() == ""


def test_a_class_is_found_with_its_text() -> None:
    """Classes of a kernel have no file."""
    space = cell("""
import torch

class Mine(torch.nn.Module):
    def __init__(self, n):
        super().__init__()
        self.n = n
""")
    attempt = attempt_of(space["Mine"])
    assert ran(attempt)["Mine"](3).n == 3


def test_a_class_without_methods_is_looked_for_in_cells_and_not_in_files(tmp_path) -> None:
    """A cell known by its name: another class, from any file in a folder of somebody who is called ipython; or none."""
    space = cell("class Sizes:\n    wide = 2\n", "some kernel's cell 1")
    other = tmp_path / "ipython" / "sizes.py"
    other.parent.mkdir()
    other.write_text("class Sizes:\n    wide = 1\n")
    linecache.getlines(str(other))
    assert attempt_of(space["Sizes"]).source == "class Sizes:\n    wide = 2\n"


def test_a_class_of_classes_brings_what_they_are_made_of() -> None:
    """Bases of inner classes; and torch's names from where one imports them, not from torch's own files."""
    space = cell("""
from torch.autograd import Function
from torch.nn.functional import linear

class Pair:
    class F(Function):
        @staticmethod
        def forward(ctx, x):
            return linear(x, x)
""")
    attempt = attempt_of(space["Pair"])
    assert "from torch.autograd import Function" in attempt.before
    assert "from torch.nn.functional import linear" in attempt.before
    assert ran(attempt)["Pair"].F


def test_names_that_stand_only_in_annotations_are_not_needed() -> None:
    """A refusal because a name for a type is no plain value."""
    space = cell("Batch = dict[str, int]\n\ndef mine(x: Batch) -> Batch:\n    y: Batch = x\n    return y\n")
    assert attempt_of(space["mine"]).before.strip() == ""


class Owner:
    """Has a method."""

    def method(self) -> int:
        """One."""
        return 1


def closure() -> types.FunctionType:
    """A function that uses a variable of the one around it."""
    outer = 3

    def mine() -> int:
        return outer

    return mine  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("thing", "words"),
    [
        (5, "got int 5"),
        (torch.ones(2), "if you have called it, give check the function itself"),
        (None, "got NoneType"),
        (lambda x: x, "write it with def"),
        (functools.partial(print, 1), "give it the function itself"),
        (Owner().method, "give it the function itself"),
        (print, "that you wrote with def"),
        (closure(), "uses outer of the function around it"),
        (__import__("labkit").ring.reduce_scatter, "is labkit's own"),
    ],
)
def test_what_cannot_be_judged_gets_a_sentence(thing: Any, words: str) -> None:
    """A traceback from inside labkit."""
    with pytest.raises(ValueError, match=words):
        attempt_of(thing)


def test_what_lives_only_in_the_notebook_is_named() -> None:
    """A tensor of the notebook that an attempt uses: in another process there is none."""
    space = cell("def mine():\n    return big\n")
    space["big"] = torch.ones(3)
    with pytest.raises(ValueError, match="uses big, a Tensor of this notebook"):
        attempt_of(space["mine"])


def test_a_notebook_is_read_and_never_run() -> None:
    """A notebook that does harm when it is run."""
    blocks = [
        "%load_ext labkit\nimport math",
        "raise SystemExit",
        "STEP = 2\n!rm -rf x\ndef mine(x):\n    return math.floor(x) * STEP",
    ]
    attempt = attempt_in(blocks, "mine")
    assert ran(attempt)["mine"](1.5) == 2
    assert attempt.source.splitlines()[2] == "def mine(x):"


def test_what_else_stands_on_a_line_is_not_brought() -> None:
    """An import that no attempt may make, refused because it shares its line with a number."""
    attempt = attempt_in(["import numpy; STEP = 2", "def mine(x):\n    return x * STEP"], "mine")
    assert "numpy" not in attempt.before
    assert ran(attempt)["mine"](3) == 6


def test_a_helper_keeps_its_decorators() -> None:
    """A helper that is another function in the judge than in the notebook."""
    text = """
import contextlib, functools
@functools.cache
def once(x):
    return [x]

@contextlib.contextmanager
def around(x):
    yield once(x)

@functools.cache
def mine(x):
    with around(x) as found:
        return found is once(x)
"""
    assert ran(attempt_in([text], "mine"))["mine"](3)
    attempt = attempt_of(cell(text)["mine"])
    assert ran(attempt)["mine"](3)
    assert attempt.source.count("@functools.cache") == 1


def test_the_last_definition_counts() -> None:
    """A first try that is judged in place of the second."""
    attempt = attempt_in(["def mine():\n    return 1", "def mine():\n    return 2"], "mine")
    assert ran(attempt)["mine"]() == 2


def test_a_torn_cell_is_told_only_where_it_matters() -> None:
    """Another exercise that is half written keeps this one from being judged."""
    assert attempt_in(["def other(:", "def mine():\n    return 1"], "mine").name == "mine"
    assert ran(attempt_in(["def mine():\n    return 1", "def mine(:"], "mine"))["mine"]() == 1  # as in the kernel
    assert attempt_in(["x = " + "-" * 50_000 + "1", "def mine():\n    return 1"], "mine").name == "mine"
    with pytest.raises(ValueError, match="mine is not Python yet: line 1"):
        attempt_in(["def mine(:"], "mine")
    with pytest.raises(ValueError, match="no definition of mine"):
        attempt_in(["x = 1"], "mine")


def test_files_of_other_kinds_and_torn_ones_get_a_sentence(tmp_path: Path) -> None:
    """A traceback of nbformat."""
    nbformat.write(new_notebook(cells=[new_code_cell("x = 1")]), tmp_path / "a.ipynb")
    assert blocks_of(tmp_path / "a.ipynb") == ["x = 1"]
    (tmp_path / "b.py").write_text("y = 2\n")
    assert blocks_of(tmp_path / "b.py") == ["y = 2\n"]
    (tmp_path / "c.ipynb").write_text("{ no")
    with pytest.raises(ValueError, match="cannot be read as a notebook"):
        blocks_of(tmp_path / "c.ipynb")
    with pytest.raises(ValueError, match="no notebook and no Python file"):
        blocks_of(tmp_path / "d.txt")
