"""Folders of stopped jobs: dumps by node, and the logs that lie beside them."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from labkit.comm.dump_folder import read_folder
from labkit.launch.dump_verdict import verdict_of
from tests.comm.test_dumps import GOOD, dump_of, entry

WATCHDOG = (
    "[rank{0}]:[E1128 10:02:11.1 ProcessGroupNCCL.cpp:632] [PG ID 0 PG GUID 0(default_pg) Rank {0}] Watchdog caught "
    "collective operation timeout: WorkNCCL(SeqNum=4, OpType=ALLREDUCE, NumelIn=64, NumelOut=64, Timeout(ms)=600000) "
    "ran for 600041 milliseconds before timing out.\n"
)
TRACEBACK = """step 11 loss 2.1
[rank{0}]: Traceback (most recent call last):
[rank{0}]:   File "train.py", line 12, in <module>
[rank{0}]:     step(batch)
[rank{0}]: {1}
"""


def by_node(folder: Path, dumps, per_node=2) -> Path:
    for rank, dump in dumps.items():
        node = folder / f"node{rank // per_node}" / "dumps"
        node.mkdir(parents=True, exist_ok=True)
        (node / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump))
    return folder


def waiting(n_ranks):
    return dump_of(*GOOD, entry(3, 4, over=False, line=40), ranks=range(n_ranks))


@pytest.mark.parametrize("n_ranks", [4, 8])
def test_dumps_are_found_in_the_folders_of_their_nodes(n_ranks, tmp_path):
    """Would catch a reader of one flat folder, which says that there is no dump."""
    absent = dump_of(*GOOD, ranks=range(n_ranks))
    dumps = {rank: waiting(n_ranks) if rank != n_ranks - 2 else absent for rank in range(n_ranks)}
    folder = read_folder(by_node(tmp_path, dumps))
    assert [dump.rank for dump in folder.dumps] == list(range(n_ranks))
    assert folder.missing == ()
    assert f"for rank {n_ranks - 2}, which never came" in verdict_of(folder).headline


def test_two_dumps_of_one_rank_in_two_folders_are_refused_with_both_names(tmp_path):
    """Would catch nodes that have counted their own ranks, of which one would hide the other."""
    for node in ("a", "b"):
        (tmp_path / node).mkdir()
        (tmp_path / node / "nccl_trace_rank_0").write_bytes(pickle.dumps(dump_of(*GOOD)))
    with pytest.raises(ValueError, match=r"b/nccl_trace_rank_0 and a/nccl_trace_rank_0 are both of rank 0"):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    ("log", "text"),
    [
        ("node1/rank_2.log", TRACEBACK.replace("[rank{0}]: ", "")),
        ("attempt_0/2/stderr.log", TRACEBACK.replace("[rank{0}]: ", "")),
        ("all.out", TRACEBACK),
    ],
)
def test_the_log_of_a_rank_without_a_dump_is_quoted_with_its_first_exception(log, text, tmp_path):
    """Would catch a verdict that says "look at the log" while the log lies beside it; a log of all ranks that is taken
    for one rank's; and a second exception, of the ending, told for the first."""
    folder = by_node(tmp_path, {rank: waiting(4) for rank in (0, 1, 3)})
    (folder / log).parent.mkdir(parents=True, exist_ok=True)
    ending = text.format(2, "torch.distributed.DistBackendError: NCCL communicator was aborted")
    others = TRACEBACK.format(0, "RuntimeError: of rank 0")
    (folder / log).write_text(others + text.format(2, "ValueError: \x1b[31mbatch is empty") + ending)
    seen = verdict_of(read_folder(folder))
    assert seen.state == "missing"
    assert f"the log says of rank 2: ValueError: batch is empty ({log}:10)" in seen.headline


def test_the_seconds_of_a_wait_are_those_that_the_watchdog_has_written(tmp_path):
    """Would catch seconds that are not the wait's: of another rank, of another collective or up to the last record."""
    dumps = {rank: waiting(4) for rank in range(4)}
    folder = by_node(tmp_path, dumps)
    earlier = WATCHDOG.format(1).replace("SeqNum=4", "SeqNum=3")
    (folder / "job.log").write_text(WATCHDOG.format(0) + earlier + WATCHDOG.format(2))
    seen = verdict_of(read_folder(folder))
    assert [stance.seconds for stance in seen.ranks] == [600.041, None, 600.041, None]
    assert "rank 0 has been in all_reduce #4 on world [64] Float for 600.0 s" in str(seen.ranks[0])
    assert "may have been on its way" not in seen.headline


def test_a_collective_that_a_watchdog_gave_up_was_not_moving_although_it_is_over_on_some_ranks(tmp_path):
    """Would catch exit code 0 for a job whose log says that it was ended by a time-out."""
    over = dump_of(*GOOD, entry(3, 4, line=40), ranks=range(4))
    folder = by_node(tmp_path, {0: waiting(4), 1: over, 2: over, 3: over})
    assert verdict_of(read_folder(folder)).state == "moving"
    (folder / "job.log").write_text(WATCHDOG.format(0))
    seen = verdict_of(read_folder(folder))
    assert seen.state == "unfinished"
    assert "over on ranks 1, 2 and 3 alone" in seen.headline


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("nccl_trace_rank_0", {"entries": [7]}, "node0/nccl_trace_rank_0: "),
        ("nccl_trace_rank_0", {"entries": [], "pg_config": {"0": {"ranks": "[0, 1000000000000]"}}}, "is no rank"),
        ("nccl_trace_rank_0", {"entries": [{"record_id": float("inf")}]}, "node0/nccl_trace_rank_0: "),
        ("nccl_trace_rank_1000000000000", {"entries": []}, "is no rank"),
    ],
)
def test_a_dump_that_is_none_is_refused_by_its_name(name, content, match, tmp_path):
    """Would catch an error of Python's without the name of the file, and a loop over a million million ranks."""
    (tmp_path / "node0").mkdir()
    (tmp_path / "node0" / name).write_bytes(pickle.dumps(content))
    with pytest.raises(ValueError, match=match):
        read_folder(tmp_path)
