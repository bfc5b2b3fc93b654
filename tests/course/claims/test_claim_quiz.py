"""The quiz of claims: what it draws, what an answer is worth, what it shows as proof; the sheet and its key."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from labkit.course.claims.audit import claims, kept
from labkit.course.claims.claim_quiz import ANSWERS, MEANS, Quiz, condition_of, draw, judge
from labkit.course.claims.quiz_paper import key, sheet
from tests.cases import cases
from tests.waiting import LONG_S


@cases("count", [3, 10, 30])
def test_every_answer_is_right_equally_often_and_nothing_is_asked_twice_or_unproved(count):
    """Would catch a quiz that "depends" wins, the same claim twice, and one that the audit could not show."""
    for seed in range(20):
        questions = draw(count, seed=seed)
        truths = Counter(question.truth for question in questions)
        assert max(truths.values()) - min(truths[answer] for answer in ANSWERS) <= 1
        ids = [question.claim.id for question in questions]
        assert len(set(ids)) == count
        assert not {claim.id for claim in claims() if claim.verdict == "not shown"} & set(ids)
        assert [question.number for question in questions] == list(range(1, count + 1))


def test_the_same_seed_draws_the_same_and_a_topic_only_its_own():
    """Would catch a sheet that does not fit its key, and a claim on something else."""
    assert draw(8, seed=7) == draw(8, seed=7) != draw(8, seed=8)
    on_zero = draw(100, "zero", 1)
    assert {question.claim.topic for question in on_zero} == {"ZeRO"}
    assert len(on_zero) == sum(claim.topic == "ZeRO" and claim.verdict in MEANS for claim in claims())
    with pytest.raises(ValueError, match="did you mean 'ZeRO'"):
        draw(3, "zeros")
    with pytest.raises(ValueError, match="1 question or more, got 0"):
        draw(0)


def test_conditions_are_offered_with_every_claim_and_one_of_them_is_its_own_only_if_it_depends():
    """Would catch a list that gives away that it depends, and one without the answer."""
    places = Counter[int]()
    for question in draw(len(claims()), seed=3):
        assert len(set(question.conditions)) == 4
        own = condition_of(question.stored)
        assert bool(own) == (question.truth == "depends")
        assert (question.conditions.index(own) + 1 if own else 0) == question.right
        places[question.right] += 1
    assert set(places) == {0, 1, 2, 3, 4}


def test_an_answer_is_worth_what_the_audit_says():
    """Would catch a verdict of the quiz's own, and a whole point for half of the answer."""
    by_verdict = {result.claim.id: result.finding.verdict for result in kept().results}
    for question in draw(60, seed=5):
        assert question.truth == MEANS[by_verdict[question.claim.id]]
        for answer in ANSWERS[:2]:
            assert judge(question, answer) == (answer == question.truth)
        points = [judge(question, "depends", place) for place in (1, 2, 3, 4)]
        expected = [1.0 if place == question.right else 0.5 for place in (1, 2, 3, 4)]
        assert points == (expected if question.right else [0.0] * 4)
    for answer, condition in (("wrong", 0), ("", 0), ("depends", 0), ("depends", 5)):
        with pytest.raises(ValueError, match="got"):
            judge(question, answer, condition)


def test_a_round_keeps_score_and_names_the_cells_of_labs_for_what_was_missed():
    """Would catch a score that counts questions, an answer after the end, and a lab for what was known."""
    quiz = Quiz(6, seed=7)
    while quiz.question:
        asked = quiz.question
        wrong = next(answer for answer in ANSWERS if answer != asked.truth)
        known = asked.number > 3
        quiz.answer(asked.truth if known else wrong, (asked.right or 1) if known or wrong == "depends" else 0)
    assert (quiz.score, quiz.of) == (3.0, 6)
    missed = {outcome.question.claim.id for outcome in quiz.outcomes if outcome.points < 1}
    assert set(quiz.labs()) <= missed
    assert quiz.labs()
    cells = [cell for of_a_claim in quiz.labs().values() for cell in of_a_claim]
    assert all(re.fullmatch(r"(\d\d[a-z]·)?\d\d[a-z]?-\d\d[a-z]?", cell) for cell in cells)
    assert json.loads(json.dumps(quiz.as_dict()))["score"] == 3.0
    with pytest.raises(ValueError, match="the quiz is over"):
        quiz.answer("true")


def test_a_proof_can_be_run_now():
    """Would catch a stored result that is shown as if it were found now."""
    quiz = Quiz(1, "arithmetic", seed=1, prove=True)
    outcome = quiz.answer("false")
    assert outcome.proof is not outcome.question.stored
    assert outcome.proof.agrees
    assert Quiz(1, seed=1).answer("true").proof in kept().results


def test_the_sheet_has_no_answers_and_the_key_has_all_of_them_with_proofs():
    """Would catch a sheet that tells, a key of another round, and a truth without its numbers."""
    questions = draw(9, seed=7)
    paper = sheet(questions, "seed 7")
    answers = key(questions, [question.stored for question in questions], "seed 7")
    assert paper.count("☐ true   ☐ false   ☐ depends") == 9
    assert "found" not in paper
    assert "Truth" not in paper
    for question in questions:
        where = f", {'abcd'[question.right - 1]})" if question.right else ""
        assert f"## {question.number}. {question.truth}{where}" in answers
        assert len(question.stored.finding.settings) > 0
    assert answers.count(", found ") == sum(len(question.stored.finding.settings) for question in questions)


def labkit(*words: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "labkit", "quiz", *words], input=typed, capture_output=True, text=True,
                          timeout=LONG_S, env={**os.environ, "COLUMNS": "160"})  # fmt: skip


@pytest.mark.slow
def test_answers_can_be_piped_and_the_end_of_them_ends_the_quiz_with_the_score(tmp_path: Path):
    """Would catch a traceback at the end of the input, a loop over it, and results that are lost with it."""
    questions = draw(4, seed=7)
    first, second = questions[:2]
    typed = f"maybe\n{first.truth}\n{first.right or 1}\n" if first.right else f"maybe\n{first.truth[0]}\n"
    typed += f"d\n9\n{second.right or 1}\n"
    done = labkit("-n", "4", "--seed", "7", "--json", str(tmp_path / "quiz.json"), typed=typed)
    assert (done.returncode, done.stderr) == (0, "")
    points = 1 + (1 if second.right else 0)
    assert f"{points} of 2 points, 2 not answered; seed 7" in done.stdout
    assert done.stdout.count("type one of") == 2
    assert ", found " in done.stdout
    kept_there = json.loads((tmp_path / "quiz.json").read_text())
    assert [each["id"] for each in kept_there["asked"]] == [first.claim.id, second.claim.id]
    wrong = labkit("--key", "key.md")
    assert (wrong.returncode, "belong to --round" in wrong.stderr) == (2, True)


@pytest.mark.rest
def test_a_class_gets_the_same_sheet_and_key_for_the_same_seed(tmp_path: Path):
    """Would catch a key that is drawn anew."""
    papers = [labkit("--round", "-n", "5", "--seed", "3", "--key", str(tmp_path / f"{k}.md")).stdout for k in (0, 1)]
    keys = [(tmp_path / f"{k}.md").read_text() for k in (0, 1)]
    assert papers[0] == papers[1] == sheet(draw(5, seed=3), "5 claims, seed 3")
    assert keys[0] == keys[1]
    assert len(re.findall(r"^## \d", keys[0], re.MULTILINE)) == 5
