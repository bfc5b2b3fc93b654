"""The ward's pages and its game: nothing tells the cause before it is named, and everything is told afterwards."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace

import pytest

from labkit.course.clinic import clinic
from labkit.course.clinic.bedside import bedside, diagnosed, score_card
from labkit.course.clinic.shift import Shift
from labkit.course.clinic.ward import NOBODY, Ward
from tests.cases import cases
from tests.counting import lines
from tests.patients import MINUTES, SIGNS, YVES, ZOE
from tests.view import page

RECORDED = {case.name: clinic.recorded(case) for case in clinic.cases}


def never(case):
    """No ranks here."""
    raise AssertionError("a redraw has started a program")
    yield


def in_pieces(case):
    """A run that finds something new in two pieces."""
    yield 0.5, {"ledger": "one call"}
    yield 1.0, {"ledger": "two calls", "clock": "all compute"}


def ward_of(*names, pieces=never):
    """A ward with these patients."""
    return Ward(Shift([clinic.admit(name) for name in names], RECORDED), pieces)


def states(widget):
    """What the page knows of a widget and of those in it, in words; its parts have new ids each time."""
    yield re.sub("IPY_MODEL_[0-9a-f]+", "a part", json.dumps(widget.get_state(), sort_keys=True))
    for part in (*getattr(widget, "children", ()), *(getattr(widget, name, None) for name in ("layout", "style"))):
        if part is not None:
            yield from states(part)


def on_the_page(ward):
    """All that a page, or a stored notebook, can hold of the ward: the state of every widget, and the picture."""
    return [*states(ward), ward.static().html()]


def disguised(case):
    """The same patient, of another cause: one of the suspects, with all that is told in the end changed, too."""
    rival = case.differential[0]
    others = tuple(each for each in case.differential if each.cause != rival.cause)
    mine = replace(rival, cause=case.cause, would_show="otherwise")
    secrets = {"shows": "otherwise", "repair": "otherwise", "lab": "99", "look_steps": None}
    return replace(case, cause=rival.cause, test="ledger", differential=(mine, *others), **secrets)


@cases(("case", "other"), [(ZOE, YVES), *((case, disguised(case)) for case in clinic.cases[-1:])])
def test_the_page_is_the_same_whatever_the_cause_until_it_is_named(case, other):
    """Would catch a picture, an alternative text, a tooltip or a menu that gives the answer away."""
    signs = SIGNS if case is ZOE else {case.name: {test: f"a sign of {test}" for test in clinic.TESTS}}
    prices = {"minutes": MINUTES} if case is ZOE else {}
    wards = [Ward(Shift([each], signs, **prices), never) for each in (case, other)]

    def alike():
        first, second = map(on_the_page, wards)
        return first == second

    assert case.suspects == other.suspects
    assert alike()
    for probe in wards[0].probes:
        for ward in wards:
            ward.probes[probe].click()
        assert alike()
    neither = next(cause for cause in case.suspects if cause not in (case.cause, other.cause))
    for ward in wards:
        ward.cause.value = neither
        ward.commit.click()
        ward.card.click()
    assert alike()
    for ward in wards:
        ward.card.click()
        ward.cause.value = case.cause
        ward.commit.click()
    assert not alike()
    assert [ward.shift.diagnosed for ward in wards] == [True, False]


@cases("case", clinic.cases)
def test_the_bedside_of_nobody_in_the_clinic_depends_on_the_cause(case):
    """Would catch a patient whose list of suspects, or their order, tells which one it is."""
    pair = [bedside(each, RECORDED[case.name], each.suspects, (), 9) for each in (case, disguised(case))]
    assert pair[0] == pair[1]


def test_a_visit_from_the_first_probe_to_the_score_card():
    """Would catch a probe for free, a wrong name that stays a suspect, and a diagnosis without what it stands on."""
    ward = ward_of("Kim", "Mia")
    assert [button.description for button in ward.probes.values()][:2] == ["autopsy · 2 min", "ledger · 3 min"]
    assert "0 minutes" in page.texts(ward.static())
    assert ward.commit.disabled
    ward.probes["gradients"].click()
    ward.probes["gradients"].click()
    assert "5 minutes" in page.texts(ward.static())
    assert "not finite" in ward.shown.value
    ward.cause.value = "silent underflow"
    ward.commit.click()
    assert "It is not “silent underflow”" in ward.message.value
    assert "40 minutes" in ward.message.value
    assert ward.cause.options == (NOBODY, *ward.shift.suspects)
    assert "silent underflow" not in ward.cause.options
    assert ward.commit.disabled
    ward.cause.value = "fp16 overflow"
    ward.commit.click()
    told = page.words(ward.static())
    assert "Right, and you had ordered what shows it: the gradients (5 minutes)." in told
    assert "60 points" in told
    assert "gradients of step 1 are inf, while its loss is finite" in told
    assert "zeros, and nothing infinite" in told
    assert 'data-cell="05"' in ward.taught.value
    assert all(control.disabled for control in (*ward.probes.values(), ward.cause, ward.commit, ward.surrender))
    ward.onward.click()
    assert ward.who.value == "Mia"
    assert ward.taught.value == ""
    ward.surrender.click()
    assert "You gave up" in page.words(ward.static())
    ward.onward.click()
    assert "Score card: 60 of 200 points; 45 minutes, par is 35" in ward.static().label
    assert ward.taught.value.count("data-cell") == 2
    ward.card.click()
    assert "Mia: accumulation without normalisation" in page.texts(ward.static())


def test_a_patient_can_be_chosen_and_what_was_spent_is_kept():
    """Would catch a bill that is paid by looking at somebody else, and a first patient who is not there."""
    ward = ward_of("Ada", "Ned")
    ward.probes["memory"].click()
    assert "it cannot tell: the job does not come so far" in page.texts(ward.static())
    ward.who.value = "Ned"
    assert "0 minutes" in page.texts(ward.static())
    assert ward.probes["memory"].icon == ""
    ward.who.value = "Ada"
    assert "20 minutes" in page.texts(ward.static())
    assert ward.probes["memory"].icon == "check"
    assert Ward(ward.shift, never, first="Ned").who.value == "Ned"
    with pytest.raises(ValueError, match="there is no patient 'Zoe' on this shift; there are Ada, Ned"):
        Ward(ward.shift, never, first="Zoe")


def test_a_press_that_comes_too_late_is_told_and_costs_nothing():
    """Would catch an error that only the log of the kernel sees: the browser disables a button a moment later."""
    ward = ward_of("Ada")
    ward.surrender.click()
    outcome = ward.shift.outcome
    ward.probes["autopsy"].click()
    assert "the diagnosis of Ada is open" in ward.message.value
    ward.surrender.click()
    assert ward.shift.outcome == outcome


@cases("case", clinic.cases)
def test_a_bedside_and_a_diagnosis_are_whole(case):
    """Would catch a recorded sentence, or a line of a repair, that runs out of the page."""
    signs, wrong = RECORDED[case.name], case.differential[0].cause
    page.check(bedside(case, {}, case.suspects, (), 0))
    page.check(bedside(case, signs, case.suspects[:1], case.suspects[1:], 200))
    shift = Shift([case], RECORDED)
    shift.name(wrong)
    shift.give_up()
    picture = diagnosed(shift.outcome)
    page.check(picture)
    told = page.words(picture).replace("\N{NO-BREAK SPACE}", " ")
    assert all(row in told for row in case.diff.splitlines())
    assert all(rival.cause in told for rival in case.differential)
    assert f"{wrong} (repaired in vain)" in told


def test_the_score_card_is_whole_with_nobody_and_with_all():
    """Would catch words that lie on one another where minutes are many or points are few."""
    shift = Shift(clinic.cases, RECORDED, seed=1)
    page.check(score_card(shift.card()))
    for number, name in enumerate(shift.names):
        case = shift.admit(name)
        for probe in (*shift.minutes, case.test)[-1 - number % 9 :]:
            shift.order(probe)
        for rival in case.differential[: number % 3]:
            shift.name(rival.cause)
        shift.name(case.cause) if number % 4 else shift.give_up()
    picture = score_card(shift.card())
    page.check(picture)
    assert all(case.cause in page.texts(picture) for case in clinic.cases)


def test_the_button_runs_the_case_and_what_it_found_stands_in():
    """Would catch a run whose result is lost, and one that costs minutes."""
    ward = ward_of("Sam", pieces=in_pieces)
    ward.probes["ledger"].click()
    ward.real.go.click()
    assert "two calls" in ward.shown.value
    assert ward.shift.visit.minutes == 3
    assert ward.real.bar.value == 1.0
    assert "2 signs of Sam are from this run" in ward.message.value
    assert not ward.real.go.disabled
    assert ward.real.end.disabled


def test_a_run_can_be_stopped_and_another_patient_chosen_meanwhile():
    """Would catch a stop that is heard when all is over, and signs at another patient's bed."""

    async def played():
        ward = ward_of("Sam", "Tess", pieces=in_pieces)
        ward.real.go.click()
        await asyncio.sleep(0)
        assert ward.real.go.disabled
        ward.real.start()
        ward.who.value = "Tess"
        ward.real.end.click()
        while ward.real.running or ward.real.go.disabled:
            await asyncio.sleep(0.01)
        assert "stopped" in ward.message.value
        assert "Tess" in ward.static().label
        assert ward.shift.order("ledger") == RECORDED["Tess"]["ledger"]
        ward.shift.admit("Sam")
        assert ward.shift.order("ledger") == "one call"

    asyncio.run(played())


def test_a_redraw_is_little_work():
    """Would catch a press that makes the page wait."""
    ward = ward_of("Ada")
    assert lines(ward.probes["autopsy"].click) < 30_000
