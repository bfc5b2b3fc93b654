"""The page of cards in a browser, from a plain folder: reviews by keys, kept, taken to `labkit cards` and back."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from labkit.course.cards.box import Box
from labkit.course.cards.deck import the_deck
from labkit.course.cards.review_words import SENTENCES
from labkit.course.export.export import export
from tests.browser.jupyter import PATIENCE_MS
from tests.browser.test_site import CROWDED, READING, WIDTHS

ROOT = Path(__file__).resolve().parents[2]
MORNING = datetime(2026, 5, 13, 9, tzinfo=UTC)
RATINGS = (4, 5, 3, 1, 2, 4, 4, 5, 3, 4)
LABS = ("03", "10")

pytestmark = [
    pytest.mark.browser, pytest.mark.slow, pytest.mark.rest, pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("npm") is None, reason="npm fetches the schedule of the page, and is not here"),
]  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a site with live pages."""
    folder = tmp_path_factory.mktemp("site")
    export([path for path in sorted(ROOT.glob("notebooks/*.ipynb")) if path.name.startswith(LABS)], folder, live=True)
    return folder


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    """A browser that keeps nothing yet, in which it is morning in Greenwich."""
    opened = browser.new_context(
        viewport={"width": 800, "height": 900}, timezone_id="UTC", permissions=[], accept_downloads=True
    )
    opened.set_default_timeout(PATIENCE_MS)
    opened.clock.set_fixed_time(MORNING)
    yield opened
    opened.close()


@pytest.fixture
def wrong(context: BrowserContext, site: Path) -> list[str]:
    """What a page should not do: words on the console, errors, requests beyond the site."""
    complaints: list[str] = []
    context.on("console", lambda message: complaints.append(message.text))
    context.on("weberror", lambda error: complaints.append(f"{error.error}"))
    context.on(
        "request",
        lambda request: request.url.startswith((site.as_uri(), "data:", "blob:")) or complaints.append(request.url),
    )
    return complaints


@pytest.fixture
def page(context: BrowserContext, wrong: list[str], site: Path) -> Iterator[Page]:
    """The page of cards; whatever a test does with it, nothing goes wrong on it."""
    opened = context.new_page()
    opened.goto((site / "cards.html").as_uri())
    yield opened
    assert wrong == []


def review(page: Page, *ratings: int) -> list[str]:
    """Rate the next cards by keys. Returns the words of their questions."""
    panel, questions = page.locator(".lk-review"), []
    panel.focus()
    for rating in ratings:
        questions.append(panel.locator(".lk-review-face").inner_text())
        page.keyboard.press("Space")
        expect(panel.locator(".lk-card-claim")).to_be_visible()
        page.keyboard.press(str(rating))
        expect(panel.locator(".lk-card-claim")).to_have_count(0)
    return questions


def exported(page: Page, folder: Path) -> Path:
    """The file that the page exports."""
    with page.expect_download() as download:
        page.get_by_role("button", name="Export reviews").click()
    file = folder / download.value.suggested_filename
    download.value.save_as(file)
    return file


def labkit_cards(home: Path, *words: str) -> str:
    """What `labkit cards` prints, with a data folder of its own."""
    environment = {**os.environ, "XDG_DATA_HOME": str(home), "COLUMNS": "200"}
    command = [sys.executable, "-m", "labkit", "cards", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
    return done.stdout


def plain(card_front: str) -> str:
    """A question without the marks of its formulas."""
    return card_front.replace("`", "")


def test_ten_cards_are_reviewed_by_keys_and_kept(page, context):
    """Would catch an answer that shows too early, a key that does nothing, a day without an end, and reviews that are
    lost with the page."""
    n_cards = len(the_deck())
    panel = page.locator(".lk-review")
    standing, told, progress = (
        panel.locator(".lk-review-bar > span"),
        panel.locator(".lk-review-told"),
        page.locator("#progress"),
    )
    expect(standing).to_have_text("10 to go · 0 done · 0 days in a row")
    expect(progress).to_have_text(f"{n_cards} cards: {n_cards} new, 0 begun, 0 learned; 0 due now")
    panel.focus()
    page.keyboard.press("4")  # before the answer: nothing
    expect(standing).to_have_text("10 to go · 0 done · 0 days in a row")
    page.keyboard.press("Space")
    buttons = panel.locator("button:visible")
    expect(buttons).to_have_text([
        "1 nothing came1 minute", "2 only when I saw it1 minute", "3 with effort6 minutes", "4 well10 minutes",
        "5 at once8 days",
    ])  # fmt: skip
    buttons.nth(4).click()
    expect(told).to_have_text(re.compile(r"^[a-z0-9-]+: again in 8 days. $"))
    review(page, *RATINGS[1:])
    expect(standing).to_have_text("Nothing is due. 10 done · 1 day in a row")
    expect(panel.locator(".lk-review-face")).to_have_text("The next card comes in 1 minute.")
    expect(panel.locator("button:visible")).to_have_count(0)
    for _ in ("reviewed", "kept"):
        expect(progress).to_have_text(f"{n_cards} cards: {n_cards - 10} new, 7 begun, 3 learned; 0 due now")
        page.reload()
    expect(standing).to_have_text("Nothing is due. 0 done · 1 day in a row")
    context.clock.set_fixed_time(MORNING + timedelta(minutes=2))
    page.reload()
    expect(standing).to_have_text("2 to go · 0 done · 1 day in a row")
    context.clock.set_fixed_time(MORNING + timedelta(days=1))
    page.reload()
    expect(standing).to_have_text("17 to go · 0 done · 1 day in a row")


def test_reviews_go_to_labkit_cards_and_come_back(page, context, tmp_path):
    """Would catch a file that only one side reads, a review that counts twice, and two schedules of one learner."""
    asked = review(page, *RATINGS)
    file = exported(page, tmp_path)
    assert [one["rating"] for one in json.loads(file.read_text())["reviews"]] == list(RATINGS)
    home = tmp_path / "home"
    assert "10 reviews taken" in labkit_cards(home, "--import", str(file))

    later = MORNING + timedelta(days=9, hours=5)
    box = Box(the_deck(), tmp_path / "box.sqlite3", lambda: later)
    assert box.load(json.loads(file.read_text())) == 10
    wanted = [plain(card.as_sentence(card.front)) for card in box.due()]
    context.clock.set_fixed_time(later)
    page.reload()
    expect(page.locator(".lk-review-bar > span")).to_have_text(f"{len(wanted)} to go · 0 done · 0 days in a row")
    assert set(wanted[: len(asked)]) == set(asked)
    assert review(page, *[4] * 12) == wanted[:12]

    other = the_deck()[box.due()[-1].id]
    box.rate(other.id, 5)
    back = tmp_path / "back.json"
    back.write_text(json.dumps(box.export()))
    for count in ("1 review", "0 reviews"):
        page.get_by_label("Import reviews").set_input_files(back)
        expect(page.locator("#message")).to_have_text(f"{count} taken from back.json")
    assert len(json.loads(exported(page, tmp_path).read_text())["reviews"]) == 23
    labkit_cards(home, "--import", str(tmp_path / file.name), "--export", str(back))
    page.get_by_label("Import reviews").set_input_files(back)
    expect(page.locator("#message")).to_have_text("0 reviews taken from back.json")


def test_menus_choose_tags_and_labs_and_a_cell_is_a_link(page, site):
    """Would catch a menu that chooses nothing, and a cell that leads nowhere."""
    panel = page.locator(".lk-review")
    panel.locator("select").nth(0).select_option("ring")
    panel.locator("select").nth(1).select_option("03")
    chosen = the_deck().of(["ring"], "03")
    expect(page.locator("#progress")).to_contain_text(f"{len(chosen)} cards: {len(chosen)} new")
    assert panel.locator(".lk-review-face").inner_text() in {plain(card.as_sentence(card.front)) for card in chosen}
    page.keyboard.press("Space")
    link = panel.locator(".lk-card-lab a[href]").first
    assert re.fullmatch(r"(03|10)_\w+\.html#cell-id=[\w-]+", link.get_attribute("href"))
    with page.expect_popup() as popup:
        link.click()
    opened = popup.value
    expect(opened.locator(f'[id="{opened.url.partition("#")[2]}"]')).to_be_in_viewport()
    opened.close()


def test_a_browser_that_keeps_nothing_says_so(browser, site, tmp_path):
    """Would catch reviews that are lost without a word."""
    context = browser.new_context()
    context.add_init_script("Storage.prototype.setItem = () => { throw new Error('no room'); };")
    page = context.new_page()
    page.goto((site / "cards.html").as_uri())
    review(page, 4, 5)
    expect(page.locator(".lk-review-told")).to_contain_text("This browser keeps nothing for this page")
    assert [one["rating"] for one in json.loads(exported(page, tmp_path).read_text())["reviews"]] == [4, 5]
    context.close()


def test_what_cannot_be_read_is_put_aside_and_what_is_no_export_is_refused(page, tmp_path):
    """Would catch a page that is dead for ever after one damaged text, and a file that is half taken."""
    review(page, 4)
    page.evaluate('localStorage.setItem(\'labkit:cards\', \'{"format": "labkit cards", "reviews": [{}]}\')')
    page.reload()
    expect(page.locator(".lk-review-told")).to_contain_text("under the name labkit:cards:damaged")
    assert "[{}]" in page.evaluate("localStorage.getItem('labkit:cards:damaged')")
    assert page.evaluate("localStorage.getItem('labkit:cards')") is None
    review(page, 5)
    good = json.loads(exported(page, tmp_path).read_text())
    one = {**good["reviews"][0], "uid": "0" * 32}
    refused = (
        ("{", "it is no JSON"),
        ("[]", "it holds no reviews of cards"),
        (json.dumps({**good, "version": 2}), "a later labkit wrote it"),
        (json.dumps({**good, "reviews": [one, {**one, "rating": 6}]}), "rating of review 2 is wrong"),
        (json.dumps({**good, "reviews": [{**one, "at": "yesterday"}]}), "at of review 1 is wrong"),
    )
    for text, reason in refused:
        file = tmp_path / "other.json"
        file.write_text(text)
        page.get_by_label("Import reviews").set_input_files(file)
        expect(page.locator("#message")).to_have_text(f"Nothing was taken from other.json: {reason}")
    assert json.loads(exported(page, tmp_path).read_text()) == good


def test_two_windows_keep_the_reviews_of_both(page, context, site, tmp_path):
    """Would catch a window that writes over what another one has written."""
    other = context.new_page()
    other.goto((site / "cards.html").as_uri())
    review(page, 4, 5)
    review(other, 3)
    review(page, 1)
    ratings = [one["rating"] for one in json.loads(exported(page, tmp_path).read_text())["reviews"]]
    assert ratings == [4, 5, 3, 1]


def test_the_page_can_be_read_in_each_width_and_both_colours(page):
    """Would catch words over others, a page wider than its window, and dark words on a dark page."""
    complaints = []
    page.locator(".lk-review").focus()
    page.keyboard.press("Space")
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        for colours in ("light", "dark"):
            page.emulate_media(color_scheme=colours)
            read = page.evaluate(READING)
            complaints += [(width, colours, complaint) for complaint in read["complaints"]]
            lighter, darker = sorted((read["page"], read["ink"]), reverse=True)
            assert (lighter + 0.05) / (darker + 0.05) > 7
            assert (read["ink"] > read["page"]) == (colours == "dark")
        complaints += [(width, pair) for pair in page.evaluate(CROWDED)]
    assert complaints == []


def test_every_card_fits_on_a_phone(page):
    """Would catch a table or a formula that makes the page wider than its window."""
    page.set_viewport_size({"width": 390, "height": 900})
    wide = page.evaluate(
        """() => JSON.parse(document.getElementById("data").textContent).cards.filter((card) => {
            document.querySelector(".lk-review-face").innerHTML = card.front;
            document.querySelector(".lk-review-answer").innerHTML = card.back;
            return document.documentElement.scrollWidth > document.documentElement.clientWidth;
        }).map((card) => card.id)"""
    )
    assert wide == []


def test_without_scripts_the_page_says_what_it_needs(browser, site):
    """Would catch an empty page."""
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto((site / "cards.html").as_uri())
    expect(page.get_by_text("This page needs JavaScript.")).to_be_visible()
    expect(page.get_by_role("button")).to_have_count(0)
    context.close()


def test_no_sentence_shows_what_should_be_filled_in(page):
    """Would catch a name in braces, or `undefined`, on the page."""
    review(page, *RATINGS)
    for word in (*re.findall(r"\{\w+\}", "".join(SENTENCES.values())), "undefined", "NaN"):
        assert word not in page.locator("main").inner_text()
