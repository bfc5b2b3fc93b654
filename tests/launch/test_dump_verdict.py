"""The verdict on dumps of jobs that have stopped: its state, its sentences and the exit code of the command."""

from __future__ import annotations

import json
import pickle

import pytest
from typer.testing import CliRunner

from labkit.cli import app
from labkit.comm.dump_folder import DumpFolder
from labkit.comm.dumps import read
from labkit.launch.dump_verdict import STATES, verdict_of
from labkit.launch.hang_diagnosis import Whereabouts

WORLD = "0"


def record(number, seq, state="completed", verb="all_reduce", group=WORLD, local=None, line=31, **changed):
    """An entry as NCCL's recorder writes it: `local` is the number that this rank has for the group."""
    description = "default_pg" if group == WORLD else "undefined"
    return {
        "record_id": number, "pg_id": int(group) if local is None else local, "process_group": (group, description),
        "collective_seq_id": seq, "p2p_seq_id": seq, "op_id": seq, "profiling_name": f"nccl:{verb}",
        "time_created_ns": 10**18 + number, "input_sizes": [[64]], "output_sizes": [[64]], "input_dtypes": ["Float"],
        "output_dtypes": ["Float"], "state": state, "retired": state == "completed", "timeout_ms": 600000,
        "is_p2p": False, "frames": [{"name": "main", "filename": "jobs/train.py", "line": line}],
    } | changed  # fmt: skip


def dump_of(entries, groups, counts=None):
    """`groups`: name -> ranks; `counts`: the rank's own number of a group -> collectives that it has called."""
    return {
        "version": "2.10", "entries": list(entries),
        "pg_config": {name: {"name": name, "desc": "", "ranks": json.dumps(list(r))} for name, r in groups.items()},
        "pg_status": {str(k): {"last_enqueued_collective": n} for k, n in (counts or {}).items()},
    }  # fmt: skip


def verdict(dumps, **logs):
    """The verdict on dumps by rank."""
    return verdict_of(DumpFolder(tuple(read(pickle.loads(pickle.dumps(d)), r) for r, d in dumps.items()), **logs))


def alike(ranks, states, before=2, members=None, **changed):
    """Every rank has called the same: `before` that are over, and one in the state that it has here."""
    groups = {WORLD: members or ranks}
    return {
        rank: dump_of(
            [*(record(k, k + 1) for k in range(before)), record(before, before + 1, state, line=40, **changed)], groups
        )
        for rank, state in zip(ranks, states, strict=True)
    }


@pytest.mark.parametrize("n_ranks", [4, 8])
def test_a_collective_to_which_all_came_and_that_none_finished_sends_the_reader_below_the_program(n_ranks, tmp_path):
    """Would catch the absence of a mismatch that is told as movement, and an exit code of 0 for a job that stands."""
    dumps = alike(range(n_ranks), ["started"] * n_ranks)
    seen = verdict(dumps)
    assert (seen.state, seen.stuck) == ("unfinished", tuple(range(n_ranks)))
    assert f"All {n_ranks} ranks of world" in seen.headline
    assert "all_reduce #3 on world at train.py:40" in seen.headline
    assert "below the program" in seen.headline
    assert "dmesg" in seen.headline
    assert "device has not begun" not in seen.headline
    for rank, dump in dumps.items():
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump))
    result = CliRunner().invoke(app, ["autopsy", str(tmp_path), "--json", str(tmp_path / "data.json.out")])
    assert result.exit_code == 1
    assert json.loads((tmp_path / "data.json.out").read_text())["state"] == "unfinished"


def test_a_rank_whose_device_has_not_begun_what_the_others_are_in_is_named():
    """Would catch a verdict that sends everybody to the network while one GPU still computes."""
    seen = verdict(alike(range(4), ["started", "started", "scheduled", "started"]))
    assert seen.state == "unfinished"
    assert "On rank 2 the device has not begun it" in seen.headline


def test_what_is_over_on_some_ranks_was_moving_and_ends_well(tmp_path):
    """Would catch a healthy job, looked at in the middle of a step, that is told as one that stands."""
    seen = verdict(alike(range(4), ["completed", "started", "completed", "started"]))
    assert (seen.state, seen.well, seen.stuck) == ("moving", True, ())
    assert "over on ranks 0 and 2 and in flight on ranks 1 and 3" in seen.headline


def test_a_member_that_left_no_dump_is_the_finding_and_not_told_as_one_that_never_came():
    """Would catch "rank 2 never came" as a fact, where nothing is known of it, and a missing dump that nobody tells."""
    seen = verdict(alike((0, 1, 3), ["started"] * 3, members=range(4)))
    assert (seen.state, seen.stuck) == ("missing", (0, 1, 3))
    first, second = seen.sentences
    assert first.startswith("Rank 2 left no dump: look at its log first")
    assert second.startswith("Ranks 0, 1 and 3 wait in all_reduce #3 on world at train.py:40, for rank 2 as far as")
    assert "never came" not in seen.words()
    assert "  rank 2 left no dump" in seen.words().splitlines()


def test_a_rank_that_never_came_is_named_before_one_of_which_nothing_is_known():
    """Would catch a missing dump that hides what the other dumps prove."""
    dumps = alike((0, 1), ["started"] * 2, members=range(4))
    dumps[2] = dump_of([record(0, 1), record(1, 2)], {WORLD: range(4)})
    seen = verdict(dumps)
    assert seen.state == "absent"
    assert "for rank 2, which never came" in seen.sentences[0]
    assert seen.sentences[1].startswith("Rank 3 left no dump")


def grid(flying):
    """Four ranks in rows (groups 1 and 2) and columns (3 and 4); `flying`: rank -> the axis in which it waits."""
    rows, columns = {0: "1", 1: "1", 2: "2", 3: "2"}, {0: "3", 1: "4", 2: "3", 3: "4"}
    groups = {WORLD: range(4), "1": (0, 1), "2": (2, 3), "3": (0, 2), "4": (1, 3)}
    dumps = {}
    for rank in range(4):
        own = {name: ranks for name, ranks in groups.items() if rank in ranks}
        entries = [record(0, 1)]
        if rank in flying:
            name, local = (rows[rank], 1) if flying[rank] == "row" else (columns[rank], 2)
            entries.append(record(1, 1, "started", group=name, local=local, line=50 + rank))
        dumps[rank] = dump_of(entries, own, {0: 1})
    return dumps


def test_a_circle_over_four_groups_is_a_deadlock_and_nobody_is_told_to_have_never_come():
    """Would catch a search within one group: here each group of two has one rank that came and one that did not."""
    seen = verdict(grid({0: "row", 1: "column", 3: "row", 2: "column"}))
    assert (seen.state, seen.stuck) == ("circle", (0, 1, 2, 3))
    assert seen.headline.startswith("Deadlock")
    assert "never came" not in seen.headline
    assert seen.autopsy.waits == ((0, 1), (1, 3), (2, 0), (3, 2))


def test_a_chain_over_groups_ends_at_the_rank_that_is_in_nothing():
    """Would catch the first wait in time that is told as the cause: rank 0 waits for one that itself waits."""
    seen = verdict(grid({0: "row", 1: "column"}))
    assert seen.state == "absent"
    assert seen.sentences == ("Hang: rank 1 waits in all_reduce #1 on 4 at train.py:51 for rank 3, which never came.",)


def test_two_groups_that_were_called_in_another_order_are_a_circle_on_the_device():
    """Would catch "all have come" where each device holds back what the other one is in."""
    groups = {WORLD: (0, 1), "1": (0, 1)}
    a, b = {"group": WORLD, "line": 60}, {"group": "1", "local": 1, "line": 61}
    dumps = {
        0: dump_of([record(0, 1, "started", **a), record(1, 1, "scheduled", **b)], groups),
        1: dump_of([record(0, 1, "started", **b), record(1, 1, "scheduled", **a)], groups),
    }
    seen = verdict(dumps)
    assert (seen.state, seen.stuck) == ("circle", (0, 1))
    both_begun = {rank: dump_of([{**e, "state": "started"} for e in d["entries"]], groups) for rank, d in dumps.items()}
    assert verdict(both_begun).state == "unfinished"


def test_messages_of_a_pipeline_that_face_each_other_are_a_circle_and_those_that_meet_are_not():
    """Would catch a message that is held against the collective of its number, and peers that are not read."""
    groups = {WORLD: range(4), "1": (2, 3)}

    def sends(rank, verb):
        return dump_of([record(0, 1, "started", verb, "1", 1, is_p2p=True)], groups)

    facing = {0: dump_of([], groups), 1: dump_of([], groups), 2: sends(2, "send 0->1"), 3: sends(3, "send 1->0")}
    seen = verdict(facing)
    assert seen.state == "circle"
    assert seen.autopsy.waits == ((2, 3), (3, 2))
    assert "rank 2 waits in send to rank 3" in seen.headline
    meeting = {**facing, 3: sends(3, "recv 1<-0")}
    assert verdict(meeting).state == "moving"


def test_counts_are_read_under_the_names_of_groups_and_never_under_the_numbers_of_a_rank():
    """Would catch rank 3's group 1, which is another than rank 0's, counted for rank 0's: a rank that has come would be
    told to be missing. What no entry names is not guessed, unless one name alone is left."""
    groups = {WORLD: range(4), "7": (2, 3)}
    entries = [record(number, number - 37, group="7", local=1) for number in range(40, 43)]
    (named,) = [read(dump_of(entries, groups, {0: 40, 1: 5}), 3)]
    assert named.last == {WORLD: 40, "7": 5}
    assert read(dump_of([record(9, 9)], groups, {0: 9, 1: 5}), 3).last == {WORLD: 9, "7": 5}
    two = {**groups, "8": (1, 3)}
    unknown = read(dump_of([record(9, 9)], two, {0: 9, 1: 5, 2: 6}), 3)
    assert unknown.last == {WORLD: 9}
    assert unknown.called("7") is None
    waiting = dump_of([record(9, 6, "started", group="7", local=1)], groups, {0: 3, 1: 6})
    assert verdict_of(DumpFolder((read(waiting, 2), unknown))).state != "absent"


def test_no_seconds_are_told_of_a_dump_in_which_nothing_measures_the_wait():
    """Would catch seconds up to the youngest record, which are 0.0 for a wait of ten minutes; and states whose verdict
    has no sentence."""
    seen = verdict(alike((0, 1), ["started"] * 2))
    assert all(stance.seconds is None for stance in seen.ranks)
    assert " s," not in seen.words()
    assert str(Whereabouts(0, "waiting", "new_group", seconds=2.0)).startswith("rank 0 has been in new_group for 2.0 s")
    assert seen.state in STATES
