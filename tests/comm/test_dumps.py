"""Flight-recorder dumps of jobs that ran elsewhere: opened safely, held against each other, told in words."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest

from labkit.comm.dump_folder import DumpFolder, read_folder
from labkit.comm.dumps import load, read
from labkit.comm.matched_collectives import meetings, told, unmet
from labkit.comm.traffic_by_line import Tally
from labkit.launch.dump_verdict import verdict_of


def entry(number, seq, verb="all_reduce", sizes=((64,),), dtypes=("Float",), over=True, line=31, group="0", **more):
    """A record as NCCL's recorder writes it (torch 2.13, version 2.10)."""
    frames = [
        {"name": verb, "filename": "x/site-packages/torch/distributed/distributed_c10d.py", "line": 3245},
        {"name": "main", "filename": "jobs/train.py", "line": line},
    ]
    return {
        "record_id": number, "pg_id": int(group), "process_group": (group, "default_pg" if group == "0" else "tp"),
        "collective_seq_id": seq, "p2p_seq_id": 0, "op_id": seq, "profiling_name": f"nccl:{verb}",
        "time_created_ns": 10**9 + number, "input_sizes": [list(s) for s in sizes],
        "output_sizes": [list(s) for s in sizes], "input_dtypes": list(dtypes), "output_dtypes": list(dtypes),
        "state": "completed" if over else "started", "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None, "retired": over, "timeout_ms": 600000, "is_p2p": False,
        "frames": frames, **more,
    }  # fmt: skip


def dump_of(*entries, ranks=(0, 1, 2)):
    last = max((e["collective_seq_id"] for e in entries), default=0)
    return {
        "version": "2.10", "entries": list(entries),
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": json.dumps(list(ranks))}},
        "pg_status": {"0": {"last_enqueued_collective": last, "last_started_collective": last,
                            "last_completed_collective": last}},
    }  # fmt: skip


def folder_of(path: Path, *dumps, name="nccl_trace_rank_{}", write=pickle.dumps) -> Path:
    for rank, dump in enumerate(dumps):
        (path / name.format(rank)).write_bytes(write(dump))
    return path


GOOD = tuple(entry(k, k + 1) for k in range(3))


def test_a_rank_that_never_came_is_named_with_the_collective_and_the_line_that_wait_for_it(tmp_path):
    """Would catch a reader that names the ranks that wait as the cause, or the last collective in place of the one in
    flight; and one that needs pickle where JSON is there."""
    waiting = dump_of(*GOOD, entry(3, 4, over=False, line=40))
    found = verdict_of(read_folder(folder_of(tmp_path, waiting, waiting, dump_of(*GOOD))))
    assert found.headline == (
        "Hang: ranks 0 and 1 wait in all_reduce #4 on world at train.py:40 for rank 2, which never came."
    )
    assert found.stuck == (0, 1)
    assert found.autopsy.waits == ((0, 2), (1, 2))
    assert "rank 2 was in no collective; its last was all_reduce #3 on world, train.py:31" in found.words()
    as_json = tmp_path / "json"
    as_json.mkdir()
    plain = [{**waiting, "entries": [{k: v for k, v in e.items() if k != "frames"} for e in waiting["entries"]]}]
    folder_of(as_json, *plain, *plain, dump_of(*GOOD), name="job_{}.json", write=lambda d: json.dumps(d).encode())
    assert "wait in all_reduce #4 on world for rank 2" in verdict_of(read_folder(as_json)).headline


@pytest.mark.parametrize(
    ("odd", "differs", "words_of_it"),
    [
        (entry(3, 4, sizes=((32,),), over=False), ("sizes",), "[32] Float"),
        (entry(3, 4, dtypes=("Half",), over=False), ("dtypes",), "[64] Half"),
        (entry(3, 4, verb="broadcast", over=False, line=44), ("verb",), "broadcast [64] Float at train.py:44"),
    ],
)
def test_what_differs_between_ranks_is_told_with_both_sides(odd, differs, words_of_it):
    """Would catch a comparison that overlooks sizes, dtypes or verbs, or that says only that something differs."""
    dumps = [read(dump_of(*GOOD, entry(3, 4, over=False)), rank) for rank in (0, 1)]
    dumps.append(read(dump_of(*GOOD, odd), 2))
    (wrong,) = unmet(dumps)
    assert (wrong.seq, wrong.differs, wrong.odd) == (4, differs, (2,))
    assert words_of_it in told(wrong, dumps)
    assert verdict_of(DumpFolder(tuple(dumps))).headline.startswith(
        "Mismatch: collective #4 on world does not match in"
    )


def test_an_order_that_differs_is_told_as_what_was_left_out():
    """Would catch a report of sizes that differ where a rank has skipped a call: its next one is the others' next."""
    usual = [*GOOD, entry(3, 4, line=40), entry(4, 5, verb="broadcast", sizes=((7,),), line=50, over=False)]
    skipped = [*GOOD, entry(3, 4, verb="broadcast", sizes=((7,),), line=50, over=False)]
    dumps = [read(dump_of(*some), rank) for rank, some in enumerate((usual, usual, skipped))]
    (wrong,) = unmet(dumps)
    assert "rank 2 left out the all_reduce of train.py:40" in told(wrong, dumps)


def test_uneven_verbs_and_records_that_were_overwritten_are_no_mistake():
    """Would catch a false alarm over an all_to_all with sizes of its own, or where one rank keeps less than another."""
    first = dump_of(*GOOD, entry(3, 4, verb="all_to_all", sizes=((3,),)))
    second = dump_of(*GOOD[2:], entry(3, 4, verb="all_to_all", sizes=((9,),)))
    dumps = [read(first, 0), read(second, 1), read(first, 2)]
    assert unmet(dumps) == []
    assert verdict_of(DumpFolder(tuple(dumps))).headline.startswith("Nothing is wrong")


class Evil:
    """A pickle that makes a folder when it is opened by pickle.load."""

    def __reduce__(self):
        return os.mkdir, ("must_not_be_there",)


def test_what_would_steer_a_terminal_is_taken_out_of_a_dump(tmp_path):
    """Would catch escape sequences of a stranger's file in the terminal, and control characters in the picture."""
    named = entry(3, 4, "all_\x1b[31mreduce", dtypes=("Fl\x07oat",), over=False)
    headline = verdict_of(read_folder(folder_of(tmp_path, dump_of(named), dump_of(*GOOD)))).words()
    assert "all_reduce" in headline
    assert not set(headline) & {"\x1b", "\x07"}


def test_a_dump_that_asks_for_a_function_is_refused_and_runs_nothing(tmp_path, monkeypatch):
    """Would catch a reader that opens what a stranger has sent with pickle.load."""
    monkeypatch.chdir(tmp_path)
    folder_of(tmp_path, {"entries": [Evil()]})
    with pytest.raises(ValueError, match="nccl_trace_rank_0: .*mkdir"):
        read_folder(tmp_path)
    assert not Path("must_not_be_there").exists()
    with pytest.raises(ValueError, match="no dump in"):
        read_folder(_empty(tmp_path))
    with pytest.raises(ValueError, match="not the JSON"):
        load(b"{nonsense")


def _empty(path: Path) -> Path:
    folder = path / "empty"
    folder.mkdir()
    return folder


def test_bytes_are_counted_once_by_line_and_by_the_law_of_a_ring():
    """Would catch records that are counted again in the next dump, and shares that ignore what was overwritten."""
    tally = Tally(3)
    for rank in range(3):
        tally.add(read(dump_of(*GOOD), rank))
        tally.add(read(dump_of(*GOOD, entry(3, 4, verb="all_gather")), rank))
    rows = {(row.verb, row.place): (row.calls, row.sent_bytes) for row in tally.rows()}
    assert rows["all_reduce", "train.py:31"] == (3, pytest.approx(3 * 2 * 2 / 3 * 256))
    assert rows["all_gather", "train.py:31"] == (1, pytest.approx(2 / 3 * 256))
    assert tally.share == 1.0
    tally.add(read(dump_of(entry(9, 9)), 0))
    assert tally.share == pytest.approx(13 / 17)
    rows = {(row.verb, row.place): row for row in tally.rows()}
    assert rows["all_gather", "train.py:31"].calls_span == (1, pytest.approx(9 / 5)), "only rank 0 has lost records"


def test_groups_of_which_a_rank_is_no_member_are_not_counted():
    """Would catch gloo's counters of other ranks' groups taken for records of this rank that were lost."""
    tally = Tally(2)
    for rank in range(2):
        dump = dump_of(*GOOD, entry(3, 1, group=f"{rank + 1}"), ranks=(0, 1))
        dump["pg_config"] |= {str(g): {"name": str(g), "desc": "tp", "ranks": f"[{g - 1}]"} for g in (1, 2)}
        dump["pg_status"] |= {str(g): {"last_enqueued_collective": 1} for g in (1, 2)}
        dump["pg_status"]["0"]["last_enqueued_collective"] = 3
        tally.add(read(dump, rank))
    assert tally.share == 1.0
    assert {row.calls_span for row in tally.rows() if row.group == "world"} == {(3, 3)}


def test_every_meeting_is_compared_also_when_it_is_over():
    """Would catch a mismatch that is looked for in flight alone, and lines that differ by right called an order."""
    tally = Tally(2)
    tally.add(read(dump_of(*GOOD, entry(3, 4), entry(4, 5, verb="broadcast", line=1), ranks=(0, 1)), 0))
    odd = dump_of(*GOOD, entry(3, 4, dtypes=("Int",)), entry(4, 5, verb="broadcast", line=2), ranks=(0, 1))
    tally.add(read(odd, 1))
    assert [(meeting.seq, meeting.differs) for meeting in tally.odd] == [(4, ("dtypes",))]
    assert tally.swapped == []
    for lines, swapped in (((1, 2, 1), True), ((2, 2, 1), False)):
        tally = Tally(2)
        for rank in range(2):
            calls = [entry(k, k + 1, line=lines[k + rank]) for k in range(2)]
            tally.add(read(dump_of(*calls, ranks=(0, 1)), rank))
        assert bool(tally.swapped) == swapped


def test_a_row_tells_the_least_and_the_most_that_a_rank_did_and_leaves_out_who_told_nothing():
    """Would catch a mean that is told as one rank's, a rank that never calls and is left out, and one of which nothing
    is known that is told as one that did nothing."""
    tally = Tally(4)
    for rank, n in enumerate((3, 1, 0)):
        tally.add(read(dump_of(*GOOD[:n], ranks=(0, 1, 2, 3)), rank))
    (row,) = tally.rows()
    assert (row.calls_span, row.calls) == ((0, 3), pytest.approx(4 / 3))
    assert row.bytes_span == (0, pytest.approx(3 * 2 * 3 / 4 * 256))
    assert tally.silent == (3,)


@pytest.mark.slow
def test_torchs_own_analyser_finds_the_same_in_dumps_of_nccl(tmp_path):
    """Would catch a wrong idea of the form, or of what is missing: the reference is torch's own analyser."""
    from torch.distributed.flight_recorder.components.builder import build_db
    from torch.distributed.flight_recorder.components.config_manager import JobConfig

    waiting = dump_of(*GOOD, entry(3, 4, over=False))
    odd = dump_of(*GOOD, entry(3, 4, over=False, sizes=((32,),)))
    for some in ((waiting, waiting, dump_of(*GOOD)), (waiting, waiting, odd), (dump_of(*GOOD),) * 3):
        details = {}
        for rank, dump in enumerate(some):
            content = pickle.loads(pickle.dumps(dump))
            details[f"rank_{rank}"] = {"rank": rank, "host_name": f"host{rank}", **content}
        arguments = JobConfig().parse_args([str(tmp_path)])
        theirs = build_db(details, arguments, "2.10")
        ours = meetings([read(dump, rank) for rank, dump in enumerate(some)])
        missing = {c.collective_seq_id: set(c.missing_ranks) for c in theirs.collectives if c.missing_ranks}
        assert {m.seq: set(m.absent) for m in ours if m.absent} == missing
        wrong = {c.collective_seq_id for c in theirs.collectives if c.mismatch_collectives}
        assert {m.seq for m in ours if m.differs} == wrong
