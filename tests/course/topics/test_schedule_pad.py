"""The pad for schedules: what it says of a text, what it refuses, and what a run shows."""

from __future__ import annotations

import pytest

from labkit.course.topics.schedule_pad import NAMES, SchedulePad, published, run_on_ranks, weigh
from labkit.plan.schedules.schedule import validate
from tests.cases import cases


@cases("name", NAMES)
def test_every_published_schedule_fills_the_pad_and_stands_beside_1f1b(name):
    """Would catch a schedule that is drawn as another, thin stages that count as whole ones, and copies that count as
    stages: work is the same for all of them, 24 forwards a rank."""
    pad = SchedulePad()
    pad.name.value = name
    made = validate(published(name))
    assert pad.schedule.programs == made.programs
    assert f"<td>{name}</td>" in pad.message.value
    assert "<td>1f1b</td><td>33</td><td>27.3%</td><td>27.3%</td><td>4</td>" in pad.message.value
    cost, _ = weigh(made)
    assert cost.length * (1 - cost.waits) == pytest.approx(24)
    assert pad.shown.value.startswith("<svg")


def test_what_the_pad_says_of_zero_bubbles_depends_on_the_ramp():
    """Would catch a bubble that is zero because the ramp was left out, without a word."""
    cost = weigh(published("zb_v"))[0]
    assert cost.own_waits == pytest.approx(0, abs=1e-12)
    assert cost.waits == pytest.approx(1.5 / 25.5)
    assert cost.held == weigh(published("1f1b"))[0].held
    assert weigh(published("v_min"))[0].held == 2


def test_naive_input_leaves_the_last_picture_and_a_place_to_look_at():
    """Would catch a page that empties, and a run of something that is not there."""
    pad = SchedulePad("dualpipe")
    before = pad.shown.value
    for text, told in (("", "no action is there"), ("0F0 0G0", "line 1, column 5"), ("F0 B0\n" * 9, "8 ranks at most"),
                       ("<b>", "&lt;b&gt;")):  # fmt: skip
        pad.text.value = text
        assert told in pad.message.value
        pad.run()
        assert told in pad.message.value
        assert pad.ran is None
        assert pad.shown.value == before
    pad.text.value = "# mine\n0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"
    assert "<td>mine</td>" in pad.message.value


@cases("name", ["dualpipe", "v_min"])
def test_run_it_runs_the_text_on_ranks_and_compares_with_one_process(name):
    """Would catch a run of another schedule, and gradients that nobody compares."""
    pad = SchedulePad(name)
    pad.button.click()
    assert pad.ran is not None
    assert [span.action for span in pad.ran.spans if span.rank == 2] == list(pad.schedule.programs[2])
    assert pad.ran.gap < 1e-12
    assert "recorded in" in pad.shown.value
    assert "loss and gradients are one process's" in pad.message.value
    pad.name.value = "gpipe"
    assert pad.ran is None
    assert "recorded in" not in pad.shown.value


def test_a_run_takes_at_least_as_long_as_the_simulation():
    """Would catch stages that do not keep their rank busy."""
    made = published("1f1b", 2, 3)
    ran = run_on_ranks(made, forward_s=0.01)
    assert max(span.end for span in ran.spans) >= 0.01 * weigh(made)[0].length * 0.9
