"""The static site in a browser, from a plain folder: it can be read, and a prediction works without a kernel.

`make test` opens the pages of the tour and of two labs, `make rest` all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest
from playwright.sync_api import Browser, Page, expect

from labkit.course.export.export import export
from labkit.plan.typed import SCALES, parsed
from labkit.view.units import apart, value_text
from tests.browser.jupyter import PATIENCE_MS

ROOT = Path(__file__).resolve().parents[2]
LABS = sorted(ROOT.glob("notebooks/[0-9]*.ipynb"))
FEW = ("03", "10")
WIDTHS = (390, 800, 1200)

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(900)]

READING = """() => {
    const complaints = [];
    document.querySelectorAll("details").forEach((fold) => { fold.open = true; });
    document.querySelectorAll("img").forEach((image) => { image.loading = "eager"; });
    const root = document.documentElement;
    if (root.scrollWidth > root.clientWidth) complaints.push(`${root.scrollWidth} px wide in ${root.clientWidth}`);
    for (const [what, count] of [["h1", 1], ["main", 1], ["header nav", 1]]) {
        const found = document.querySelectorAll(what).length;
        if (found !== count) complaints.push(`${found} of ${what}`);
    }
    if (document.querySelector("main").innerText.length < 500) complaints.push("hardly a word");
    for (const image of document.images) if (!image.hasAttribute("alt")) complaints.push("an image without words");
    for (const drawing of document.querySelectorAll("svg[role=img]")) {
        if (!drawing.getAttribute("aria-label")) complaints.push("a drawing without words");
        if (drawing.closest(".plays .still")) continue; // its film plays in its place (test_films.py)
        if (drawing.getBoundingClientRect().width < 100) complaints.push("a drawing that cannot be seen");
    }
    const ruler = document.createElement("span");
    for (const code of document.querySelectorAll("pre, code")) {
        code.append(ruler);
        const widths = ["iiiiiiii", "WWWWWWWW"].map((letters) => {
            ruler.textContent = letters;
            return ruler.getBoundingClientRect().width;
        });
        if (widths[0] === 0 || Math.abs(widths[0] - widths[1]) > 0.5) complaints.push(`letters of code: ${widths}`);
    }
    ruler.remove();
    const light = (colour) => colour.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255)
        .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
        .reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
    const style = getComputedStyle(document.body);
    return {complaints, ink: light(style.color), page: light(style.backgroundColor)};
}"""
"""What is wrong with a page, and how light its ink and its ground are (WCAG's relative luminance)."""
CROWDED = """() => {
    const seen = new Map([[null, [-Infinity, -Infinity, Infinity, Infinity]]]);
    const clip = (element) => { // what of an element can be seen, since each box that scrolls hides what is outside
        if (seen.has(element)) return seen.get(element);
        let [left, top, right, bottom] = clip(element.parentElement);
        if (element !== document.documentElement && getComputedStyle(element).overflow !== "visible") {
            const box = element.getBoundingClientRect();
            [left, top] = [Math.max(left, box.left), Math.max(top, box.top)];
            [right, bottom] = [Math.min(right, box.right), Math.min(bottom, box.bottom)];
        }
        seen.set(element, [left, top, right, bottom]);
        return seen.get(element);
    };
    const lines = [], walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const node = walker.currentNode;
        if (!node.data.trim() || node.parentElement.closest("svg, math, option")) continue; // pictures have a test
        const range = document.createRange();
        range.selectNodeContents(node);
        const limits = clip(node.parentElement);
        for (const box of range.getClientRects()) {
            const [left, top] = [Math.max(box.left, limits[0]), Math.max(box.top, limits[1])];
            const [right, bottom] = [Math.min(box.right, limits[2]), Math.min(box.bottom, limits[3])];
            if (right - left > 2 && bottom - top > 2) lines.push([node, {left, top, right, bottom}]);
        }
    }
    lines.sort((a, b) => a[1].top - b[1].top);
    const complaints = [];
    lines.forEach(([node, box], i) => {
        for (let j = i + 1; j < lines.length && lines[j][1].top < box.bottom; j++) {
            const [other, beside] = lines[j];
            const across = Math.min(box.right, beside.right) - Math.max(box.left, beside.left);
            const down = Math.min(box.bottom, beside.bottom) - beside.top;
            // lines of one paragraph may share a pixel or two; letters of a line are at most a third of it apart
            if (other !== node && across > 2 && down > (box.bottom - box.top) / 3)
                complaints.push(`${node.data.trim().slice(0, 30)} | ${other.data.trim().slice(0, 30)}`);
        }
    });
    return complaints;
}"""
"""The pairs of texts of which one lies over the other."""


@pytest.fixture(scope="module", params=[FEW, pytest.param(("",), marks=pytest.mark.rest)], ids=["two labs", "all labs"])
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a site."""
    folder = tmp_path_factory.mktemp("site")
    export([lab for lab in LABS if lab.name.startswith(request.param)], folder)
    return folder


@pytest.fixture
def window(browser: Browser) -> Iterator[Page]:
    """A window that has seen no page."""
    context = browser.new_context(viewport={"width": WIDTHS[0], "height": 900})
    context.set_default_timeout(PATIENCE_MS)
    yield context.new_page()
    context.close()


def test_every_page_can_be_read_in_each_width_and_both_colours(site, window):
    """Would catch code in uneven letters, a page that is wider than its window, words over others, dark words on a dark
    page, a picture that is gone, a script that fails, and anything that is asked of another host."""
    wrong, now = [], ""
    window.on("console", lambda message: wrong.append((now, message.text)))
    window.on("pageerror", lambda error: wrong.append((now, str(error))))
    window.on("requestfailed", lambda request: wrong.append((now, f"not there: {request.url}")))
    window.on(
        "request",
        lambda request: request.url.startswith((site.as_uri(), "data:")) or wrong.append((now, request.url)),
    )
    for path in sorted(site.rglob("*.html")):
        now = str(path.relative_to(site))
        window.goto(path.as_uri(), wait_until="load")
        for width in WIDTHS:
            window.set_viewport_size({"width": width, "height": 900})
            for colours in ("light", "dark"):
                window.emulate_media(color_scheme=colours)
                read = window.evaluate(READING)
                wrong += [(now, width, colours, complaint) for complaint in dict.fromkeys(read["complaints"])]
                lighter, darker = (read["page"], read["ink"])[:: 1 if colours == "light" else -1]
                if (lighter + 0.05) / (darker + 0.05) < 7:
                    wrong.append((now, width, colours, f"ink {read['ink']:.2f} on {read['page']:.2f}"))
            wrong += [(now, width, pair) for pair in window.evaluate(CROWDED)]
        window.wait_for_function("[...document.images].every((image) => image.complete && image.naturalWidth > 0)")
        for untrue in ("run this cell first", "Commit a number above", "not a page"):
            if untrue in window.content():
                wrong.append((now, f"says {untrue!r}"))
    assert wrong == []


def test_words_over_others_are_seen(window):
    """Would catch an instrument that finds nothing: the test above hangs on it."""
    window.set_content("<main><p>one line</p><p style='position: relative; top: -2em'>another line</p></main>")
    assert len(window.evaluate(CROWDED)) == 1
    window.set_content("<main><p>one <b>line</b> of <code>words</code></p><p>another line</p></main>")
    assert window.evaluate(CROWDED) == []


def test_every_link_of_the_site_leads_to_a_place_that_is_there(site, window):
    """Would catch a page that was renamed, a heading without its name, and a link to a notebook."""
    names: dict[Path, set[str]] = {}
    links: list[tuple[Path, str]] = []
    for path in site.rglob("*.html"):
        window.goto(path.as_uri(), wait_until="domcontentloaded")
        names[path] = set(window.evaluate("[...document.querySelectorAll('[id]')].map((one) => one.id)"))
        assert len(names[path]) == window.locator("[id]").count(), f"{path.name} has a name twice"
        links += [(path, link) for link in window.evaluate("[...document.links].map((one) => one.href)")]
    here = [(path, link.removeprefix(site.as_uri() + "/")) for path, link in links if link.startswith("file:")]
    dead = [
        (path.name, link)
        for path, link in here
        for file, _, place in [link.partition("#")]
        if site / file not in names or (place and unquote(place) not in names[site / file])
    ]
    assert len(here) > 100
    assert dead == []


def test_a_prediction_is_committed_kept_and_held_against_law_and_measurement(site, window):
    """Would catch an answer that is open before it is asked for, a number that is refused without a reason or lost with
    the page, and a box that only a pointer can use."""
    page = (site / "ten_minutes.html").as_uri()
    window.goto(page)
    field, status = window.get_by_label("Bytes that each rank sends for"), window.get_by_role("status")
    answer, law = window.locator("details.answer"), window.get_by_text("2(n_ranks - 1)").or_(window.locator("tr.law"))
    expect(status).to_have_text("You have not predicted yet. Write a number, such as 1,024 or 5.7 MiB.")
    expect(law.first).to_be_hidden()
    expect(window.get_by_text("however many ranks there are")).to_be_hidden()
    field.press_sequentially("six million")
    field.press("Enter")
    expect(status).to_contain_text("“six million” is not a number of B, 0 or more. Use digits, as in 1,024 or 2e6.")
    expect(answer).not_to_have_attribute("open", "")
    field.fill("5.7MiB")
    field.press("Tab")
    window.keyboard.press("Enter")  # the button
    for _ in ("committed", "kept"):
        guess = parsed("5.7MiB", "B")
        expect(status).to_contain_text(f"You predict {value_text(guess, 'B')}.")
        rows = window.locator("table.bars tr")
        expect(rows).to_have_text([
            "law6,000,000 B = 5.72 MiB (exact)",
            f"your prediction{value_text(guess, 'B')} ({apart(guess, 6e6)})",
            "measured6,000,000 B = 5.72 MiB",
        ])  # fmt: skip
        expect(window.get_by_text("however many ranks there are")).to_be_visible()
        window.goto(page)
    field.fill("24e6")
    field.press("Enter")
    expect(window.locator("tr.prediction .words")).to_have_text("24,000,000 B = 22.9 MiB (4 times the measurement)")
    law_px, prediction_px = (window.locator(f"tr.{side} i").bounding_box()["width"] for side in ("law", "prediction"))
    assert law_px == pytest.approx(prediction_px / 4, abs=2)


def test_pages_read_and_say_numbers_as_labkit_does(site, window):
    """Would catch a page that understands "2 KiB", or says how far off a number is, as no notebook does."""
    window.goto((site / "ten_minutes.html").as_uri())
    typed = ("5.7MiB", "33%", "six million", "", "1,024", "2e6", "-3", "1_000", "0.3 ms", "3 GB", ".5", "1e", "7 B")
    for unit in ("B", "s", "%", "messages", ""):
        scales = dict(SCALES.get(unit, {}))
        for text in typed:
            try:
                right: float | None = parsed(text, unit)
            except ValueError:
                right = None
            read = window.evaluate(
                "(args) => [parsed(...args)].map((n) => (isNaN(n) ? null : n))", [text, unit, scales]
            )
            assert read == [pytest.approx(right)], (text, unit)
    numbers = (0, 1, 64, 999.4, 1234.6, 9999, 10_000, 10_000.4, 6e6, 5.7 * 2**20, 3.5e15, 2.5e-7, 8.04e-4, 0.169)
    for unit in ("B", "s", "%", "flops", "messages", "processes", ""):
        for number in numbers:
            assert window.evaluate("([n, unit]) => words(n, unit)", [number, unit]) == value_text(number, unit)
    for number in numbers:
        for seen in (6e6, 64, 1e-6, 0):
            said = window.evaluate("([n, seen]) => apart(n, seen, 'the measurement')", [number, seen])
            assert said == apart(number, seen), (number, seen)
