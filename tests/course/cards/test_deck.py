"""The deck: every number computed, every source answered, and a malformed file told by line and field."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest

from labkit.course.cards.card import Card
from labkit.course.cards.deck import Deck, read_deck, sources, the_deck
from labkit.course.cards.figures import VOCABULARY, evaluate, figure
from labkit.course.claims.audit import claim, claims
from labkit.course.numbers import number_of
from labkit.course.whiteboard.derivations import derivation
from tests.cases import cases

NOTEBOOKS = Path(__file__).resolve().parents[3] / "notebooks"
GOOD = {
    "id": "a-card",
    "front": "What is asked?",
    "claim": "What is said.",
    "law": "`a`",
    "difficulty": 1,
    "tags": ["basics"],
}


@cases("card", the_deck)
def test_every_number_of_a_card_is_computed_and_every_law_holds(card: Card) -> None:
    """A figure that cannot be computed, a law that the planner does not know, a placeholder that is left over."""
    for _, text in card.texts():
        assert not re.search(r"\{\w+\}", card.as_sentence(text))
    assert card.broken() == []
    assert list(card.parts())[0] == "claim"


def test_the_deck_is_as_large_as_promised_and_asks_nothing_twice() -> None:
    """150 cards were promised; two cards with the same question are one."""
    assert len(the_deck()) >= 150
    fronts = [card.as_sentence(card.front).lower() for card in the_deck()]
    assert len(set(fronts)) == len(fronts)


def test_every_question_of_the_sources_has_a_card() -> None:
    """A source item that nobody answers, and an answer to an item that is none."""
    covered = {item for card in the_deck() for item in card.covers}
    assert covered == set(sources())
    assert [f"003/{place}" for place in range(1, 90) if f"003/{place}" in covered] == [f"003/{n}" for n in range(1, 90)]


def test_what_a_card_names_is_there() -> None:
    """A link to a cell, a claim, a derivation or a card that does not exist (any more)."""
    cells = {cell["id"] for file in NOTEBOOKS.glob("[0-9]*.ipynb") for cell in json.loads(file.read_text())["cells"]}
    ids = {card.id for card in the_deck()}
    for card in the_deck():
        assert not [cell for cell in card.lab if cell.partition("·")[2] not in cells and cell not in cells], card.id
        assert not set(card.next) - ids, card.id
        if card.derive:
            assert derivation(card.derive).name == card.derive


def test_every_wrong_claim_of_the_audit_stands_on_a_card() -> None:
    """A claim that is known to be wrong, and that no card warns of."""
    warned = {id for card in the_deck() if card.wrong for id in card.wrong.claims}
    assert not [id for id in warned if claim(id).verdict == "holds"]  # those are `proofs`
    assert [each.id for each in claims() if each.verdict == "wrong" and each.id not in warned] == []


def test_every_claim_of_the_audit_is_evidence_on_a_card_once() -> None:
    """A measurement that no card shows, a card that shows one twice, or more than a reader takes in."""
    shown = [[each.claim.id for each in card.audited()] for card in the_deck()]
    assert {id for ids in shown for id in ids} == {each.id for each in claims()}
    for card, ids in zip(the_deck(), shown, strict=True):
        assert len(set(ids)) == len(ids) == len(card.proofs) + len(card.wrong.claims if card.wrong else ()), card.id
        assert len(ids) <= 5, card.id


def test_no_two_cards_ask_the_same() -> None:
    """Two cards of one answer in different files, which a learner reviews twice: one of them adds nothing.

    Words are weighed by how few cards have them; two texts are the same at 1, and have no word in common at 0."""
    worded = [words_of(card) for card in the_deck()]
    cards_with = Counter(word for words in worded for word in words)
    vectors = []
    for words in worded:
        weights = {word: count * math.log(len(worded) / cards_with[word]) for word, count in words.items()}
        length = math.hypot(*weights.values())
        vectors.append({word: weight / length for word, weight in weights.items()})
    pairs = combinations(zip(the_deck(), vectors, strict=True), 2)
    alike = [
        (first.id, second.id)
        for (first, ours), (second, theirs) in pairs
        if sum(weight * theirs.get(word, 0.0) for word, weight in ours.items()) > 0.5
    ]
    assert alike == []


def words_of(card: Card) -> Counter[str]:
    """The words of a card's question, claim and reason, cut to six letters so that their endings do not count."""
    text = re.sub(r"\{\w+\}", "", f"{card.front} {card.claim} {card.reason}".lower())
    return Counter(word[:6] for word in re.findall(r"[a-z]{3,}", text))


@cases(
    ("text", "line", "field", "words"),
    [
        ("- id: a-card\n  front: What is it?\n", 1, "claim", "required"),
        ("- id: A Card\n  front: What is it?\n", 1, "id", "pattern"),
        ("- id: a-card\n  front: What is asked?\n  claim: It is 5.\n  law: a\n  difficulty: 1\n  tags: [x]\n", 3,
         "claim", "'5.' is typed"),
        ("- id: a-card\n  front: What is asked?\n  claim: It is {n}.\n  law: a\n  difficulty: 1\n  tags: [x]\n", 3,
         "claim", "no number is called 'n'"),
        ("- id: a-card\n  front: What is asked?\n  claim: It is so.\n  law: a\n  difficulty: 9\n  tags: [x]\n", 5,
         "difficulty", "less than or equal"),
        ("- id: a-card\n  front: What is asked?\n  front: Again?\n", 3, "front", "stands twice"),
        ("- id: a-card\n  front: What is asked?\n  claim: It is so.\n  law: a\n  proofs: [c1]\n  difficulty: 1\n"
         "  tags: [x]\n", 5, "proofs", "no claim is called 'c1'; did you mean 'c01'?"),
        ("- id: a-card\n  front: What is asked?\n  claim: It is so.\n  law: a\n  wrong:\n    myth: No.\n    but: So.\n"
         "    claims: [c999]\n  difficulty: 1\n  tags: [x]\n", 8, "wrong.claims", "no claim is called 'c999'"),
        ("- id: a-card\n  colour: red\n", 2, "colour", "not permitted"),
        ("- id: a-card\n  front: [unclosed\n", 3, "", "no YAML"),
        ("- just words\n", 1, "", "a mapping"),
        ("id: a-card\n", 1, "", "a list of cards"),
        ("- id: a-card\n  front: What is asked?\n  claim: It is {n}.\n  law: a\n  numbers:\n    n: 1\n    m: 2\n"
         "  difficulty: 1\n  tags: [x]\n", 6, "numbers", "'m' is said nowhere"),
        ("- id: a-card\n  front: What is asked?\n  claim: It is so.\n  law: a\n  axes: [x, y]\n  rows:\n    r: [one]\n"
         "  difficulty: 1\n  tags: [x]\n", 7, "rows", "1 cells"),
    ],
)  # fmt: skip
def test_a_malformed_deck_is_told_by_line_and_field(
    tmp_path: Path, text: str, line: int, field: str, words: str
) -> None:
    """A traceback of pydantic or YAML in place of a sentence; a line that is not where the fault is."""
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=re.escape(words)) as told:
        read_deck(file)
    assert str(told.value).startswith(f"mine.yaml, line {line}"), told.value
    assert f"field {field}" in str(told.value) or not field


@cases(
    ("said", "words"),
    [
        ("__import__('os')", "nothing is called"),
        ("steps.__globals__", "cannot be computed"),
        ("ModelState(7e9, 8).held(3)._items", "cannot be computed"),
        ("open('/etc/passwd')", "nothing is called 'open'"),
        ("[].append(1)", "is a NoneType"),
        ("9**9**9**9", "cannot be computed"),
        ("'a' * 10**10", "cannot be computed"),
        ("(lambda: 1)()", "cannot be computed"),
        ("sent_byte('ring', 'all_reduce', 2, 8)", "did you mean 'sent_bytes'"),
        ("sent_bytes('ring', 'all_reduce', 0, 8)", "ValueError"),
        ("1 / 0", "division by zero"),
        ("measured('c12', 'a stop')", "has measured no 'a stop'; it has 7B on 8 ranks, law, a step"),
        ("measured('c999', 'a step')", "it has nothing"),
        ("1 -> parsec", "no unit is called 'parsec'"),
        ("'word' -> GB", "has no unit"),
        ("1e308 * 10", "is inf"),
        ("1 +", "cannot be computed"),
        ("", "cannot be computed"),
    ],
)
def test_an_expression_that_is_none_is_told(said: str, words: str) -> None:
    """A deck comes from anybody: what is no arithmetic of the planner neither runs nor hangs."""
    with pytest.raises(ValueError, match=re.escape(words)):
        figure(said)


def test_figures_are_shown_as_people_say_them() -> None:
    """1.75e+09 B for 1.75 GB, and 8.0 for 8."""
    assert str(figure("sent_bytes('ring', 'all_reduce', 8, 1e9) -> GB")) == "1.75 GB"
    assert str(figure("7e9 -> billion")) == "7 billion"
    assert str(figure("0.158 -> %")) == "15.8%"
    assert str(figure("1234567")) == "1,234,567"
    assert str(figure("3.4e38")) == "3.4e+38"
    assert str(figure("'ring'")) == "ring"
    assert str(figure("measured('c12', 'a step') -> times")) == "1 times"


def test_a_number_may_use_those_above_it() -> None:
    """The order of numbers, and their base units."""
    card = Card.model_validate({**GOOD, "claim": "It is {b}.", "numbers": {"a": "2e9 -> GB", "b": "a * 2 -> GB"}})
    assert card.parts()["claim"] == "It is 4 GB."
    wrong = Card.model_validate({**GOOD, "claim": "It is {b}.", "numbers": {"b": "a * 2 -> GB", "a": "2e9 -> GB"}})
    with pytest.raises(ValueError, match="nothing is called 'a'"):
        wrong.parts()


def test_a_check_that_is_not_true_is_named() -> None:
    """A law that the planner contradicts."""
    card = Card.model_validate({**GOOD, "checks": ["steps('ring', 'all_reduce', 8) == 14", "1 > 2"]})
    assert card.broken() == ["1 > 2"]


def test_every_name_of_the_vocabulary_is_there() -> None:
    """A function of the planner that was renamed."""
    assert all(evaluate(f"{name} is None") is False for names in VOCABULARY.values() for name in names.split())


def test_cards_are_found_by_tag_lab_and_difficulty() -> None:
    """A filter that lets others through, and one that finds nothing for a slip of the pen."""
    chosen = the_deck().of({"zero"}, lab="07", hardest=3)
    assert 0 < len(chosen) < len(the_deck().of({"zero"}))
    assert all("zero" in card.tags and any(cell.startswith("07") for cell in card.lab) and card.difficulty <= 3
               for card in chosen)  # fmt: skip
    with pytest.raises(ValueError, match="did you mean 'zero'"):
        the_deck().of({"zeros"})
    with pytest.raises(ValueError, match="no card is called"):
        the_deck()["no-such-card"]
    with pytest.raises(ValueError, match="2 cards are called 'a-card'"):
        Deck((Card.model_validate(GOOD), Card.model_validate(GOOD)))


def test_labs_and_readme_say_how_many_cards_there_are() -> None:
    """A number in prose that the deck has outgrown."""
    for file in sorted(NOTEBOOKS.glob("[0-9]*.ipynb")):
        if (lab := number_of(file.name)) == "17":  # which asks all of them
            continue
        assert f"{len(the_deck().of(lab=lab))} cards ask what this lab shows" in file.read_text(), lab
    readme = (NOTEBOOKS.parent / "README.md").read_text()
    assert f"labkit.cards()  # {len(the_deck())} cards;" in readme
    assert f"{len(sources())} questions, challenges, cards and checklist lines" in readme
    verdicts = Counter(each.verdict for each in claims())
    said = f"{verdicts['wrong']} of them wrong, and {verdicts['holds with conditions']} that hold only under conditions"
    assert f"**audit** holds {len(claims())} claims, {said}" in " ".join(readme.split())
    assert f"{sum(bool(card.audited()) for card in the_deck())} cards show what it found" in " ".join(readme.split())
