"""The bottleneck explorer: a recorded step by its parts, Amdahl's curve, and a watched run."""

from __future__ import annotations

import math

import pytest

from labkit.comm.ledger import Transfer
from labkit.course.topics.bottleneck_explorer import BottleneckExplorer
from labkit.course.topics.bottleneck_picture import MOST, dashboard, explored, speed_up, split_of
from labkit.plan.breakdown import Breakdown
from labkit.plan.pocket.scaling import amdahl
from labkit.probe.recording import Recording
from labkit.probe.rows import OperationSpan, ProgramSpan, RankTimeline
from labkit.view.overlap import overlap
from tests.cases import cases
from tests.view import page


def parts(compute, communication=0.0, bubble=0.0, data=0.0):
    """A split in seconds."""
    return Breakdown.of({"compute": compute, "communication": communication, "bubble": bubble, "data": data}, "s")


STEPS = {1: parts(0.1), 2: parts(0.05, 0.01, 0.0, 0.01), 4: parts(0.025, 0.02, 0.0, 0.01)}


def recorded(rank, data, compute, end):
    """A rank that reads, computes, and is in an all_reduce until the end; times are those of a step from 0."""
    spans = (
        (ProgramSpan("step", 0.0, end), ProgramSpan("data", 0.0, data)) if data else (ProgramSpan("step", 0.0, end),)
    )
    entry = OperationSpan(0, "all_reduce", "world", (0, 1), None, 0, 1, data + compute, end, True, False, 0)
    transfer = Transfer("all_reduce", "world", None, 100, data + compute, end)
    return Recording((RankTimeline(rank, 0.0, end, spans, (entry,), (transfer,)),))


def test_a_recording_is_split_by_its_spans_and_its_waits():
    """Would catch data that is counted as compute, and a wait for a reading rank that is called a bubble."""
    step = Recording.of([recorded(0, 0.0, 2.0, 8.0), recorded(1, 4.0, 3.0, 8.0)])
    assert dict(split_of(step)) == pytest.approx({"compute": 2.5, "communication": 1, "bubble": 1.5, "data": 3})
    assert split_of(step).total == pytest.approx(step.seconds)
    unnamed = split_of(step, data="input")
    assert unnamed["data"] == 0
    assert unnamed["compute"] == pytest.approx(4.5)
    useful = split_of(step, flops=4, peak_flops=1)
    assert useful["useful"] / useful.total == pytest.approx(step.mfu(4, 1))


@cases(("serial", "n_ranks"), [(0.0, 1), (0.5, 3), (1.0, MOST)])
@cases("faster", [{}, {"communication": 4.0, "data": math.inf}])
@cases("steps", [STEPS, {2: parts(1e-6, 1.0), 256: parts(5.0, 1e-9, 3.0, 100.0)}])
def test_the_picture_is_whole_for_any_step(serial, n_ranks, faster, steps):
    """Would catch words on words, a bar that leaves the page, and a job that gets slower with ranks."""
    picture = explored(steps, serial, n_ranks, faster)
    page.check(picture)
    assert "nan" not in str(picture)
    full = {n: Breakdown.of({"useful": 1.0, "underutilisation": 2.0, **dict(each)}, "s") for n, each in steps.items()}
    page.check(explored(full, serial, n_ranks, faster))


def test_it_says_what_costs_most_and_what_its_end_would_bring():
    """Would catch the gain of another part, and a law of other ranks."""
    words = page.words(explored(STEPS, 0.1, 64, {}))
    assert "4 ranks: 55 ms a step, most lost to communication" in words
    assert f"at 64 ranks, by Amdahl's law: {amdahl(64, 0.1):.3g} times, 14% efficient, limit 10" in words
    assert f"gone: {55 / 35:.3g} x" in words
    assert "20 ms, 36%" in words
    assert "measured on 4 ranks: 1.82 times as fast" in words
    assert "what if" not in words


def test_what_if_shrinks_its_part_alone_and_draws_a_curve_of_its_own():
    """Would catch a repair that is promised to all parts."""
    said = explored(STEPS, 0.1, 4, {"communication": 4.0, "data": math.inf})
    words = page.words(said)
    assert "then 30 ms, 1.83 times as fast" in words
    assert "what if: 5 ms" in words
    assert "what if: 0" in words
    assert "what if: 25 ms" in words
    assert "what if, on 4 ranks: 3.33 times as fast" in words
    ranks, speeds = page.line_of(said, "law")
    assert speeds == pytest.approx([amdahl(n, 0.1) for n in ranks])
    assert page.line_of(said, "what if")[1] != speeds
    assert not any(line.get_label() == "what if" for line in explored(STEPS, 0.1, 4, {}).axes[0].get_lines())
    bars = {hover: bar.get_width() for hover, bar in page.boxes(said).items()}
    assert bars["what if: 5 ms"] == pytest.approx(0.005)
    assert bars["what if: 25 ms"] == pytest.approx(0.025)


def test_the_bars_are_those_of_the_recorded_size_below():
    """Would catch a step of four ranks that is shown for two."""
    assert "2 ranks: 70 ms a step" in explored(STEPS, 0.1, 2, {}).label
    assert "2 ranks: 70 ms a step" in explored(STEPS, 0.1, 3, {}).label
    assert "4 ranks: 55 ms a step" in explored(STEPS, 0.1, 1024, {}).label


@cases("serial", [0.0, 0.3])
@cases("guess", [None, (4, 0.1), (2, 900.0)])
def test_law_prediction_and_measurement_are_on_one_picture(serial, guess):
    """Would catch a prediction that leaves the page, and one that is drawn where none was made."""
    picture = speed_up({1: 1.0, 2: 1.5, 4: 1.8}, serial, guess)
    page.check(picture)
    assert "measured on 4 ranks 1.8" in picture.label
    assert ("your prediction" in page.words(picture)) == (guess is not None)
    assert ("you predicted" in picture.label) == (guess is not None)
    points = page.dots(picture)
    assert points["measured on 4 ranks: 1.8 times as fast"] == (4, 1.8)
    assert guess is None or guess[0] in {n for hover, (n, _) in points.items() if hover.startswith("you predicted")}


WATCHED = {
    "tokens/s": ([5000.0, 5100.0, 1200.0], ""),
    "data": ([1.0, 2.0, 70.0], "%"),
    "memory": ([7e6, 7e6, 7e6], "B"),
    "loss": ([5.5, math.nan, 3.0], ""),
    "step": ([0.02, 0.02, 0.3], "s"),
}


def test_a_watched_run_names_what_left_its_limits():
    """Would catch an alarm without a step, and a NaN that raises none."""
    picture = dashboard(WATCHED, {"data": (0, 30), "memory": (0, 1e9), "loss": (0, 10)}, "three steps")
    page.check(picture)
    assert "three steps: data out of its limits from step 2; loss out of its limits from step 1" in picture.label
    assert "tokens/s: 1,200" in page.words(picture)
    assert "memory: 6.68 MiB" in page.words(picture)
    assert "step 2: 70 %" in page.told(picture)
    sound = {name: each for name, each in WATCHED.items() if name != "loss"}
    assert "all within limits" in dashboard(sound, {"memory": (0, 1e9)}).label
    assert "no limits" in dashboard(sound).label
    page.check(dashboard({"one": ([0.0], "")}))
    page.check(dashboard({"below": ([-3.0, -5.0], "")}))


BAD = [
    (lambda: dashboard({}), "as many values of each number, got \\[\\]"),
    (lambda: dashboard({"a": ([1.0], ""), "b": ([1.0, 2.0], "")}), "got \\[1, 2\\]"),
    (lambda: explored({4: parts(1.0)}, 0.1, 4, {}), "two sizes or more"),
    (lambda: explored(STEPS, 0.1, 4, {"disk": 2.0}), "disk 2 times as fast"),
    (lambda: speed_up({1: 1.0}, 2.0), "share of 0 to 1"),
    (lambda: BottleneckExplorer({4: parts(1.0)}), "two sizes or more, got \\[4\\]"),
]


@pytest.mark.parametrize(("ask", "said"), BAD)
def test_nonsense_is_refused_with_the_numbers(ask, said):
    """Would catch an empty picture."""
    with pytest.raises(ValueError, match=said):
        ask()


def test_the_controls_move_the_picture():
    """Would catch a slider without a picture."""
    explorer = BottleneckExplorer(STEPS)
    assert "4 ranks: 55 ms a step" in explorer.static().label
    assert "what if" not in explorer.shown.value
    assert f"serial share of {explorer.serial_fit:.1%}" in explorer.message.value
    explorer.wire.value = 4.0
    assert "then 40 ms" in explorer.shown.value
    explorer.data.value = math.inf
    assert "then 30 ms" in explorer.shown.value
    explorer.serial.value = 10
    explorer.ranks.value = 64
    assert f"at 64 ranks, by Amdahl&#x27;s law: {amdahl(64, 0.1):.3g} times" in explorer.shown.value
    explorer.ranks.value = 2
    assert "2 ranks: 70 ms a step" in explorer.shown.value


def test_it_begins_where_the_law_fits_the_recorded_steps():
    """Would catch a curve that has nothing to do with the points."""
    law = {n: parts(1 / amdahl(n, 0.25), 1e-9) for n in (1, 2, 8)}
    explorer = BottleneckExplorer(law)
    assert explorer.serial_fit == pytest.approx(0.25, abs=1e-6)
    assert explorer.serial.value == 25
    assert explorer.ranks.value == 8
    odd = BottleneckExplorer({n: law[1] if n == 1 else law[2] for n in (1, 3)})
    assert 3 in [value for _, value in odd.ranks.options]


def test_recordings_are_split_by_the_widget_itself():
    """Would catch a widget that wants more than what the ranks returned."""
    two = Recording.of([recorded(0, 1.0, 2.0, 4.0), recorded(1, 1.0, 2.0, 4.0)])
    alone = Recording((RankTimeline(0, 0.0, 5.0, (ProgramSpan("input", 0.0, 1.0),), (), ()),))
    explorer = BottleneckExplorer({1: alone, 2: two})
    assert dict(explorer.splits[2]) == pytest.approx({"compute": 2, "communication": 1, "bubble": 0, "data": 1})
    assert explorer.splits[1]["data"] == 0
    assert BottleneckExplorer({1: alone, 2: two}, data="input").splits[1]["data"] == 1


def test_a_step_that_is_cut_out_is_drawn_without_its_neighbours():
    """Would catch spans of the step before that run over the edge of the page."""
    spans = tuple(ProgramSpan(f"step {k}", k, k + 1.0) for k in range(3)) + tuple(
        ProgramSpan("data", k, k + 0.5) for k in range(3)
    )
    step = Recording((RankTimeline(0, 0.0, 3.0, spans, (), ()),), merged=True).during("step 1")
    picture = overlap(step)
    page.check(picture)
    assert "rank 0 data: 0.5 s" in page.told(picture) or "rank 0 data: 500 ms" in page.told(picture)
    assert not any("step 0" in each or "step 2" in each for each in page.told(picture))
