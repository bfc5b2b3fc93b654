"""The picture of published runs: each mark where its seconds are, fitted ones apart from those that were held out."""

from __future__ import annotations

import re

import pytest

from labkit.view.published import published
from tests.plan.test_compared_with_published import some
from tests.view import page


def test_every_run_has_its_mark_where_its_seconds_are():
    """Would catch axes that are swapped, a run that is drawn twice, and fitted runs that look like the others."""
    runs = some()
    chart = published(runs)
    page.check(chart)
    axes = chart.axes[0]
    assert axes.get_xscale() == axes.get_yscale() == "log"
    assert axes.get_xlim() == axes.get_ylim()
    faces = set()
    for source in ("playbook", "foundry"):
        for fitted, name in ((True, "fitted to"), (False, "held out")):
            mine = [run for run in runs if run.run.source == source and run.run.fitted == fitted]
            across, up = page.line_of(chart, f"{source}, {name}")
            assert across == [run.measured_s for run in mine]
            assert up == [run.predicted_s for run in mine]
            line = next(line for line in axes.get_lines() if line.get_label() == f"{source}, {name}")
            faces.add((line.get_marker(), line.get_markerfacecolor()))
            assert (line.get_markerfacecolor() == "none") == fitted
    assert len(faces) == 4
    diagonal = axes.get_lines()[0]
    assert list(diagonal.get_xdata()) == list(diagonal.get_ydata())


def test_it_says_how_many_and_how_far_off():
    """Would catch a picture that has no numbers, and the errors of all runs under the name of those held out."""
    runs = some()
    drawn = page.texts(published(runs))
    for source in ("playbook", "foundry"):
        for fitted, name in ((True, "fitted to"), (False, "held out")):
            count = sum(run.run.source == source and run.run.fitted == fitted for run in runs)
            assert f"{count} {name}" in drawn
    assert re.search(r"of \d+ held out the median is \d\.\d\d of the measured seconds", published(runs).label)
    assert published(runs, "mine").label.startswith("mine: ")


def test_a_few_runs_of_one_kind_have_a_picture_and_none_have_not():
    """Would catch the median of nothing."""
    fitted = [run for run in some() if run.run.fitted and run.run.source == "foundry"]
    page.check(published(fitted))
    page.check(published(fitted[:1]))
    with pytest.raises(ValueError, match="no runs to draw"):
        published([])
