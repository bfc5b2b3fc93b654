"""The black box: pages of shared memory that are read while they are written."""

from __future__ import annotations

import marshal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from labkit.comm.ledger import PendingOperation
from labkit.launch import blackbox
from labkit.launch.blackbox import _HEAD, PAGE, BlackBox, Page
from labkit.launch.hang_diagnosis import observe
from tests.waiting import LONG_S


@pytest.fixture
def box(tmp_path):
    made = BlackBox(str(tmp_path / "box"), 3, create=True)
    yield made
    made.close()


def call(
    rank, verb="all_reduce", seq=1, shape=(4,), dtype="float32", axis="world", ranks=(0, 1, 2), peer=None, op="sum"
):
    return PendingOperation(verb, axis, ranks, rank, peer, 0, shape, dtype, seq, op)


def page(box, rank, call_id=1):
    made = Page(box, rank)
    made.begin(call_id)
    return made


def test_a_page_tells_verb_shape_number_and_line(box):
    """Would catch a report that names a line of the launcher in place of the learner's."""
    mine = page(box, 1)
    mine.enter(call(1, seq=7, shape=(2, 3)))
    entry = box.read(1).entry
    assert entry is not None
    assert (entry.verb, entry.seq, entry.shape, entry.dtype, entry.axis) == (
        "all_reduce",
        7,
        (2, 3),
        "float32",
        "world",
    )
    assert entry.file == __file__
    assert str(entry) == "all_reduce #7 on world"
    mine.leave(call(1, seq=7))
    assert box.read(1).entry is None
    assert box.read(1).done == 1
    assert box.read(0).entry is None, "another rank's page is untouched"


def test_a_wait_inside_a_wait_shows_the_inner_one_and_then_the_outer_one_again(box):
    """Would catch a ring's receive that leaves the page saying "not waiting" while the all_reduce goes on."""
    mine = page(box, 0)
    mine.enter(call(0))
    mine.enter(call(0, verb="recv", peer=2))
    assert str(box.read(0).entry) == "recv from rank 2"
    mine.leave(call(0, verb="recv", peer=2))
    assert str(box.read(0).entry) == "all_reduce #1 on world"
    mine.leave(call(0))
    assert box.read(0).entry is None


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"shape": (6,)}, ("(4,)", "(6,)")),
        ({"dtype": "float64"}, ("float32", "float64")),
        ({"verb": "broadcast"}, ("all_reduce", "broadcast")),
        ({"op": "max"}, ("op=max",)),
    ],
)
def test_the_second_to_come_is_refused_with_what_both_bring(box, other, words):
    """Would catch gloo aborting the process, and a message that shows one side only."""
    page(box, 0).enter(call(0))
    second = page(box, 1)
    with pytest.raises(ValueError, match="collective #1 on world does not match") as caught:
        second.enter(call(1, **other))
    assert all(word in str(caught.value) for word in words)
    assert "rank 0 brings" in str(caught.value)
    assert "rank 1 brings" in str(caught.value)
    assert box.read(1).entry is None, "a refused rank waits for nothing"


def test_equal_calls_other_numbers_groups_and_earlier_calls_are_no_mismatch(box):
    """Would catch a comparison with what was posted for another collective, or left over from the last cell."""
    page(box, 0, call_id=1).enter(call(0))
    page(box, 1, call_id=1).enter(call(1))
    page(box, 1, call_id=1).enter(call(1, seq=2, shape=(9,)))
    page(box, 1, call_id=1).enter(call(1, axis="tp", ranks=(0, 1), shape=(9,)))
    page(box, 1, call_id=2).enter(call(1, shape=(9,)))


def test_messages_may_differ_in_shape_on_their_two_ends(box):
    """Would catch a send compared with a collective."""
    page(box, 0).enter(call(0, verb="send", peer=1, shape=(4,)))
    page(box, 1).enter(call(1, verb="recv", peer=0, shape=None))


def test_a_page_of_an_earlier_call_says_nothing_of_this_one(box):
    """Would catch a false deadlock: ranks that were freed from a wait and are slow to begin the next call, which a
    third rank has begun, seemed to be in that wait still."""
    page(box, 0, call_id=1).enter(call(0))
    assert observe(box, 0, "running", None, 0.0, call_id=1).state == "waiting"
    assert observe(box, 0, "running", None, 0.0, call_id=2).state == "running"


def test_a_page_that_was_wiped_says_nothing(box):
    """Would catch a fresh rank that is believed to wait where its predecessor died."""
    page(box, 2).enter(call(2))
    box.wipe(2)
    assert box.read(2) == (0, 0, 0.0, 0.0, 0.0, None)
    assert box.posted(2, 1, "world", (0, 1, 2), 1) is None


def test_a_page_with_a_depth_and_no_call_yet_reads_as_not_waiting(box):
    """Would catch an EOFError in the notebook: the checksum of nothing is 0, as on a page that nobody has written."""
    _HEAD.pack_into(box.memory, 0, 1, 0, 1, 0.0, 0.0, 0.0, 0)
    assert box.read(0).entry is None


def test_a_half_written_page_reads_as_not_waiting(box, monkeypatch):
    """A bug: bytes of two calls mixed could be unmarshalled as a tuple of a billion items, which stopped the watch."""
    mine = page(box, 0)
    mine.enter(call(0))
    whole, unmarshalled = bytes(box.memory[64:4096]), set()
    loads = SimpleNamespace(loads=lambda packed: unmarshalled.add(packed) or marshal.loads(packed))
    monkeypatch.setattr(blackbox, "marshal", loads)
    for at in range(0, 120, 3):
        for garbage in (b"(\xff\xff\xff\x3f", b"\x00\x00\x00\x00", b"[zzzz"):
            if whole[at : at + len(garbage)] == garbage:
                continue
            box.memory[64:4096] = whole[:at] + garbage + whole[at + len(garbage) :]
            entry = box.read(0).entry
            assert entry is None or entry.seq == 1, "either refused, or the bytes were beyond the call"
    box.memory[64:4096] = whole
    assert box.read(0).entry is not None
    assert len(unmarshalled) == 1, "no half of a call is looked into"


WRITER = """
import sys
from labkit.comm.ledger import PendingOperation
from labkit.launch.blackbox import BlackBox, Page
page = Page(BlackBox(sys.argv[1], 3), 0)
page.begin(1)
calls = [PendingOperation("all_reduce", "world", (0,), 0, None, 0, (7,) * 2, "float32", 0),
         PendingOperation("broadcast", "a_long_axis_name", tuple(range(1)), 0, None, 0, (9,) * 40, "bfloat16", 1)]
print("ready", flush=True)
while True:
    for call in calls:
        page.enter(call)
        page.leave(call)
"""


def test_what_is_read_while_another_process_writes_is_one_call_or_none(box, tmp_path):
    """Would catch a torn read that mixes the shape of one call with the verb of another."""
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "box")], stdout=subprocess.PIPE, text=True)
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        deadline, seen = time.monotonic() + LONG_S, set()
        entries = (box.read(0).entry for _ in range(10**9))
        for k, entry in enumerate(entries):
            if entry is not None:
                seen.add((entry.verb, entry.axis, entry.seq, entry.shape, entry.dtype))
            if (len(seen) >= 2 and k > 100_000) or time.monotonic() > deadline:
                break
    finally:
        writer.kill()
        writer.wait()
    legal = {
        ("all_reduce", "world", 0, (7,) * 2, "float32"),
        ("broadcast", "a_long_axis_name", 1, (9,) * 40, "bfloat16"),
    }
    assert seen == legal


def test_a_group_of_very_many_ranks_fits_on_its_page(tmp_path):
    """Would catch a list of ranks that runs into the posts, or a write beyond the page."""
    ranks = tuple(range(1200))
    box = BlackBox(str(tmp_path / "wide"), len(ranks), create=True)
    page(box, 0).enter(call(0, ranks=ranks))
    entry = box.read(0).entry
    assert entry is not None
    assert entry.verb == "all_reduce"
    assert box.memory[PAGE : 2 * PAGE] == bytes(PAGE), "the neighbour's page is untouched"
    assert box.posted(0, 1, "world", ranks, 1) is not None
    box.close()
