"""The quiz of claims in a browser, from a plain folder, without a kernel."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from labkit.course.claims.audit import claim, claims, kept
from labkit.course.claims.claim_quiz import ANSWERS, MEANS, POINTS, condition_of, truth_of
from labkit.course.export.export import export
from tests.browser.jupyter import PATIENCE_MS
from tests.browser.test_site import CROWDED, WIDTHS

ROOT = Path(__file__).resolve().parents[2]
OPEN_ALL = "document.querySelectorAll('details').forEach((fold) => { fold.open = true; })"

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a site."""
    folder = tmp_path_factory.mktemp("site")
    export([ROOT / "notebooks/03_collectives.ipynb"], folder)
    return folder


@pytest.fixture
def page(browser: Browser, site: Path) -> Iterator[Page]:
    """The page of claims; whatever a test does with it, nothing goes wrong on it."""
    context = browser.new_context(viewport={"width": 800, "height": 900})
    context.set_default_timeout(PATIENCE_MS)
    complaints: list[str] = []
    context.on("console", lambda message: complaints.append(message.text))
    context.on("weberror", lambda error: complaints.append(f"{error.error}"))
    context.on("request", lambda request: request.url.startswith(site.as_uri()) or complaints.append(request.url))
    opened = context.new_page()
    opened.goto((site / "claims.html").as_uri())
    yield opened
    context.close()
    assert complaints == []


def begin(page: Page, count: str = "10", topic: str = "") -> None:
    """Begin a round."""
    page.get_by_label("topic").select_option(topic)
    page.get_by_label("questions").select_option(count)
    page.get_by_role("button", name="Begin").click()


def asked(page: Page) -> str:
    """The claim that is asked now."""
    return re.search(r"c\d+$", page.locator("#place").inner_text())[0]


def press_condition(page: Page, condition: str, right: bool = True) -> None:
    """Choose the condition of a claim, or another one."""
    choices = page.locator("#conditions button").all_inner_texts()
    assert 1 < len(choices) <= 4
    place = next(place for place, words in enumerate(choices, 1) if (words == f"{place} {condition}") == right)
    page.keyboard.press(str(place))


def test_a_round_is_answered_by_keys_and_every_right_answer_counts(page):
    """Would catch a right answer that counts as wrong, a condition that is not offered, a claim that comes twice."""
    stored = {result.claim.id: result for result in kept().results}
    begin(page, "20")
    seen = []
    for number in range(1, 21):
        expect(page.locator("#place")).to_contain_text(f"{number} of 20")
        result = stored[asked(page)]
        expect(page.locator("#claim")).to_have_text(result.claim.claim)
        expect(page.locator("#proof")).to_be_empty()
        answer = MEANS[result.claim.verdict]
        page.keyboard.press(answer[0])
        if answer == "depends":
            press_condition(page, condition_of(result))
        expect(page.locator("#outcome")).to_have_text(f"{POINTS[1.0]}: {truth_of(result)}.")
        expect(page.locator("#proof .verdict")).to_contain_text(result.claim.verdict)
        expect(page.locator("#proof tbody tr")).to_have_count(len(result.finding.settings))
        seen.append(result.claim.id)
        page.keyboard.press("Enter")
    expect(page.locator("#score p")).to_have_text("20 of 20 points")
    expect(page.locator("#score li")).to_have_count(0)
    assert len(set(seen)) == 20
    counts = Counter(MEANS[claim(id).verdict] for id in seen)
    assert sorted(counts.values()) == [6, 7, 7]
    assert set(counts) == set(ANSWERS)


def test_wrong_answers_earn_nothing_and_lead_to_the_labs(page):
    """Would catch points for nothing, half a point that is a whole one, and a page that does not help on."""
    begin(page, "5", "communication")
    points = 0.0
    for _ in range(5):
        row = claim(asked(page))
        assert row.topic == "communication"
        answer = MEANS[row.verdict]
        if answer == "depends":
            result = next(result for result in kept().results if result.claim.id == row.id)
            page.keyboard.press("d")
            press_condition(page, condition_of(result), right=False)
            expect(page.locator("#outcome")).to_contain_text(POINTS[0.5])
            points += 0.5
        else:
            page.keyboard.press("t" if answer == "false" else "f")
            expect(page.locator("#outcome")).to_contain_text(POINTS[0.0])
        page.get_by_role("button", name=re.compile("Next|The result")).click()
    expect(page.locator("#score p").first).to_have_text(f"{points:g} of 5 points")
    expect(page.locator("#score li")).to_have_count(5)
    expect(page.locator("#score li a").first).to_have_attribute("href", re.compile(r"03_collectives.html#cell-id=.+"))


def test_the_buttons_do_what_the_keys_do_and_a_round_can_begin_anew(page):
    """Would catch a quiz for keyboards only, and outcomes of a round before."""
    begin(page)
    page.get_by_role("button", name="depends").click()
    page.locator("#conditions button").first.click()
    page.get_by_role("button", name="Next").click()
    expect(page.locator("#place")).to_contain_text("2 of 10")
    begin(page, "5")
    expect(page.locator("#place")).to_contain_text("1 of 5")
    expect(page.locator("#answers button")).to_have_count(3)


def test_a_cell_of_a_claim_is_there_and_can_be_seen(page):
    """Would catch a link to a fold that stays closed."""
    page.evaluate(OPEN_ALL)
    link = page.locator("details.claim .places a").first
    place = link.get_attribute("href").partition("#")[2]
    link.click()
    expect(page.locator(f'[id="{place}"]')).to_be_in_viewport()


def test_the_quiz_can_be_read_in_each_width_and_without_scripts_the_claims_can(page, browser, site):
    """Would catch words over others in a question, a page wider than its window, and a page that needs its script."""
    begin(page)
    page.evaluate(OPEN_ALL)  # what is folded has a place, too, in the eyes of a script
    for step in ("asked", "conditions", "answered"):
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), step
            assert page.evaluate(CROWDED) == [], step
        page.keyboard.press("1" if step == "conditions" else "d")
    context = browser.new_context(java_script_enabled=False)
    still = context.new_page()
    still.goto((site / "claims.html").as_uri())
    expect(still.locator("#quiz")).to_be_hidden()
    expect(still.locator("details.claim summary:visible")).to_have_count(len(claims()))
    context.close()


def test_on_paper_every_proof_is_open_and_nothing_asks(page):
    """Would catch a print of closed folds and of buttons."""
    page.emulate_media(media="print")
    expect(page.locator("#quiz")).to_be_hidden()
    expect(page.locator("header")).to_be_hidden()
    expect(page.locator("details.claim .proof").last).to_be_visible()
