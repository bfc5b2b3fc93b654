"""Schedules as text: what is written is read, and what is wrong is told with line, column and mend."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings, strategies as st

from labkit.plan.schedules.published_schedules import dualpipe, dualpipe_v, v_half, v_min, zb_h2, zb_v
from labkit.plan.schedules.schedule import gpipe, interleaved, one_f_one_b, zero_bubble
from labkit.plan.schedules.schedule_text import from_text, to_text
from tests.cases import cases

MAKERS = (gpipe, one_f_one_b, zero_bubble, zb_h2, zb_v, v_half, v_min, dualpipe_v, dualpipe)


@given(st.integers(1, 5), st.integers(1, 9), st.sampled_from(MAKERS), st.booleans())
@settings(max_examples=60)
def test_every_schedule_is_read_as_it_was_written_with_and_without_its_placement(p, m, make, told):
    """Would catch a placement, or a copy of a stage, that is lost on the way."""
    made = make(2 * p, m + 1) if make is dualpipe else make(p, m)
    text = to_text(made)
    if not told:
        text = "\n".join(line for line in text.splitlines() if not line.startswith("placement"))
    found = from_text(text, made.name)
    assert found.programs == made.programs
    assert (found.n_ranks, found.n_stages, found.n_micro) == (made.n_ranks, made.n_stages, made.n_micro)
    for stage in range(made.n_stages):
        assert set(found.ranks_of(stage)) == set(made.ranks_of(stage))


def test_pauses_comments_commas_and_missing_stages_are_read():
    """Would catch a dot that is taken for a rank of its own, and a comment for an action."""
    text = """# two ranks   0F9 is no action here
    0F0, 0F1 .  .  -  0B0 ; 0B1   # rank 0

    .   f0 f1 | B0 . b1
    """
    found = from_text(text)
    assert found.programs == gpipe(2, 2).programs
    assert found.placement is None
    assert from_text("0F0 1F0 2F0 2B0 1B0 0B0").placement is None  # the only rank has all stages anyway
    assert from_text(to_text(gpipe(3, 2, (2, 0, 1)))).placement == (2, 0, 1)
    assert from_text(to_text(interleaved(2, 4, 2))).programs == interleaved(2, 4, 2).programs


WRONG = [
    ("hello", "line 1, column 1: 'hello' is no action: write 0F0 for stage 0, forward, micro-batch 0"),
    ("# nothing\n", "line 1, column 1: no action is there: write a line of actions for each rank"),
    ("F0 B0\n  F0 X1", "line 2, column 6: 'X1' is no action: write 1F0 for stage 1"),
    ("F0 B0\nB0 F0", "line 1, column 4: schedule 'by hand' deadlocks: rank 0 at 0B0 needs 1B0; rank 1 at 1B0"),
    ("0F0 0B0 0B0", "line 1, column 5: schedule 'by hand' does twice 0B0"),
    ("0F0 0F2 0B0 0B2", "line 1, column 5: micro-batches count from 0, without gaps, and 1 is not there"),
    ("0F1 0B1", "line 1, column 1: micro-batches count from 0, without gaps, and 0 is not there"),
    ("0F0 2F0\n2B0 0B0", "line 1, column 5: stages count from 0, without gaps, and 1 is not there"),
    ("placement: 0 x\n0F0 0B0", "line 1, column 14: 'x' is no rank: write the rank of each stage"),
    (
        "placement: 5\n0F0 0B0",
        "line 2, column 5: schedule 'by hand' has 0B0, 0F0 on rank 0, but stage 0 lives on rank 5",
    ),
    ("placement: 0 1 0\n0F0 0B0\n1F0 1B0", "places for 3 of 2 stages"),
    ("0F0 0B0\n1F0 1B0 1W0", "lacks 0W0"),
    ("F0 F99999999999 B0", "column 4: 'F99999999999' is no action"),
    (" ".join(f"F{k}" for k in range(4001)), "4,001 actions are more than 4,000"),
]


@cases(("text", "told"), WRONG)
def test_what_is_wrong_is_told_with_line_column_and_mend(text, told):
    """Would catch a typing error that becomes another schedule, and a message without a place."""
    with pytest.raises(ValueError, match=re.escape(told)):
        from_text(text)
