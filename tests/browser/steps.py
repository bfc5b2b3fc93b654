"""Steps on a widget: what somebody does to it, and what must be seen then. `STEP(...)` is a line of the table."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from playwright.sync_api import Error, Locator, expect

from tests.browser.jupyter import END_MS, PATIENCE_MS, wait_until_idle

HANDLE = ".noUi-handle"
TEXT = "input[type=text]"
Act = Callable[..., None]


@dataclass(frozen=True)
class Step:
    """`act` on the widget, with these words."""

    act: Act
    words: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        options = [f"{name}={value!r}" for name, value in self.options.items()]
        return f"{self.act.__name__}({', '.join([*map(repr, self.words), *options])})"


def step(act: Act) -> Callable[..., Step]:
    """Makes of what is done to a widget a line that says so."""

    @wraps(act)
    def line(*words: Any, **options: Any) -> Step:
        return Step(act, words, options)

    return line


def play(view: Locator, steps: Iterable[Step], where: str) -> None:
    """Wait until the widget is drawn, then do one step after the other; an error says which one, and what was seen."""
    expect(view).to_be_visible()
    view.scroll_into_view_if_needed()
    for number, now in enumerate(steps, 1):
        try:
            now.act(view, *now.words, **now.options)
        except (AssertionError, Error) as error:
            error.add_note(f"{where}, step {number}: {now}\nseen: {view.text_content(timeout=5_000)}")
            raise


# What is seen


@step
def sees(view: Locator, *texts: str | re.Pattern[str] | Callable[[], str], part: str = "") -> None:
    """The widget, or the first such part of it, shows these texts; a function is asked for its text only now."""
    shown = view.locator(part).first if part else view
    for text in texts:
        expect(shown).to_contain_text(text() if callable(text) else text)


@step
def at_last(view: Locator, *texts: str) -> None:
    """The widget shows these texts when a run on the ranks has ended."""
    for text in texts:
        expect(view).to_contain_text(text, timeout=END_MS)


@step
def has(view: Locator, part: str) -> None:
    """There is such a part of the widget, even if nobody can see it."""
    expect(view.locator(part).first).to_be_attached()


@step
def lacks(view: Locator, *texts: str | Callable[[], str]) -> None:
    """The widget shows none of these texts; a function is asked for its text only now."""
    for text in texts:
        expect(view).not_to_contain_text(text() if callable(text) else text)


@step
def shows(view: Locator, part: str, patience_ms: int = PATIENCE_MS) -> None:
    """Such a part of the widget can be seen."""
    expect(view.locator(part).first).to_be_visible(timeout=patience_ms)


@step
def links(view: Locator, part: str, address: str) -> None:
    """Such a part that can be seen leads to an address of this pattern."""
    expect(view.locator(part).locator("visible=true").first).to_have_attribute("href", re.compile(address))


@step
def counts(view: Locator, part: str, count: int) -> None:
    """The widget has so many such parts."""
    expect(view.locator(part)).to_have_count(count)


@step
def focuses(view: Locator, part: str, place: int) -> None:
    """What is typed goes to this part now."""
    expect(view.locator(part).nth(place)).to_be_focused()


# What is done


@step
def predict(view: Locator, question: str, typed: str, answer: str) -> None:
    """Type a prediction, press the button, and read what the widget says then."""
    expect(view).to_contain_text(question)
    view.locator("input").first.fill(typed)
    view.get_by_role("button", name="commit").click()
    expect(view).to_contain_text(answer)


def move(view: Locator, place: int, *keys: str, part: str = HANDLE) -> None:
    """Press keys where such a part has the focus."""
    target = view.locator(part).nth(place)
    target.focus()
    for key in keys:
        target.press(key)


@step
def slides(view: Locator, place: int, *keys: str, part: str = HANDLE) -> None:
    """Move a slider by keys."""
    move(view, place, *keys, part=part)


@step
def types(view: Locator, place: int, words: str, part: str = TEXT, end: str = "Enter") -> None:
    """Type words into a field, and press Enter."""
    line = view.locator(part).nth(place)
    line.fill(words)
    line.press(end)


@step
def writes(view: Locator, text: str) -> None:
    """Write lines into the box for them, and leave it."""
    box = view.locator("textarea")
    expect(box).to_be_visible()
    box.fill(text)
    box.blur()


@step
def chooses(view: Locator, place: int, option: str | int) -> None:
    """Choose an option of a menu, by its words or by its place."""
    if isinstance(option, int):
        view.locator("select").nth(place).select_option(index=option)
    else:
        view.locator("select").nth(place).select_option(option)


@step
def clicks(view: Locator, name: str) -> None:
    """Click the button with these words, as soon as it can be clicked."""
    view.get_by_role("button", name=name).click()


@step
def clicks_on(view: Locator, part: str, place: int = 0) -> None:
    """Click such a part."""
    view.locator(part).nth(place).click()


@step
def presses(view: Locator, part: str, place: int, *keys: str) -> None:
    """Press keys where such a part has the focus."""
    move(view, place, *keys, part=part)


@step
def redraws(view: Locator, place: int, *keys: str) -> None:
    """Move a slider by keys: the picture is another one then."""
    wait_until_idle(view.page)
    picture = view.locator("svg").first
    before = picture.inner_html()
    move(view, place, *keys)
    view.page.wait_for_function(
        "([view, before]) => view.querySelector('svg').innerHTML !== before", arg=[view.element_handle(), before]
    )


@step
def rewords(view: Locator, place: int, key: str, pattern: str) -> None:
    """Move a slider by a key: the words that match the pattern are others then."""
    before = re.search(pattern, view.text_content() or "")
    assert before, f"nothing matches {pattern}"
    move(view, place, key)
    expect(view).not_to_contain_text(before[0])
    expect(view).to_contain_text(re.compile(pattern))


# What only the table, or only one widget, needs


@step
def goes_on(view: Locator) -> None:
    """Nothing is done: here the journey goes on to the next widget."""


GOES_ON = goes_on()


@step
def hovers_over_an_action(view: Locator, needs: str) -> None:
    """The frame of what an action needs is seen while the pointer rests on it, and only then."""
    box = view.locator(".lk-do").filter(has=view.page.locator("title", has_text=needs)).first
    frame = box.locator(".lk-need")
    expect(frame).to_have_css("visibility", "hidden")
    box.locator("rect").first.hover(position={"x": 3, "y": 4})
    expect(frame).to_have_css("visibility", "visible")


@step
def is_asked_about_system_design(view: Locator) -> None:
    """Skip cards until the case of system design: its planner is seen only with the answer."""
    for number in range(1, 20):
        question = view.locator("p", has_text=re.compile(rf"^{number} · "))
        expect(question).to_be_visible()
        if "System design" in question.inner_text():
            break
        view.get_by_role("button", name="skip").click()
    expect(question).to_contain_text("System design")
    planner = view.locator(".jupyter-widget-Collapse", has_text="the planner, with this case loaded")
    expect(planner.locator("svg").first).to_be_hidden()
    view.get_by_role("button", name="show the answer").click()
    expect(planner.locator("svg").first).to_be_visible()
    expect(view.locator("input[type=checkbox]").first).to_be_visible()
