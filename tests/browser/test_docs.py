"""The documentation site in a browser, from a plain folder: search, colours, three widths, and the keyboard alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.jupyter import PATIENCE_MS
from tests.docs_site import documentation

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.rest, pytest.mark.timeout(900)]

WIDTHS = (390, 800, 1200)
READING = """() => {
    document.querySelectorAll("details").forEach((fold) => { fold.open = true; });
    const root = document.documentElement, complaints = [];
    if (root.scrollWidth > root.clientWidth) complaints.push(`${root.scrollWidth} px wide in ${root.clientWidth}`);
    for (const [what, count] of [["h1", 1], ["[role=main]", 1]]) {
        const found = document.querySelectorAll(what).length;
        if (found !== count) complaints.push(`${found} of ${what}`);
    }
    for (const image of document.images) {
        if (!image.alt) complaints.push("an image without words");
        if (image.offsetParent && !image.naturalWidth) complaints.push("an image that is gone");
    }
    const light = (colour) => colour.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255)
        .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
        .reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
    const style = getComputedStyle(document.body);
    return {complaints, ink: light(style.color), page: light(style.backgroundColor)};
}"""
"""What is wrong with a page, and how light its ink and its ground are (WCAG's relative luminance)."""


@pytest.fixture(scope="module")
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    return documentation(tmp_path_factory, request.config)


@pytest.fixture
def window(browser: Browser, site: Path) -> Iterator[Page]:
    """A window that has seen no page. A complaint on its console, a failure and a request to elsewhere end the test;
    that the colours have changed, the theme says there, too."""
    context = browser.new_context(viewport={"width": WIDTHS[-1], "height": 900})
    context.set_default_timeout(PATIENCE_MS)
    page, wrong = context.new_page(), list[str]()
    page.on("console", lambda said: said.type in ("error", "warning") and wrong.append(f"console: {said.text}"))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("requestfailed", lambda request: wrong.append(f"not there: {request.url}"))
    page.on(
        "request",
        lambda request: request.url.startswith((site.as_uri(), "data:")) or wrong.append(f"asked: {request.url}"),
    )
    yield page
    context.close()
    assert wrong == []


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_every_page_can_be_read_in_both_colours_and_three_widths(site, window, colours):
    """Would catch a page that is wider than its window, dark words on a dark page, and a picture that is gone."""
    wrong = []
    window.emulate_media(color_scheme=colours)
    names = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    for name in (name for name in names if name != "search.html"):
        window.goto((site / name).as_uri(), wait_until="load")
        for width in WIDTHS:
            window.set_viewport_size({"width": width, "height": 900})
            read = window.evaluate(READING)
            wrong += [(name, width, complaint) for complaint in read["complaints"]]
        lighter, darker = (read["page"], read["ink"])[:: 1 if colours == "light" else -1]
        if (lighter + 0.05) / (darker + 0.05) < 7:
            wrong.append((name, colours, f"ink {read['ink']:.2f} on {read['page']:.2f}"))
    assert wrong == []


@pytest.mark.parametrize(
    ("words", "title"),
    [
        ("reduce_scatter", "reduce_scatter"),
        ("everybody waits for somebody who waits", "What an error message means"),
        ("built without CUDA", "What an error message means"),
    ],
)
def test_the_search_finds_a_name_and_a_message_without_a_server(site, window, words, title):
    """Would catch a search that needs a server, or whose index lacks what people look for."""
    window.goto((site / "how_to/hang.html").as_uri())
    window.get_by_role("searchbox").or_(window.get_by_placeholder("Search")).first.fill(words)
    window.keyboard.press("Enter")
    expect(window.locator("ul.search li").filter(has_text=title).first).to_be_visible()
    window.locator("ul.search li a").filter(has_text=title).first.click()
    expect(window.locator("[role=main]")).to_contain_text(words.split()[0])


def test_a_reader_can_choose_the_colours_and_they_stay(site, window):
    """Would catch a button that does nothing, and a choice that the next page forgets."""
    window.emulate_media(color_scheme="light")
    window.goto((site / "index.html").as_uri())
    shown = window.get_by_role("img", name="ZeRO-3")
    expect(shown).to_have_attribute("src", "_images/first_light.svg")
    button = window.get_by_role("button", name="Toggle Light / Dark / Auto color theme")
    for _ in range(3):  # automatic, and the two others in an order that depends on the system's colours
        button.first.click()
        if window.locator("body").get_attribute("data-theme") == "dark":
            break
    assert window.evaluate(READING)["page"] < 0.1
    window.goto((site / "faq.html").as_uri())
    assert window.evaluate(READING)["page"] < 0.1


def test_a_phone_s_menu_can_be_used_by_keyboard_alone(site, window):
    """Would catch a menu that only a finger opens, and one whose links are walked through while it is shut."""
    window.set_viewport_size({"width": WIDTHS[0], "height": 900})
    window.goto((site / "index.html").as_uri())
    drawer, focused = window.locator(".sidebar-drawer"), window.locator(":focus")
    window.keyboard.press("Tab")
    expect(focused).to_have_text("Skip to content")
    menu = window.get_by_role("button", name="Menu")
    expect(menu).to_have_attribute("aria-expanded", "false")
    for _ in range(3):
        window.keyboard.press("Tab")
        if menu.evaluate("(menu) => menu === document.activeElement"):
            break
    expect(menu).to_be_focused()
    expect(drawer).not_to_be_in_viewport()
    window.keyboard.press("Enter")
    expect(menu).to_have_attribute("aria-expanded", "true")
    expect(drawer).to_be_in_viewport()
    window.keyboard.press("Escape")
    expect(menu).to_have_attribute("aria-expanded", "false")
    expect(drawer).not_to_be_in_viewport()


def test_the_keyboard_reaches_the_search(site, window):
    """Would catch a search for which one needs a pointer."""
    window.goto((site / "mechanisms.html").as_uri())
    window.keyboard.press("/")
    field = window.get_by_placeholder("Search")
    expect(field.first).to_be_focused()
    window.keyboard.type("Muon")
    window.keyboard.press("Enter")
    expect(window.locator("ul.search li a").first).to_be_visible()
