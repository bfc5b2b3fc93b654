"""The mock interview: what it asks, when it ends, what a rating is, and what the report makes of it."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from hypothesis import given, settings, strategies as st

from labkit.course.cards.card import PARTS, Card
from labkit.course.cards.deck import Deck, the_deck
from labkit.course.interview.interview import Interview
from labkit.course.interview.interview_picture import spoken
from labkit.course.interview.interview_questions import BUDGET_S, DERIVATION, DESIGN, FOLLOW_UP, POINTS, rating_of
from labkit.course.topics.design_cases import CASES
from tests.view import page

TAGS = ("zero", "memory", "ring", "precision")


def card(number: int, level: int = 2, **more: object) -> Card:
    fields = {
        "id": f"card-{number}",
        "front": f"What is asked in question `{number}`?",
        "claim": "Twice {n}, which is the claim.",
        "law": "`2 n`, with n the number.",
        "limits": "Not below one.",
        "numbers": {"n": "3 * 1e9 -> GB"},
        "difficulty": level,
        "tags": (TAGS[number % 4],),
        "lab": (f"0{number % 4 + 3}-1{number % 10}",),
        "next": (f"card-{number + 1}",),
    }
    return Card.model_validate(fields | more)


DECK = Deck(tuple(card(number, number % 5 + 1) for number in range(60)))


class Clock:
    """Goes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def session(deck: Deck = DECK, **more: object) -> tuple[Interview, Clock]:
    clock = Clock()
    return Interview(deck, clock=clock, **{"seed": 1, "level": 5, **more}), clock  # type: ignore[arg-type]


def go_on(talk: Interview, clock: Clock, takes: Callable[[float], float] = lambda budget: budget, rating: int = 4):
    """Answer until it is over; each question as it was when it was asked, with what was left then."""
    seen = []
    while talk.question:
        seen.append((talk.question, talk.left_s))
        clock.now += takes(talk.question.budget_s)
        talk.rate(rating)
    return seen


@settings(max_examples=60)
@given(
    minutes=st.integers(5, 120),
    level=st.integers(1, 5),
    seed=st.integers(0, 10**6),
    steps=st.lists(st.tuples(st.integers(0, 6), st.floats(-1e4, 1e4)), min_size=1, max_size=40),
)
def test_whatever_is_answered_and_whatever_the_clock_does_nothing_is_asked_twice_or_above_the_level(
    minutes, level, seed, steps
):
    """Would catch a card drawn again, one that is too hard, a time below zero, and a session that does not end."""
    talk, clock = session(minutes=minutes, level=level, seed=seed)
    keys, done = [], 0
    while talk.question:
        asked = talk.question
        keys.append(asked.key)
        assert asked.card is None or asked.card.difficulty <= level
        assert 0 < asked.budget_s <= BUDGET_S[asked.kind]
        does, gone = steps[done % len(steps)]
        clock.now += gone if done < 40 else asked.budget_s
        assert 0 <= talk.left_s <= minutes * 60
        assert talk.used_s >= 0
        if does == 0:
            talk.skip()
        elif does == 6:
            assert talk.reveal()
            talk.rate(dict.fromkeys(talk.rubric, seed % 2 == 0))
        else:
            talk.rate(does)
        done += 1
    assert len(keys) == len(set(keys)) == len(talk.report().asked)
    assert talk.over
    report = talk.report()
    assert 0 <= report.share <= 1
    assert json.loads(json.dumps(report.as_dict(), allow_nan=False))["seed"] == seed
    page.check(spoken(report))


@settings(max_examples=40)
@given(
    minutes=st.integers(5, 120),
    level=st.integers(1, 5),
    seed=st.integers(0, 10**6),
    haste=st.sampled_from((0.3, 0.8, 1)),
)
def test_who_keeps_to_the_budgets_is_done_in_time_and_the_budgets_add_up_to_no_more(minutes, level, seed, haste):
    """Would catch a question that is begun without the time for it, and an hour that is planned for half of one."""
    talk, clock = session(minutes=minutes, level=level, seed=seed, deck=the_deck())
    seen = go_on(talk, clock, lambda budget: haste * budget)
    assert all(asked.budget_s <= left + 1e-6 for asked, left in seen)
    assert sum(haste * asked.budget_s for asked, _ in seen) <= minutes * 60 + 1e-6
    assert talk.left_s < 90 or talk.report().ended == "cards"
    if haste == 1 and talk.report().ended != "cards":
        assert minutes * 60 - 90 <= sum(asked.budget_s for asked, _ in seen)


def test_a_question_that_runs_beyond_the_end_is_finished_and_is_the_last():
    """Would catch an answer that is cut off, and one more question after the end."""
    talk, clock = session(minutes=5)
    for _ in range(9):
        clock.now += 60
        assert talk.left_s >= 0
    assert (talk.left_s, talk.over) == (0.0, False)
    assert "claim" in talk.reveal()
    assert talk.rate(5) is None
    assert (talk.over, talk.question, talk.report().ended) == (True, None, "time")
    for call in (talk.reveal, talk.skip, lambda: talk.rate(3), lambda: talk.answer("N")):
        with pytest.raises(ValueError, match="the interview is over"):
            call()
    clock.now += 500
    assert talk.report().spent_s == 540


def test_the_same_seed_and_the_same_answers_ask_the_same():
    """Would catch a draw that hangs on the order of a set, or on anything but the seed."""
    runs = [[asked.key for asked, _ in go_on(*session(the_deck(), seed=seed, minutes=60))] for seed in (7, 7, 8)]
    assert runs[0] == runs[1] != runs[2]
    assert isinstance(Interview(DECK).seed, int)


def test_weak_cards_are_drawn_more_often_than_known_ones_and_unseen_ones_as_the_weakest():
    """Would catch a weakness that is not looked at, or is taken for strength."""
    flat = Deck(tuple(card(number, 2, next=(), tags=("zero",)) for number in range(60)))
    weakness = {f"card-{number}": 0.9 if number < 20 else 0.1 for number in range(40)}
    found: Counter[str] = Counter()
    for seed in range(150):
        asked = go_on(*session(flat, seed=seed, minutes=10, level=2, weakness=weakness))
        found.update(("weak", "known", "unseen")[int(each.key[5:]) // 20] for each, _ in asked)
    assert found["weak"] > 5 * found["known"] > 0
    assert found["unseen"] > found["weak"]


def test_topics_vary_over_a_session():
    """Would catch an interview about one thing: a tenth of the deck has a tag, and half of the questions."""
    for seed in range(8):
        asked = [each for each, _ in go_on(*session(the_deck(), seed=seed, minutes=24, level=3), rating=2)]
        tags = Counter(tag for each in asked for tag in each.tags)
        assert len(tags) >= 8
        assert max(tags.values()) <= len(asked) / 2 + 1


def test_the_mix_goes_up_to_the_level():
    """Would catch a session at level 4 that asks what beginners are asked."""
    mean = {}
    for level in (2, 4):
        asked = [each for seed in range(10) for each, _ in go_on(*session(seed=seed, minutes=20, level=level))]
        mean[level] = sum(each.card.difficulty for each in asked) / len(asked)
    assert 1.5 < mean[2] < 2 < 2.8 < mean[4] < 4  # with nothing but the draw it would be 1.5 and 2.5


@pytest.mark.parametrize("seed", range(6))
def test_a_follow_up_is_named_by_the_card_just_before_it_and_there_are_two_in_a_row_at_most(seed):
    """Would catch a follow-up of something else, and a session that is led by one thread."""
    asked = [each for each, _ in go_on(*session(the_deck(), seed=seed, minutes=60), rating=5)]
    kinds = [each.kind for each in asked]
    assert FOLLOW_UP in kinds
    assert all(kinds[k : k + 3] != [FOLLOW_UP] * 3 for k in range(len(kinds)))
    for before, each in zip(asked, asked[1:], strict=False):
        if each.kind == FOLLOW_UP:
            assert each.after == before.key
            assert each.key in before.card.next
        else:
            assert each.after == ""


def test_a_good_answer_is_followed_up_more_often_than_a_bad_one_and_a_skipped_one_never():
    """Would catch a probability that does not grow, and an interviewer who insists on what was passed over."""
    count = {}
    for rating in (1, 5):
        runs = [go_on(*session(seed=seed, minutes=20), rating=rating) for seed in range(40)]
        count[rating] = sum(each.kind == FOLLOW_UP for run in runs for each, _ in run)
    assert count[5] > 2 * count[1] > 0
    talk, clock = session(minutes=60)
    while talk.question:
        assert talk.question.kind != FOLLOW_UP
        clock.now += 60
        talk.skip()


@pytest.mark.parametrize(("minutes", "level", "expected"), [(25, 3, 1), (60, 5, 1), (24, 3, 0), (60, 2, 0)])
def test_there_is_one_design_case_in_long_sessions_of_level_three_and_more_near_the_end(minutes, level, expected):
    """Would catch a case in a short session or for beginners, two of them, and one without its twelve minutes."""
    names = set()
    for seed in range(12):
        seen = go_on(*session(the_deck(), seed=seed, minutes=minutes, level=level))
        cases = [place for place, (asked, _) in enumerate(seen) if asked.kind == DESIGN]
        assert len(cases) == expected
        for place in cases:
            asked, left = seen[place]
            assert asked.case in CASES
            assert asked.words == asked.case.question
            assert asked.budget_s == 720 <= left < 720 + 90
            assert len(seen) - place <= 2  # a last card, if there is time left
            names.add(asked.key)
    assert len(names) >= 3 * expected


def test_a_design_case_that_has_no_time_left_is_left_out_and_that_is_told():
    """Would catch twelve minutes that are begun with five left, and a case that is missing without a word."""
    for minutes, budget in ((16, 720), (24, 360), (25, None)):
        talk, clock = session(minutes=30)
        for _ in range(minutes):
            clock.now += 60
            assert talk.left_s > 0
        talk.rate(3)
        asked = go_on(talk, clock)
        assert [each.budget_s for each, _ in asked if each.kind == DESIGN] == ([budget] if budget else [])
    assert talk.note == "the design case was left out: too little time was left for it"
    assert session(minutes=30)[0].note == ""


def test_the_answer_to_a_design_case_is_the_planners_and_its_rubric_what_a_good_answer_says():
    """Would catch asks without their paragraph, and an answer of another case."""
    talk, clock = session(minutes=25, level=3)
    while talk.question.kind != DESIGN:
        clock.now += 60
        talk.skip()
    case, answer = talk.question.case, talk.reveal()
    assert list(talk.rubric.values()) == list(case.asks)
    assert list(answer) == list(talk.rubric)
    first = list(answer.values())
    assert case.shape.name in first[0]
    assert str(case.found[0]) in first[2]
    assert f"{case.batch * case.seq:,} tokens a step" in first[4]
    points = dict.fromkeys(list(talk.rubric)[:2], True)
    talk.rate(points)
    assert (talk.asked[-1].reached, talk.asked[-1].of, talk.asked[-1].share) == (2, 5, 0.4)


def at_a_derivation(**more: object) -> tuple[Interview, Clock]:
    for seed in range(100):
        talk, clock = session(the_deck(), seed=seed, minutes=60, level=4, **more)
        for _ in range(12):
            if talk.question.kind == DERIVATION:
                return talk, clock
            clock.now += 10
            talk.skip()
    raise AssertionError("no derivation is ever asked")


def test_a_formula_is_checked_and_counts_as_the_rating():
    """Would catch a wrong formula that counts as right, a second try that counts as a first, and points one tells."""
    talk, clock = at_a_derivation()
    asked = talk.question.derivation
    with pytest.raises(ValueError, match="column"):
        talk.answer("2*(")
    assert not talk.rated
    wrong = talk.answer(f"2*({asked.answer})")
    assert wrong.kind == "factor"
    clock.now += 30
    assert talk.answer(asked.answer).right
    clock.now += 500
    talk.rate({"first": True})
    kept = talk.asked[-1]
    assert dict(kept.points) == {"unit": True, "limit": True, "formula": True, "first": False, "time": True}
    assert (kept.kind, kept.seconds, kept.formulas) == (DERIVATION, 30, (f"2*({asked.answer})", asked.answer))

    talk, clock = at_a_derivation()
    talk.answer(f"2*({talk.question.derivation.answer})")
    assert talk.question.derivation.answer in talk.reveal()["law"]
    with pytest.raises(ValueError, match="has been shown"):
        talk.answer(asked.answer)
    talk.rate()
    assert not talk.asked[-1].points["formula"]
    assert talk.asked[-1].points["limit"]


def test_no_law_is_to_be_derived_that_a_card_of_the_session_has_shown():
    """Would catch "derive this" right below the answer."""
    for seed in range(25):
        shown, derived = set(), 0
        for asked, _ in go_on(*session(the_deck(), seed=seed, minutes=45, level=4), rating=3):
            if asked.kind == DERIVATION:
                assert asked.key not in shown
                derived += 1
            elif asked.card:
                shown.add(asked.card.derive)
        assert derived <= 8


def test_a_card_cannot_be_answered_by_a_formula_nor_go_unrated():
    """Would catch a verdict on words, and an empty rating that goes on as a bad one."""
    talk, _ = session()
    before = talk.question
    with pytest.raises(ValueError, match="answered in words"):
        talk.answer("2*N")
    with pytest.raises(ValueError, match="tell the points"):
        talk.rate()
    with pytest.raises(ValueError, match="did you mean 'claim'"):
        talk.rate({"clain": True})
    for nonsense in (0, 6, True, 2.5, math.nan, "3"):
        with pytest.raises(ValueError, match="a rating is 1 to 5"):
            talk.rate(nonsense)
    assert talk.question is before
    assert talk.asked == ()


def test_the_rubric_of_a_card_has_its_parts_and_the_time_and_the_answer_has_the_figures():
    """Would catch a point for a part that the card does not have, and a name of a number that is shown for it."""
    talk, clock = session()
    assert list(talk.rubric) == ["claim", "law", "limits", "time"]
    assert talk.reveal() == {"claim": "Twice 3 GB, which is the claim.", "law": "`2 n`, with n the number.",
                             "limits": "Not below one."}  # fmt: skip
    clock.now += 400  # reading the answer
    talk.rate({"claim": True})
    assert talk.asked[-1].points == {"claim": True, "law": False, "limits": False, "time": True}
    assert (talk.asked[-1].seconds, talk.report().spent_s) == (0, 400)
    clock.now += 121
    talk.rate({"claim": True, "law": True, "limits": True})
    assert talk.asked[-1].points["time"] is False
    assert set(PARTS) < set(POINTS)


def test_a_rating_is_by_the_parts_that_came_and_without_its_claim_a_card_is_forgotten():
    """Would catch a box of cards that is told that a card is known by someone who named only its limits."""
    parts = ("claim", "reason", "law", "number", "costs", "limits")
    assert rating_of(dict.fromkeys(parts, True)) == 5
    assert rating_of(dict.fromkeys(parts, False)) == 1
    assert rating_of(dict.fromkeys(parts, True) | {"claim": False, "time": True}) == 2
    assert rating_of(dict.fromkeys(parts, False) | {"claim": True, "law": True, "number": True}) == 3
    assert rating_of({"claim": True, "limits": True, "time": False}) == 5


def test_a_clock_that_jumps_is_not_counted_and_is_told():
    """Would catch a night of a sleeping laptop that ends the session, and a time that runs backwards."""
    talk, clock = session(minutes=30)
    clock.now += 100
    assert talk.left_s == 1700
    clock.now -= 5000
    assert talk.left_s == 1700
    clock.now += 8 * 3600
    assert talk.left_s == 1700
    assert talk.note == "the clock went back by 83 min and the clock jumped ahead by 8 h: that is not counted"
    clock.now += 120 + 599  # a long pause, but no more than its budget and ten minutes
    assert talk.left_s == 1700 - 719
    talk.rate(3)
    assert talk.asked[0].seconds == 819
    assert "jumped" in talk.report().note
    assert "jumped" in repr(talk.report())


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"minutes": 4}, "5 to 120 minutes, got 4"),
        ({"minutes": 121}, "5 to 120 minutes, got 121"),
        ({"minutes": math.nan}, "got nan"),
        ({"level": 0}, "a level is 1 to 5"),
        ({"level": 6}, "a level is 1 to 5"),
        ({"topics": ("memori",)}, "no card has the tag 'memori'; did you mean 'memory'"),
        ({"weakness": {"card-1": 1.5}}, "weakness of 'card-1': a probability is 0 to 1, got 1.5"),
        ({"deck": Deck((card(1, 4),)), "level": 2}, "the easiest is of level 4"),
        ({"deck": Deck(())}, "the deck is empty"),
    ],
)
def test_what_makes_no_session_is_told_with_its_numbers(asked, said):
    """Would catch a session that begins and has nothing to ask, or never ends."""
    with pytest.raises(ValueError, match=said):
        session(**asked)


def test_topics_are_kept_to_by_cards_follow_ups_and_derivations():
    """Would catch a follow-up that leads away from what was asked for."""
    for seed in range(5):
        for asked, _ in go_on(*session(the_deck(), seed=seed, minutes=60, topics=("pipeline", "lora")), rating=5):
            assert asked.kind == DESIGN or {"pipeline", "lora"} & set(asked.tags)


def test_a_deck_that_has_been_asked_ends_the_session_and_says_so():
    """Would catch a hang, or a silence, where no card is left."""
    talk, clock = session(Deck(tuple(card(number, 1) for number in range(3))), minutes=24)
    assert len(go_on(talk, clock, lambda _: 5.0)) == 3
    assert talk.report().ended == "cards"
    assert "until no card was left" in talk.report().judgement


def test_stopping_early_keeps_what_was_answered():
    """Would catch an open question that counts as a bad one, and a stop that takes the report away."""
    talk, clock = session()
    talk.rate(5)
    clock.now += 10
    talk.end()
    talk.end()
    report = talk.report()
    assert (talk.over, report.ended, len(report.asked), report.share) == (True, "stopped", 1, 1.0)
    done, clock = session(minutes=5)
    go_on(done, clock)
    done.end()
    assert done.report().ended == "time"
    assert "no question was answered" in Interview(DECK).report().judgement.lower()


def two_tags() -> Interview:
    """Zero goes well, memory badly; the law is never said, the last is skipped."""
    talk, clock = session(DECK, level=5, minutes=24)
    while len(talk.asked) < 8:
        asked = talk.question
        clock.now += 60 if len(talk.asked) else 150
        good = asked.tags == ("zero",)
        talk.rate({"claim": good, "limits": good, "law": False})
    clock.now += 10
    talk.skip()
    talk.end()
    return talk


def test_the_report_counts_by_part_by_tag_and_by_time():
    """Would catch a share that forgets what was skipped, and parts that are counted where nobody could say them."""
    talk = two_tags()
    report = talk.report()
    assert report.by_part["law"] == (0, 8)
    good = sum(each.tags == ("zero",) for each in report.asked[:-1])
    assert report.by_part["claim"] == (good, 8)
    shares = [each.share for each in report.asked]
    assert shares[-1] == 0
    assert report.share == pytest.approx(sum(shares) / 9)
    for tag, (share, count) in report.by_tag.items():
        mine = [each.share for each in report.asked if tag in each.tags]
        assert (share, count) == (pytest.approx(sum(mine) / len(mine)), len(mine))
    said = report.judgement
    assert "You leave out the law in 8 of 8" in said
    assert "9 questions in 9:40 of 24:00, until you stopped, level 5" in said
    assert "1 skipped" in said
    assert f"1 of 8 over their time; {report.asked[0].key} took 2:30 of 2:00" in said


def test_what_was_skipped_is_not_praised_for_its_time():
    """Would catch "all within their time" where nothing was said."""
    talk, clock = session(DECK, level=5, minutes=24)
    talk.skip()
    clock.now += 10
    assert "their time" not in talk.report().judgement
    talk.rate(5)
    assert "All within their time" in talk.report().judgement


def test_the_weakest_tags_come_with_cells_and_cards_of_what_was_missed():
    """Would catch a praise of what went badly, and a place to look at that has nothing to do with it."""
    report = two_tags().report()
    assert report.weak
    order = [(each.share * each.questions + 1) / (each.questions + 2) for each in report.weak]
    assert order == sorted(order)
    named = Counter(id for each in report.weak for id, _ in each.cards)
    assert set(named.values()) == {1}
    for each in report.weak:
        missed = [one for one in report.asked if each.tag in one.tags and one.share < 0.75]
        assert set(each.cells) <= {cell for one in missed for cell in one.lab}
        assert each.cards[0][0] in {one.key for one in missed}
        assert all(front == DECK[id].as_sentence(DECK[id].front) for id, front in each.cards)


def test_what_was_said_well_is_nothing_to_look_at_again():
    """Would catch a list of cards that sends a learner to what they know."""
    flat = Deck(tuple(card(number, 1, next=(), tags=("zero",)) for number in range(4)))
    talk, clock = session(flat, level=1, minutes=24)
    known = [talk.question.key]
    talk.rate(5)
    known.append(talk.question.key)
    talk.rate(5)
    go_on(talk, clock, rating=1)
    (weak,) = talk.report().weak
    assert (weak.tag, weak.share, weak.questions) == ("zero", 0.5, 4)
    assert {id for id, _ in weak.cards} == {each.id for each in flat} - set(known)
    assert not {cell for id in known for cell in flat[id].lab} & set(weak.cells)


def test_the_report_shows_itself_and_is_plain_data():
    """Would catch words that are taken for HTML, and data that json cannot hold."""
    talk, clock = session(Deck((card(1, 1, front="Is a < b & c?"), card(2, 1))), level=1, minutes=10)
    while talk.question:
        clock.now += 30
        talk.rate({"claim": False})
    html = talk.report()._repr_html_()
    assert "Is a &lt; b &amp; c?" in html
    assert "Is a < b" not in html
    assert "aria-label" in html
    plain = json.loads(json.dumps(talk.report().as_dict()))
    assert [each["seconds"] for each in plain["asked"]] == [30, 30]
    assert plain["by_part"]["claim"] == [0, 2]


def test_the_picture_of_a_session_is_whole_however_long_and_late_it_was():
    """Would catch bars that leave the page, words on words, and a session of a hundred questions."""
    one = {"kind": "derivation", "key": "a name that is far too long for its place " * 3, "words": "Why?",
           "budget_s": 120.0, "seconds": 7199.0, "points": {}, "rating": 3, "skipped": False}  # fmt: skip
    rows = [SimpleNamespace(**{**one, "seconds": 1200.0 / (k + 1), "skipped": k % 3 == 0}) for k in range(75)]
    parts = {"law": (0, 4), "claim": (4, 4), "x" * 80: (1, 2)}
    named = {"law": "the law", "claim": "the claim", "x" * 80: "x" * 80}
    for asked in ((), [SimpleNamespace(**one)], rows):
        picture = spoken(SimpleNamespace(asked=asked, by_part=parts if asked else {}, named=named, share=0.5))
        page.check(picture)
    words = page.texts(picture)
    assert "... and 15 more" in words
    assert sum(" of 2:00" in each for each in words) == 60
    assert "4 of 4" in words
    assert "0 of 4, missing in 4" in words
    assert {"skipped", "rated 3 of 5", "20:00 of 2:00 over", "1:40 of 2:00"} <= set(words)
