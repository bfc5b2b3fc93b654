"""`hang_diagnosis.diagnose` as arithmetic on whereabouts: no process is started here."""

from __future__ import annotations

import itertools
import threading
import weakref

import pytest

from labkit.launch import unblock
from labkit.launch.hang_diagnosis import Whereabouts, diagnose, lines


def waits(rank, *others, axis="world", seq=1, verb="all_reduce", peer_call=""):
    call = peer_call or f"{verb} #{seq} on {axis}"
    return Whereabouts(rank, "waiting", call, waits_for=others, axis=axis, seq=seq, verb=verb)


def runs(rank):
    return Whereabouts(rank, "running")


def gone(rank, state, detail=""):
    return Whereabouts(rank, state, detail=detail)


@pytest.mark.parametrize("n", range(2, 9))
def test_a_circle_of_any_length_is_a_deadlock_of_all_its_members(n):
    """Would catch a search that only looks for two ranks that wait for each other."""
    seen = [waits(rank, (rank + 1) % n, verb="recv") for rank in range(n)]
    found = diagnose(seen)
    assert found is not None
    assert found.stuck == tuple(range(n))
    assert found.headline.startswith("Deadlock")
    assert found.waits == tuple((rank, (rank + 1) % n) for rank in range(n))


@pytest.mark.parametrize("n", range(2, 9))
def test_a_chain_of_any_length_that_ends_in_a_running_rank_may_go_on(n):
    """Would catch a fixed number of rounds in the search, which calls a long chain stuck."""
    assert diagnose([*(waits(rank, rank + 1, verb="recv") for rank in range(n)), runs(n)]) is None


@pytest.mark.parametrize(
    ("state", "detail", "said"),
    [
        ("finished", "", "which has finished without it"),
        ("raised", "raised ValueError: boom", "which raised ValueError: boom"),
        ("dead", "was killed by SIGKILL", "which was killed by SIGKILL"),
        ("idle", "", "which is not part of this call"),
    ],
)
def test_a_chain_that_ends_in_a_rank_that_will_not_come_is_stuck_as_a_whole(state, detail, said):
    """Would catch a report of the last link only, or one that does not say why the missing rank is missing."""
    found = diagnose([waits(0, 1, verb="recv"), waits(1, 2, verb="recv"), gone(2, state, detail)])
    assert found is not None
    assert found.stuck == (0, 1)
    assert said in found.headline


def test_who_is_stuck_does_not_depend_on_the_order_in_which_ranks_are_seen():
    """Would catch a search that follows the list once, from front to back."""
    seen = [waits(0, 1), waits(1, 2), waits(2, 3), runs(3), waits(4, 5), waits(5, 4), waits(6, 4)]
    verdicts = {
        frozenset(found.stuck) if (found := diagnose(order)) else frozenset()
        for order in itertools.islice(itertools.permutations(seen), 0, 5040, 97)
    }
    assert verdicts == {frozenset({4, 5, 6})}


def test_two_subgroups_entered_in_opposite_order_are_a_deadlock_that_names_both_groups():
    """Would catch a headline that shows one of the two groups."""
    found = diagnose([waits(0, 1, axis="dp"), waits(1, 3, axis="tp"), waits(2, 0, axis="tp"), waits(3, 2, axis="dp")])
    assert found is not None
    assert found.stuck == (0, 1, 2, 3)
    assert "on dp" in found.headline
    assert "on tp" in found.headline


def test_different_verbs_under_one_number_are_named_each():
    """Would catch "rank 0 waits for rank 1" where both are there, each in a collective of its own."""
    found = diagnose([waits(0, 1, verb="all_reduce"), waits(1, 0, verb="broadcast")])
    assert found is not None
    assert "different collectives" in found.headline
    assert "rank 0 in all_reduce #1" in found.headline
    assert "rank 1 in broadcast #1" in found.headline


@pytest.mark.parametrize(
    ("a", "b", "meets"),
    [
        ({"verb": "send"}, {"verb": "recv"}, True),
        ({"verb": "send"}, {"verb": "send"}, False),
        ({"verb": "recv"}, {"verb": "recv"}, False),
        ({"verb": "send", "axis": "dp"}, {"verb": "recv", "axis": "tp"}, False),
    ],
)
def test_only_a_send_and_a_receive_of_one_group_meet(a, b, meets):
    """Would catch a large message on its way being given up, and a receive in another group taken for its match."""
    assert (diagnose([waits(0, 1, **a), waits(1, 0, **b)]) is None) == meets


def test_a_straggler_holds_up_everybody_and_is_no_hang():
    """Would catch a watchdog that shoots whoever is slow: three wait for one, and that one runs Python."""
    assert diagnose([waits(0, 3), waits(1, 3), waits(2, 3), runs(3)]) is None


def test_a_hang_in_one_pair_is_found_while_the_others_are_busy():
    """Would catch a diagnosis that waits until everybody is stuck."""
    found = diagnose([waits(0, 1, verb="recv"), waits(1, 0, verb="recv"), runs(2), runs(3)])
    assert found is not None
    assert found.stuck == (0, 1)


def test_nobody_waits_means_no_verdict():
    """Would catch a report about a world in which nothing is wrong."""
    assert diagnose([runs(0), gone(1, "finished"), gone(2, "raised", "raised ValueError: x")]) is None
    assert diagnose([]) is None


def test_the_paragraph_says_where_every_rank_stands():
    """Would catch an autopsy that drops the ranks that are well."""
    found = diagnose([waits(0, 1), gone(1, "finished"), runs(2)])
    assert found is not None
    words = found.words()
    assert words.splitlines()[0] == found.headline
    assert all(f"rank {rank} " in words for rank in range(3))
    assert "<pre>" in found._repr_html_()


def test_several_ranks_with_one_fate_stand_in_one_line_that_reads_as_a_sentence():
    """A bug: "ranks 0, 2 and 3 was killed by SIGSEGV"."""
    fates = [gone(rank, "dead", "was killed by SIGSEGV") for rank in (0, 2, 3)]
    assert lines(fates) == ["each of ranks 0, 2 and 3 was killed by SIGSEGV"]
    assert lines(fates[:1]) == ["rank 0 was killed by SIGSEGV"]
    assert lines([gone(rank, "finished") for rank in range(3)]) == ["ranks 0, 1 and 2 have finished"]


def test_a_frame_between_two_lines_has_a_position_too(monkeypatch):
    """A bug: Python gives None for such a line, the control thread died of it, and the rank could not be freed."""
    import types

    code = types.SimpleNamespace(co_filename="train.py", co_name="train")
    frame = types.SimpleNamespace(f_code=code, f_lineno=None, f_back=None)
    monkeypatch.setattr("sys._current_frames", lambda: {7: frame})
    found = unblock.position(7)
    assert (found.file, found.line) == ("train.py", 0)


def test_who_looks_where_a_rank_is_holds_none_of_its_memory(monkeypatch):
    """A bug: its frame was held while the file with its line was read. A rank that went on meanwhile had the tensors
    of a verb from which it had returned, and one with a cap of memory ran out of it."""
    waits, goes_on = threading.Event(), threading.Event()
    local = []

    class Tensor:
        pass

    def verb():
        x = Tensor()
        local.append(weakref.ref(x))
        waits.set()
        goes_on.wait(30)

    rank = threading.Thread(target=verb)
    rank.start()
    assert waits.wait(30)

    def slow(file, line):
        goes_on.set()
        rank.join(30)
        alive.append(local[0]())
        return ""

    alive: list[object] = []
    monkeypatch.setattr(unblock.linecache, "getline", slow)
    assert unblock.position(rank.ident).function == "verb"
    assert alive == [None]
