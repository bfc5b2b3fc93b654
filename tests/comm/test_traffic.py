"""When messages arrive on shaped links, by a clock that only moves when somebody sleeps: exact, on any machine."""

from __future__ import annotations

import random

import pytest

from labkit.comm import traffic
from labkit.comm.traffic import FORGIVEN_S, LOOK_S, Traffic
from labkit.plan.machine.link import Link
from labkit.plan.machine.topology import Links

ALPHA, SPEED = 2e-3, 1e6
ONE_NODE = Links.uniform(4, alpha_s=ALPHA, bytes_per_s=SPEED, ports=False)
TWO_NODES = Links.two_nodes(2, Link("fast", 1e-3, 10 * SPEED), Link("slow", ALPHA, SPEED))


class FakeTime:
    """A clock for `traffic`; `late_s` is how much later than asked a sleeper wakes."""

    def __init__(self):
        self.now, self.late_s, self.naps = 100.0, 0.0, []

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.naps.append(seconds)
        self.now += seconds + self.late_s


@pytest.fixture
def clock(monkeypatch):
    fake = FakeTime()
    monkeypatch.setattr(traffic, "time", fake)
    return fake


@pytest.fixture
def ranks(clock, tmp_path):
    """`ranks(links)` is the same page seen by two processes (by two openings of the file)."""
    made = []

    def open_twice(links):
        made.extend(Traffic(str(tmp_path / "page"), links) for _ in range(2))
        return made[-2:]

    yield open_twice
    for each in made:
        each.close()


def test_a_message_on_an_idle_edge_takes_alpha_and_its_bytes(clock, ranks):
    """Would catch latency that is paid twice, or not, and bytes that start before they are handed over."""
    one, other = ranks(ONE_NODE)
    for n_bytes in (0, 1, 5_000, 3_000_000):
        clock.now += 50
        handed = clock.now
        stamp = one.road(0, 1).book(n_bytes)
        assert other.due(0 * 4 + 1, stamp) == pytest.approx(handed + ALPHA + n_bytes / SPEED, abs=1e-9)
        other.road(0, 1).rest(stamp)
        assert clock.now == pytest.approx(handed + ALPHA + n_bytes / SPEED, abs=1e-9)
        assert other.road(0, 1).here(stamp)


def test_messages_of_one_edge_follow_each_other_and_latencies_overlap(clock, ranks):
    """Would catch an edge that carries two messages at the same time, and one that is idle for alpha between them."""
    one, other = ranks(ONE_NODE)
    start = clock.now
    stamps = [one.road(0, 1).book(10_000) for _ in range(3)]
    back = other.road(1, 0).book(10_000)
    for k, stamp in enumerate(stamps, 1):
        assert other.due(1, stamp) == pytest.approx(start + ALPHA + k * 10_000 / SPEED, abs=1e-9)
    assert one.due(4, back) == pytest.approx(start + ALPHA + 10_000 / SPEED, abs=1e-9)  # full duplex


def test_messages_that_end_together_are_foretold_whoever_is_first_by_a_rounding(clock, ranks):
    """A bug: of edges that are served at the same time, one was brought to its end along with another and was then said
    to end never. Who waited for it looked up after 4 ms and not when it was there: in any ring, now and then."""
    one, other = ranks(ONE_NODE)
    numbers = random.Random(0)
    for _ in range(60):
        clock.now += 1 + numbers.random()
        there, stamps = {}, {}
        for rank in range(3):
            n_bytes = numbers.choice((4_369, 4_368, 1_000))
            stamps[4 * rank + rank + 1] = one.road(rank, rank + 1).book(n_bytes)
            there[4 * rank + rank + 1] = clock.now + ALPHA + n_bytes / SPEED
        for _ in range(3):
            clock.now += 1.1e-3
            assert {edge: other.due(edge, stamp) for edge, stamp in stamps.items()} == pytest.approx(there, abs=1e-9)


def test_two_senders_of_a_node_share_its_card_for_as_long_as_both_send(clock, ranks):
    """Would catch a trunk that only counts edges, first come first served, and rates that are fixed at the start."""
    one, other = ranks(TWO_NODES)
    start = clock.now
    first = one.road(0, 2).book(40_000)
    clock.now += 10e-3  # a quarter is through; the rest goes at half speed beside the second
    second = other.road(1, 3).book(10_000)
    third = one.road(2, 0).book(10_000)  # the other direction is free
    for later in (0.0, 1.0):  # what is foretold, and what is remembered
        clock.now += later
        assert one.due(2, first) == pytest.approx(start + 10e-3 + 20e-3 + 20e-3 + ALPHA, abs=1e-9)
        assert other.due(7, second) == pytest.approx(start + 10e-3 + 20e-3 + ALPHA, abs=1e-9)
        assert other.due(8, third) == pytest.approx(start + 10e-3 + 10e-3 + ALPHA, abs=1e-9)


def test_who_looks_late_finds_when_the_message_arrived(clock, ranks):
    """Would catch an arrival that counts from the look: a receiver that computes meanwhile would wait once more."""
    one, other = ranks(TWO_NODES)
    start = clock.now
    early, beside = one.road(0, 2).book(10_000), one.road(1, 3).book(10_000)
    for _ in range(5):  # the page is brought up to date many times before anybody asks for these
        clock.now += 7e-3
        other.due(8, one.road(2, 0).book(100))
    clock.now += 10
    for edge, stamp in ((2, early), (7, beside)):
        assert other.due(edge, stamp) == pytest.approx(start + 20e-3 + ALPHA, abs=1e-9)
    before = clock.now
    other.road(0, 2).rest(early)
    assert clock.now == before
    later = one.road(0, 2).book(10_000)  # the edge begins anew where the mark of the first message is
    clock.now += 1
    assert other.due(2, early) == pytest.approx(start + 20e-3 + ALPHA, abs=1e-9)
    assert other.due(2, later) == pytest.approx(before + 10e-3 + ALPHA, abs=1e-9)


def test_a_message_comes_in_pieces(clock, ranks):
    """Would catch a first piece that is held back until the last one is there: sums would not overlap."""
    one, other = ranks(ONE_NODE)
    start = clock.now
    stamp = one.road(2, 3).book(40_000)
    for behind in (30_000, 10_000, 0):
        other.road(2, 3).rest(stamp, behind)
        assert clock.now == pytest.approx(start + ALPHA + (40_000 - behind) / SPEED, abs=1e-9)


def test_more_is_remembered_than_anybody_forgets(clock, ranks):
    """Would catch a history that runs full: what is older than it is still never late."""
    one, other = ranks(ONE_NODE)
    start = clock.now
    first = one.road(0, 1).book(1_000)
    for _ in range(3 * traffic.HISTORY):
        clock.now += 1.0
        one.road(0, 1).book(1_000)
    assert start + ALPHA + 1e-3 <= other.due(1, first) <= clock.now


def test_who_is_woken_late_hands_over_in_time(clock, ranks):
    """Would catch wake-ups that add up: a ring of 2(n-1) steps would be slower than its law on a busy machine."""
    one, other = ranks(ONE_NODE)
    clock.late_s = 0.3e-3
    start = clock.now
    for hop in range(6):
        sender, receiver = (one, other) if hop % 2 == 0 else (other, one)
        stamp = sender.road(hop % 2, 1 - hop % 2).book(0)
        receiver.road(hop % 2, 1 - hop % 2).rest(stamp)
    assert clock.now == pytest.approx(start + 6 * ALPHA + clock.late_s, abs=1e-9)
    clock.now += 5e-3  # work of its own is not forgiven
    stamp = one.road(0, 1).book(0)
    assert one.due(1, stamp) == pytest.approx(start + 7 * ALPHA + 5e-3, abs=1e-9)


def test_who_works_while_a_message_comes_is_not_late(clock, ranks):
    """Would catch work that is forgiven: a rank that computes would send its next message for nothing."""
    one, other = ranks(ONE_NODE)
    stamp = one.road(0, 1).book(1_000)
    clock.now += 8e-3
    other.road(0, 1).rest(stamp)
    assert other.road(1, 0).book(0)[2] == 0.0


def test_forgiving_has_limits(clock, ranks):
    """Would catch a hiccup of a second that lets a rank send as if latency were gone ever after."""
    one, _ = ranks(Links.uniform(4, alpha_s=1.0, bytes_per_s=SPEED))
    clock.late_s = 0.501
    one.road(0, 1).rest(one.road(0, 1).book(0))
    assert one.road(1, 0).book(0)[2] == pytest.approx(FORGIVEN_S)
    one.punctual()
    assert one.road(1, 0).book(0)[2] == 0.0


def test_a_sleeper_looks_up_and_gives_signs_of_life(clock, ranks):
    """Would catch a sleep that a change of traffic cannot shorten, and work that the watch takes for a hang."""
    one, other = ranks(ONE_NODE)
    beats = []
    other.beat = lambda: beats.append(clock.now)
    other.road(0, 1).rest(one.road(0, 1).book(2_000_000))
    assert max(clock.naps) <= LOOK_S
    assert 5 <= len(beats) <= 11


def test_a_closed_page_frees_whoever_was_left_behind(clock, ranks):
    """Would catch a thread of an earlier world that sleeps, or writes, for ever."""
    one, other = ranks(ONE_NODE)
    stamp = one.road(0, 1).book(1_000)
    other.close()
    with pytest.raises(RuntimeError, match="left behind"):
        other.road(0, 1).rest(stamp)
