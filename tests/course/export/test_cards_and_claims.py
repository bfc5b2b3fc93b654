"""The pages of cards and of claims: nothing is missing, words are those of a notebook, the schedule is that of Python.

(That they work in a browser is asked in tests/browser/test_cards_page.py and test_claims_page.py.)"""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from html import escape, unescape
from pathlib import Path

import fsrs
import pytest

from labkit.course.cards.box import RATINGS, scheduler
from labkit.course.cards.card_faces import back, front
from labkit.course.cards.deck import the_deck
from labkit.course.cards.review_panel import SCRIPT, ReviewPanel
from labkit.course.cards.review_words import SENTENCES, sentence, span
from labkit.course.claims.audit import claims, kept
from labkit.course.claims.claim_quiz import MEANS, cells_on, condition_of
from labkit.course.claims.claims_picture import amount, asked
from labkit.course.export.cards_page import TS_FSRS, CardsPage
from labkit.course.export.cells import TEMPLATES, templates
from labkit.course.export.claims_page import CellLink, ClaimsPage, place_of
from labkit.course.export.export import export
from labkit.course.export.npm import Package
from labkit.course.export.page import Page, page_of
from labkit.course.learner.reviews import Review, export_of

ROOT = Path(__file__).resolve().parents[3]
LABS = sorted(ROOT.glob("notebooks/[0-9]*.ipynb"))
REVIEWS = 600

needs_npm = [
    pytest.mark.rest,
    pytest.mark.skipif(shutil.which("npm") is None, reason="npm fetches ts-fsrs, and is not here"),
]


@pytest.fixture(scope="module")
def labs() -> list[Page]:
    """The pages of all labs."""
    return [page_of(path) for path in LABS]


@pytest.fixture(scope="module")
def cards(labs: list[Page]) -> str:
    """The page of cards."""
    page = CardsPage(labs)
    return templates({}).get_template("cards.html.j2").render(title="Cards", file="cards.html", root="", cards=page)


@pytest.fixture(scope="module")
def claims_page(labs: list[Page]) -> str:
    """The page of claims."""
    page = ClaimsPage(labs)
    return templates({}).get_template("claims.html.j2").render(title="Claims", file="claims.html", root="", claims=page)


def data_of(page: str) -> Mapping[str, object]:
    """What the scripts of the page of cards read."""
    (block,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(block)


@pytest.mark.rest
def test_the_page_has_every_card_with_both_faces(cards, labs):
    """Would catch a card that is left out, a face of its own, and an answer that ends the block of data."""
    data = data_of(cards)
    assert [card["id"] for card in data["cards"]] == [card.id for card in the_deck()]
    for shown, card in zip(data["cards"], the_deck(), strict=True):
        assert (shown["front"], shown["back"]) == (front(card), back(card))
        assert shown["tags"] == list(card.tags)
        assert {cell[: len(lab)] for lab in shown["labs"] for cell in card.lab if cell.startswith(lab)} == {
            *shown["labs"]
        }
    assert data["tags"] == sorted(the_deck().tags())
    assert data["labs"] == the_deck().labs()
    assert data["addresses"] == {page.number: page.file for page in labs}
    assert data["scheduler"] == json.loads(json.dumps(scheduler().to_dict()))


@pytest.mark.slow
def test_every_cell_that_a_card_names_is_a_place_on_the_site(labs):
    """Would catch a link that opens a lab at its top, or nowhere."""
    pages = {page.number: page for page in labs}
    named = {cell for card in the_deck() for cell in card.lab}
    assert len(named) > 300
    assert [cell for cell in named if not place_of(cell, pages).file] == []


@pytest.mark.slow
def test_the_panel_and_the_words_are_those_of_a_notebook(cards):
    """Would catch a second panel, and sentences that grow apart."""
    assert SCRIPT in cards
    assert str(ReviewPanel._esm) == SCRIPT
    assert data_of(cards)["sentences"] == dict(SENTENCES)
    script = (TEMPLATES / "cards.js").read_text()
    assert all(f'"{occasion}"' in script or f"sentences.{occasion}" in script for occasion in SENTENCES)


def test_a_sentence_is_filled_in_and_a_span_is_rounded():
    """Would catch braces on a page, `1 days`, and half a minute that is no time at all."""
    assert sentence("rated", card="a", span="2 days") == "a: again in 2 days. "
    spans = [(1, "a minute"), (58, "1 minute"), (330, "6 minutes"), (3500, "1 hour"), (86400 * 2.5, "3 days")]
    assert [span(seconds) for seconds, _ in spans] == [words for _, words in spans]


@pytest.mark.slow
def test_the_page_of_claims_has_each_with_its_verdict_its_truth_and_its_numbers(claims_page):
    """Would catch a claim that is left out, numbers of another one, and a question without an answer."""
    articles = dict(re.findall(r'<details class="fold claim" id="(\w+)"(.*?)</details>', claims_page, re.DOTALL))
    assert set(articles) == {claim.id for claim in claims()}
    for result in kept().results:
        text = unescape(articles[result.claim.id])
        assert f'data-answer="{MEANS.get(result.claim.verdict, "")}"' in text
        assert f'data-condition="{condition_of(result)}"' in text
        assert result.claim.claim in text
        assert f" {result.claim.verdict}</span> {result.truth}</p>" in text
        for setting in result.finding.settings:
            row = f">{setting.name}</th><td>{asked(setting)}</td><td>{amount(setting.truth, setting.unit)}, "
            assert row in text, (result.claim.id, setting.name)
        assert text.count("✓ holds") == sum(setting.holds for setting in result.finding.settings) + (
            result.claim.verdict == "holds"
        )


@pytest.mark.slow
def test_a_claim_leads_to_the_cells_of_its_cards(claims_page, labs):
    """Would catch a wrong answer after which nobody knows where to read on."""
    pages = {page.number: page for page in labs}
    cells = cells_on(claim.id for claim in claims())
    assert len(cells) > 100
    for some in cells.values():
        place = place_of(some[0], pages)
        assert f'<a href="{escape(place.file)}">{place.words}</a>' in claims_page


def test_a_cell_of_a_lab_that_is_not_there_is_words(labs):
    """Would catch a dead link, and a name that is read wrongly."""
    pages = {page.number: page for page in labs if page.number in ("02", "10")}
    numbered = next(cell.id for cell in pages["10"].cells if cell.id.startswith("10-"))
    assert place_of("03-12", pages) == CellLink("lab 03, cell 03-12", "")
    assert place_of("10", pages) == CellLink("lab 10", "10_pipelines.html")
    assert place_of("10-nothing", pages) == CellLink("lab 10, cell 10-nothing", "")
    assert place_of(numbered, pages).file == f"10_pipelines.html#cell-id={numbered}"
    other = next(cell.id for cell in pages["02"].cells if not cell.id.startswith("02-"))
    assert place_of(f"02·{other}", pages).file == f"02_point_to_point.html#cell-id={other}"


@pytest.mark.slow
@pytest.mark.parametrize("live", [False, True])
def test_claims_are_on_every_site_and_cards_on_live_ones(tmp_path, monkeypatch, live):
    """Would catch a page that no menu names, a menu that names none, and a script that is left behind."""
    monkeypatch.setattr(Package, "files", lambda package, _: dict.fromkeys(package.wanted, b"content"))
    export([ROOT / "notebooks/02_point_to_point.ipynb"], tmp_path, live=live)
    index, page = ((tmp_path / name).read_text() for name in ("index.html", "02_point_to_point.html"))
    for text in (index, page):
        assert ('href="claims.html"' in text, 'href="cards.html"' in text) == (True, live)
    assert (index.count('href="claims.html"'), index.count('href="cards.html"')) == (2, 2 * live)
    wanted = ("cards.html", "ts-fsrs/index.umd.js", "ts-fsrs/LICENSE", "style/review_panel.css")
    assert [(tmp_path / name).is_file() for name in wanted] == [live] * len(wanted)
    used = re.findall(r'(?:href|src)="((?:style|ts-fsrs)/[^"]+)"', (tmp_path / wanted[0]).read_text()) if live else []
    assert all((tmp_path / name).is_file() for name in used)
    assert (tmp_path / "claims.html").is_file()
    assert (tmp_path / "style/claims.js").is_file()


@pytest.fixture(scope="module")
def ts_fsrs() -> Mapping[str, bytes]:
    """The package, fetched once."""
    return TS_FSRS.files()


@pytest.mark.parametrize("name", [pytest.param("LICENSE", marks=needs_npm)])
def test_the_package_of_the_schedule_comes_with_its_license(ts_fsrs, name):
    """Would catch code of others without the words under which it may be passed on."""
    assert ts_fsrs[name].startswith(b"MIT License")
    assert b"FSRS = {}" in ts_fsrs["dist/index.umd.js"]


SCHEDULERS = (
    scheduler(),
    fsrs.Scheduler(
        learning_steps=[timedelta(seconds=seconds) for seconds in (30, 90, 1800)],
        relearning_steps=[timedelta(minutes=7)],
        desired_retention=0.85,
        enable_fuzzing=False,
    ),
    fsrs.Scheduler(learning_steps=(), relearning_steps=(), enable_fuzzing=False),
)


def drawn(seed: int) -> list[Review]:
    """Reviews of some cards, after seconds, hours or months."""
    dice, at = random.Random(seed), datetime(2026, 1, 1, tzinfo=UTC)
    reviews = []
    for place in range(REVIEWS):
        at += timedelta(milliseconds=round(dice.random() * dice.choice([1e3, 5e4, 7e5, 4e6, 9e7, 6e8, 5e9])))
        rating = dice.choice([1, 2, 3, 3, 4, 4, 4, 5])
        reviews.append(Review(uid=f"{place:032x}", card=f"card-{dice.randrange(25)}", rating=rating, at=at))
    return reviews


@pytest.mark.parametrize(
    "right", [pytest.param(one, marks=needs_npm) for one in SCHEDULERS], ids=["labkit's", "three steps", "no steps"]
)
def test_the_page_schedules_as_python_does(ts_fsrs, right):
    """Would catch a card that comes at another time in a browser than in a notebook.

    ts-fsrs rounds each number to 8 decimals, so that a small stability may differ in its seventh digit."""
    reviews = drawn(seed=7)
    asked_of = {
        "package": ts_fsrs["dist/index.umd.js"].decode(),
        "script": (TEMPLATES / "schedule.js").read_text(encoding="utf-8"),
        "settings": right.to_dict(),
        "reviews": export_of(reviews)["reviews"],
        "now": (reviews[-1].at + timedelta(days=1)).timestamp() * 1000,
    }
    program = Path(__file__).with_name("replay.js")
    done = subprocess.run(["node", program], input=json.dumps(asked_of), capture_output=True, text=True, check=True)
    cards: dict[str, fsrs.Card] = {}
    states = set()
    for review, seen in zip(reviews, json.loads(done.stdout), strict=True):
        before = cards.get(review.card, fsrs.Card(card_id=0))
        card, _ = right.review_card(before, RATINGS[review.rating - 1], review.at)
        cards[review.card] = card
        states.add((card.state, card.step))
        assert (seen["state"], seen["step"]) == (card.state.value, card.step)
        assert seen["stability"] == pytest.approx(card.stability, rel=1e-6)
        assert seen["difficulty"] == pytest.approx(card.difficulty, rel=1e-6)
        assert seen["due"] / 1000 == pytest.approx(card.due.timestamp(), abs=0.5)
    steps = len(right.learning_steps) + len(right.relearning_steps)
    assert len(states) == 1 + steps
