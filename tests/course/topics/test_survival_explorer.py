"""The explorer of a run that survives: what its picture says, and what its controls do."""

from __future__ import annotations

import pytest

from labkit.course.topics.survival_explorer import SurvivalExplorer
from labkit.course.topics.survival_picture import Played, of_devices, survival
from labkit.plan.pocket.survival import Job, best_interval, goodput
from tests.view import page


@pytest.mark.parametrize("job", [of_devices(16, 3, 60, 300), of_devices(131_072, 60, 0, 3000), Job(100, 50, 500, 40)])
def test_the_picture_is_whole_and_its_lines_are_the_laws(job):
    """Would catch a picture that fails where a job gets nowhere, and the line of another law."""
    picture = survival(job, 500, 16, (Played(500, 0.4, 0.01),))
    page.check(picture)
    assert "nan" not in str(picture)
    words = page.words(picture)
    assert f"{goodput(job, best_interval(job)):.1%} useful; if the steps wait" in words
    at, share = page.line_of(picture, "async")
    assert share[-1] == pytest.approx(goodput(job, at[-1]), rel=1e-6)
    points = {hover.split(":")[0]: point for hover, point in page.dots(picture).items()}
    assert points["played"] == (500, 0.4)


def test_the_controls_move_the_picture():
    """Would catch a slider without a picture, runs of an earlier job that stay, and a best interval of another job."""
    explorer = SurvivalExplorer()
    assert "16,384 devices, saved every 1,000 s" in explorer.shown.value
    explorer.best.click()
    half_a_step = 0.012
    assert explorer.interval.value == pytest.approx(best_interval(explorer.job()), rel=half_a_step)
    explorer.play.click()
    (played,) = explorer.played
    assert abs(played.goodput - goodput(explorer.job(), explorer.interval.value)) < 5 * played.error
    assert "played: every" in explorer.shown.value
    explorer.devices.value = 1024
    assert explorer.played == ()
    assert "1,024 devices" in explorer.static().label
    explorer.behind.value = False
    assert explorer.job().write_s == 0
    assert explorer.job().block_s == 63


def test_nonsense_is_told_and_the_picture_stays():
    """Would catch a typing error that empties the page, and a button that fails where nobody sees it."""
    explorer = SurvivalExplorer()
    before = explorer.shown.value
    for odd in ("soon", "-1 s", ""):
        explorer.copy.value = odd
        assert "the picture is the last one that made sense" in explorer.message.value
        explorer.best.click()
        explorer.play.click()
        assert "the picture is the last one that made sense" in explorer.message.value
        assert explorer.shown.value == before
    explorer.copy.value = "5 s"
    assert explorer.message.value == ""
    explorer.write.value = "2000 s"
    assert "save every 1995 s or less often" in explorer.message.value
