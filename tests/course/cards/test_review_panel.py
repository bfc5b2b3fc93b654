"""The panel that reviews cards, driven by what its page sends."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from labkit.course.cards.box import Box
from labkit.course.cards.card import Card
from labkit.course.cards.deck import Deck
from labkit.course.cards.review_panel import ReviewPanel


class Clock:
    now = datetime(2026, 5, 13, 9, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now


@pytest.fixture
def box(tmp_path: Path) -> Box:
    cards = (Card(id=f"card-{n}", front=f"Question `{n}`?", claim=f"Answer `{n}`.", law="`a`", difficulty=1,
                  tags=("odd" if n % 2 else "even",), lab=(f"0{n % 2}-01",)) for n in range(4))  # fmt: skip
    return Box(Deck(tuple(cards)), tmp_path / "cards.sqlite3", Clock())


def test_space_shows_and_a_number_rates_and_goes_on(box: Box) -> None:
    """An answer that is there before one has tried, a rating that is not kept, the same card again."""
    panel = ReviewPanel(box)
    assert "Question" in panel.face
    assert not panel.shown
    panel.heard({"do": "show"})
    assert panel.shown
    assert "Answer" in panel.answer
    panel.heard({"do": "rate", "rating": 4})
    assert panel.rated == [("card-0", 4)]
    assert [each.rating for each in box.reviews()] == [4]
    assert not panel.shown
    assert panel.card.id == "card-1"
    assert "3 to go · 1 done · 1 day in a row" in panel.standing
    assert "card-0: again in 10 minutes" in panel.note


def test_what_a_page_should_not_send_does_nothing(box: Box) -> None:
    """A key that comes before the answer is shown, numbers that are no rating, anything at all."""
    panel = ReviewPanel(box)
    for said in ({"do": "rate", "rating": 3}, {"do": "rate"}, {"do": "dance"}, "rate", None, {"rating": 3}, []):
        panel.heard(said)
    panel.heard({"do": "show"})
    for rating in (0, 6, "3", None, 2.5):
        panel.heard({"do": "rate", "rating": rating})
    assert box.reviews() == []
    assert panel.card.id == "card-0"


def test_at_the_end_there_is_a_picture_of_the_habit(box: Box) -> None:
    """A panel that is empty, or that goes round for ever."""
    panel = ReviewPanel(box)
    for _ in range(4):
        panel.heard({"do": "show"})
        panel.heard({"do": "rate", "rating": 5})
    assert panel.card is None
    assert panel.face.startswith("<svg")
    assert panel.standing.startswith("Nothing is due. 4 done")
    panel.heard({"do": "show"})
    panel.heard({"do": "rate", "rating": 5})
    assert len(box.reviews()) == 4
    box.clock.now += timedelta(days=400)  # type: ignore[attr-defined]
    panel.ask()
    assert panel.card is not None


def test_menus_choose_tags_and_labs(box: Box) -> None:
    """A menu that changes nothing, or that asks what was not chosen."""
    panel = ReviewPanel(box, tag="odd")
    assert panel.card.id == "card-1"
    panel.tag = "even"
    assert panel.card.id == "card-0"
    panel.tag, panel.lab = "", "01"
    assert panel.card.id == "card-1"
    assert panel.labs == ["00", "01"]
    with pytest.raises(ValueError, match="did you mean 'odd'"):
        ReviewPanel(box, tag="od")
    with pytest.raises(ValueError, match="no card is shown by lab '09'; there are 00, 01"):
        ReviewPanel(box, lab="09")


def test_two_panels_of_one_box_do_not_get_into_each_others_way(box: Box) -> None:
    """A second panel that rates what the first has shown."""
    one, two = ReviewPanel(box), ReviewPanel(box)
    for panel in (one, two):
        panel.heard({"do": "show"})
        panel.heard({"do": "rate", "rating": 5})
    assert box.standings()["card-0"].times == 2
    assert one.card is not None
    assert two.card.id == "card-1"


def test_where_no_widgets_run_a_picture_says_what_is_missing(box: Box) -> None:
    """An export with a hole."""
    assert "4 cards to review" in str(ReviewPanel(box).static())


def test_below_each_rating_stands_when_the_card_would_come_again(box: Box) -> None:
    """A rating that does not do what was foreseen, spans of the card before, a look ahead that counts as a review."""
    panel = ReviewPanel(box)
    assert panel.spans == ["1 minute", "1 minute", "6 minutes", "10 minutes", "8 days"]
    assert box.reviews() == []
    for rating in range(1, 6):
        foreseen = box.foreseen("card-0")[rating - 1]
        assert box.rate("card-0", rating).due == foreseen
        box.clock.now += timedelta(days=3)  # type: ignore[attr-defined]
    panel.ask()
    assert len(panel.spans) == 5
    with pytest.raises(ValueError, match="no card is called 'card-9'"):
        box.foreseen("card-9")
