"""The whiteboard: its pictures, and what its controls do."""

from __future__ import annotations

import importlib
import itertools
import math

import pytest

from labkit.course.whiteboard.derivations import DERIVATIONS, derivation
from labkit.course.whiteboard.whiteboard import Whiteboard
from labkit.course.whiteboard.whiteboard_picture import question, whiteboard
from tests.cases import cases
from tests.counting import calls
from tests.view import page

by_name = cases("each", DERIVATIONS)


@by_name
def test_a_question_shows_every_symbol_with_its_unit(each):
    """Would catch words on each other, and a symbol that nobody explains."""
    picture = question(each)
    page.check(picture)
    for symbol in each.symbols:
        assert {symbol.name, symbol.means} <= set(page.texts(picture))
        assert symbol.means in picture.label


@pytest.mark.rest
@by_name
def test_every_formula_has_a_picture_over_every_symbol(each):
    """Would catch the logarithm of 0, a range of one number, and marks on each other."""
    asked = {"answer": each.answer, "wrong": each.wrong[0].formula, "zero": "0", "nothing": "1/0"}
    places = zip(itertools.cycle(each.names), each.draws(4), asked.items(), strict=False)
    for along, at, (kind, words) in places:
        picture = whiteboard(each, each.read(words), along, at)
        page.check(picture)
        assert "nan" not in str(picture)
        assert ("nowhere apart" in picture.label) == (kind == "answer") or kind == "wrong"
        xs, truth = page.line_of(picture, "truth")
        wanted = [each.formula.number({**at, along: x}) for x in xs]
        assert truth == pytest.approx([y if math.isfinite(y) else math.nan for y in wanted], nan_ok=True)


def test_the_picture_says_where_the_two_part():
    """Would catch two curves that look alike and are not."""
    asked = derivation("1F1B: micro-batches held")
    picture = whiteboard(asked, asked.read("p - r"), "r", {"p": 6, "m": 2, "r": 0})
    assert "apart up to r = 3" in page.words(picture)
    picture = whiteboard(asked, asked.read("p - r"), "p", {"p": 6, "m": 2, "r": 0})
    assert "apart from p = 3 on" in page.words(picture)
    with pytest.raises(KeyError):
        whiteboard(asked, asked.formula, "q", {"p": 6, "m": 2, "r": 0})


def test_a_formula_gets_its_verdict_and_its_picture():
    """Would catch a verdict that stays from the formula before."""
    board = Whiteboard("ring all-reduce: bytes")
    assert board.verdict is None
    assert "bytes of the whole tensor" in str(board.static())
    board.field.value = "(n-1)/n*S"
    assert board.verdict.kind == "factor"
    assert "Right up to a factor" in board.message.value
    assert "a reduce-scatter" in board.message.value
    assert r"\frac{n - 1}{n} \cdot S" in board.reading.value
    assert "ring all-reduce: bytes over n: apart everywhere" in board.picture.label
    board.along.value = "S"
    assert "over S: apart everywhere" in board.picture.label
    board.field.value = "2*(n-1)/n*S"
    assert board.verdict.right
    assert board.derived == {"ring all-reduce: bytes"}
    assert "1 of 30 derived" in board.message.value
    assert "nowhere apart" in board.picture.label


@pytest.mark.parametrize("nonsense", ["2n", "n*", "x", "__import__('os')", "9^9^9", "<b>n</b>", "n" * 300])
def test_nonsense_is_told_with_its_column_and_the_picture_stays(nonsense):
    """Would catch an empty page after a slip of the finger, and markup that the field brings into the page."""
    board = Whiteboard("bubble")
    board.field.value = "1/m"
    before = board.picture
    board.field.value = nonsense
    assert board.picture is before
    assert board.verdict is None
    assert board.reading.value == ""
    assert "column " in board.message.value
    assert "the picture is the last one that made sense" in board.message.value
    assert "<b>" not in board.message.value


def test_another_question_begins_with_an_empty_field():
    """Would catch the symbols of the question before, and its answer."""
    board = Whiteboard("bubble")
    board.field.value = "(p-1)/(m+p-1)"
    board.reveal.value = True
    assert "plan.schedules.schedule.bubble" in board.message.value
    board.choice.value = "Amdahl: speed-up"
    assert (board.field.value, board.reveal.value, board.verdict) == ("", False, None)
    assert board.along.options == ("n", "s")
    assert "share s of the work" in board.asking.value
    assert "Amdahl: speed-up" in board.picture.label
    assert "bubble" not in board.message.value
    board.field.value = "1/(s + (1-s)/n)"
    assert "2 of 30 derived" in board.message.value


def test_a_menu_of_some_and_names_that_are_not_there():
    """Would catch a misspelt name that opens another question."""
    board = Whiteboard("bubble", ["MFU", "tokens a day"])
    assert board.choice.options == ("bubble", "MFU", "tokens a day")
    with pytest.raises(ValueError, match="did you mean 'MFU'"):
        Whiteboard("bubble", ["MFUs"])
    with pytest.raises(ValueError, match="no derivation is called"):
        Whiteboard("qqq")


@pytest.mark.rest
@by_name
def test_an_answer_takes_little_work(each):
    """Would catch a law that is simulated a thousand times for one Enter."""
    board = Whiteboard(each.name, [each.name])

    def answer():
        board.field.value = each.answer
        board.field.value = each.wrong[-1].formula

    importlib.import_module("sympy")  # which is no work of an answer
    assert calls(answer) < 500_000
