"""Clocks: hand-made rows with known answers, traces that are parsed again, simulated ranks, and real ones.

No real second is compared with anything but those that the same run wrote down."""

from __future__ import annotations

import json
import pickle
import sys
import time
from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from labkit import Cluster, WorkerError, run_threads, track
from labkit.comm import ring
from labkit.comm.ledger import Ledger, PendingOperation, Transfer
from labkit.parallel.ddp import DDP
from labkit.parallel.pipeline import Pipeline
from labkit.plan.machine.topology import Links
from labkit.plan.schedules.schedule import bubble, one_f_one_b, simulate as simulate_schedule
from labkit.probe import clock as clock_module, own_calls
from labkit.probe.clock import Clock, Recording, bubble_share, clock_offset, overlap_share
from labkit.probe.intervals import common, seconds, union, without
from labkit.probe.own_calls import OwnCalls
from labkit.probe.rows import OperationSpan, ProgramSpan, RankTimeline
from labkit.probe.trace import LANES
from labkit.probe.verb_listener import VerbListener
from labkit.train.checkpoint import checkpoint
from tests.counting import lines
from tests.simulated import simulate

TWO = (0, 1)


def meets(call, seq, t0, t1, ranks=TWO, number=-1, verb="all_reduce"):
    """A rank is in a collective from t0 to t1."""
    return OperationSpan(call, verb, "world", ranks, None, 0, seq, t0, t1, True, False, number)


def receives(call, source, t0, t1, tag=0, inside=False, verb="recv"):
    """A rank waits for a message (or, verb="send", for its receiver) from t0 to t1."""
    return OperationSpan(call, verb, "world", TWO, source, tag, 0, t0, t1, not inside, inside)


def sends(to, t0, t1, tag=0, within="", n_bytes=8):
    return Transfer("send", "world", to, n_bytes, t0, t1, within, tag)


def together(t0, t1):
    return Transfer("all_reduce", "world", None, 64, t0, t1)


def merged(*rows):
    return Recording.of([Recording((row,)) for row in rows])


def close(spans):
    """Intervals, rounded."""
    return tuple((round(a, 9), round(b, 9)) for a, b in spans)


# Intervals

CUTS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=6)


def cells(spans):
    """The unit cells that intervals of whole numbers cover."""
    return {k for a, b in spans for k in range(a, b)}


@given(CUTS, CUTS)
def test_interval_arithmetic_is_set_arithmetic(left, right):
    """Would catch a touching edge that counts twice, a hole at an end, and an empty interval that is kept."""
    a, b = union(left), union(right)
    for made, wanted in (
        (a, cells(left)),
        (common(a, b), cells(left) & cells(right)),
        (without(a, b), cells(left) - cells(right)),
    ):
        assert cells(made) == wanted
        assert seconds(made) == len(wanted)
        assert all(x < y for x, y in made)
        assert all(first[1] <= second[0] for first, second in zip(made, made[1:], strict=False))


# Known answers


def test_waiting_for_a_late_rank_is_a_bubble_and_the_rest_of_the_wait_is_exposed():
    """Would catch waiting for a straggler booked as communication, and a straggler that is told it waited."""
    made = merged(
        RankTimeline(0, 0.0, 10.0, (), (meets(0, 1, 2.0, 8.0, number=0),), (together(2.0, 8.0),)),
        RankTimeline(1, 0.0, 10.0, (), (meets(0, 1, 6.0, 8.0, number=0),), (together(6.0, 8.0),)),
    )
    first, second = made.parts[0], made.parts[1]
    assert first.compute == ((0, 2), (8, 10))
    assert first.bubble == ((2, 6),)
    assert first.exposed == first.wire == ((6, 8),)
    assert second.bubble == ()
    assert second.exposed == second.wire == ((6, 8),)
    assert made.shares(0) == pytest.approx((0.4, 0.2, 0.4))
    assert made.shares() == pytest.approx((0.6, 0.2, 0.2))
    assert overlap_share(made) == 0
    assert bubble_share(made, 0) == pytest.approx(0.4)
    assert bubble_share(made, 1) == 0


def test_an_asynchronous_collective_is_hidden_while_the_rank_computes():
    """Would catch an overlap of the whole transfer, and one that begins before the last rank has come."""
    row = (meets(0, 1, 2.0, 2.0, number=0), meets(0, 1, 7.0, 9.0))
    late = (meets(0, 1, 4.0, 4.0, number=0), meets(0, 1, 9.0, 9.0))
    made = merged(
        RankTimeline(0, 0.0, 10.0, (), row, (together(2.0, 9.0),)),
        RankTimeline(1, 0.0, 10.0, (), late, (together(4.0, 9.0),)),
    )
    assert made.parts[0].wire == ((4, 9),)
    assert (made.wire_s(0), made.hidden_s(0)) == (5, 3)
    assert overlap_share(made, 0) == pytest.approx(3 / 5)
    assert overlap_share(made, 1) == 1
    assert overlap_share(made) == made.overlap == pytest.approx(8 / 10)


def test_a_receive_waits_first_for_the_sender_and_then_for_the_wire_and_a_send_for_its_receiver():
    """Would catch ends of a message that are swapped."""
    made = merged(
        RankTimeline(0, 0.0, 10.0, (), (receives(0, 1, 6.0, 7.0, verb="send"),), (sends(1, 5.0, 7.001),)),
        RankTimeline(1, 0.0, 10.0, (), (receives(0, 0, 1.0, 7.0),)),
    )
    assert made.parts[1].bubble == ((1, 5),)
    assert made.parts[1].exposed == made.parts[1].wire == ((5, 7),)
    assert made.parts[0].exposed == ((6, 7),)
    assert made.parts[0].wire == ((5, 7),)
    assert made.overlap == pytest.approx(1 / 4)
    late = merged(
        RankTimeline(0, 0.0, 10.0, (), (receives(0, 1, 2.0, 7.0, verb="send"),), (sends(1, 1.0, 7.001),)),
        RankTimeline(1, 0.0, 10.0, (), (receives(0, 0, 6.0, 7.0),)),
    )
    assert late.parts[0].bubble == ((2, 6),)
    assert late.parts[0].exposed == late.parts[0].wire == late.parts[1].wire == ((6, 7),)


def test_a_message_in_a_mailbox_is_not_on_the_wire():
    """Would catch a small activation that counts as communication for as long as its receiver computes."""
    made = merged(
        RankTimeline(0, 0.0, 10.0, (), (), (sends(1, 1.0, 9.0),)),
        RankTimeline(1, 0.0, 10.0, (), (receives(0, 0, 8.0, 8.5),)),
    )
    assert made.messages[0].moving == (8.0, 8.5)
    assert made.wire_s() == 1
    early = merged(
        RankTimeline(0, 0.0, 10.0, (), (), (sends(1, 1.0, 2.0),)),
        RankTimeline(1, 0.0, 10.0, (), (receives(0, 0, 8.0, 8.5),)),
    )
    assert early.messages[0].moving == (1.0, 2.0)  # its sender knew: it was through before anybody waited


def test_what_a_rank_lacks_at_the_beginning_and_at_the_end_is_a_bubble():
    """Would catch a rank that goes home early and looks busy for all of its time."""
    made = merged(RankTimeline(0, 0.0, 10.0), RankTimeline(1, 2.0, 6.0))
    assert made.parts[1].bubble == ((0, 2), (6, 10))
    assert made.shares(1) == pytest.approx((0.4, 0, 0.6))
    assert made.bubble == pytest.approx(0.3)
    assert made.overlap == 1  # nothing was on the wire


def test_a_rank_that_is_missing_in_the_recording_is_not_said_to_be_late():
    """Would catch a bubble that is made up."""
    alone = Recording((RankTimeline(0, 0.0, 10.0, (), (meets(0, 1, 2.0, 8.0, number=0),), (together(2.0, 8.0),)),))
    assert alone.shares() == pytest.approx((0.4, 0.6, 0))
    receiver = Recording((RankTimeline(1, 0.0, 10.0, (), (receives(0, 0, 2.0, 8.0),)),))
    assert receiver.shares() == pytest.approx((0.4, 0.6, 0))


def test_messages_are_matched_in_order_for_each_tag_and_apart_from_those_of_collectives():
    """Would catch arrows that cross: another tag, a swapped-in ring's message, the second for the first."""
    transfers = (sends(1, 1.0, 2.0), sends(1, 2.0, 5.0, tag=7), sends(1, 3.0, 6.0, within="all_reduce"), sends(1, 4, 9))
    waits = (
        receives(0, 0, 1.5, 2.0), receives(1, 0, 4.5, 5.0, tag=7), receives(2, 0, 5.5, 6.0, inside=True),
        receives(3, 0, 8.0, 9.0),
    )  # fmt: skip
    met = merged(RankTimeline(0, 0.0, 9.0, (), (), transfers), RankTimeline(1, 0.0, 9.0, (), waits)).messages
    assert [(each.number, each.call, each.tag, each.inside) for each in met] == [
        (0, 0, 0, False), (1, 1, 7, False), (2, 2, 0, True), (3, 3, 0, False),
    ]  # fmt: skip
    assert [(each.t0, each.came, each.left) for each in met][3] == (4, 8, 9)


def test_a_receive_of_a_message_from_before_the_recording_does_not_shift_the_others():
    """Would catch every later arrow starting one message too late."""
    early, own = receives(0, 0, 0.5, 1.0), receives(1, 0, 5.0, 6.0)
    sender = RankTimeline(0, 0.0, 9.0, (), (), (sends(1, 4.0, 6.0),), earlier=((1, 3, 0),))
    met = merged(sender, RankTimeline(1, 0.0, 9.0, (), (early, own), earlier=((0, 0, 2),))).messages
    assert [(each.number, each.call) for each in met] == [(0, 1)]


def test_a_sender_that_was_paused_before_it_wrote_its_send_down_keeps_its_message():
    """Would catch a message that is lost, and all after it shifted, since it was had before it was noted."""
    sender = RankTimeline(0, 0.0, 9.0, (), (), (sends(1, 4.0, 6.0), sends(1, 7.0, 8.0)), earlier=((1, 3, 0),))
    waits = (receives(0, 0, 0.5, 1.0), receives(1, 0, 7.0, 8.0))
    made = merged(sender, RankTimeline(1, 0.0, 9.0, (), waits, earlier=((0, 0, 3),)))
    assert [(each.number, each.call, each.t0) for each in made.messages] == [(0, 0, 1.0), (1, 1, 7.0)]
    _, flows = check_trace(clock_module_events(made))
    assert [flow["s"]["ts"] for flow in flows.values()] == [1e6, 7e6]


def test_no_arrow_is_drawn_from_a_rank_whose_messages_were_taken_in_unseen():
    """Would catch a guess: with a receive that nobody waited for, the order of the others says nothing."""
    rows = (
        RankTimeline(0, 0.0, 9.0, (), (), (sends(1, 1.0, 2.0), sends(1, 3.0, 6.0))),
        RankTimeline(1, 0.0, 9.0, (), (receives(0, 0, 5.0, 6.0),), unseen=(0,)),
    )
    assert merged(*rows).messages == ()


def test_groups_of_one_axis_and_one_group_formed_anew_are_kept_apart():
    """Would catch the dp group of ranks 0 and 1 waiting for that of ranks 2 and 3, and call 1 for the later call 1."""
    rows = [
        RankTimeline(rank, 0.0, 9.0, (), (meets(0, 1, t, 5.0, ranks), meets(1, 1, 6.0 + t / 10, 8.0, ranks)))
        for ranks, times in (((0, 1), (1.0, 2.0)), ((2, 3), (1.0, 4.0)))
        for rank, t in zip(ranks, times, strict=True)
    ]
    parts = merged(*rows).parts
    assert close(parts[0].bubble) == ((1, 2), (6.1, 6.2))
    assert close(parts[2].bubble) == ((1, 4), (6.1, 6.4))
    assert parts[1].bubble == parts[3].bubble == ()


def test_mfu_is_flops_over_what_all_devices_could_have_done():
    """Would catch the number of ranks forgotten, and a peak in flops instead of flop/s."""
    made = merged(RankTimeline(0, 0.0, 2.0), RankTimeline(1, 0.0, 2.0))
    assert made.mfu(flops=1e12, peak_flops=1e12) == pytest.approx(0.25)
    assert made.mfu(0, 1e12) == 0
    for flops, peak in ((1e12, 0.0), (-1.0, 1.0), (float("nan"), 1.0)):
        with pytest.raises(ValueError, match="mfu needs"):
            made.mfu(flops, peak)


def test_a_recording_can_be_cut_to_a_span():
    """Would catch warming up that counts for the step, and waits that begin before the step."""
    row = RankTimeline(
        0, 0.0, 10.0, (ProgramSpan("step", 4.0, 6.0), ProgramSpan("step", 7.0, 9.0)), (meets(0, 1, 2.0, 5.0, (0,)),)
    )
    cut = Recording((row,)).during("step")
    assert cut.seconds == 5
    assert cut.shares() == pytest.approx((0.8, 0.2, 0))
    with pytest.raises(ValueError, match="rank 0 has no span 'stop'; it has 'step'"):
        Recording((row,)).during("stop")


# Properties


@st.composite
def rows_of_ranks(draw):
    """Ranks with clocks that are off and with a moment that all have recorded, in verbs that overlap in any way, also
    nested and asynchronous ones."""
    n = draw(st.integers(1, 4))
    time_of = st.integers(0, 40)
    rows = []
    for rank in range(n):
        begin, end = draw(st.integers(0, 20)), draw(st.integers(20, 41))
        entries, transfers = [], []
        for call in range(draw(st.integers(0, 5))):
            t0, t1 = sorted((draw(time_of), draw(time_of)))
            verb = draw(st.sampled_from(["all_reduce", "recv", "send"]))
            peer = None if verb == "all_reduce" or n == 1 else draw(st.integers(0, n - 1))
            place = (verb, "world", tuple(range(n)), peer, draw(st.integers(0, 1)), draw(st.integers(1, 3)))
            number = -1
            if verb != "recv" and draw(st.booleans()):
                number = len(transfers)
                to = None if verb == "all_reduce" else peer
                transfers.append(Transfer(verb, "world", to, 8, float(t0), float(t1 + draw(st.integers(0, 3)))))
            blocks = draw(st.booleans())
            entries.append(
                OperationSpan(call, *place, float(t0), float(t1), blocks, not blocks, number if peer is None else -1)
            )
        entries.sort(key=lambda entry: (entry.t0, -entry.t1))
        spans = (ProgramSpan("step", float(begin), float(end)),)
        row = RankTimeline(rank, float(begin), float(end + 1), spans, tuple(entries), tuple(transfers))
        rows.append(row)
    return rows


@settings(max_examples=150)
@given(rows_of_ranks())
def test_the_parts_of_each_rank_add_up_to_the_whole_and_every_share_is_a_share(rows):
    """Would catch time that is lost or counted twice, and an overlap above 1."""
    made = merged(*rows)
    for rank, mine in made.parts.items():
        pieces = (*mine.compute, *mine.exposed, *mine.bubble)
        assert seconds(pieces) == pytest.approx(made.seconds)
        assert seconds(union(pieces)) == pytest.approx(made.seconds), "the parts lie in one another"
        assert without(mine.exposed, mine.wire) == (), "who waits for the wire has something on the wire"
        assert sum(made.shares(rank)) == pytest.approx(1)
        assert all(-1e-12 <= share <= 1 + 1e-12 for share in (*made.shares(rank), overlap_share(made, rank)))
        assert 0 <= made.hidden_s(rank) <= made.wire_s(rank) <= made.seconds + 1e-9
    assert sum(made.shares()) == pytest.approx(1)
    assert 0 <= overlap_share(made) <= 1
    assert 0 <= bubble_share(made) <= 1


@settings(max_examples=60)
@given(rows_of_ranks(), st.lists(st.integers(-(10**4), 10**4), min_size=4, max_size=4))
def test_clocks_that_are_off_change_nothing_when_their_offsets_are_known(rows, offsets):
    """Would catch an offset that is added instead of taken away, and times that are forgotten in a shift."""
    shifted = [row.shifted(by)._replace(offset_s=float(by)) for row, by in zip(rows, offsets, strict=False)]
    straight, corrected = merged(*rows), merged(*shifted)
    for rank in straight.ranks:
        for mine, theirs in zip(straight.parts[rank], corrected.parts[rank], strict=True):
            assert close(mine) == close(theirs)
    assert min(row.begin for row in corrected.rows) == 0
    assert [row.spans for row in corrected.rows] == [row.spans for row in straight.rows]


def test_recordings_of_two_steps_are_not_merged():
    """Would catch ranks that each return their own quickest step: all waits looked as if a rank had not come."""
    early, late = ((meets(0, 1, 0.2, 0.8),), (meets(0, 2, 2.2, 2.8),))
    with pytest.raises(ValueError, match=r"rank 0's recording ends 1.000 s before that of rank 1 begins"):
        merged(RankTimeline(0, 0.0, 1.0, entries=early), RankTimeline(1, 2.0, 3.0, entries=late))
    merged(RankTimeline(0, 0.0, 2.0, entries=early), RankTimeline(1, 2.0, 3.0, entries=late))
    merged(RankTimeline(0, 0.0, 1.0), RankTimeline(1, 2.0, 3.0, entries=late))


def test_recordings_that_cannot_be_merged_are_refused():
    """Would catch one rank counted twice, a second shift, and clocks that were never compared with each other."""
    one = Recording((RankTimeline(0, 0.0, 1.0),))
    for given_ in ([], [one, one], [merged(RankTimeline(0, 0.0, 1.0))]):
        with pytest.raises(ValueError, match="recording of each rank once"):
            Recording.of(given_)
    with pytest.raises(ValueError, match=r"ranks \[0, 2\]: give Clock a group of all the ranks"):
        merged(RankTimeline(0, 0.0, 1.0), RankTimeline(2, 0.0, 1.0, reference=2))
    with pytest.raises(ValueError, match="rank 3 is not in this recording; it has 0"):
        one.shares(3)
    with pytest.raises(ValueError, match="no shares"):
        Recording((RankTimeline(0, 1.0, 1.0),)).shares()


def test_a_recording_is_a_value():
    """Would catch what was worked out being sent along, and a value that somebody can change."""
    made = merged(RankTimeline(0, 0.0, 1.0), RankTimeline(1, 0.0, 2.0, (ProgramSpan("a", 0.0, 1.0),)))
    before = len(pickle.dumps(made))
    assert made.shares().compute == pytest.approx(0.75)
    again = pickle.loads(pickle.dumps(made))
    assert again == made
    assert len(pickle.dumps(made)) == before
    with pytest.raises(AttributeError):
        made.rows = ()
    assert "rank   0  compute  50.0%" in repr(made)


# Traces


def check_trace(events):
    """What the Trace Event Format asks for: names, durations, order, bars that nest, flows with both ends in bars."""
    lanes, flows, named = defaultdict(list), defaultdict(dict), set()
    for event in events:
        assert {"ph", "pid", "tid", "ts", "name"} <= set(event)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ts"] >= 0
        if event["ph"] == "M":
            named.add((event["pid"], event["tid"], event["name"]))
        elif event["ph"] == "X":
            assert event["dur"] >= 0
            lanes[event["pid"], event["tid"]].append(event)
        else:
            assert event["ph"] in "sf"
            assert event["ph"] not in flows[event["id"]], "a flow starts and ends once"
            flows[event["id"]][event["ph"]] = event
    for (pid, tid), bars in lanes.items():
        assert (pid, 0, "process_name") in named
        assert (pid, tid, "thread_name") in named
        assert [bar["ts"] for bar in bars] == sorted(bar["ts"] for bar in bars)
        open_until = []
        for bar in bars:
            end = bar["ts"] + bar["dur"]
            while open_until and open_until[-1] <= bar["ts"] + 1e-6:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-6, "bars of a lane follow or hold each other"
            open_until.append(end)
    for flow in flows.values():
        start, end = flow["s"], flow["f"]  # KeyError: a flow with one end
        assert end["bp"] == "e"
        assert start["ts"] <= end["ts"]
        assert (start["cat"], start["name"]) == (end["cat"], end["name"])
        for each in (start, end):
            bars = lanes[each["pid"], each["tid"]]
            held = (bar for bar in bars if bar["ts"] <= each["ts"] <= bar["ts"] + bar["dur"] + 1e-6)
            assert any(held), f"an arrow hangs in the air at {each['ts']}: {each}, {bars}"
    return lanes, flows


def test_a_trace_has_a_process_for_each_rank_and_an_arrow_for_each_message(tmp_path):
    """Would catch seconds for microseconds, an arrow from the receiver, and two overlapping bars in one lane."""
    step = (
        ProgramSpan("step", 0.0, 9.0),
        ProgramSpan("forward", 1.0, 4.0),
        ProgramSpan("0", 4.0, 9.5, "backward"),
        ProgramSpan("k", 5, 6, "gpu"),
    )
    made = merged(
        RankTimeline(
            0, 0.0, 10.0, step, (receives(0, 1, 6.0, 7.0, verb="send"),), (sends(1, 5.0, 7.5), sends(1, 5.5, 8.0, 3))
        ),
        RankTimeline(1, 0.0, 10.0, (), (receives(0, 0, 1.0, 7.0), receives(1, 0, 7.0, 8.0, tag=3))),
    )
    content = json.loads(made.to_perfetto(tmp_path / "trace.json").read_text())
    assert content["displayTimeUnit"] == "ms"
    lanes, flows = check_trace(content["traceEvents"])
    assert {pid for pid, _ in lanes} == {0, 1}
    assert [(f["s"]["pid"], f["f"]["pid"], f["s"]["ts"]) for f in flows.values()] == [(0, 1, 5e6), (0, 1, 5.5e6)]
    names = {e["args"]["name"] for e in content["traceEvents"] if e["name"] == "thread_name"}
    assert names == {*LANES, "spans 2", "communication 2"}  # the backward sticks out of the step; two sends at once
    compute = [each for each in content["traceEvents"] if each["name"] == "compute" and each["pid"] == 1]
    assert [(each["ts"], each["dur"]) for each in compute] == [(0, 1e6), (8e6, 2e6)]
    sent = next(each for each in content["traceEvents"] if each["name"] == "send to 1")
    assert sent["args"] == {"axis": "world", "bytes": 8, "tag": 0, "within": ""}


@settings(max_examples=40)
@given(rows_of_ranks())
def test_every_trace_is_well_formed(rows):
    """Would catch what only an odd recording shows: a bar that ends before it begins, an arrow without an end."""
    made = merged(*rows)
    check_trace(clock_module_events(made))


def clock_module_events(made):
    from labkit.probe.trace import trace_events

    return trace_events(made.rows, made.parts, made.messages)


# Simulated ranks: what programs take that sleep and send, to the last digit


def simulated(world, fn, *args, **how):
    """The merged recording of `fn(group, clock, *args)` on simulated ranks, and what it returned."""
    return _merged(simulate(_recording, world, fn, *args, **how))


def recorded(cluster, fn, *args):
    """The same on real ones."""
    return _merged([reply.value for reply in cluster.run(_recording, fn, *args)])


def _recording(group, fn, *args):
    with Clock(group) as clock:
        result = fn(group, clock, *args)
    return clock.recording, result


def _merged(values):
    return Recording.of([recording for recording, _ in values]), [result for _, result in values]


def links(law_s, n_ranks=3, n_bytes=0, steps=4):
    """Links on which that many steps of that many bytes take `law_s`, mostly for their bytes."""
    return Links.uniform(n_ranks, alpha_s=law_s / steps / 10, bytes_per_s=n_bytes / (0.9 * law_s / steps), ports=False)


def near(value):
    """As exact as simulated seconds are, whose clock ticks at each look."""
    return pytest.approx(value, abs=1e-6)


def sleeps_before_a_barrier(group, clock):
    if group.rank == 0:
        with clock.span("sleep"):
            time.sleep(0.05)
    group.barrier()


def test_a_rank_that_sleeps_before_a_barrier_is_waited_for_by_the_others():
    """Would catch waiting that is booked on the rank that is late, or not at all."""
    made, _ = simulated(3, sleeps_before_a_barrier)
    assert made.seconds == near(0.05)
    assert made.shares(0) == near((1, 0, 0))
    assert made.shares(1) == near((0, 0, 1))
    assert made.shares(2) == near((0, 0, 1))


N = 1 << 12
"""Floats in what is summed behind a loop: 2/3 of them a step on three ranks, four steps."""


def under_way(group, clock, behind, work_s):
    """One all-reduce, with work behind it or after it; what came out."""
    x = torch.ones(N)
    group.barrier()
    work = group.all_reduce_start(x)
    if not behind:
        work.wait()
    with clock.span("compute"):
        time.sleep(work_s)
    work.wait()
    return float(x[0])


@pytest.mark.parametrize("work_s", [0.02, 0.08])
def test_an_all_reduce_behind_a_loop_is_hidden_and_one_before_it_is_not(work_s):
    """Would catch an overlap that is what the program says and not what the threads did."""
    law_s = 0.04
    wire = links(law_s, n_bytes=4 * N / 3)
    hidden, sums = simulated(wire, under_way, True, work_s)
    exposed, others = simulated(wire, under_way, False, work_s)
    assert sums + others == [3.0] * 6
    for rank in range(3):
        assert hidden.hidden_s(rank) == near(work_s), "until somebody looks it counts as on the wire"
        assert exposed.hidden_s(rank) == near(0)
        for made, took_s in ((hidden, max(law_s, work_s)), (exposed, law_s)):
            started, waited = (entry for entry in made.rows[rank].entries if entry.verb == "all_reduce")
            assert waited.t1 - started.t0 == pytest.approx(took_s, rel=1e-3)


def test_clocks_that_are_off_are_put_right():
    """Would catch a sign, a whole round trip for half of one, and an offset from the wrong rank."""
    ahead_s = (7.0, -3.21, 4000.5)

    def program(group, clock):
        group.barrier()
        ring.all_reduce(torch.ones(300), group)
        group.barrier()

    made, _ = simulated(Links.uniform(3, alpha_s=0.01, bytes_per_s=1e9), program, ahead_s=ahead_s)
    for row, ahead in zip(made.rows, ahead_s, strict=True):
        assert row.offset_s == near(ahead - ahead_s[0])
        assert row.error_s == pytest.approx(0.01 if row.rank else 0.0, rel=1e-4), "half of there and back"
    assert made.seconds == pytest.approx(8 * 0.01, rel=0.01), "two rounds of a barrier, four steps, two rounds"
    chunks = [message for message in made.messages if message.n_bytes]
    assert len(chunks) == 3 * 4
    assert all(chunk.left - chunk.t0 == pytest.approx(0.01, rel=0.01) for chunk in chunks)
    check_trace(clock_module_events(made))


# Real ranks: what must hold of what they wrote down, on a busy machine too


@pytest.fixture(scope="module")
def three():
    with Cluster(3, device="cpu", quiet=True) as cluster:
        yield cluster


def last_to_come(made, place):
    """When the last rank called the collective that is the entry at this place in every row."""
    return max(row.entries[place].t0 for row in made.rows)


def test_real_ranks_wait_in_a_barrier_for_the_last_to_come(three):
    """Would catch, between processes, what the simulated ranks above show: the late rank's own time told as waiting.
    Clocks are put right within an error only, so that on a busy machine a rank may seem to leave the barrier before the
    last one has come, by as much; it has waited until it left, and no longer."""
    made, _ = recorded(three, sleeps_before_a_barrier)
    woke, asleep = last_to_come(made, 0), made.rows[0].spans[0]
    assert asleep.t1 - asleep.t0 >= 0.05
    assert made.rows[0].entries[0].t0 >= asleep.t1
    error_s = max(row.error_s for row in made.rows)
    for row in made.rows:
        lacks, barrier = made.seconds - (row.end - row.begin), row.entries[0]
        assert woke <= barrier.t1 + row.error_s + error_s + 1e-9
        waited_s = min(woke, barrier.t1) - barrier.t0
        assert seconds(made.parts[row.rank].bubble) - lacks == pytest.approx(waited_s, abs=1e-9)


@pytest.mark.parametrize("behind", [True, False])
def test_a_real_all_reduce_is_hidden_from_when_all_have_begun_until_it_is_waited_for(three, behind):
    """Would catch an all_reduce of gloo whose begin or end is not heard: the overlap of every real run."""
    made, sums = recorded(three, under_way, behind, 0.01)
    assert sums == [3.0] * 3
    for row in made.rows:
        assert [(entry.verb, entry.call, entry.number) for entry in row.entries] == [
            ("barrier", 0, 0), ("all_reduce", 1, 1), ("all_reduce", 1, -1),
        ]  # fmt: skip
        assert [entry.blocks for entry in row.entries] == [True, False, True]  # to start it is no wait
        started, waited = row.entries[1:]
        assert started.t0 <= started.t1 <= waited.t0 <= waited.t1
        span = row.spans[0]
        assert waited.t0 >= span.t1 if behind else waited.t1 <= span.t0
        barrier, summing = row.transfers
        hidden_s = max(0.0, waited.t0 - max(summing.t0, last_to_come(made, 1)))
        closing_s = (barrier.t1 - row.entries[0].t1) + (summing.t1 - waited.t1)  # until the ledger has written the end
        assert made.hidden_s(row.rank) == pytest.approx(hidden_s + closing_s, abs=1e-9)


def with_a_clock_that_is_off(group, shifts):
    """perf_counter of this rank runs ahead, as on another machine."""
    true, shift = time.perf_counter, shifts[group.rank]
    time.perf_counter = lambda: true() + shift
    try:
        with Clock(group, rounds=48) as clock:
            group.barrier()
            ring.all_reduce(torch.ones(300), group)
            group.barrier()
        return clock.recording
    finally:
        time.perf_counter = true


def test_clocks_of_real_ranks_are_put_right_within_the_error_that_they_tell(three):
    """Would catch an error that is told too small: it is half of the quickest question and answer, however slow."""
    shifts = (7.0, -3.21, 4000.5)
    mine = [reply.value for reply in three.run(with_a_clock_that_is_off, shifts)]
    for rank, recording in enumerate(mine):
        row = recording.rows[0]
        assert abs(row.offset_s - (shifts[rank] - shifts[0])) <= row.error_s + 1e-6
        assert row.error_s < 1, "the quickest of 48 answers"
    made = Recording.of(mine)
    assert len(made.messages) == 3 * 4
    first = [next(entry for entry in row.entries if entry.verb == "barrier") for row in made.rows]
    slack_s = 2 * max(row.error_s for row in made.rows)
    assert max(entry.t0 for entry in first) <= min(entry.t1 for entry in first) + slack_s, (
        "nobody leaves before all come"
    )
    check_trace(clock_module_events(made))


def test_clocks_of_one_machine_agree_and_asking_them_is_in_no_ledger(three):
    """Would catch an offset that is made up by slow messages, and questions that spoil the laws of bytes."""

    def compare(group):
        offset = clock_offset(group, 32)
        with Clock(group) as clock:
            group.all_reduce(torch.ones(8))
        return (
            offset,
            len(group.ledger),
            group.ledger.sent_bytes(),
            sum(group.ledger.received.values()),
            clock.recording,
        )

    replies = three.run(compare)
    assert sum(reply.value[2] for reply in replies) == 2 * 2 * 32  # 2(n-1)/n of 32 bytes, from each of 3 ranks
    for reply in replies:
        (offset_s, error_s), n_transfers, _, received, recording = reply.value
        assert abs(offset_s) <= error_s + 1e-6
        assert (n_transfers, received) == (1, 0)
        assert recording.rows[0].reference == 0
        assert recording.rows[0].rank == reply.rank
    assert run_threads(clock_offset, 1) == [(0.0, 0.0)]


def ring_of_messages(group, clock):
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    for k in range(3):
        group.exchange(torch.full((5,), float(k)), right, left, tag=k % 2)
    return group.using(all_reduce=ring.all_reduce).all_reduce(torch.ones(9)).tolist()


def test_every_message_of_a_real_run_becomes_an_arrow(three, tmp_path):
    """Would catch receives that the witness is not told of, and a collective's messages taken for the caller's."""
    made, values = recorded(three, ring_of_messages)
    assert values == [[3.0] * 9] * 3
    assert len(made.messages) == sum(each.verb == "send" for row in made.rows for each in row.transfers) == 3 * (3 + 4)
    assert sum(each.inside for each in made.messages) == 3 * 4
    assert all(each.to == (each.source + 1) % 3 for each in made.messages)
    content = json.loads(made.to_perfetto(tmp_path / "ring.json").read_text())
    _, flows = check_trace(content["traceEvents"])
    assert len(flows) == 3 * (3 + 4)
    blocking = [entry for entry in made.rows[0].entries if entry.blocks and entry.verb == "all_reduce"]
    assert len(blocking) == 1
    assert all(entry.inside for entry in made.rows[0].entries if entry.t0 > blocking[0].t0)


class Sleeps(torch.autograd.Function):
    """Takes some simulated seconds forward and back."""

    @staticmethod
    def forward(ctx, x, w, forward_s, backward_s):
        ctx.save_for_backward(w)
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x * w[0]

    @staticmethod
    def backward(ctx, g):
        time.sleep(ctx.backward_s)
        return g, torch.ones_like(ctx.saved_tensors[0]), None, None


class Slow(nn.Module):
    """One layer of n weights."""

    def __init__(self, n, forward_s, backward_s):
        super().__init__()
        self.w, self.seconds = nn.Parameter(torch.ones(n)), (forward_s, backward_s)

    def forward(self, x):
        return Sleeps.apply(x, self.w, *self.seconds)


def pipelined(group, clock):
    batch = [torch.ones(2, 3)] * 4
    loss = nn.functional.mse_loss
    Pipeline({group.rank: Slow(1, 0, 0)}, one_f_one_b(3, 4), group, loss=loss).step(batch, batch)  # warms up
    pipeline = Pipeline({group.rank: Slow(1, 0.03, 0.06)}, one_f_one_b(3, 4), group, loss=loss)
    clock.watch(pipeline.stages[group.rank], "stage")
    group.barrier()
    with clock.span("step"):
        pipeline.step(batch, batch)
    return pipeline.spans


def test_the_bubble_of_a_pipeline_is_that_of_the_simulated_schedule():
    """Would catch waiting for an activation that counts as compute, and one rank's share for all ranks'."""
    made, spans = simulated(3, pipelined)
    made = made.during("step")
    law = bubble(simulate_schedule(one_f_one_b(3, 4), 0.03, 0.06))
    assert law == pytest.approx(2 / 6)  # (p-1) / (m + p-1)
    assert bubble([span for mine in spans for span in mine]) == pytest.approx(law)
    assert made.shares() == near((1 - law, 0, law))
    for row in made.rows:
        for phase, took_s in (("forward", 0.03), ("backward", 0.06)):
            took = [span.t1 - span.t0 for span in row.spans if (span.name, span.phase) == ("stage", phase)]
            assert took == pytest.approx([took_s] * 4)


def backward_of_ddp(group, clock, bucket_bytes):
    """Five layers of 128 KiB whose backwards take 30 ms each; all in one bucket are less than a first bucket is."""
    layers = nn.Sequential(*(Slow(1 << 15, 0, 0.03) for _ in range(5)))
    ddp = DDP(layers, group, lambda ps: torch.optim.SGD(ps, lr=0.1), bucket_bytes)
    ddp.zero_grad()
    loss = layers(torch.ones(2)).sum()
    group.barrier()
    with clock.span("backward"):
        loss.backward()
        ddp.finish()


def test_ddp_hides_its_buckets_behind_backward_and_one_bucket_of_all_is_exposed():
    """Would catch a DDP that waits in backward, and an overlap that is always near 1."""
    law_s = 0.02  # of the sum of one layer's gradients, less than the next layer's backward
    wire = links(law_s, n_bytes=(1 << 17) / 3)
    buckets = simulated(wire, backward_of_ddp, 1 << 17)[0].during("backward")
    whole = simulated(wire, backward_of_ddp, 1 << 30)[0].during("backward")
    assert buckets.seconds == pytest.approx(5 * 0.03 + law_s, rel=0.01)
    assert buckets.exposed_s(0) == pytest.approx(law_s, rel=0.01), "the last layer's"
    assert overlap_share(buckets) == pytest.approx(4 * 0.03 / (4 * 0.03 + law_s), rel=0.01)
    whole_s = law_s * (0.1 + 5 * 0.9)  # five times the bytes, one latency
    assert whole.seconds == pytest.approx(5 * 0.03 + whole_s, rel=0.01)
    assert whole.exposed_s(0) == pytest.approx(whole_s, rel=0.01)
    assert overlap_share(whole) == near(0)
    assert overlap_share(whole, alone_s=whole.exposed_s()) == 0
    assert overlap_share(whole, alone_s=4 * whole.exposed_s()) == pytest.approx(0.75)
    with pytest.raises(ValueError, match="alone_s"):
        overlap_share(whole, alone_s=0.0)


# The clock itself


def test_the_clock_hands_everything_on_to_the_witness_and_puts_it_back():
    """Would catch a hang that can no longer be explained, and a clock that listens for ever."""

    class Page:
        def __init__(self):
            self.heard = []

        def enter(self, call):
            self.heard.append(("enter", call.verb))

        def leave(self, call):
            self.heard.append(("leave", call.verb))

        def track(self, done, total):
            self.heard.append((done, total))

    def program(group):
        page = group.ledger.witness = Page()
        with Clock(group) as clock:
            asked = len(page.heard)
            assert group.ledger.witness is not page
            group.all_reduce(torch.ones(3))
            list(track([1], group))
        assert group.ledger.witness is page
        heard = page.heard[asked:]
        assert heard[0] == ("enter", "all_reduce")
        assert ("leave", "all_reduce") in heard
        assert heard[-2:] == [(0, 1), (1, 1)]
        group.barrier()
        assert all(entry.verb != "barrier" for entry in clock.recording.rows[0].entries)
        return clock.recording

    made = Recording.of(run_threads(program, 2))
    assert [entry.verb for entry in made.rows[0].entries if entry.blocks] == ["all_reduce"]
    with Clock() as alone:
        assert list(track(range(2), FakeGroup(alone._ledger))) == [0, 1]  # no witness: nothing to tell


class FakeGroup:
    def __init__(self, ledger):
        self.ledger = ledger


def test_a_clock_in_a_clock_and_one_that_is_left_first_both_record():
    """Would catch the inner one taking the outer one's place, and a witness that is lost when left crosswise."""

    def program(group):
        outer, inner = Clock(group), Clock(group)
        outer.__enter__()
        group.barrier()
        inner.__enter__()
        group.barrier()
        outer.__exit__(None, None, None)
        group.barrier()
        inner.__exit__(None, None, None)
        return [sum(e.blocks and e.verb == "barrier" for e in c.recording.rows[0].entries) for c in (outer, inner)]

    assert run_threads(program, 2) == [[2, 2]] * 2


def test_a_refused_call_and_an_exception_leave_no_verb_open(three):
    """Would catch a clock that swallows an error, and a rank that looks blocked for the rest of the recording."""

    class Refuses:
        def enter(self, call):
            if call.verb == "barrier":
                raise ValueError("another rank brought something else")

        def leave(self, call):
            """Nobody is told."""

    def program(group):
        clock = Clock(group)
        group.ledger.witness = Refuses()
        with pytest.raises(ValueError, match="something else"), clock:
            group.barrier()
        return clock.recording

    for recording in run_threads(program, 2):
        assert recording.rows[0].entries == ()
        assert recording.shares().compute == 1

    def fails(group):
        with Clock(group):
            if group.rank == 1:
                raise KeyError("mine")
            group.barrier()

    with pytest.raises(WorkerError, match="KeyError") as caught:
        three.run(fails)
    assert caught.value.rank == 1


def test_waiting_of_another_thread_is_not_the_main_threads():
    """Would catch a background thread's wait that is taken away from compute."""
    import threading

    def program(group):
        with Clock(group) as clock:
            other = threading.Thread(target=group.barrier)
            other.start()
            other.join()
        return clock.recording

    made = Recording.of(run_threads(program, 2))
    assert made.shares() == pytest.approx((made.shares().compute, 0, 1 - made.shares().compute))
    assert {entry.verb for entry in made.rows[0].entries if not entry.inside} == {"barrier"}
    assert not any(entry.blocks for row in made.rows for entry in row.entries)


def test_transfers_that_nobody_waited_for_take_no_time_and_receives_that_were_only_looked_at_are_named():
    """Would catch a send that is on the wire for ever, and arrows by an order that is not known."""

    def program(group):
        with Clock(group) as clock:
            if group.rank == 0:
                group.send(torch.ones(2), 1)
                group.send(torch.ones(2), 1, tag=1).wait()
            else:
                expected = group.recv_start(0)
                while not expected.done:
                    time.sleep(1e-3)
                group.recv(0, tag=1)
            clock_now = clock.recording
            group.barrier()
        return clock.recording, clock_now

    first, second = (row for row, _ in run_threads(program, 2))
    assert second.rows[0].unseen == (0,)
    assert first.rows[0].unseen == ()
    made = Recording.of([first, second])
    assert [each.source for each in made.messages if each.inside is False] == []
    assert made.rows[0].transfers[0].t0 == made.rows[0].transfers[0].t1
    check_trace(clock_module_events(made))


def test_a_clock_says_what_it_cannot_do():
    """Would catch an AttributeError where a sentence helps."""
    clock = Clock()
    with pytest.raises(ValueError, match="has recorded nothing"):
        clock.recording  # noqa: B018
    with pytest.raises(ValueError, match="does not run"), clock.span("x"):
        pass
    with pytest.raises(ValueError, match="rounds=0"):
        Clock(rounds=0)
    with pytest.raises(ValueError, match="depth"):
        clock.watch(nn.Linear(1, 1), depth=-1)
    with clock:
        with pytest.raises(ValueError, match="running already"):
            clock.__enter__()
        with clock.span("outer"), clock.span("inner"):
            time.sleep(0.002)
        assert clock.recording.seconds > 0.002
    assert [span.name for span in clock.recording.rows[0].spans] == ["outer", "inner"]
    assert clock.overlap == 1
    assert clock.recording.shares() == (1, 0, 0)

    def cleared(group):
        with Clock(group):
            group.ledger.clear()

    with pytest.raises(ValueError, match="ledger was cleared while the clock ran"):
        run_threads(cleared, 2)


def test_a_clock_writes_its_own_trace(tmp_path):
    """Would catch a path that is not given on."""
    with Clock() as clock, clock.span("forward"):
        time.sleep(0.001)
    content = json.loads(clock.to_perfetto(str(tmp_path / "one.json")).read_text())
    assert "forward" in [event["name"] for event in content["traceEvents"]]
    check_trace(content["traceEvents"])


# Watched modules


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)) for _ in range(2))
        self.head = nn.Linear(4, 1)

    def forward(self, tokens, again=False):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + (checkpoint(block, x) if again else block(x))
        return self.head(x).sum()


def spans_of(clock, phase):
    return [span for span in clock.recording.rows[0].spans if span.phase == phase]


def test_watched_modules_have_spans_forward_and_backward_and_their_gradients_are_the_same():
    """Would catch a hook that changes gradients, a ModuleList that hides its members, an order that is turned round."""
    torch.manual_seed(0)
    net, tokens = Net(), torch.arange(6)
    net(tokens).backward()
    plain = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    with Clock() as clock:
        clock.watch(net)
        net(tokens).backward()
    for p, expected in zip(net.parameters(), plain, strict=True):
        assert torch.equal(p.grad, expected)
    forward, backward = spans_of(clock, "forward"), spans_of(clock, "backward")
    assert [span.name for span in forward] == ["Net", "embedding", "blocks.0", "blocks.1", "head"]
    assert [span.name for span in backward] == ["Net", "head", "blocks.1", "blocks.0", "embedding"]
    assert all(span.t1 > span.t0 for span in (*forward, *backward))
    assert max(span.t1 for span in forward) <= min(span.t0 for span in backward)
    whole = backward[0]
    assert all(whole.t0 <= span.t0 and span.t1 <= whole.t1 for span in backward)
    net.zero_grad()
    net(tokens).backward()
    assert len(clock.recording.rows[0].spans) == 10, "the hooks are gone when the clock is left"
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


def test_recomputing_is_told_from_forward_and_accumulating_has_a_span_for_each_backward():
    """Would catch a checkpointed block with two forwards, and a second backward that stretches the first one's span."""
    net, tokens = Net(), torch.arange(6)
    with Clock() as clock:
        clock.watch(net, "net", depth=1)
        net(tokens, True).backward()
        with clock.span("between"):
            time.sleep(0.01)
        net(tokens).backward()
    assert [span.name for span in spans_of(clock, "recompute")] == ["net.blocks.1", "net.blocks.0"]
    backward = [span for span in spans_of(clock, "backward") if span.name == "net"]
    between = next(span for span in clock.recording.rows[0].spans if span.name == "between")
    assert backward[0].t1 <= between.t0 <= between.t1 <= backward[1].t0
    with Clock() as clock, torch.no_grad():
        clock.watch(net, depth=0)
        net(tokens)
    assert [(span.name, span.phase) for span in clock.recording.rows[0].spans] == [("Net", "forward")]


# The device


class FakeEvent:
    """An event of a device that is 2 ms behind the host."""

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = time.perf_counter() + 0.002

    def synchronize(self):
        """The host waits."""
        time.sleep(0.002)

    def query(self):
        return time.perf_counter() >= self.at

    def elapsed_time(self, other):
        return 1e3 * (other.at - self.at)


def test_times_of_the_device_come_from_events_and_stand_on_the_clock_of_the_host(monkeypatch):
    """Would catch milliseconds for seconds, and a first event that is not where the recording begins."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: time.sleep(0.003))

    def program(group):
        group.device = "cuda:0"
        monkeypatch.setattr(clock_module, "clock_offset", lambda group, rounds: (0.0, 0.0))
        with Clock(group) as clock, clock.span("work"):
            time.sleep(0.01)
        return clock.recording

    spans = {span.phase: span for span in simulate(program, 1)[0].rows[0].spans}
    assert spans["gpu"].name == spans[""].name == "work"
    assert spans["gpu"].t0 == near(spans[""].t0 + 0.002)
    assert spans["gpu"].t1 == near(spans[""].t1 + 0.002)
    assert spans[""].t1 - spans[""].t0 == near(0.01)


@pytest.mark.gpu
def test_a_span_on_a_gpu_lasts_as_long_as_the_device_works_on_it():
    """Would catch the time that it takes to hand work over in place of the time that the work takes."""

    def program(group):
        x = torch.randn(4096, 4096, device=group.device)
        x @ x
        with Clock(group) as clock:
            with clock.span("products"):
                for _ in range(20):
                    x @ x
            torch.cuda.synchronize()
        return clock.recording

    with Cluster(1, device="cuda") as cluster:
        row = cluster.run(program)[0].value.rows[0]
    spans = {span.phase: span for span in row.spans}
    assert spans["gpu"].t1 - spans["gpu"].t0 > 2 * (spans[""].t1 - spans[""].t0)
    assert row.begin - 1e-3 <= spans["gpu"].t0 <= spans["gpu"].t1 <= row.end + 1e-3


# What it costs


def test_listening_costs_a_few_lines():
    """Would catch a clock that reads a stack, or copies the ledger, at every verb."""
    ledger = Ledger()
    listener = ledger.witness = VerbListener(ledger, OwnCalls())
    calls = [PendingOperation("barrier", "world", (0, 1), 0, None, 0, None, "", k) for k in range(2000)]

    def listen():
        for call in calls:
            listener.enter(call)
            listener.leave(call)

    assert lines(listen) < 100 * len(calls)
    assert len(listener.read(time.perf_counter())) == 2000


@pytest.mark.parametrize("counts", [True, False])
def test_whose_call_it_is_has_one_reference_more_while_torch_keeps_it(counts, monkeypatch):
    """A bug: torch 2.11 keeps the object without a reference of its own. The tuple was freed while it was in use, and
    ranks crashed, or got other functions' arguments, as soon as a clock ran."""
    kept = []
    stash = (lambda key, thing: kept.append(thing)) if counts else (lambda key, thing: None)
    monkeypatch.setattr(own_calls, "private", lambda path: stash)
    entered = (object(), object())
    before = sys.getrefcount(entered)
    own_calls._note(entered)
    assert sys.getrefcount(entered) == before + 1
