"""The box of cards: nothing is lost, two kernels agree, clocks may jump, files may be damaged or locked."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from datetime import UTC, datetime, timedelta
from pathlib import Path

import fsrs
import pytest
from hypothesis import given, settings, strategies as st

from labkit.course.cards.box import Box, replayed
from labkit.course.cards.card import Card
from labkit.course.cards.deck import Deck
from labkit.course.learner.reviews import Review

START = datetime(2026, 3, 2, 9, tzinfo=UTC)


class Clock:
    """A clock that goes when it is told to."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> datetime:
        return self.now

    def go(self, **by: float) -> None:
        self.now += timedelta(**by)


def deck(n: int = 8) -> Deck:
    """Cards of two tags and labs."""
    return Deck(tuple(
        Card(id=f"card-{place}", front="What is asked?", claim="This is said.", law="`a`", difficulty=1 + place % 5,
             tags=("even" if place % 2 == 0 else "odd", "all"), lab=(f"0{place % 3}-01",))
        for place in range(n)))  # fmt: skip


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def box(tmp_path: Path, clock: Clock) -> Box:
    return Box(deck(), tmp_path / "cards.sqlite3", clock)


def test_a_card_comes_back_when_fsrs_says_so(box: Box, clock: Clock) -> None:
    """A schedule of our own making: the library's, from the same ratings, is the reference."""
    theirs, scheduler = fsrs.Card(card_id=1), fsrs.Scheduler(enable_fuzzing=False)
    for rating, word in ((4, fsrs.Rating.Good), (4, fsrs.Rating.Good), (3, fsrs.Rating.Hard), (1, fsrs.Rating.Again),
                         (2, fsrs.Rating.Again), (5, fsrs.Rating.Easy)):  # fmt: skip
        theirs, _ = scheduler.review_card(theirs, word, clock.now)
        assert box.rate("card-0", rating).due == theirs.due
        clock.now = theirs.due + timedelta(hours=1)
    assert box.recall("card-0") == pytest.approx(scheduler.get_card_retrievability(theirs, clock.now))
    assert box.standings()["card-0"].lapses == 2


def test_due_cards_come_first_and_new_ones_are_few(box: Box, clock: Clock) -> None:
    """All new cards at once, or a new one before an old one that is being forgotten."""
    assert [card.difficulty for card in box.due(new=4)] == [1, 1, 2, 2]
    for card in box.due(new=3):
        box.rate(card.id, 4)
    assert len(box.due(new=3)) == 0  # three a day were wanted
    clock.go(days=3)
    asked = box.due(new=3)
    assert {card.id for card in asked[:3]} == {"card-0", "card-5", "card-1"}
    assert len(asked) == 6
    assert {tag for card in box.due({"odd"}) for tag in card.tags} == {"odd", "all"}
    assert all(card.lab[0].startswith("01") for card in box.due(lab="01"))
    with pytest.raises(ValueError, match="did you mean 'odd'"):
        box.due({"ood"})


def test_what_is_most_forgotten_is_asked_first(box: Box, clock: Clock) -> None:
    """The order of the deck in place of that of need."""
    for id, rating in (("card-0", 5), ("card-1", 3), ("card-2", 1)):
        box.rate(id, rating)
    clock.go(days=60)
    assert [card.id for card in box.due(new=0)][-1] == "card-0"
    weak = box.weakness()
    assert weak["card-7"] == 1.0
    assert weak["card-0"] < weak["card-1"] < 1


def test_only_ratings_from_1_to_5_of_cards_that_are_there(box: Box) -> None:
    """A key that slips, a card of another deck."""
    for wrong in (0, 6, 2.5, "3", None):
        with pytest.raises(ValueError, match="a rating is 1 to 5"):
            box.rate("card-0", wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="did you mean 'card-0'"):
        box.rate("card-00", 3)
    assert box.reviews() == []


def test_days_in_a_row_forecast_and_what_was_expected(box: Box, clock: Clock) -> None:
    """A streak that ends at midnight before one has had the chance, reviews of a new card counted as remembered."""
    for day in range(4):
        for card in box.due(new=1):
            box.rate(card.id, 4)
        assert box.streak() == day + 1
        clock.go(days=1)
    assert box.streak() == 4
    clock.go(days=1)
    assert box.streak() == 0
    assert sum(box.forecast(60)) == len(box.standings())
    assert box.forecast(1)[0] == len(box.due(new=0)) or box.forecast(1)[0] >= len(box.due(new=0))
    assert box.asked()
    assert all(0 < each.expected <= 1 for each in box.asked())
    assert len(box.asked()) < len(box.reviews())


def test_a_box_in_a_cell_shows_the_habit(box: Box) -> None:
    """An object and its address, where days, forecast and retention are asked for."""
    box.rate("card-0", 4)
    shown = box._repr_html_()
    assert "1 reviews in" in shown
    assert "1 due in 14 days" in shown
    assert "<script" not in shown


def test_a_clock_that_jumps_ahead_and_back_spoils_nothing(box: Box, clock: Clock) -> None:
    """A review in the year 2100 that keeps a card away for ever once the clock is right again."""
    box.rate("card-0", 4)
    clock.go(days=1)
    right = clock.now
    clock.now = datetime(2100, 1, 1, tzinfo=UTC)
    box.rate("card-0", 4)
    box.rate("card-1", 5)
    clock.now = right
    assert "2 reviews lie after now, up to 2100-01-01" in box.note
    assert box.standings()["card-0"].due < right + timedelta(days=365)
    assert box.rate("card-0", 1).due <= right + timedelta(days=1)
    clock.now = START - timedelta(days=400)  # and back, before the first
    assert box.rate("card-1", 4).due >= START - timedelta(days=400)
    assert len(box.reviews()) == 5
    assert 0 <= box.recall("card-1") <= 1
    assert box.streak() >= 0


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5), st.integers(-(10**6), 10**7)), max_size=40),
    st.integers(0, 10**7),
)
def test_whatever_the_clock_did_times_rise_and_no_card_is_lost(said: list[tuple[int, int, int]], now_s: int) -> None:
    """Times that go backwards within a card, which FSRS would take for negative spans."""
    now, at = START + timedelta(seconds=now_s), START
    reviews = []
    for place, (card, rating, jump) in enumerate(said):
        at += timedelta(seconds=jump)
        reviews.append(Review(uid=f"{place:032d}", card=f"card-{card}", rating=rating, at=at))
    standings, asked = replayed(reviews, now)
    assert sum(each.times for each in standings.values()) == len(said)
    assert all(each.memory.last_review is not None and each.memory.last_review <= now for each in standings.values())
    assert all(0 <= each.expected <= 1 and each.at <= now for each in asked)


def test_two_boxes_on_one_file_see_each_other(tmp_path: Path, clock: Clock) -> None:
    """Two kernels that review at once: the last one to write wins."""
    one, two = (Box(deck(), tmp_path / "cards.sqlite3", clock) for _ in range(2))
    one.rate("card-0", 4)
    assert "card-0" in two.standings()
    two.rate("card-0", 4)
    one.rate("card-1", 2)
    assert one.standings() == two.standings()
    assert one.standings()["card-0"].times == 2


WRITER = """
import sys
sys.path.insert(0, {root!r})
from tests.course.cards.test_box import deck
from labkit.course.cards.box import Box
box = Box(deck(), {path!r})
for place in range({count}):
    box.rate(f"card-{{place % 8}}", 1 + place % 5)
    print(place, flush=True)
"""


def writer(path: Path, count: int) -> subprocess.Popen[str]:
    root = str(Path(__file__).resolve().parents[3])
    code = textwrap.dedent(WRITER).format(root=root, path=str(path), count=count)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
                            env={**os.environ, "PYTHONPATH": root})  # fmt: skip


@pytest.mark.slow
def test_nothing_is_lost_when_the_kernel_dies_in_the_middle_of_a_review(tmp_path: Path) -> None:
    """A rating that was shown as kept and is not, a file that cannot be opened after the kill."""
    path = tmp_path / "cards.sqlite3"
    process = writer(path, 10_000)
    assert process.stdout is not None
    for told in process.stdout:
        if int(told) == 20:
            os.kill(process.pid, signal.SIGKILL)
            break
    rest = process.stdout.read().split()
    process.wait(300)
    shown = max([20, *(int(each) for each in rest)]) + 1
    box = Box(deck(), path)
    assert shown <= len(box.reviews()) <= shown + 1  # one may have been kept and not told any more
    assert not box.note


@pytest.mark.slow
def test_two_kernels_at_once_lose_nothing(tmp_path: Path) -> None:
    """Writes that overwrite each other, or that give up."""
    path = tmp_path / "cards.sqlite3"
    processes = [writer(path, 40), writer(path, 40)]
    for process in processes:
        process.communicate(timeout=300)
        assert process.returncode == 0
    assert len(Box(deck(), path).reviews()) == 80


def test_a_damaged_file_is_kept_aside_and_the_review_goes_on(tmp_path: Path, clock: Clock) -> None:
    """Somebody's years of reviews written over, because a few bytes were torn."""
    path = tmp_path / "cards.sqlite3"
    path.write_bytes(b"not a database at all" * 300)
    box = Box(deck(), path, clock)
    box.rate("card-0", 4)
    assert "kept as cards.sqlite3.damaged" in box.note
    (kept,) = tmp_path.glob("*.damaged-*")
    assert kept.read_bytes().startswith(b"not a database")
    assert len(Box(deck(), path, clock).reviews()) == 1


def test_a_locked_file_holds_up_nobody_and_the_rating_is_written_later(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A review that fails, or is forgotten, because another program has the file."""
    box.rate("card-0", 4)
    box.store.wait_s = 0.05
    other = sqlite3.connect(box.store.path)
    other.execute("BEGIN EXCLUSIVE")
    try:
        assert box.rate("card-1", 3).times == 1
        assert "kept until that is mended" in box.note
        assert "card-1" in box.standings()
    finally:
        other.rollback()
        other.close()
    box.rate("card-2", 3)
    assert [each.card for each in Box(deck(), box.store.path).reviews()] == ["card-0", "card-1", "card-2"]
    assert "kept until" not in box.note


def test_what_is_exported_comes_back_once(box: Box, tmp_path: Path, clock: Clock) -> None:
    """Progress that is doubled by a second import, or lost on the way through JSON."""
    for id in ("card-0", "card-1", "card-0"):
        box.rate(id, 4, seconds=3.5)
        clock.go(days=2)
    said = json.loads(json.dumps(box.export()))
    there = Box(deck(), tmp_path / "there.sqlite3", clock)
    there.rate("card-3", 2)
    assert there.load(said) == 3
    assert there.load(said) == 0
    assert {each.card for each in there.reviews()} == {"card-0", "card-1", "card-3"}
    assert there.standings()["card-0"].due == box.standings()["card-0"].due


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "something else"}, "format"),
        ({"version": 99}, "later labkit"),
        ({"reviews": [{"uid": "x" * 32, "card": "a", "rating": 7, "at": "2026-01-01T00:00:00Z"}]}, "reviews.0.rating"),
        ({"reviews": [{"uid": "x" * 32, "card": "a", "rating": 3, "at": "yesterday"}]}, "reviews.0.at"),
        ({"reviews": "none"}, "reviews"),
    ],
)
def test_an_export_that_is_none_is_told_by_its_field(box: Box, change: dict[str, object], words: str) -> None:
    """Half an import, or a traceback."""
    with pytest.raises(ValueError, match=words):
        box.load({**box.export(), **change})
    assert box.reviews() == []


def test_reviews_of_cards_that_left_the_deck_stay(tmp_path: Path, clock: Clock) -> None:
    """A deck of one's own that is moved away for a day takes its history along."""
    path = tmp_path / "cards.sqlite3"
    Box(deck(8), path, clock).rate("card-7", 4)
    small = Box(deck(2), path, clock)
    clock.go(days=30)
    assert "card-7" not in [card.id for card in small.due()]
    assert sum(small.forecast(400)) == 0
    assert Box(deck(8), path, clock).standings()["card-7"].times == 1
