"""The law of Streaming DiLoCo: turns, bytes and seconds against what a person works out."""

from __future__ import annotations

import pytest

from labkit.plan.machine.collectives import Line
from labkit.plan.pocket.streaming_diloco import StreamedFragments, deal

MB = 10**6


def of(*n_bytes, n=4, every=8, delay=0, mix=0.0):
    return StreamedFragments(tuple(((size, 4),) for size in n_bytes), n, every, delay, mix)


@pytest.mark.parametrize("n_layers", [1, 2, 5, 12])
def test_layers_are_dealt_out_whole_and_evenly_in_both_patterns(n_layers):
    """Would catch a layer that is left out or in two fragments, and fragments that differ by more than a layer."""
    for n_fragments in range(1, n_layers + 1):
        for pattern in ("in order", "strided"):
            dealt = deal(n_layers, n_fragments, pattern)
            assert sorted(k for layers in dealt for k in layers) == list(range(n_layers))
            assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
            gap = n_fragments if pattern == "strided" else 1
            assert all(late - early == gap for layers in dealt for early, late in zip(layers, layers[1:], strict=False))


@pytest.mark.parametrize(("every", "n_fragments"), [(1, 1), (4, 2), (7, 3), (5, 5), (100, 7)])
def test_in_any_period_each_fragment_has_one_turn_and_no_step_has_two(every, n_fragments):
    """Would catch offsets that fall together or beyond the period."""
    law = of(*[4] * n_fragments, every=every)
    for first in (1, 2, every, 3 * every):
        turns = [law.starts(step) for step in range(first, first + every)]
        assert sorted(turn for turn in turns if turn is not None) == list(range(n_fragments))
    assert law.starts(0) is None
    assert law.starts(every) == 0


def test_the_picture_at_the_head_of_the_file_is_what_the_law_says():
    """Would catch an offset that is off by one: H = 4, two fragments."""
    law = of(40, 80, n=2, every=4, delay=1)
    assert law.bytes_by_step(9) == [0, 80, 0, 40, 0, 80, 0, 40, 0]
    assert law.under_way(8) == [0]
    assert law.under_way(9) == []
    assert of(120, n=2, every=4).bytes_by_step(9) == [0, 0, 0, 120, 0, 0, 0, 120, 0]


def test_the_end_exchanges_what_is_not_equal_yet():
    """Would catch an end that sends everything, and one that trusts a mix."""
    law = of(40, 80, n=2, every=4, delay=1)
    assert [law.behind(steps) for steps in (0, 1, 2, 3, 4, 5)] == [[], [0, 1], [0], [0], [1], [1]]
    assert [law.finish_bytes(steps) for steps in (1, 2, 4)] == [120, 40, 80]
    assert of(40, 80, n=2, every=4, delay=1, mix=0.5).behind(4) == [0, 1]
    assert of(40, every=4).behind(4) == []


def test_diloco_waits_for_the_whole_and_fragments_for_what_the_steps_do_not_hide():
    """Would catch bytes for half of the ring, and a wait that may be below zero."""
    link = Line(1e-3, 1e-6)  # 1 MB a second
    whole, quarter = 6 * (1e-3 + 1.0), 6 * (1e-3 + 0.25)
    assert of(4 * MB).waits(16, 0.5, link) == pytest.approx([*[0] * 7, whole, *[0] * 7, whole, 0])
    # four fragments have a turn after 2, 4, 6 and 8 steps; exchanges of 1.506 s do not overlap behind steps of 1 s
    for compute_s in (1.0, 1.4, 2.0):
        law = of(*[MB] * 4, delay=1)
        stood_still = law.waits(16, compute_s, link)
        used = [step for step in range(1, 17) if step > 1 and law.starts(step - 1) is not None]
        for step in range(1, 17):
            wanted = max(0.0, quarter - compute_s) if step in used else 0.0
            assert stood_still[step - 1] == pytest.approx(wanted)


@pytest.mark.parametrize(("mix", "at_the_end"), [(0.0, 0), (0.5, 4)])
def test_exchanges_queue_up_on_a_slow_link_so_that_the_link_is_never_idle(mix, at_the_end):
    """Would catch a link on which exchanges that are under way at a time do not slow each other down, and an end that
    takes no time: with a mix it exchanges all four once more.

    Each turn comes after 2 steps of 1 s and is used 7 later; an exchange takes 6 s. From step 2 on the link is busy."""
    law, link = of(*[4 * MB] * 4, n=4, delay=7, mix=mix), Line(0, 1e-6)
    assert law.exchange_s(0, link) == pytest.approx(6)
    steps = 40
    total = steps * 1.0 + sum(law.waits(steps, 1.0, link))
    assert total == pytest.approx(2.0 + 6 * (steps // 2 + at_the_end))


def test_no_ranks_and_no_time_are_refused_and_one_rank_sends_nothing():
    """Would catch a ring of no ranks and a division by 0, deep inside."""
    with pytest.raises(ValueError, match="1 or more; got 0"):
        of(4, n=0)
    with pytest.raises(ValueError, match="0 s or more; got -1"):
        of(4).waits(8, -1, Line(0, 1e-6))
    assert of(40, 80, n=1).bytes_by_step(9) == [0] * 9
