"""What every explorer does with its controls, whatever it draws."""

from __future__ import annotations

import ipywidgets as widgets
import pytest

from labkit.course.widgets.explorer import Explorer
from labkit.view.svg import Picture, text


class Halves(Explorer):
    """Draws half of an even number, sets an odd one to the next, and refuses negative ones."""

    def __init__(self) -> None:
        self.number, self.drawn_times = widgets.IntText(2), 0
        super().__init__([self.number], [self.number])

    def drawn(self) -> Picture:
        self.drawn_times += 1
        if self.number.value < 0:
            raise ValueError(f"{self.number.value} < 0 has no half here")
        if self.number.value % 2:
            self.note = "made <b>even</b>"
            self.number.value += 1
        half = f"half: {self.number.value // 2}"
        return Picture(text(0, 20, half), 40, half)


def test_a_control_that_moves_draws_once_more():
    """Would catch a picture that stays behind its controls."""
    explorer = Halves()
    assert explorer.drawn_times == 1
    explorer.number.value = 10
    assert explorer.drawn_times == 2
    assert "half: 5" in explorer.shown.value
    assert "half: 5" in str(explorer.static())


def test_a_control_that_the_drawing_sets_does_not_draw_again():
    """Would catch an explorer that draws twice for one move, or for ever."""
    explorer = Halves()
    explorer.number.value = 7
    assert explorer.drawn_times == 2
    assert "half: 4" in explorer.shown.value


def test_a_note_is_gone_with_the_picture_that_it_was_for():
    """Would catch yesterday's warning over today's picture."""
    explorer = Halves()
    explorer.number.value = 7
    assert explorer.message.value == "made <b>even</b>"
    explorer.number.value = 12
    assert explorer.message.value == ""


def test_what_makes_no_sense_is_told_and_the_last_picture_stays():
    """Would catch an empty widget, a traceback in its place, and words that are taken for HTML."""
    explorer = Halves()
    explorer.number.value = -4
    assert explorer.message.value == "-4 &lt; 0 has no half here: the picture is the last one that made sense"
    assert "half: 1" in explorer.shown.value
    assert "half: 1" in str(explorer.static())
    explorer.number.value = 6
    assert explorer.message.value == ""
    assert "half: 3" in explorer.shown.value


class Menu(Explorer):
    """A menu that has None among its options, and starts there."""

    def __init__(self) -> None:
        menu = widgets.Dropdown(options=[("no limit", None), ("1", 1.0)], value=None, description="capacity")
        super().__init__([menu], [menu])

    def drawn(self) -> Picture:
        return Picture("", 1, "")


def test_no_explorer_starts_with_an_empty_menu():
    """Would catch a menu that a browser shows blank: each explorer's own tests go through this on their way."""
    with pytest.raises(AssertionError, match="'capacity' of Menu starts without a choice"):
        Menu()


def test_an_explorer_that_draws_nothing_says_so():
    """Would catch a subclass that forgot `drawn`, found by an empty cell."""
    with pytest.raises(AssertionError, match="Explorer does not say what it draws"):
        Explorer([], [])
