"""Cards of one's own: measured, failed, and read from one's own files."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from labkit.course.cards.deck import read_deck, the_deck
from labkit.course.cards.own import failed, measured
from labkit.course.cards.own_cards import cards
from labkit.course.learner.events import Attempt
from labkit.course.learner.progress import Failed, Progress
from labkit.course.machine.doctor import Finding, MachineReport
from labkit.plan.machine.collectives import Line, seconds

LINE = Line(8e-5, 1 / 2e9)
REPORT = MachineReport((Finding("fresh cluster", 80.5, "ms", ""), Finding("warm call", 0.9, "ms", "")), LINE)
NOW = datetime(2026, 5, 1, tzinfo=UTC)


def test_what_was_measured_here_becomes_cards_with_those_numbers() -> None:
    """Somebody else's latency on a card that says "your machine"."""
    found = {card.id: card for card in measured(REPORT.as_dict(), LINE)}
    assert "alpha was 80 us" in found["own-latency"].parts()["claim"]
    assert "2 GB/s" in found["own-bandwidth"].parts()["claim"]
    assert "160 KB" in found["own-bandwidth"].parts()["number"]
    small = seconds("ring", "all_reduce", 4, 4e3, LINE)
    assert f"{small * 1e3:.3g} ms" in found["own-all-reduce"].parts()["claim"]
    assert (
        found["own-start"].parts()["claim"] == "From nothing to the first sum it took 80.5 ms, and a warm call 0.9 ms."
    )


def test_what_could_not_be_measured_makes_no_card() -> None:
    """A division by nothing, a card that says None."""
    assert measured({}, None) == ()
    assert [card.id for card in measured({"warm call": {"value": None}}, Line(1e-5, 0.0))] == []


def test_a_mistake_becomes_a_card_once() -> None:
    """A card for each of ten attempts with the same mistake; words of a cause that a card would take for figures."""
    mistakes = [Failed("03.2", "wire", "the whole tensor goes round: {n} times 4 bytes `x`", NOW)] * 3
    mistakes += [Failed("03.2", "wire", "another one", NOW), Failed("07.1", "memory", "", NOW)]
    found = failed(mistakes, {"03.2": "A ring in 2 phases"})
    assert len(found) == 2
    assert "03.2" in found[0].front
    assert "The whole tensor goes round: (n) times `4` bytes" in found[0].parts()["claim"]


def test_what_went_wrong_in_an_exercise_is_among_the_cards(tmp_path: Path) -> None:
    """A box that looks for mistakes in another file than exercises keep them in."""
    progress = Progress(tmp_path / "progress.sqlite3")
    progress.log.keep([Attempt(uid="a" * 32, key="03.2", at=NOW, passed=False, starred=False, verdict="wire",
                               cause="whole tensors travel, not parts", seconds=0.1, source="")])  # fmt: skip
    (own,) = cards(folder=tmp_path).due({"own"})
    assert own.parts()["claim"] == "Whole tensors travel, not parts."
    assert "`03.2` (A reduce-scatter on a ring)" in own.front


def test_measured_cards_stay_for_the_next_time_and_are_replaced_by_the_next_measurement(tmp_path: Path) -> None:
    """Numbers that are gone with the kernel, or that stand there twice."""
    assert "own-latency" not in [card.id for card in cards(folder=tmp_path).deck]
    box = cards(REPORT, tmp_path)
    box.rate("own-latency", 4)
    again = cards(folder=tmp_path)
    assert "80 us" in again.deck["own-latency"].parts()["claim"]
    assert again.standings()["own-latency"].times == 1
    other = cards(MachineReport(REPORT.findings, Line(5e-6, 1e-10)), tmp_path)
    assert "5 us" in other.deck["own-latency"].parts()["claim"]
    assert len(other.deck) == len(the_deck()) + 4


def test_ones_own_decks_are_read_and_a_broken_one_is_told(tmp_path: Path) -> None:
    """One bad file that keeps everybody from reviewing; a card that takes the place of one of labkit's."""
    (tmp_path / "decks").mkdir()
    good = "- id: {id}\n  front: What is asked?\n  claim: This is said.\n  law: a\n  difficulty: 1\n  tags: [mine]\n"
    (tmp_path / "decks" / "a.yaml").write_text(good.format(id="my-card") + good.format(id=next(iter(the_deck())).id))
    (tmp_path / "decks" / "b.yaml").write_text("- id: broken\n")
    box = cards(folder=tmp_path)
    assert [card.id for card in box.due({"mine"})] == ["my-card"]
    assert "b.yaml, line 1, field front" in box.note
    assert "stays out" in box.note
    assert len(box.deck) == len(the_deck()) + 1


def test_a_deck_that_calls_a_myth_said_as_decks_did_before_is_still_read(tmp_path: Path) -> None:
    """A learner's deck that an update of labkit makes unreadable."""
    text = "- id: a-card\n  front: What is asked?\n  claim: So it is.\n  law: a\n  difficulty: 1\n  tags: [mine]\n"
    for key in ("said", "myth"):
        (tmp_path / "mine.yaml").write_text(f"{text}  wrong:\n    {key}: It is not.\n    but: It is.\n")
        wrong = read_deck(tmp_path / "mine.yaml")["a-card"].wrong
        assert wrong is not None
        assert wrong.myth == "It is not."
