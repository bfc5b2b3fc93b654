"""The folded hints: one after the other, counted by whoever gives them, and a solution after an attempt."""

from __future__ import annotations

from types import SimpleNamespace

from labkit.course.exercises.hint_panel import HintPanel


class Giver:
    """Gives hints in order, and a solution once it has been told of an attempt."""

    def __init__(self) -> None:
        self.given: list[int] = []
        self.tried = False

    def hint(self, key: str, level: int) -> SimpleNamespace:
        """As labkit.course.exercises.check.hint does."""
        self.given.append(level)
        return SimpleNamespace(words=f"{key} <{level}>")

    def solution(self, key: str) -> SimpleNamespace:
        """As labkit.course.exercises.check.solution does."""
        if not self.tried:
            raise ValueError("try it once first")
        return SimpleNamespace(code="def f():\n    return 1 < 2\n")


def test_hints_open_one_after_the_other_and_each_is_counted() -> None:
    """A skeleton that can be had before the idea."""
    giver = Giver()
    panel = HintPanel("03.2", giver.hint, giver.solution)
    assert [button.disabled for button in panel.buttons] == [False, True, True]
    panel.buttons[0].click()
    assert [button.disabled for button in panel.buttons] == [False, False, True]
    panel.buttons[1].click()
    panel.buttons[2].click()
    assert giver.given == panel.opened == [1, 2, 3]
    assert "03.2 &lt;2&gt;" in panel.message.value


def test_a_hint_that_is_opened_again_is_not_shown_twice() -> None:
    """Words that pile up."""
    giver = Giver()
    panel = HintPanel("03.2", giver.hint, giver.solution)
    panel.unfold(1)
    panel.unfold(1)
    assert panel.message.value.count("03.2") == 1


def test_the_solution_waits_for_an_attempt() -> None:
    """A solution that can be had for nothing, or that stays shut after an attempt."""
    giver = Giver()
    panel = HintPanel("03.2", giver.hint, giver.solution)
    panel.last.click()
    assert "try it once first" in panel.message.value
    assert "return" not in panel.message.value
    giver.tried = True
    panel.last.click()
    assert "return 1 &lt; 2" in panel.message.value


def test_where_no_widgets_run_there_are_words() -> None:
    """An empty place in an export."""
    giver = Giver()
    assert "three hints" in str(HintPanel("03.2", giver.hint, giver.solution).static())
