"""The rules of the clinic's game: what probes and wrong names cost, what a name stands on, and what nobody may see."""

from __future__ import annotations

from dataclasses import replace

import pytest

from labkit.course.clinic import clinic
from labkit.course.clinic.outcome import EXCLUDED, GAVE_UP, GUESSED, SHOWN
from labkit.course.clinic.shift import IN_VAIN, MINUTES, Shift
from tests.cases import cases
from tests.patients import MINUTES as PRICES, SIGNS, ZOE

RECORDED = {case.name: clinic.recorded(case) for case in clinic.cases}


def alone(patient=ZOE, signs=SIGNS):
    """A shift with one patient."""
    return Shift([patient], signs, minutes=PRICES)


def played(*moves):
    """The outcome of Zoe's visit: `moves` are probes, or causes that are named."""
    shift = alone()
    for move in moves:
        shift.order(move) if move in PRICES else shift.name(move)
    return shift.outcome


@cases(
    ("moves", "how", "minutes", "points"),
    [
        (("thermometer", "no heating"), SHOWN, 10, 100),
        (("calendar", "thermometer", "thermometer", "no heating"), SHOWN, 11, 99),
        (("thermometer", "winter", "no heating"), SHOWN, 50, 60),
        (("calendar", "candle", "no heating"), EXCLUDED, 5, 75),
        (("calendar", "draught", "no heating"), EXCLUDED, 41, 51),
        (("calendar", "no heating"), GUESSED, 1, 50),
        (("winter", "no heating"), GUESSED, 40, 35),
        (("no heating",), GUESSED, 0, 50),
    ],
)
def test_a_patient_is_worth_what_is_left_above_par_times_what_the_name_stood_on(moves, how, minutes, points):
    """Would catch a probe that is paid twice, a wrong name for free, and a guess that is worth a proof."""
    outcome = played(*moves)
    assert (outcome.how, outcome.minutes, outcome.par, outcome.points) == (how, minutes, 10, points)
    assert outcome.first_try == ("winter" not in moves and "draught" not in moves)
    assert f"{points} of 100 points" in outcome.words


def test_points_never_fall_below_none_and_who_gives_up_has_none():
    """Would catch a bill that reaches other patients."""
    shift = Shift([replace(ZOE, test="calendar", differential=())], SIGNS, minutes={"calendar": 1, "candle": 120})
    shift.order("candle")
    assert shift.name("no heating")
    assert shift.outcome.points == 0
    shift = alone()
    shift.order("thermometer")
    shift.give_up()
    assert (shift.outcome.how, shift.outcome.minutes, shift.outcome.points) == (GAVE_UP, 10, 0)
    assert not shift.outcome.first_try
    assert "You gave up" in shift.outcome.words


def test_a_probe_that_cannot_tell_rules_nobody_out():
    """Would catch an exclusion that stands on nothing: the job did not come so far."""
    shift = alone(signs={"Zoe": {**SIGNS["Zoe"], "candle": ""}})
    assert shift.order("candle") == ""
    shift.order("calendar")
    assert shift.name("no heating")
    assert shift.outcome.how == GUESSED


def test_the_diagnosis_opens_with_the_right_name_and_not_before():
    """Would catch an answer that can be read for nothing, and one that leaves out what others would have shown."""
    shift = alone()
    for move in (lambda: None, lambda: shift.order("calendar"), lambda: shift.name("winter")):
        move()
        assert not shift.diagnosed
        with pytest.raises(ValueError, match="the diagnosis of Zoe is closed: name the cause first, or give up"):
            _ = shift.outcome
    assert shift.suspects == ("draught", "no heating")
    assert shift.name("no heating")
    told = str(shift.outcome)
    assert all(words in told for words in ("5 degrees", "draught: the candle would show: a flicker", "heat (lab 00)"))
    assert ZOE.diff in told


def test_nothing_can_be_done_once_the_diagnosis_is_open():
    """Would catch evidence that is ordered afterwards, and points that can be earned twice."""
    shift = alone()
    shift.name("no heating")
    before = shift.outcome
    for act in (lambda: shift.order("thermometer"), lambda: shift.name("no heating"), shift.give_up):
        with pytest.raises(ValueError, match="the diagnosis of Zoe is open: go on to somebody who waits"):
            act()
    assert shift.outcome == before


def test_what_is_refused_costs_nothing():
    """Would catch minutes that are lost by a slip of the hand."""
    shift = alone()
    shift.name("winter")
    for act, why in (
        (lambda: shift.name("winter"), "'winter' was named in vain already; there are draught, no heating"),
        (lambda: shift.name("ghosts"), "'ghosts' is no suspect here; there are draught, no heating"),
        (lambda: shift.order("tarot"), "there is no probe 'tarot'; there are calendar, candle, thermometer"),
        (lambda: shift.admit("Max"), "there is no patient 'Max' on this shift; there are Zoe"),
        (lambda: shift.replace("Max", {}), "there is no patient 'Max' on this shift; there are Zoe"),
        (shift.next, "nobody else waits: 0 of 1 are diagnosed"),
    ):
        with pytest.raises(ValueError, match=why):
            act()
    assert shift.visit.minutes == IN_VAIN


@cases(
    ("patients", "signs", "minutes", "why"),
    [
        ([], SIGNS, PRICES, "nobody is in the ward"),
        ([ZOE, ZOE], SIGNS, PRICES, "there are 2 patients of the name 'Zoe'"),
        ([ZOE], {}, PRICES, "nothing is recorded of Zoe"),
        ([ZOE], {"Zoe": {"calendar": "May"}}, PRICES, "what shows the cause of Zoe is not recorded"),
        ([ZOE], SIGNS, {"thermometer": 10}, "the probe 'candle' has no price; there are prices of thermometer"),
        ([ZOE], SIGNS, {**PRICES, "candle": 0}, "the probe 'candle' costs 0 minutes: a price must be above 0"),
    ],
)
def test_a_shift_that_could_not_be_played_is_refused(patients, signs, minutes, why):
    """Would catch a KeyError in the middle of the game."""
    with pytest.raises(ValueError, match=why):
        Shift(patients, signs, minutes=minutes)


def test_a_seed_draws_the_order_once_and_for_all():
    """Would catch an order that changes from one run of a cell to the next, and a patient who is lost in it."""
    names = tuple(case.name for case in clinic.cases)
    orders = [Shift(clinic.cases, RECORDED, seed=seed).names for seed in (None, 1, 1, 2)]
    assert orders[0] == names
    assert orders[1] == orders[2] != orders[3]
    assert all(sorted(order) == sorted(names) for order in orders)


def test_patients_come_one_after_the_other_and_find_what_was_spent():
    """Would catch minutes that are forgotten when somebody else is looked at, and a diagnosed one who comes again."""
    shift = Shift(clinic.cases[:3], RECORDED)
    shift.order("ledger")
    assert shift.next().name == "Bea"
    shift.give_up()
    shift.next()
    assert shift.next().name == "Ada"
    assert (shift.visit.minutes, list(shift.seen)) == (3, ["ledger"])
    assert shift.waiting == ("Ada", "Cem")


def test_the_score_card_sums_up_and_names_what_to_look_at_again():
    """Would catch a guess that counts as knowledge, and a mechanism without its lab."""
    shift = Shift(clinic.cases[:4], RECORDED)  # Ada, Bea, Cem, Dora: all four are shown by the autopsy
    assert shift.card().words == "nobody is diagnosed yet"
    shift.order("autopsy")
    shift.name("uneven batches")
    shift.next()
    shift.name("a skipped collective")
    shift.next()
    shift.order("autopsy")
    shift.name("a slow rank")
    shift.name("only rank 0")
    card = shift.card()
    assert (card.points, card.minutes, card.par, card.first_tries, card.guesses) == (100 + 50 + 60, 2 + 42, 6, 2, 1)
    assert card.again == (("a skipped collective", "02"), ("only rank 0", "02"))
    assert card.waiting == ("Dora",)
    assert "210 of 300 points; 44 minutes, par is 6" in str(card)


def test_what_real_ranks_show_stands_in_for_the_recording():
    """Would catch a run for real whose result nobody sees."""
    shift = alone()
    shift.order("candle")
    shift.replace("Zoe", {"candle": "out"})
    assert shift.seen == {"candle": "out"}
    assert SIGNS["Zoe"]["candle"] == "still"


@cases("case", clinic.cases)
def test_every_patient_of_the_clinic_can_be_had_at_par(case):
    """Would catch a patient whom nobody can diagnose for 100 points, and a probe that is dearer than a wrong name."""
    shift = Shift(clinic.cases, RECORDED, seed=3)
    shift.admit(case.name)
    assert shift.order(case.test)
    assert shift.name(case.cause)
    assert (shift.outcome.how, shift.outcome.points) == (SHOWN, 100)
    assert set(MINUTES) == set(clinic.TESTS)
    assert max(MINUTES.values()) < IN_VAIN
