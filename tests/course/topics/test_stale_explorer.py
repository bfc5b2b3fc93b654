"""The stale-gradient explorer: what its picture says, and what its controls do."""

from __future__ import annotations

import pytest

from labkit.course.topics.stale_explorer import StaleExplorer
from labkit.course.topics.stale_picture import Seen, stale
from labkit.plan.pocket.stale_gradients import best, distances, limit
from tests.cases import cases
from tests.view import page

RUNS = [Seen(2, 0.5, True), Seen(2, 0.93, False)]


@cases(("staleness", "rate"), [(0, 2.0), (1, 1e-4), (16, 400.0)])
@cases("runs", [(), RUNS])
def test_the_picture_is_whole_for_any_staleness_and_rate(staleness, rate, runs):
    """Would catch a run that leaves the page as it diverges."""
    picture = stale(staleness, rate, runs)
    page.check(picture)
    assert "nan" not in str(picture)
    assert "inf" not in str(picture)


def test_it_says_what_happens_and_where_the_laws_are():
    """Would catch the verdict of another point."""
    words = page.words(stale(4, 0.3, RUNS))
    assert "gradients 4 steps old, lr × curvature 0.3: swings" in words
    assert f"limit {limit(4):.3g}, best 0.0819, like momentum 0.8" in words
    assert "recorded: staleness 2, lr × curvature 0.93: diverged" in words
    assert "recorded: staleness 2, lr × curvature 0.5: converged" in words
    assert "1 step old, lr × curvature 1: diverges" in page.words(stale(1, 1.0))
    assert "creeps" in stale(0, 0.9).label
    assert "recorded" not in page.words(stale(0, 0.9))


def test_dots_converged_and_crosses_diverged():
    """Would catch meaning that rests on colour alone."""
    chart = stale(0, 0.1, RUNS)
    seen = {line.get_gid().split(": ")[-1]: line.get_marker() for line in chart.axes[0].get_lines()
            if (line.get_gid() or "").startswith("recorded")}  # fmt: skip
    assert seen == {"converged": "o", "diverged": "x"}
    points = {hover: point for hover, point in page.dots(chart).items() if hover.startswith("recorded")}
    assert sorted(points.values()) == sorted((run.staleness, run.rate) for run in RUNS)


def test_the_lines_are_the_laws_and_the_simulated_distance():
    """Would catch the limit under the name of the best, and the distance of another rate."""
    chart = stale(3, 0.2)
    assert page.line_of(chart, "limit") == (list(range(17)), [limit(step) for step in range(17)])
    assert page.line_of(chart, "best") == (list(range(17)), [best(step) for step in range(17)])
    assert page.line_of(chart, "staleness 3")[1] == pytest.approx([max(each, 1e-6) for each in distances(3, 0.2, 80)])
    assert page.line_of(chart, "fresh")[1] == pytest.approx([max(each, 1e-6) for each in distances(0, 0.2, 80)])


def test_the_controls_move_the_picture():
    """Would catch a slider without a picture, and a curvature that is forgotten."""
    explorer = StaleExplorer(RUNS, staleness=2, lr=0.5)
    assert "2 steps old, lr × curvature 0.501: swings" in explorer.static().label
    explorer.staleness.value = 8
    assert "8 steps old, lr × curvature 0.501: diverges" in explorer.shown.value
    explorer.curvature.value = "0.1"
    assert "8 steps old, lr × curvature 0.0501: swings" in explorer.shown.value
    explorer.lr.value = 0.1
    assert "lr × curvature 0.01: creeps" in explorer.shown.value
