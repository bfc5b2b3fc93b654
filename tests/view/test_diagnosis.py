"""The differential-diagnosis table, the bedside, and the ward: what they say, and what the ward's choices do."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from labkit.lab import clinic
from labkit.view.diagnosis import bedside, diagnosis, opinion
from labkit.view.widgets.ward import NOTHING, Ward
from tests.cases import cases
from tests.counting import lines
from tests.view import page

RECORDED = {each.name: clinic.recorded(each) for each in clinic.cases}


def never(case):
    """No ranks here."""
    raise AssertionError("a redraw has started a program")
    yield


def in_pieces(case):
    """A run that finds something new in two pieces."""
    yield 0.5, {"ledger": "one call"}
    yield 1.0, {"ledger": "two calls", "clock": "all compute"}


@dataclass(frozen=True)
class Rival:
    """Another cause."""

    cause: str
    test: str
    would_show: str


@dataclass(frozen=True)
class Plain:
    """A patient that the clinic does not know."""

    name: str = "Zoe"
    complaint: str = "It is cold."
    symptom: str = "cold"
    cause: str = "no heating"
    test: str = "thermometer"
    shows: str = "5 degrees"
    repair: str = "heat"
    lab: str = "00"
    suspects: tuple[str, ...] = ("no heating", "winter")
    differential: tuple[Rival, ...] = (Rival("winter", "calendar", "January"),)


@pytest.mark.parametrize("symptom", ["", *dict.fromkeys(each.symptom for each in clinic.cases)])
def test_the_table_is_whole_with_all_symptoms_and_with_one(symptom):
    """Would catch words that lie on one another, and a row that leaves the page."""
    picture = diagnosis(clinic.cases, symptom)
    page.check(picture)
    for each in clinic.cases:
        if not symptom or each.symptom == symptom:
            assert each.cause in page.texts(picture)
            assert f"{each.test}: {each.shows} · lab {each.lab}" in page.texts(picture)


def test_a_column_has_those_that_are_it_and_those_that_look_like_it():
    """Would catch a suspect that is not in its column: a slow rank looks like a hang, and is none."""
    slow = diagnosis(clinic.cases, "stops for ever")
    assert "a slow rank" in page.texts(slow)
    assert "a slow rank: a suspect where a job stops for ever" in page.told(slow)
    assert "uneven batches: stops for ever" in page.told(slow)
    assert "fp16 overflow" not in page.texts(slow)
    here = [said for said in page.told(slow) if said.endswith(": stops for ever")]
    assert len(here) == sum(each.symptom == "stops for ever" for each in clinic.cases)


def test_no_cases_and_an_unknown_symptom_are_refused():
    """Would catch an empty page."""
    with pytest.raises(ValueError, match="there are no cases"):
        diagnosis([])
    with pytest.raises(ValueError, match="no case has the symptom 'hot'; there are stops for ever"):
        diagnosis(clinic.cases, "hot")


@cases("case", clinic.cases)
def test_a_bedside_is_whole_with_no_test_and_with_all(case):
    """Would catch a recorded sentence that runs out of the page."""
    page.check(bedside(case, {}))
    full = bedside(case, RECORDED[case.name], opinion(case, case.cause, RECORDED[case.name]))
    page.check(full)
    assert "It fits." in page.words(full)
    assert case.cause not in page.words(bedside(case, {})).split("Suspects:")[0]


def test_a_cause_fits_is_a_guess_or_does_not_fit():
    """Would catch a verdict that praises a guess, and one that hides what would have been seen."""
    zoe = Plain()
    assert opinion(zoe, "no heating", {}) == "A guess so far: no test that you took shows “no heating”."
    assert opinion(zoe, "no heating", {"thermometer": "5"}) == "It fits. thermometer: 5 degrees. Repair: heat (lab 00)."
    assert opinion(zoe, "winter", {}).endswith("would show: January. You have not looked.")
    assert opinion(zoe, "winter", {"calendar": "May"}).endswith("would show: January. It shows something else.")
    with pytest.raises(ValueError, match="'draught' is no suspect here; there are no heating, winter"):
        opinion(zoe, "draught", {})


def test_the_ward_shows_tests_one_by_one_and_starts_nothing():
    """Would catch a test that is forgotten, and a choice that runs ranks."""
    ward = Ward(clinic.cases, RECORDED, never, first="Mia")
    assert "Mia: loss explodes" in ward.static().label
    assert "no test taken" in ward.static().label
    ward.test.value = "gradients"
    ward.test.value = "reference"
    assert list(ward.taken) == ["gradients", "reference"]
    assert "8 times as long" in ward.shown.value
    ward.cause.value = "fp16 overflow"
    assert ward.verdict.startswith("It does not fit: gradients")
    ward.cause.value = "accumulation without normalisation"
    assert ward.verdict.startswith("It fits.")
    assert ward.verdict in ward.static().label
    ward.who.value = "Ada"
    assert (ward.taken, ward.verdict, ward.test.value, ward.cause.value) == ({}, "", NOTHING, NOTHING)
    assert "uneven batches" in ward.cause.options
    ward.test.value = "memory"
    assert "the job does not come so far" in ward.shown.value


def test_the_button_runs_the_case_and_what_it_found_stands_in():
    """Would catch a run whose result is lost, or shown at another patient's bed."""
    ward = Ward(clinic.cases, RECORDED, in_pieces, first="Sam")
    ward.test.value = "ledger"
    ward.real.go.click()
    assert "two calls" in ward.shown.value
    assert ward.real.bar.value == 1.0
    assert "2 tests are from this run" in ward.said.value
    assert not ward.real.go.disabled
    assert ward.real.end.disabled


def test_a_run_can_be_stopped_and_another_patient_chosen_meanwhile():
    """Would catch a stop that is heard when all is over, and a second run beside the first."""

    async def played():
        ward = Ward(clinic.cases, RECORDED, in_pieces, first="Sam")
        ward.real.go.click()
        await asyncio.sleep(0)
        assert ward.real.go.disabled
        ward.real.start()
        ward.who.value = "Tess"
        ward.real.end.click()
        while ward.real.running or ward.real.go.disabled:
            await asyncio.sleep(0.01)
        assert "stopped" in ward.said.value
        assert "Tess" in ward.static().label
        assert ward.recorded["Sam"]["ledger"] == "one call"

    asyncio.run(played())


def test_a_redraw_is_little_work():
    """Would catch a choice that makes the page wait."""
    ward = Ward(clinic.cases, RECORDED, never)

    def choose():
        ward.test.value = "autopsy"

    assert lines(choose) < 30_000
