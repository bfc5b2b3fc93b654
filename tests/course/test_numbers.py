"""The numbers of labs and exercises: written as a learner writes them, and in their order."""

from __future__ import annotations

import pytest

from labkit.course.classroom.nbgrader_course import key_of, number
from labkit.course.exercises.catalogue import folders, problem
from labkit.course.exercises.new_exercise import NAME
from labkit.course.learner.events import full_key
from labkit.course.numbers import full, natural, subject


def test_a_number_is_sorted_as_a_number_wherever_it_stands() -> None:
    """Would catch exercise 10 before exercise 2, a lab between two others behind both, and keys in no order."""
    right = ["", "03.2", "03.9", "03.10", "05", "05.1", "05_precision", "05b", "05b.1", "06", "99", "100.1"]
    mixed = [*right[1::2], *right[::2]]
    assert sorted(mixed, key=natural) == right
    assert [key for key, _ in folders()] == sorted((key for key, _ in folders()), key=natural)


def test_a_lab_with_a_letter_is_a_lab() -> None:
    """Would catch `labkit build --nbgrader`, a hint or a new exercise that knows labs of digits only."""
    assert [full(words) for words in ("3", "3.2", "5b", "5b.1", "05b_eight_bits", "12", "tour", "")] == [
        "03", "03.2", "05b", "05b.1", "05b_eight_bits", "12", "tour", ""]  # fmt: skip
    assert [number(words) for words in ("5", "5b", "05b_eight_bits", "03_collectives")] == ["05", "05b", "05b", "03"]
    assert [key_of(words) for words in ("check_05b_1", "check_03_12", "check_5_1", "mine")] == [
        "05b.1",
        "03.12",
        "",
        "",
    ]
    assert [full_key(words) for words in ("5b.1", "05b.12", "3.2")] == ["05b.1", "05b.12", "03.2"]
    assert [subject(words) for words in ("05b_eight_bits", "05_precision", "05b")] == ["eight bits", "precision", ""]
    assert NAME.fullmatch("05b.1_delayed_scale")
    assert problem("3.2").key == "03.2"
    for words in ("3", ".2", "3b", "x.1", "3.2.1"):
        with pytest.raises(ValueError, match=r"a lab and a place, as in '03.2'"):
            full_key(words)
