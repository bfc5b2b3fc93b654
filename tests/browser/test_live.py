"""Live pages in a browser, from a server of files: Python answers there as it does here, and asks no other host."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from labkit.course.export.export import export
from labkit.course.export.live.answers import PAGES, answer
from tests.browser.jupyter import PATIENCE_MS

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = 50

pytestmark = [
    pytest.mark.browser, pytest.mark.slow, pytest.mark.rest, pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("npm") is None, reason="npm fetches the Python of live pages, and is not here"),
]  # fmt: skip


class Quiet(SimpleHTTPRequestHandler):
    """Serves files without a word."""

    def log_message(self, *_: object) -> None:
        """A test says only what is wrong."""
        return


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where a site with live pages is served."""
    folder = tmp_path_factory.mktemp("site")
    export([ROOT / "notebooks/10_pipelines.ipynb"], folder, live=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def questions() -> list[tuple[str, dict[str, str]]]:
    """Drawn ones: what stands in the fields first, with one or two changes. Some cannot be answered."""
    dice, drawn = random.Random(7), []
    quick = [form for form, _ in PAGES.values() if form.name != "plan"]
    for count in range(QUESTIONS):
        form = PAGES["plan"][0] if count == 0 else dice.choice(quick)
        values = form.begin()
        for field in dice.sample(form.fields, 2) if count else ():
            if field.kind == "choice":
                values[field.name] = dice.choice(field.options)
            elif field.kind == "number":
                values[field.name] = str(dice.choice([0, 1, 2, 3, 4, 8, 16, 30]))
        drawn.append((form.name, values))
    return drawn


def here(page: str, values: dict[str, str]) -> dict[str, str]:
    """What Python says, as the worker tells a page."""
    try:
        return {"answer": answer(page, values)}
    except ValueError as error:
        return {"refused": f"{error}"}


def test_a_page_answers_as_python_does_and_asks_no_other_host(browser: Browser, address: str) -> None:
    """Would catch a page whose numbers are not the planner's, one that freezes, and one that needs the network."""
    context = browser.new_context(viewport={"width": 800, "height": 900})
    context.set_default_timeout(PATIENCE_MS)
    page, wrong = context.new_page(), []
    page.on("request", lambda request: request.url.startswith((address, "data:")) or wrong.append(request.url))
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(f"{address}/live/schedule.html")
    answered = page.locator("#answer")
    expect(answered).to_contain_text("27.3 %")  # before any Python
    page.get_by_label("ranks", exact=True).fill("2")
    expect(answered).to_have_attribute("data-id", "1")
    expect(answered.locator("rect")).to_have_count(32)
    page.get_by_label("ranks", exact=True).fill("0")
    expect(page.get_by_role("status")).to_have_text("ranks: from 1 to 32, got 0")
    expect(answered.locator("rect")).to_have_count(32)  # the last answer stays
    asked = questions()
    told = page.evaluate(
        """async (asked) => {
            const worker = new Worker("worker.mjs", { type: "module" });
            const told = [];
            worker.postMessage({ id: 0, page: asked[0][0], values: asked[0][1] });
            await new Promise((done, failed) => {
                worker.onerror = failed;
                worker.onmessage = ({ data }) => {
                    if (data.ready) return;
                    const { id, ...rest } = data;
                    told.push(rest);
                    if (told.length === asked.length) return done();
                    const [page, values] = asked[told.length];
                    worker.postMessage({ id: told.length, page, values });
                };
            });
            return told;
        }""",
        asked,
    )
    assert sum("answer" in each for each in told) > QUESTIONS / 2
    assert [(question, said) for question, said in zip(asked, told, strict=True) if said != here(*question)] == []
    assert wrong == []
    context.close()


@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 800, 1200])
def test_every_live_page_shows_its_answer_before_python_comes(
    browser: Browser, address: str, colours: str, width: int
) -> None:
    """Would catch an empty page, one wider than its window, and a field without a name."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=colours)
    page = context.new_page()
    for name, (form, _) in PAGES.items():
        page.goto(f"{address}/live/{name}.html")
        expect(page.get_by_role("heading", level=1)).to_have_text(form.title)
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), name
        assert len(page.locator("#answer").inner_text()) > 100
        for field in form.fields:
            expect(page.get_by_label(field.label, exact=True)).to_be_visible()
    context.close()


def test_a_page_that_was_opened_as_a_file_says_how_it_is_served(browser: Browser, tmp_path: Path) -> None:
    """Would catch a page on which nothing happens, without a word."""
    export([ROOT / "notebooks/10_pipelines.ipynb"], tmp_path, live=True)
    page = browser.new_page()
    page.goto((tmp_path / "live/checkpoint.html").as_uri())
    expect(page.get_by_role("status")).to_contain_text("python -m http.server")
    expect(page.locator("#answer")).to_contain_text("Save every")
    page.close()
