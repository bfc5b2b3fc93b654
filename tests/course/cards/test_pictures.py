"""Pictures of cards: every expression of the decks draws, and nothing else is taken for a picture."""

from __future__ import annotations

import importlib
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from labkit.course.cards.card import Card
from labkit.course.cards.deck import the_deck
from labkit.course.cards.figures import VOCABULARY
from labkit.course.cards.pictures import DRAWS, picture
from labkit.view.schedule import rows
from labkit.view.svg import Drawing
from tests.cases import cases


def illustrated() -> list[Card]:
    """The cards that have a picture."""
    return [card for card in the_deck() if card.picture]


def a_card(picture: str, **numbers: str) -> Card:
    return Card(id="a-card", front="How long is it?", claim="As long as it is.", law="`a = a`", numbers=numbers,
                picture=picture, difficulty=1, tags=("basics",))  # fmt: skip


def test_the_decks_have_pictures():
    """Would catch decks whose pictures were lost, with which every other test here would pass."""
    assert len(illustrated()) >= 30


@cases("card", illustrated)
def test_every_picture_of_the_decks_draws_and_says_what_it_shows(card):
    """Would catch a picture that breaks with a law or a number of its card, has no words, or is no SVG."""
    drawn = card.drawn()
    assert isinstance(drawn, Drawing)
    assert len(drawn.label) > 20
    assert drawn.height > 100
    shapes = [each.tag.rpartition("}")[2] for each in ElementTree.fromstring(str(drawn)).iter()]
    assert shapes[0] == "svg"
    assert len({"rect", "path", "line", "circle"} & set(shapes)) >= 1
    assert shapes.count("text") >= 4
    body = str(drawn).partition(">")[2]  # without the label
    assert "nan" not in body
    assert "inf" not in body.replace("in flight", "")


def test_a_card_without_a_picture_has_none():
    """Would catch an empty expression that is taken for a broken one."""
    assert picture("") is picture("  ") is a_card("").drawn() is None


def test_a_picture_is_what_the_function_draws():
    """Would catch an expression whose calls go elsewhere than to labkit's own function."""
    from labkit.plan.schedules.schedule import one_f_one_b

    drawn = picture("rows(one_f_one_b(4, 8), 'four stages')")
    assert str(drawn) == str(rows(one_f_one_b(4, 8), "four stages"))


def test_a_picture_follows_the_numbers_of_its_card():
    """Would catch a picture that shows other numbers than the card says."""
    four, two = (a_card("rows(gpipe(p, m))", p=p, m="6").drawn() for p in ("4", "2"))
    assert "4 ranks, 6 micro-batches" in four.label
    assert "2 ranks, 6 micro-batches" in two.label


def test_a_number_may_have_the_name_of_a_function():
    """Would catch a card whose number `rows` is called as if it were the function, or the other way round."""
    drawn = picture("rows(gpipe(2, rows), str_)", {"rows": 3, "str_": "three"})
    assert drawn is not None
    assert drawn.label.startswith("three")
    assert "3 micro-batches" in picture("rows(gpipe(2, rows))", {"rows": 3}).label


@cases("module", DRAWS)
def test_every_name_of_the_vocabulary_exists(module):
    """Would catch a name that a picture may not say because the module has lost it."""
    for name in DRAWS[module].split():
        assert callable(getattr(importlib.import_module(f"labkit.{module}"), name)) or name.isupper(), name


def test_no_name_means_two_things():
    """Would catch a function of the pictures that hides one of the figures: the same words for another thing."""
    names = " ".join([*DRAWS.values(), *VOCABULARY.values()]).split()
    assert sorted(names) == sorted(set(names))


@cases(
    ("said", "reason"),
    [
        ("rows(gpipe(4, 8)", "cannot be read"),
        ("rws(gpipe(4, 8))", "nothing is called 'rws'"),
        ("rows(gipe(4, 8))", "nothing is called 'gipe'; did you mean 'gpipe'"),
        ("rows(gpipe(4, 0))", "micro"),
        ("rows(5)", "cannot be computed"),
        ("2 + 2", "is a int, and not a picture"),
        ("gpipe(4, 8)", "is a Schedule, and not a picture"),
        ("rows", "is a function, and not a picture"),
        ("rows(gpipe(p, 8))", "nothing is called 'p'"),
        ("open('/etc/passwd')", "nothing is called 'open'"),
        ("__import__('os')", "cannot be computed|nothing is called"),
        ("rows.__globals__", "cannot be computed"),
        ("Picture('<script>', 1, 'x')", "nothing is called 'Picture'"),
        ("x := rows(gpipe(4, 8))", "cannot be read"),
        ("[" * 400 + "]" * 400, "cannot be"),
    ],
)
def test_an_expression_that_is_no_picture_is_told_with_the_card(said, reason):
    """Would catch a broken picture that is shown as nothing, a reason without its card, and a deck that runs code."""
    with pytest.raises(ValueError, match=reason) as told:
        a_card(said).drawn()
    assert "'a-card', field picture" in str(told.value)


def test_a_picture_of_a_law_does_not_wait_for_torch():
    """Would catch cards that take seconds to show, since all that pictures may name was loaded for one of them."""
    code = "import sys; from labkit.course.cards.deck import the_deck; the_deck()['pp-naive'].drawn()"
    code += "; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
