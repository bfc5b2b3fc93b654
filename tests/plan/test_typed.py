"""Numbers as people type them, in fields of widgets and in options: what is read, and what is refused with the mend."""

from __future__ import annotations

import re

import pytest

from labkit.plan.typed import parsed, whole
from tests.cases import cases


@cases(
    ("text", "unit", "value"),
    [
        ("1,024", "B", 1024), ("1.5e6", "B", 1.5e6), ("2 KiB", "B", 2048), ("7 B", "B", 7), ("2 MB", "bytes", 2e6),
        ("0.3 ms", "s", 3e-4), ("20µs", "seconds", 2e-5), ("33%", "%", 33), (".5", "", 0.5),
        ("7B", "parameters", 7e9), ("124 M", "parameters", 1.24e8), ("300b", "tokens", 3e11), ("15 t", "tokens", 15e12),
        ("2_000_000", "tokens", 2e6), ("128k", "tokens a row", 131_072),
    ],
)  # fmt: skip
def test_a_number_is_read_as_people_write_it(text, unit, value):
    """Would catch a comma that ends a number, a billion taken for a trillion or for bytes, and 128k tokens of 1,000."""
    assert parsed(text, unit) == pytest.approx(value, rel=1e-12)


@cases("text", ["", "T", "-1T", "1TB", "1e", "nan", "inf", "1.2.3", "--1", "1 2", "7 apples", "9" * 400])
def test_words_that_are_no_number_are_refused_with_numbers_that_would_do(text):
    """Would catch nonsense that becomes zero, a budget of nothing, and a refusal that leaves a learner alone."""
    with pytest.raises(ValueError, match=r"is not a number of tokens, 1 or more: write 1T, 300B or 1\.5e12$") as caught:
        parsed(text, "tokens", least=1)
    assert len(str(caught.value)) < 120


@cases(
    ("text", "name", "message"),
    [
        ("2.5", "heads", "heads: a whole number from 1 to 64, got '2.5'"),
        ("65", "heads", "heads: a whole number from 1 to 64, got '65'"),
        ("many", "heads", "heads: a whole number from 1 to 64, got 'many'"),
        ("128kb", "tokens a row", "tokens a row: a whole number from 1 to 64, such as 8,192 or 128k, got '128kb'"),
    ],
)
def test_a_whole_number_is_refused_with_its_name_and_its_range(text, name, message):
    """Would catch half a head, a search for a million devices, and a message that does not say which field it means."""
    with pytest.raises(ValueError, match=re.escape(message)):
        whole(text, name, most=64)
    assert whole("1_0", name, most=64) == 10
