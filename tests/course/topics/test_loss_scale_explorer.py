"""The loss-scale machine on a recorded run: what is replayed, what the picture says, what the sliders do."""

from __future__ import annotations

import math

import pytest

from labkit.course.topics.loss_scale_explorer import LossScaleExplorer
from labkit.course.topics.loss_scale_picture import replay, scales
from labkit.train.loss_scale import LossScale
from tests.counting import lines
from tests.view import page

CEILINGS = tuple(2.0 ** (17 + math.sin(k)) for k in range(40))
HIGH = LossScale(2.0**24, interval=5)


def test_a_recorded_yes_and_no_is_taken_as_it_is():
    """Would catch a bool that is read as a ceiling of 1: then nothing would ever be finite."""
    steps = [True, True, False, True, True, True]
    run = replay(LossScale(8.0, interval=2), steps)
    assert run.taken == tuple(steps)
    assert run.scales == (8, 8, 16, 8, 8, 16)
    assert run.skipped == (2,)
    assert run.last == LossScale(16.0, interval=2, clean=1)
    assert run.stopped == ""


def test_under_ceilings_a_step_is_skipped_because_of_the_scale():
    """Would catch a replay that cannot skip a step which the recorded run took."""
    run = replay(LossScale(32.0, interval=2), [8.0] * 7)
    assert run.taken == (False, False, True, True, False, True, True)
    assert run.scales == (32, 16, 8, 8, 16, 8, 8)
    never = replay(LossScale(2.0**20, interval=1), [math.inf] * 5)
    assert never.skipped == ()


def test_a_scale_with_nowhere_to_go_ends_the_run_with_a_reason():
    """Would catch a traceback in a slider's place."""
    run = replay(LossScale(2.0**-125), [False] * 9)
    assert len(run.scales) == len(run.taken) == 2
    assert run.stopped.startswith("step 1: gradients were not finite even at a scale of 1.18e-38")
    page.check(scales(run, [False] * 9))


@pytest.mark.parametrize("run", [CEILINGS, [True] * 20 + [False] + [True] * 30, [False] * 200, [True], [math.inf, 0.0]])
def test_the_picture_is_whole(run):
    """Would catch one step, two hundred skipped ones, and the logarithm of an infinite ceiling."""
    page.check(scales(replay(HIGH, run), run))


def test_it_says_what_was_skipped_and_what_comes_next():
    """Would catch marks at other steps than those that were skipped."""
    picture = scales(replay(HIGH, CEILINGS), CEILINGS, "the run")
    assert picture.label.startswith("the run: ")
    run = replay(HIGH, CEILINGS)
    told = page.told(picture)
    assert len(told) == len(run.skipped)
    assert told[0] == "step 0 skipped at 2^24"
    assert "largest scale at which this step is finite" in page.words(picture)
    assert "largest scale" not in page.words(scales(replay(HIGH, [True])))


def test_a_run_of_no_steps_is_refused():
    """Would catch a division by zero in the axes."""
    with pytest.raises(ValueError, match="no steps"):
        scales(replay(HIGH, []))
    with pytest.raises(ValueError, match="no steps"):
        LossScaleExplorer([])


def test_the_sliders_run_the_real_machine():
    """Would catch a picture of another rule than the controls describe."""
    explorer = LossScaleExplorer(CEILINGS, HIGH)
    assert explorer.rule == HIGH
    assert explorer.replayed == replay(HIGH, CEILINGS)
    explorer.interval.value = 1
    assert explorer.replayed == replay(LossScale(2.0**24, interval=1), CEILINGS)
    many = len(explorer.replayed.skipped)
    explorer.interval.value = 40
    assert len(explorer.replayed.skipped) < many
    explorer.first.value = 10
    explorer.growth.value = 4.0
    explorer.backoff.value = 0.25
    assert explorer.rule == LossScale(2.0**10, 4.0, 0.25, 40)
    assert explorer.replayed.skipped == ()
    assert "0 of 40 steps skipped" in explorer.shown.value
    assert explorer.static().label in explorer.shown.value


def test_a_run_that_cannot_be_saved_is_told():
    """Would catch an error that leaves the sliders dead."""
    explorer = LossScaleExplorer([False] * 200)
    assert "look at the first loss that is not finite" in explorer.message.value
    explorer.backoff.value = 0.95
    assert explorer.message.value == ""


def test_the_default_rule_is_torch_s():
    """Would catch sliders that cannot show an interval of 2000."""
    explorer = LossScaleExplorer([True] * 10)
    assert explorer.rule == LossScale()


def test_a_redraw_of_a_thousand_steps_is_little_work():
    """Would catch a path that is built anew for each step."""
    explorer = LossScaleExplorer([2.0**20] * 1000, HIGH)

    def move():
        explorer.interval.value = 7

    assert lines(move) < 2_000_000
