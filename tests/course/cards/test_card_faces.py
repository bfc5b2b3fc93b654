"""Faces of cards, and pictures of a habit."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from datetime import date, timedelta
from html import escape

import pytest

from labkit.course.cards.box import Asked
from labkit.course.cards.card import Card, Wrong
from labkit.course.cards.card_faces import CELL, back, evidence, front, habits
from labkit.course.cards.deck import the_deck
from labkit.course.claims.audit import kept
from labkit.course.claims.claims_picture import amount, asked, brief
from tests.cases import cases

TODAY = date(2026, 5, 13)


def test_both_faces_say_all_that_the_card_says() -> None:
    """A part that is left out, a figure that is not filled in, markup from a deck that is not escaped."""
    card = Card(id="a-card", front="Is `a < b` & <b>bold</b>?", claim="Yes: {n}.", reason="So it is.", law="`n = <k>`",
                axes=("what", "how"), rows={"DDP": ("rows", "{n}")}, numbers={"n": "7"}, difficulty=1, tags=("basics",),
                wrong=Wrong(myth="Never", but="it is {n}"), lab=("07-34",), derive="bubble")  # fmt: skip
    assert front(card) == '<div class="lk-card-front">Is <code>a &lt; b</code> &amp; &lt;b&gt;bold&lt;/b&gt;?</div>'
    shown = back(card)
    words = ("Yes: 7.", "So it is.", "<code>n = &lt;k&gt;</code>", "<q>Never</q> it is 7", "cell 07-34")
    for each in (*words, "whiteboard: bubble"):
        assert each in shown, each
    cells = [cell.text for cell in ET.fromstring(f"<div>{shown}</div>").iter("td")]
    assert cells[:3] == [None, "rows", "7"]


def test_a_card_shows_what_the_audit_measured_beside_what_is_claimed() -> None:
    """A measurement that is typed, one that shows only where the claim fails, markup that is not escaped."""
    card = Card(id="a-card", front="How many bytes?", claim="All of them.", law="`2 n`", proofs=("c13", "c11"),
                wrong=Wrong(myth="Half", but="all", claims=("c12",)), difficulty=1, tags=("basics",))  # fmt: skip
    found = {each.claim.id: each for each in kept().results}
    assert [each.claim.id for each in card.audited()] == ["c13", "c11", "c12"]
    lines = [f"<div>{escape(brief(found[id]), quote=False)}</div>" for id in ("c13", "c11", "c12")]
    assert evidence(card.audited()) == "".join(lines)
    assert f"<td {CELL}>{''.join(lines)}</td>" in back(card)
    both = brief(found["c11"])
    shown = [each.holds for each in found["c11"].finding.settings if f"{each.name}: " in both]
    assert sorted(shown) == [False, True]
    one = found["c12"].finding.settings[0]
    assert f"{one.name}: {amount(one.truth, one.unit)}, claimed {asked(one)} (measured)" in brief(found["c12"])
    assert evidence(()) == ""


@pytest.mark.rest
@cases("card", the_deck)
def test_every_card_of_the_deck_can_be_shown(card: Card) -> None:
    """A card whose back is no HTML."""
    ET.fromstring(f"<div>{front(card)}{back(card)}</div>")
    assert not re.search(r"\{\w+\}|`", front(card) + re.sub(r"<svg.*?</svg>", "", back(card), flags=re.S))


def test_habits_count_days_what_is_coming_and_what_stayed() -> None:
    """Bars of another height than the numbers, days that fall off the calendar."""
    days = {TODAY - timedelta(days=back): back % 4 for back in range(90)}
    asked = [Asked(None, 0.85, True)] * 3 + [Asked(None, 0.85, False)] + [Asked(None, 1.0, True)]  # type: ignore[arg-type]
    picture = habits(days, [3, 0, 5], asked, TODAY)
    ET.fromstring(str(picture))
    assert "Wed 13 May 2026: 0 reviews" in str(picture)
    assert "80% of 5 remembered" in str(picture)
    assert "80–90%: 75% of 4" in picture.label
    assert "due by day: 3, 0, 5" in picture.label
    tall = {
        words: float(height)
        for height, words in re.findall(r'height="([\d.]+)"[^>]*><title>(today|in 2 days):', str(picture))
    }
    assert tall["in 2 days"] - 1 == pytest.approx((tall["today"] - 1) * 5 / 3, rel=0.01)


def test_a_learner_who_has_done_nothing_yet_sees_an_empty_calendar() -> None:
    """A division by nothing on the first day."""
    picture = habits({}, [0] * 14, [], TODAY)
    ET.fromstring(str(picture))
    assert "0 reviews" in picture.label
