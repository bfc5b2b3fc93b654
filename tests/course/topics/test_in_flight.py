"""Activations in flight: the law beside the simulation, and what the controls do."""

from __future__ import annotations

import pytest

from labkit.course.topics.in_flight_explorer import InFlightExplorer
from labkit.course.topics.in_flight_picture import LAWS, Pick, held, inflight
from labkit.course.topics.pipeline_player_picture import played
from labkit.plan.schedules.schedule import bubble, in_flight, one_f_one_b, simulate, zero_bubble
from tests.cases import cases
from tests.counting import lines
from tests.view import page

NAMES = [name for name, _ in LAWS]


@cases("name", NAMES)
@cases(("p", "m"), [(1, 1), (4, 32), (8, 3)])
def test_the_picture_is_whole_and_the_law_is_what_the_schedule_holds(name, p, m):
    """Would catch words on words, and a law of other counts."""
    pick = Pick(name, p, m, 3 if name == "interleaved" else 1)
    steps = [[(0.0, 0.0), (1.0, float(n)), (2.0, n + 0.11), (3.0, 0.0)] for n in pick.most]
    for measured in ((), steps):
        picture = inflight(pick, measured)
        page.check(picture)
        for rank, most in enumerate(in_flight(pick.schedule)):
            assert f"rank {rank}: law {most}, held {most}" in picture.label
            assert (f"measured {most + 0.11:.3g}" in picture.label) == bool(measured)


@pytest.mark.parametrize("name", NAMES)
def test_the_law_of_waiting_is_that_of_the_simulation_where_it_is_told(name):
    """Would catch a law for even stages that is off, or told where it does not hold."""
    told = 0
    for p in range(1, 6):
        for m in range(1, 13):
            for v in (2, 3) if name == "interleaved" else (1,):
                for ratio in (1.0, 2.0, 3.0):
                    pick = Pick(name, p, m, v)
                    said = pick.waiting(ratio)
                    if said:
                        share = bubble(played(pick.schedule, [1.0] * p, ratio))
                        assert said.endswith(f"= {share:.1%}"), (pick, ratio)
                        told += 1
    assert told >= 40


def test_it_says_how_many_times_less_than_gpipe():
    """Would catch the factor of another number of ranks."""
    assert "a rank holds 4 at most, gpipe 32: 8 times as many" in inflight(Pick("1f1b", 4, 32)).label
    assert "times as many" not in inflight(Pick("gpipe", 4, 32)).label
    assert "a rank holds 11 at most, gpipe 16: 1.45 times as many" in inflight(Pick("interleaved", 4, 8, 2)).label


def test_what_is_held_rises_with_f_and_falls_with_the_last_use():
    """Would catch an activation that is let go by B though W still wants it."""
    first = [each for each in simulate(one_f_one_b(2, 3)) if each.rank == 0]
    counts = [n for _, n in held(first, False)]
    assert counts == [0, 1, 2, 1, 2, 1, 0]
    cut = [each for each in simulate(zero_bubble(2, 3)) if each.rank == 1]
    assert max(n for _, n in held(cut, True)) == 2
    assert max(n for _, n in held(cut, False)) == 1
    with pytest.raises(ValueError, match="each of 2 ranks, got 1"):
        inflight(Pick("1f1b", 2, 3), [[(0.0, 1.0)]])


def test_a_long_recording_is_drawn_with_a_point_for_each_pixel():
    """Would catch a notebook that is drowned in a picture of every moment."""
    steps = [[(k / 1e5, float(k % 7)) for k in range(100_000)]]
    assert len(str(inflight(Pick("gpipe", 1, 7), steps))) < 40_000


def test_the_controls_move_the_picture_and_a_measurement_stays_with_its_pick():
    """Would catch a measurement of one schedule beside the law of another."""
    first = Pick("1f1b", 2, 8)
    explorer = InFlightExplorer(first, {first: [[(0.0, 0.0), (1.0, 2.1)], [(0.0, 0.0), (1.0, 1.1)]]})
    assert "measured 2.1" in explorer.shown.value
    explorer.name.value = "gpipe"
    assert "law 8, held 8" in explorer.shown.value
    assert "measured" not in explorer.shown.value
    assert explorer.stages.disabled
    explorer.name.value = "interleaved"
    assert not explorer.stages.disabled
    explorer.stages.value = 3
    assert explorer.pick == Pick("interleaved", 2, 8, 3)
    explorer.ranks.value = 4
    assert "rank 3: law" in explorer.static().label
    explorer.name.value, explorer.ranks.value = "1f1b", 2
    assert "measured 1.1" in explorer.shown.value


def test_a_redraw_is_little_work():
    """Would catch a picture that grows with the square of the micro-batches."""
    explorer = InFlightExplorer(Pick("interleaved", 8, 63, 4))

    def move():
        explorer.micro.value = "64"

    assert lines(move) < 900_000
