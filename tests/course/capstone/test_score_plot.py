"""The capstone's plane and its explorer: what the picture says, and what the controls and the button do."""

from __future__ import annotations

import math

import pytest

from labkit.course.capstone.attempts import Progress, strategies, tasks
from labkit.course.capstone.capstone_explorer import CapstoneExplorer
from labkit.course.capstone.entry import Entry
from labkit.course.capstone.forecast import forecast
from labkit.course.capstone.score_plot import Mark, plane, score_text
from labkit.course.learner.scores import Scores
from labkit.plan.partition.layout import Layout
from tests.cases import cases
from tests.view import page

TASKS = tasks(4)
HOME = TASKS["home"]
WAYS = strategies(HOME)


def entry(way="pipeline", task=HOME, seconds=0.6, peak=3_500_000, **more) -> Entry:
    return Entry(task.name, task.key, WAYS[way], (seconds,), (peak,), **more)


@cases(("seconds", "n_bytes"), [(1e-4, 9e9), (0.3, 4e6), (50.0, 2e4)])
@cases("cap", [1e5, 4e6, 1e10])
def test_the_picture_is_whole_for_any_time_peak_and_cap(seconds, n_bytes, cap):
    """Would catch words on words, and a mark that leaves the page."""
    marks = [
        Mark("a way", seconds, n_bytes),
        Mark("R1", seconds * 3, n_bytes / 2, "reference"),
        Mark("law", seconds, n_bytes * 1.01, "law"),
    ]
    law = forecast(HOME, WAYS["shards"])
    picture = plane(marks, cap, "any", Mark("chosen", seconds / 2, n_bytes * 2, "law"), law.memory)
    page.check(picture)
    assert "nan" not in str(picture)
    assert "cap" in page.words(picture)


def test_the_plane_is_whole_with_many_entries_in_one_place():
    """Would catch a board of a long evening that nobody can read."""
    marks = [Mark(str(k), 0.5 + k / 100, 3.5e6 + 1e4 * k) for k in range(8)]
    page.check(plane(marks, HOME.cap_bytes, "home", Mark("chosen", 0.55, 3.6e6, "law")))


def test_lines_of_equal_score_go_through_equal_scores():
    """Would catch a line whose number is that of another."""
    marks = [Mark("slow and small", 2.0, 1e6), Mark("quick and large", 0.5, 4e6)]
    picture = plane(marks, 3e6, "two of 2 MB s")
    assert page.words(picture).count("2 MB s") >= 2
    assert (
        "slow and small (yours): 2 s x 1 MB = 2 MB s; quick and large (yours): 0.5 s x 4 MB = 2 MB s" in picture.label
    )
    lines = [line for line in picture.axes[0].get_lines() if line.get_color() == "#888888"]
    scores = [{round(x * y) for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)} for line in lines]
    assert {2_000_000} in scores
    assert all(len(ends) == 1 for ends in scores)
    assert {(2.0, 1e6), (0.5, 4e6)} == {*page.dots(picture).values()}
    assert any(list(line.get_ydata()) == [3e6, 3e6] for line in picture.axes[0].get_lines())  # the cap


def test_what_is_measured_and_what_is_predicted_differ_in_shape():
    """Would catch meaning that rests on colour alone."""
    marks = [Mark("1", 0.5, 3e6), Mark("R1", 0.6, 3e6, "reference"), Mark("x", 0.7, 3e6, "law")]
    words = page.words(plane(marks, 4e6, "kinds", Mark("chosen", 0.4, 3e6, "law")))
    for said in ("measured by you", "measured, the reference", "predicted", "predicted, what is chosen"):
        assert said in words
    assert "reference" not in page.words(plane(marks[:1], 4e6, "one"))


def test_attempts_without_a_score_are_left_out_and_no_attempt_is_told():
    """Would catch an infinite score that squeezes all others into a corner."""
    picture = plane([Mark("1", 0.5, 3e6), Mark("2", math.inf, 3e6)], 4e6, "one")
    assert "2 (yours)" not in picture.label
    with pytest.raises(ValueError, match="no attempt to draw"):
        plane([Mark("2", math.inf, 3e6)], 4e6, "none")
    assert score_text(math.inf) == "no score"


# The explorer


@pytest.fixture
def board(tmp_path):
    return Scores(tmp_path / "scores.sqlite3")


def runs(task, way):
    """An attempt of four calls."""
    for number in range(3):
        yield Progress(number + 1, 4)
    yield Progress(4, 4, Entry(task.name, task.key, way, (0.5,), (3_000_000,)))


def test_the_controls_move_what_the_laws_say(board):
    """Would catch a slider without a picture, and a task whose links are forgotten."""
    explorer = CapstoneExplorer(TASKS, WAYS["pipeline"], runs, board)
    page.check(explorer.static())
    assert "home; pp 4: 1f1b of 2, checkpointing: predicted 2.7 MB s, fits under the cap" in explorer.static().label
    explorer.checkpointing.value = False
    assert "pp 4: 1f1b of 2: predicted" in explorer.shown.value
    assert "MB over the cap" in explorer.shown.value
    explorer.task.value = "roomy"
    assert "roomy; pp 4: 1f1b of 2: predicted" in explorer.shown.value
    assert "fits under the cap" in explorer.shown.value
    explorer.layout_.value = Layout(2, 2)
    before = explorer.shown.value
    explorer.place.value = True
    assert "apart" in explorer.shown.value
    assert explorer.shown.value != before
    explorer.micro.value, explorer.strategy.value, explorer.schedule.value = 1, "zero1", "gpipe"
    assert "dp 2, pp 2, apart: zero1, gpipe of 1" in explorer.shown.value


def test_nonsense_is_told_and_the_picture_stays(board):
    """Would catch a combination that empties the page."""
    explorer = CapstoneExplorer(TASKS, WAYS["replicas"], runs, board)
    before = explorer.shown.value
    explorer.micro.value = 8
    assert "fewer than n_micro=8" in explorer.message.value
    assert "the picture is the last one that made sense" in explorer.message.value
    assert explorer.shown.value == before == str(explorer.static())
    explorer.attempt()
    assert "fewer than n_micro=8" in explorer.message.value
    assert len(board) == 0
    explorer.micro.value = 2
    assert explorer.message.value == ""


def test_the_button_runs_it_and_the_score_goes_to_the_board(board):
    """Would catch a run that nobody finds again, and a button that stays grey."""
    theirs = [entry(seconds=0.7), entry("shards", task=TASKS["roomy"]), entry("mixed", refused="out of memory")]
    explorer = CapstoneExplorer(TASKS, WAYS["pipeline"], runs, board, theirs)
    assert "R1 (reference)" in explorer.static().label
    assert "R2 (reference)" not in explorer.static().label
    explorer.real.go.click()
    assert "1.5 MB s = 0.5 s x 3 MB" in explorer.message.value
    assert "added to the board" in explorer.message.value
    assert explorer.real.bar.value == 1.0
    assert "1 (yours): 0.5 s x 3 MB = 1.5 MB s" in explorer.static().label
    assert (explorer.real.go.disabled, explorer.real.end.disabled) == (False, True)
    assert board.entries(HOME) == [explorer.entry]


def test_stop_keeps_nothing(board):
    """Would catch half an attempt on the board."""
    explorer = CapstoneExplorer(TASKS, WAYS["pipeline"], runs, board)
    going = explorer.real._steps()
    next(going)
    assert (explorer.real.go.disabled, explorer.real.end.disabled) == (True, False)
    explorer.real.end.click()
    assert list(going) == []
    assert explorer.message.value == "stopped: nothing is kept of this run"
    assert len(board) == 0
    assert (explorer.real.go.disabled, explorer.real.end.disabled) == (False, True)


def test_what_does_not_finish_is_told_and_kept(board):
    """Would catch a run over the cap that reads as an error of the widget."""

    def refused(task, way):
        yield Progress(1, 4)
        yield Progress(4, 4, Entry(task.name, task.key, way, refused="out of memory on rank 1 in step 0: 8 B"))

    explorer = CapstoneExplorer(TASKS, WAYS["replicas"], refused, board).attempt()
    assert "did not finish" in explorer.message.value
    assert "added" not in explorer.message.value
    assert len(board) == 1

    def closed(task, way):
        raise ValueError("this cluster is closed: make a new one")

    explorer.run = closed
    explorer.attempt()
    assert explorer.message.value == "this cluster is closed: make a new one"
