"""Stubs: what is left of a reference when its bodies are taken out."""

from __future__ import annotations

import ast
import json
from pathlib import Path

from labkit.course.exercises.catalogue import problem
from labkit.course.exercises.stub import n_lines, stub_of

SOLVED = '''from functools import cache


def best_cut(costs: list[int]) -> int:
    """The cut.   [n] -> int

    More of it."""
    @cache
    def best(i: int) -> int:
        return i

    return best(len(costs))
'''


def test_a_stub_keeps_signature_and_docstring_and_nothing_of_the_body() -> None:
    """A decorator of the first inner function that stays behind; a line of the answer."""
    stub = stub_of(SOLVED)
    ast.parse(stub)
    assert "More of it." in stub
    assert "best(" not in stub.replace("best_cut(", "")
    assert "...  # about 5 lines" in stub
    assert n_lines(SOLVED) == 5


def test_each_method_of_a_class_is_a_stub_of_its_own() -> None:
    """A class whose __init__ is given away."""
    stub = stub_of("class A:\n    def __init__(self):\n        self.x = 1\n\n    def f(self):\n        return 2\n")
    assert stub.count("...  # one line") == 2
    assert "self.x" not in stub


def test_names_for_types_come_with_a_reference() -> None:
    """A stub that a notebook cannot run: NameError in its first line."""
    for key, name in (("01.4", "Batch"), ("02.3", "Place"), ("02.4", "Call")):
        space: dict[str, object] = {}
        exec(problem(key).stub, space)
        assert name in space


def test_the_tour_asks_its_exercise_in_the_words_of_the_stub() -> None:
    """Would catch an argument, such as a negative `by`, that the check tries and the tour's stub never names."""
    tour = json.loads((Path(__file__).parents[3] / "notebooks" / "ten_minutes.ipynb").read_text())
    sources = ["".join(cell["source"]) for cell in tour["cells"] if cell["cell_type"] == "code"]
    (asked,) = (source for source in sources if "def shift_along_ring" in source)
    assert asked.endswith(problem("02.1").stub.rstrip())
