"""Typed answers: numbers with units, laws, words, what is denied; and how well that does on labkit's own deck."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import yaml

from labkit.course.cards.card import Card
from labkit.course.cards.deck import the_deck
from labkit.course.cards.figures import figure
from labkit.course.interview.answered import LONGEST, Judged, judge
from labkit.course.interview.quantities import held_against, quantities
from labkit.course.interview.spoken_formulas import against, formulas
from tests.cases import cases

TYPED = yaml.safe_load(Path(__file__).with_name("answers.yaml").read_text(encoding="utf-8"))
QUICK = ("ring-latency", "zero-partition", "pp-in-flight", "staleness-is-momentum", "tp-block-bytes", "amdahl-256")
"""Cards whose figures take no time."""


def whole(card: Card) -> str:
    """The card's own good answer."""
    return "\n".join(card.parts().values())


def reached(points: dict[str, Judged]) -> set[str]:
    return {point for point, judged in points.items() if judged.reached}


@cases(
    ("typed", "met"),
    [
        ("16 GB", True), ("16GB of state", True), ("sixteen gigabytes", True), ("15,900 MB", True), ("14.9 GiB", True),
        ("128 Gbit", True), ("16.3 GB", True), ("17 GB", False), ("16 GiB", False), ("16 Gb", False), ("16 MB", False),
        ("16", False), ("16 s", False), ("not 16 GB", False), ("it isn't 16 GB but 12 GB", False),
        ("16 GB is wrong", False), ("bf16 GB", False), ("16B", False), ("", False),
    ],
)  # fmt: skip
def test_a_number_is_met_in_every_unit_that_fits_and_in_no_other(typed, met):
    """Would catch GiB taken for GB, bits for bytes, a number without a unit, a name for a number, and a denied one."""
    assert bool(held_against(figure("16e9 -> GB"), quantities(typed)).met) == met


@cases(
    ("expression", "typed", "words"),
    [
        ("16e9 -> GB", "16 GiB", "1,024 is not 1,000"), ("16e9 -> GB", "16 Gb", "bits, and not bytes"),
        ("16e9 -> GB", "128 GB", "bits for bytes?"), ("16e9 -> GB", "16 MB", "a 1,000th of 16 GB"),
        ("16e9 -> GB", "16", "has no unit"), ("3.5e-3 -> ms", "3.5 s", "1,000 times 3.5 ms"),
        ("16 * 2**30 -> GiB", "16 GB", "1,024 is not 1,000"), ("0.164 -> %", "16.4", "the card has 16.4%"),
    ],
)  # fmt: skip
def test_a_number_that_is_nearly_right_is_told_what_is_wrong_with_it(expression, typed, words):
    """Would catch "wrong" without a reason, for a slip that one sees."""
    match = held_against(figure(expression), quantities(typed))
    assert not match.met
    assert words in match.remark


@cases(
    ("typed", "expression"),
    [
        ("1.5x", "1.5 -> times"), ("40 %", "0.4 -> %"), ("40 percent", "0.4"), ("8k tokens", "8000"),
        ("8k tokens", "8192"), ("70B parameters", "70e9 -> billion"), ("70 billion", "70e9 -> billion"),
        ("3 bytes per parameter", "3"), ("989 TFLOPS", "989e12 -> Tflop/s"), ("400 Gbit/s", "50e9 -> GB/s"),
        ("two hours", "7200 -> s"), ("1,192 rows", "1192"), ("4us", "4e-6 -> us"), ("2-fold", "2 -> times"),
        ("30-50%", "0.5 -> %"),
    ],
)  # fmt: skip
def test_quantities_are_read_as_people_write_them(typed, expression):
    """Would catch a k that is no thousand, a B that is only bytes, and a unit that is lost behind a space."""
    assert held_against(figure(expression), quantities(typed)).met


@cases(
    ("typed", "renamed"),
    [
        ("2 (n-1)/n D", ""), ("2(n−1)/n·D bytes", ""), ("it is 2 (n-1)/n times D", ""), ("2D - 2D/n", ""),
        ("D*(2n-2)/n", ""), ("2 (p-1)/p N per rank", "p for n, N for D"), ("twice (n-1)/n times D", ""),
        ("not 2D but 2 (n-1)/n D", ""),
    ],
)  # fmt: skip
def test_a_law_is_found_in_every_form_and_with_other_letters(typed, renamed):
    """Would catch a checker that compares texts, and letters that are swapped without a word."""
    said_law = against("2*(n-1)/n*D", formulas(typed))
    assert said_law is not None
    assert said_law.renamed == renamed


@cases("typed", ["2D", "(n-1)/n D", "2 (D-1)/D n", "not 2 (n-1)/n D", "2 (n-1)/n D is wrong", "2n-1/n D", "bytes", ""])
def test_another_law_or_a_denied_one_is_not_taken_for_it(typed):
    """Would catch a limit taken for the value, letters with their meanings exchanged, and "not 2N" that counts."""
    assert against("2*(n-1)/n*D", formulas(typed)) is None


def test_sums_with_words_between_and_bytes_of_a_parameter_are_the_law():
    """Would catch a law that counts only if it stands alone."""
    assert against("16*N", formulas("2 N for weights + 2 N for gradients + 12 N for the optimizer"))
    assert against("16*N", formulas("sixteen bytes a parameter"))
    assert against("6*N", formulas("16 bytes per parameter")) is None
    assert against("16*N", formulas("16 D")), "both are letters of a size"
    assert against("2*L", formulas("2 N")) is None, "layers are no size"


def test_a_law_that_is_nearly_right_is_told_what_it_is():
    """Would catch a bare "no" for the most common mistake."""
    half = judge(the_deck()["ring-latency"], "A ring waits (n-1) times, and a tree ceil(log2(n)) times.")["law"]
    assert not half.reached
    assert "1/2 of the truth" in half.remarks[0]
    denied = judge(the_deck()["pp-in-flight"], "I would not say min(p - r, m).")["law"]
    assert not denied.reached
    assert "denies it" in " ".join(denied.remarks)


def test_the_setting_of_a_number_is_not_the_number():
    """Would catch a point for the model and its length, which a card names beside what was computed for them."""
    card = the_deck()["more-rows-nearly-free"]
    setting = "Predicted for Llama 3 with 70.6 billion parameters in bf16, tp over 8 H100, sequences of 4,096 tokens."
    assert not judge(card, setting)["number"].reached
    assert judge(card, f"{setting} It takes 1.18 times as long for 27.1 times the tokens.")["number"].reached


@cases("row", TYPED)
def test_answers_in_other_words_reach_what_they_say_and_not_what_they_do_not(row):
    """Would catch a judge that wants the card's own words, and one that gives points for being on the topic.

    Points that are known to be missed stand in the file: when one is found, it belongs to the others."""
    card = the_deck()[row["card"]]
    points = reached(judge(card, row["text"]))
    assert not points & set(row["not"])
    assert set(row["says"]) <= points
    assert not points & set(row.get("missed", ()))


@cases("id", QUICK)
def test_a_cards_own_answer_reaches_every_point_and_says_by_which_words(id):
    """Would catch a point that nobody can reach, and a tick without evidence."""
    card = the_deck()[id]
    points = judge(card, whole(card))
    assert set(points) == set(card.parts())
    assert all(judged.reached and judged.evidence for judged in points.values()), points


@cases("id", QUICK)
def test_nothing_and_the_question_and_the_opposite_reach_nothing(id):
    """Would catch points for repeating the question, and for a claim that is turned round."""
    card = the_deck()[id]
    assert not reached(judge(card, ""))
    assert not reached(judge(card, card.as_sentence(card.front) * 2))
    words = card.as_sentence(card.claim).split()
    denied = " ".join(f"not {word}" for word in words)
    assert not judge(card, denied)["claim"].reached


def test_the_claim_comes_first_and_a_trade_off_has_two_sides():
    """Would catch a claim at the end that counts as one at the beginning, and half of a trade-off that counts whole."""
    card = the_deck()["zero-partition"]
    parts = card.parts()
    late = judge(card, "\n".join([parts["reason"], parts["limits"], parts["number"], parts["claim"]]))["claim"]
    assert not late.reached
    assert "comes late" in late.remarks[0]
    twice = judge(card, "\n".join([parts["claim"].partition(";")[2], parts["reason"], parts["limits"], parts["claim"]]))
    assert twice["claim"].reached, "what is said at first and again at the end"
    costs = "Larger ones waste fewer latencies, but the last gradients then hide behind nothing."
    fields = {"id": "buckets", "front": "How large is a bucket?", "claim": "Neither tiny nor whole.", "costs": costs}
    card = Card.model_validate({**fields, "difficulty": 2, "tags": ("ddp",)})
    both = "Large ones waste fewer latencies, but nothing is left behind which the final gradients can hide."
    assert judge(card, both)["costs"].reached
    half = judge(card, "They should be larger, which wastes fewer latencies.")["costs"]
    assert not half.reached
    assert half.remarks == ("that is one side of it: what is on the other?",)


def test_a_book_is_no_answer():
    """Would catch a kernel that is busy for minutes with a text that somebody pasted."""
    with pytest.raises(ValueError, match="20,000 characters at most, this one has 20,001"):
        judge(the_deck()["ring-latency"], "a" * (LONGEST + 1))


@pytest.mark.rest
def test_on_the_whole_deck_own_answers_reach_their_points_and_those_of_other_topics_do_not():
    """Would catch a threshold that is moved until one of the two looks good."""
    cards, numbers = tuple(the_deck()), random.Random(1)
    counts = {"own": [0, 0], "other": [0, 0], "nothing": [0, 0]}
    for card in cards:
        other = numbers.choice([another for another in cards if not set(another.tags) & set(card.tags)])
        asked = card.as_sentence(card.front)
        for kind, text in (("own", whole(card)), ("other", whole(other)), ("nothing", ""), ("nothing", asked)):
            points = judge(card, text)
            judged = [point for point in points.values() if kind != "own" or point.reached is not None]
            counts[kind][0] += sum(bool(point.reached) for point in judged)
            counts[kind][1] += len(judged)
    assert len(cards) > 250
    assert counts["own"][0] >= 0.99 * counts["own"][1]
    assert counts["own"][1] >= 0.99 * sum(len(card.parts()) for card in cards)
    assert counts["other"][0] <= 0.02 * counts["other"][1]
    assert counts["nothing"][0] == 0
