"""Recorded films on the static site, opened from a plain folder: they step, play and slide without a kernel."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from playwright.sync_api import Browser, Page, expect

from labkit.course.export.export import export
from labkit.course.widgets.packed import unpacked
from tests.browser.jupyter import PATIENCE_MS

ROOT = Path(__file__).resolve().parents[2]
(ZERO,) = ROOT.glob("notebooks/07_*.ipynb")
(POINT,) = ROOT.glob("notebooks/02_*.ipynb")
TOUR = ROOT / "notebooks/ten_minutes.ipynb"
WIDTHS = (390, 1200)

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

SAME = """(figure, frame) => {
    const other = document.createElement("div");
    other.innerHTML = frame;
    return figure.querySelector(".lk-film-stage").innerHTML === other.innerHTML;
}"""
"""Whether a film shows this frame, letter by letter."""
CONTRASTS = """(figure) => {
    const light = (colour) => colour.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255)
        .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
        .reduce((sum, part, place) => sum + part * [0.2126, 0.7152, 0.0722][place], 0);
    const page = light(getComputedStyle(document.body).backgroundColor);
    return [...figure.querySelectorAll("button, .lk-film-bar span, svg, figcaption")].map((part) => {
        const ink = light(getComputedStyle(part).color);
        return (Math.max(ink, page) + 0.05) / (Math.min(ink, page) + 0.05);
    });
}"""
"""How far the words of a film stand out from the page (WCAG's contrast)."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a site of two labs, of which one has films, and the tour."""
    folder = tmp_path_factory.mktemp("site")
    export([POINT, ZERO], folder)
    return folder


@pytest.fixture
def wrong() -> list[str]:
    """What a page complains of, or asks of others."""
    return []


@pytest.fixture
def window(browser: Browser, site: Path, wrong: list[str]) -> Iterator[Page]:
    """A window that notes what goes wrong in it."""
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    context.set_default_timeout(PATIENCE_MS)
    opened = context.new_page()
    opened.on("console", lambda message: wrong.append(message.text))
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("requestfailed", lambda request: wrong.append(f"not there: {request.url}"))
    opened.on("request", lambda request: request.url.startswith((site.as_uri(), "data:")) or wrong.append(request.url))
    yield opened
    context.close()


def films_of(notebook: Path) -> list[dict[str, Any]]:
    """What is stored with the films of a notebook, in their order."""
    outputs = [output for cell in nbformat.read(notebook, 4).cells for output in cell.get("outputs", ())]
    stored = [output.get("metadata", {}).get("labkit", {}) for output in outputs]
    return [kept for kept in stored if "film" in kept]


def opened(window: Page, site: Path, notebook: Path) -> Any:
    """The first film of a page, all of whose folds are open."""
    window.goto((site / f"{notebook.stem}.html").as_uri())
    window.evaluate("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
    return window.locator("figure.plays").first


@pytest.mark.parametrize("notebook", [ZERO, TOUR], ids=lambda path: path.stem)
def test_a_film_steps_by_button_key_and_slider_through_the_stored_frames(site, window, wrong, notebook):
    """Would catch frames in another order, a control that is dead, a script that fails, and a request elsewhere."""
    kept = films_of(notebook)[0]
    frames, at = unpacked(kept["film"]), kept["at"]
    last = len(frames) - 1
    film = opened(window, site, notebook)
    slider = film.get_by_role("slider", name="step")

    def shows(step: int) -> None:
        expect(slider).to_have_value(str(step))
        assert film.evaluate(SAME, frames[step])
        words = kept["over"]["words"][step] if "over" in kept else f"step {step} of {last}"
        expect(film.locator(".lk-film-bar span")).to_have_text(words)

    shows(at)
    film.get_by_role("group").focus()
    for key, step in (("Home", 0), ("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", last)):
        window.keyboard.press(key)
        shows(step)
    film.get_by_role("button", name="previous step").click()
    shows(last - 1)
    film.get_by_role("button", name="next step").click()
    shows(last)
    window.keyboard.press("ArrowRight")  # there is none
    shows(last)
    slider.evaluate("(slider) => { slider.value = 1; slider.dispatchEvent(new Event('input')); }")
    shows(1)
    film.get_by_role("button", name="play or pause").click()
    expect(slider).to_have_value(str(last))
    assert len({frames[step] for step in (0, 1, last)}) == 3
    assert wrong == []


def test_all_films_of_a_page_play(site, window, wrong):
    """Would catch a film that stays a picture."""
    for notebook in (ZERO, TOUR):
        film = opened(window, site, notebook)
        expect(film).to_be_visible()
        expect(window.locator("figure[data-film].plays")).to_have_count(len(films_of(notebook)))
        names = window.locator(".lk-film").evaluate_all("(films) => films.map((film) => film.ariaLabel)")
        assert [name.partition(":")[0] for name in names] == [kept["name"] for kept in films_of(notebook)]
    assert wrong == []


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("colours", ["light", "dark"])
def test_a_film_can_be_read_and_used_in_each_width_and_both_colours(site, window, width, colours):
    """Would catch dark words on a dark page, buttons outside of a telephone, and a page that is scrolled sideways."""
    window.set_viewport_size({"width": width, "height": 900})
    window.emulate_media(color_scheme=colours)
    film = opened(window, site, ZERO)
    assert min(film.evaluate(CONTRASTS)) > 5
    assert window.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    for part in film.locator("button, input").all():
        box = part.bounding_box()
        assert box
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
    assert film.locator(".lk-film-stage svg").bounding_box()["width"] >= min(width, 600)
    expect(film.locator(".still")).to_be_hidden()
    narrow = opened(window, site, TOUR).locator(".lk-film-stage svg")
    assert narrow.bounding_box()["width"] <= narrow.evaluate("(svg) => svg.viewBox.baseVal.width")


def test_on_paper_and_without_scripts_the_picture_stays(site, window, browser):
    """Would catch a page that is empty where no script runs, and a print of buttons."""
    film = opened(window, site, ZERO)
    window.emulate_media(media="print")
    expect(film.locator(".still svg")).to_be_visible()
    expect(film.locator(".lk-film")).to_be_hidden()
    context = browser.new_context(java_script_enabled=False)
    plain = context.new_page()
    plain.goto((site / f"{ZERO.stem}.html").as_uri())
    expect(plain.locator("figure[data-film] .still svg")).to_have_count(len(films_of(ZERO)))
    expect(plain.locator(".lk-film")).to_have_count(0)
    context.close()


def test_only_pages_with_films_load_the_scripts(site):
    """Would catch a page that loads what it does not need, and one that lacks what it does."""
    assert films_of(POINT) == []
    scripts = ("film_player.js", "model.js", "films.js", "film_player.css")
    for notebook, wanted in ((POINT, []), (ZERO, [*scripts]), (TOUR, [*scripts])):
        text = (site / f"{notebook.stem}.html").read_text()
        assert [name for name in scripts if f"style/{name}" in text] == wanted
    assert json.dumps(films_of(ZERO)[0]["over"]["words"][0]).strip('"') in (site / f"{ZERO.stem}.html").read_text()
