"""The pipeline player: what its picture says, what its programs in words mean, and what its controls do."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from labkit.course.topics.in_flight_picture import Pick
from labkit.course.topics.pipeline_player import PipelinePlayer
from labkit.course.topics.pipeline_player_picture import MOST, matches, paler, played, player
from labkit.plan.schedules.schedule import (
    Action,
    Span,
    bubble,
    gpipe,
    interleaved,
    naive,
    needs,
    one_f_one_b,
    zero_bubble,
)
from labkit.plan.schedules.schedule_text import from_text, to_text
from labkit.view.svg import Picture
from tests.cases import cases
from tests.counting import lines
from tests.view import page

SVG = page.SVG
SCHEDULES = [gpipe(4, 8), one_f_one_b(4, 8), interleaved(4, 8, 2), zero_bubble(4, 8), naive(3), one_f_one_b(8, 32)]


def slower(spans, seconds=0.006, late=0.0):
    """The same step in seconds, as a recording has it."""
    return [each._replace(start=late + each.start * seconds, end=late + each.end * seconds) for each in spans]


def groups(picture: Picture) -> dict[str, ET.Element]:
    """Each action's group, by what it tells the pointer; those of the simulation come first, a recording's later."""
    found: dict[str, ET.Element] = {}
    for group in ET.fromstring(str(picture)).iter(SVG + "g"):
        if group.get("class") == "lk-do":
            title = group.find(SVG + "title")
            assert title is not None
            found.setdefault((title.text or "").split(",")[0] + (title.text or "").split(",")[1], group)
    return found


@cases("schedule", SCHEDULES)
@cases("recorded", [False, True])
def test_the_picture_is_whole_and_has_every_action_once_or_twice(schedule, recorded):
    """Would catch words on words, an action left out, and a recording that leaves the page."""
    spans = played(schedule, [1.0] * schedule.n_ranks)
    picture = player(schedule, spans, Action("B", 0, 0), slower(spans, late=3.0) if recorded else ())
    page.check(picture)
    rects = [each for each in ET.fromstring(str(picture)).iter(SVG + "rect") if each.get("stroke-dasharray") is None]
    legend = 3 if schedule.splits else 2
    assert len(rects) == legend + len(spans) * (1 + recorded)


def test_it_says_time_bubble_law_and_who_waits_how_much():
    """Would catch the share of another schedule, a rank's share that is everybody's, and a law that is not told."""
    words = page.words(player(one_f_one_b(4, 8), played(one_f_one_b(4, 8), [1] * 4), law="(p-1)/(m+p-1) = 27.3%"))
    assert "1f1b, 4 ranks, 8 micro-batches: 33 forwards, ranks wait 27.3%; law (p-1)/(m+p-1) = 27.3%" in words
    uneven = played(gpipe(2, 4), [1, 2])
    texts = page.texts(player(gpipe(2, 4), uneven))
    whole = max(each.end for each in uneven)
    assert f"{1 - 12 / whole:.0%}" in texts
    assert f"{1 - 24 / whole:.0%}" in texts
    assert f"ranks wait {bubble(uneven):.1%}" in texts[0]


def test_what_the_picked_action_needs_is_framed_and_told():
    """Would catch frames around other actions, and a sentence with other times."""
    schedule = one_f_one_b(4, 8)
    spans = played(schedule, [1] * 4)
    picture = player(schedule, spans, Action("B", 1, 0), slower(spans))
    assert "1B0 runs on rank 1 from 8 to 10; it needs 1F0 (rank 1, until 2) and 2B0 (rank 2, until 8)" in picture.label
    outside = re.sub(r'<g class="lk-need".*?</g>', "", str(picture))
    assert outside.count('stroke-dasharray="4 2"') == 1 + 2 * 2  # the legend's, and both needs in both parts
    first = player(schedule, spans, Action("F", 0, 0))
    assert "0F0 runs on rank 0 from 0 to 1; it needs nothing" in first.label


def test_resting_the_pointer_frames_what_an_action_needs_by_style_alone():
    """Would catch a script, a frame that is always seen where styles are stripped, and frames in wrong places."""
    schedule = one_f_one_b(3, 4)
    spans = played(schedule, [1] * 3)
    picture = str(player(schedule, spans))
    assert "<script" not in picture
    assert ".lk-do:hover .lk-need{visibility:visible}" in picture
    found = groups(player(schedule, spans))
    place = {}
    for each in spans:
        name = f"rank {each.rank} stage {each.action.stage}: "
        name += {"F": "forward", "B": "backward"}[each.action.kind] + f" of micro-batch {each.action.micro}"
        place[each.action] = found[name]
    for action, group in place.items():
        wanted = group.find(SVG + "g")
        assert wanted is not None
        assert wanted.get("visibility") == "hidden"
        frames = [(float(each.get("x", 0)), float(each.get("y", 0))) for each in wanted]
        boxes = [place[each].find(SVG + "rect") for each in needs(action, 3)]
        corners = [(float(each.get("x", 0)) + 1, float(each.get("y", 0)) + 1) for each in boxes if each is not None]
        assert len(frames) == len(corners)
        for one, other in zip(frames, corners, strict=True):
            assert one == pytest.approx(other, abs=0.11)


def test_later_stages_of_a_rank_are_paler_and_dark_words_stay_readable():
    """Would catch stages that look alike, and colours that let a dark page through."""
    assert paler("#000000", 0.5) == "#808080"
    assert paler("#56B4E9", 1) == "#FFFFFF"
    words = str(player(interleaved(2, 2, 2), played(interleaved(2, 2, 2), [1, 1])))
    assert "opacity" not in words
    fills = set(re.findall(r'fill="(#\w+)" rx=', words))
    assert len(fills) == 4


def test_what_cannot_be_drawn_is_refused():
    """Would catch a page of ten megabytes, and a frame around nothing."""
    with pytest.raises(ValueError, match=r"1f1b has no action 9B0: stages 0 to 1, micro-batches 0 to 1"):
        player(one_f_one_b(2, 2), played(one_f_one_b(2, 2), [1, 1]), Action("B", 9, 0))
    with pytest.raises(ValueError, match=r"a picture holds 1 to 4,000 actions, this schedule has 0"):
        player(one_f_one_b(2, 2), [])
    many = [Span(0, Action("F", 0, k), k, k + 1.0) for k in range(MOST + 1)]
    with pytest.raises(ValueError, match=r"has 4,001"):
        player(gpipe(1, MOST + 1), many)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s.name}-{s.n_ranks}")
def test_programs_in_words_are_read_as_they_are_written(schedule):
    """Would catch a stage that is lost on the way, and a rank's line that becomes another's."""
    made = from_text(to_text(schedule))
    assert made.programs == schedule.programs
    assert (made.n_ranks, made.n_stages, made.n_micro) == (schedule.n_ranks, schedule.n_stages, schedule.n_micro)


def test_what_is_written_wrongly_is_told():
    """Would catch a typing error that becomes another schedule, and an order that hangs."""
    assert to_text(gpipe(2, 2)) == "# gpipe\n0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1"
    assert from_text("f0, b0\n\nF0 B0\n").n_ranks == 2
    for said, why in (
        ("F0 G1", "line 1, column 4: 'G1' is no action: write 0F0"),
        ("", "write a line of actions for each rank"),
        ("F0 F1 B0", "lacks 0B1"),
        ("F0 B0\nB0 F0", "rank 0 at 0B0 needs 1B0; rank 1 at 1B0 needs 1F0"),
        ("F0 F999999 B0", "count from 0, without gaps"),
        ("F0 1F0 B0 1B0\nF0 B0", "does twice"),
    ):
        with pytest.raises(ValueError, match=re.escape(why)):
            from_text(said)


def test_a_recording_belongs_to_the_schedule_that_it_ran():
    """Would catch a measurement drawn under the simulation of something else."""
    spans = slower(played(one_f_one_b(3, 4), [1, 2, 1]))
    assert matches(one_f_one_b(3, 4), spans)
    assert not matches(gpipe(3, 4), spans)
    assert not matches(one_f_one_b(3, 5), spans)
    assert not matches(one_f_one_b(3, 4), spans[:-1])


def test_a_ranks_cost_is_shared_by_its_stages():
    """Would catch an interleaved schedule that does v times the work."""
    work = {}
    for schedule in (one_f_one_b(2, 4), interleaved(2, 4, 2)):
        spans = played(schedule, [1, 3], 2.0)
        work[schedule.name] = [sum(each.end - each.start for each in spans if each.rank == rank) for rank in (0, 1)]
    assert work["1f1b"] == work["interleaved"] == [12, 36]
    with pytest.raises(ValueError, match="2 ranks have 2 costs, got 3"):
        played(gpipe(2, 2), [1, 1, 1])


# -- the widget


def recorded() -> list[list[Span]]:
    return [slower(played(made, [1] * 4)) for made in (gpipe(4, 8), one_f_one_b(4, 8))]


def test_the_controls_move_the_picture_and_a_recording_stays_with_its_schedule():
    """Would catch a slider that does nothing, and a law that is told where it does not hold."""
    shown = PipelinePlayer(Pick("1f1b", 4, 8), recorded())
    assert "recorded in 198 ms: ranks wait 27.3%" in shown.shown.value
    assert "its forward took 6 ms on every rank, B / F was 2.0" in shown.shown.value
    assert "not the costs" not in shown.shown.value
    assert "law (p-1)/(m+p-1) = 27.3%" in shown.shown.value
    shown.micro.value = 16
    assert "recorded" not in shown.shown.value
    assert "ranks wait 15.8%" in shown.static().label
    shown.costs[2].value = 2.0
    assert "law" not in shown.shown.value
    shown.costs[2].value = 1.0
    shown.ratio.value = 1.0
    assert "38 forwards" in shown.shown.value
    shown.send.value = 0.5
    assert "law" not in shown.shown.value
    shown.name.value = "gpipe"
    shown.micro.value = 8
    assert "recorded in 198 ms" in shown.shown.value
    shown.ranks.value = 2
    assert [each.layout.display for each in shown.costs].count("none") == 6
    assert shown.stages.disabled
    shown.name.value = "interleaved"
    assert not shown.stages.disabled
    assert shown.schedule == interleaved(2, 8, 2)


@cases("change", [("costs", 2.0), ("ratio", 1.0)])
def test_a_recording_says_that_it_ran_with_other_costs_than_those_above(change):
    """Would catch a straggler that is simulated above, over a time that was measured without one."""
    shown = PipelinePlayer(Pick("1f1b", 4, 8), recorded())
    name, value = change
    control = shown.costs[2] if name == "costs" else shown.ratio
    first, control.value = control.value, value
    assert "recorded in 198 ms" in shown.shown.value
    assert "These are not the costs of the step above" in shown.shown.value
    page.check(shown.static())
    control.value = first
    assert "not the costs" not in shown.shown.value


def test_actions_are_picked_in_the_order_of_time_and_stay_picked_while_they_exist():
    """Would catch a pick that jumps to another action when a slider moves."""
    shown = PipelinePlayer(Pick("1f1b", 2, 3))
    assert list(shown.action.options) == ["none", *(str(each.action) for each in shown.spans)]
    shown.action.value = "0B2"
    assert "0B2 runs on rank 0" in shown.shown.value
    shown.micro.value = 5
    assert shown.action.value == "0B2"
    assert "0B2 runs on rank 0" in shown.shown.value
    shown.micro.value = 2
    assert shown.action.value == "none"
    assert "pick one" in shown.shown.value


def test_an_order_of_ones_own_is_played_and_one_that_hangs_is_told():
    """Would catch a deadlock that empties the page."""
    shown = PipelinePlayer(Pick("gpipe", 2, 2), [slower(played(gpipe(2, 2), [1, 1]))])
    assert shown.program.layout.display == "none"
    shown.name.value = "by hand"
    assert shown.program.layout.display == ""
    assert shown.program.value == "# gpipe\n0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1"
    assert "recorded" in shown.shown.value  # the same order by another name
    before = shown.shown.value
    shown.program.value = "F0 B0 F1 B1\nF0 F1 B1 B0"
    assert "rank 0 at 0B0 needs 1B0; rank 1 at 1F1 needs 0F1" in shown.message.value
    assert shown.shown.value == before
    shown.program.value = "B0 F0 F1 B1\nF0 F1 B0 B1"
    assert "deadlocks: rank 0 at 0B0 needs 0F0" in shown.message.value
    assert shown.message.value.endswith("the picture is the last one that made sense")
    shown.program.value = "\n".join(["F0 B0"] * 9)
    assert "8 ranks at most, got 9 lines" in shown.message.value
    shown.program.value = "F0 B0 F1 B1\nF0 B0 F1 B1"
    assert shown.message.value == ""
    assert "by hand, 2 ranks, 2 micro-batches: 12 forwards" in shown.shown.value


@pytest.mark.parametrize(("name", "most"), [("1f1b", 400_000), ("interleaved", 900_000)])
def test_a_redraw_is_little_work_also_for_the_longest_schedule(name, most):
    """Would catch a redraw that can be felt (some ten million lines take a second)."""
    shown = PipelinePlayer(Pick(name, 8, 31, 4 if name == "interleaved" else 1))

    def move():
        shown.micro.value = 32

    assert lines(move) < most
