"""Recorded steps of a pipeline in slow motion: every action is there, on one clock, and the quickest step is kept."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from labkit import Cluster, gpipe, zero_bubble
from labkit.course.topics.paced_pipeline import quickest, took
from labkit.plan.schedules.schedule import Schedule
from tests.cases import cases


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two ranks for all steps of this file."""
    with Cluster(2, device="cpu", quiet=True) as started:
        yield started


@cases("schedule", [gpipe(2, 2), zero_bubble(2, 3)])
def test_a_recorded_step_has_each_action_once_after_what_it_needs(cluster: Cluster, schedule: Schedule) -> None:
    """Would catch spans of two steps in one, and ranks whose clocks were not brought together: a forward that ends
    before the one that feeds it has begun."""
    step = quickest(cluster, schedule, [0.01] * schedule.n_stages)
    assert sorted(span.action for span in step.spans) == sorted(sum(schedule.programs, ()))
    at = {span.action: span for span in step.spans}
    for action, span in at.items():
        if action.kind == "F" and action.stage:
            assert span.end > at[action._replace(stage=action.stage - 1)].end
    assert len(step.replies) == schedule.n_ranks
    assert 0 < step.recording.shares().compute < 1


def test_the_quickest_of_several_steps_is_kept(cluster: Cluster) -> None:
    """Would catch the first step, which also loads code, in the place of the quickest."""
    step = quickest(cluster, gpipe(2, 2), [0.01, 0.01], repeats=3)
    lengths = []
    for number in range(3):
        lengths.append(took([span for reply in step.replies for span in reply.value[number][0]]))
    assert took(step.spans) == min(lengths)


def test_a_number_of_seconds_for_each_stage_is_asked_for(cluster: Cluster) -> None:
    """Would catch an IndexError on a rank in the place of a sentence here."""
    with pytest.raises(ValueError, match="gpipe has 2 stages, and 1 numbers of seconds"):
        quickest(cluster, gpipe(2, 2), [0.01])
