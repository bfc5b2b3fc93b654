"""The differential-diagnosis table: what it says, and that it can be read."""

from __future__ import annotations

import pytest

from labkit.course.clinic import clinic
from labkit.course.clinic.diagnosis import diagnosis
from tests.view import page


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
