"""Scripts as people write them, run unchanged: what the page says of each, and that nothing is left."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from labkit.capped import Cluster
from labkit.cli.script import script as command
from labkit.comm.libraries import shown_by
from labkit.plan.breakdown import KINDS
from labkit.probe.trace import write_spans
from labkit.scripted import script
from labkit.view.script_page import page
from tests.waiting import LONG_S, until

SCRIPTS = Path(__file__).parent / "scripts"


def line_of(name: str, words: str) -> str:
    """`ddp_good.py:44`, the first line of a script that has these words."""
    lines = (SCRIPTS / name).read_text().splitlines()
    return f"{name}:{next(number for number, line in enumerate(lines, 1) if words in line)}"


@pytest.mark.slow
def test_a_good_ddp_script_is_told_by_its_law_its_lines_and_its_memory(tmp_path, capfd):
    """Would catch a rank that is no clean `__main__` (argparse, a loader's worker), a collective that is counted twice
    or at a line of torch's, a law that is not held, and a page that loads something."""
    report = script(SCRIPTS / "ddp_good.py", 2, ["--epochs", "1", "--width", "96"])
    assert report.well, report.words()
    assert re.search(r"^\[rank 0\] epoch 0: loss \d", capfd.readouterr().out, re.MULTILINE)
    assert report.n_steps == 8
    n_bytes = 4 * (32 * 96 + 96 + 96 * 10 + 10)
    (law,) = report.laws
    assert (law.what, law.law_bytes) == ("DDP", n_bytes)  # 2(n-1)/n N of 2 ranks
    assert law.sent_bytes == pytest.approx(n_bytes, rel=0.01)
    gradients = next(row for row in report.rows if row.origin == "DDP gradients")
    assert (gradients.place, gradients.calls) == (line_of("ddp_good.py", "loss.backward()"), 8)
    mine = next(row for row in report.rows if row.place == line_of("ddp_good.py", "dist.all_reduce(loss"))
    assert (mine.origin, mine.calls) == ("your own", 1)
    peak = report.memory["peak"]
    assert set(peak) == set(KINDS)
    assert peak["parameters"] == peak["gradients"] == n_bytes
    assert peak["optimizer"] == pytest.approx(2 * n_bytes, rel=0.01)  # AdamW: m and v
    at = report.overlap
    assert at["hidden_s"] + at["exposed_s"] == pytest.approx(at["wire_s"])
    html = page(report)
    assert "ddp_good.py" in html
    assert "Bytes beside the law" in html
    assert not re.search(r"src=|href=|<script|url\(|@import", html)
    spans = {rank: seen["overlap"]["spans"] for rank, seen in report.run.seen.items()}
    events = json.loads(write_spans(tmp_path / "t.json", spans).read_text())["traceEvents"]
    assert {e["pid"] for e in events if e["name"] == "gloo:all_reduce"} == {0, 1}


@pytest.mark.slow
def test_a_good_fsdp_script_moves_three_times_its_weights(capfd):
    """Would catch gloo's reduce_scatter, which is an all_reduce underneath, counted as one; and shards taken for N."""
    report = script(SCRIPTS / "fsdp_good.py", 2, ["--steps", "6", "--layers", "2", "--width", "32"])
    assert report.well, report.words()
    (law,) = report.laws
    n_bytes = 2 * 4 * (2 * 32 * 128 + 128 + 32)
    assert (law.what, law.law_bytes) == ("FSDP", 1.5 * n_bytes)
    assert law.ratio == pytest.approx(1.0, abs=0.02)
    assert {row.verb for row in report.rows if row.origin == "FSDP"} == {"all_gather", "reduce_scatter"}


@pytest.mark.slow
def test_a_tensor_parallel_script_sends_a_sum_of_activations_for_each_block_and_direction(capfd):
    """Would catch sums of DTensor that are taken for the script's own, and a law of other bytes than travel."""
    report = script(SCRIPTS / "tp_good.py", 2)
    assert report.well, report.words()
    n_blocks, n_bytes = 2, 4 * 16 * 32  # A, the activations between two layers
    sums = [row for row in report.rows if (row.origin, row.verb) == ("tensor parallel", "all_reduce")]
    n_sums = 2 * n_blocks - 1  # one a block forward, one backward: nobody wants the gradient of the data
    assert sum(row.calls for row in sums) == 6 * n_sums  # six steps
    assert sum(row.sent_bytes for row in sums) == 6 * n_sums * n_bytes  # 2(n-1)/n A of 2 ranks
    assert {row.place for row in sums} == {
        line_of("tp_good.py", "return x + self.down"), line_of("tp_good.py", "loss.backward()"),
    }  # fmt: skip
    (law,) = report.laws
    assert (law.what, law.law_bytes, law.ratio) == ("TP", n_sums * n_bytes, 1.0)


MIXED = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
for _ in range(4):
    model(torch.ones(2, 8)).sum().backward()
    dist.all_reduce(torch.ones(4))
if dist.get_rank():
    dist.send(torch.ones(3), 0)
else:
    dist.recv(torch.ones(3))
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("by_link", [False, True])
def test_the_folders_of_a_script_may_be_called_as_those_of_libraries(by_link, tmp_path, capfd):
    """Would catch a line that is not told because its script lies below a folder named labkit, torch or site-packages,
    or one with signs in its name, or is started through a link; and records of another machine that are read otherwise
    than our own, with libraries from packages or from checkouts."""
    file = tmp_path / "labkit" / "torch" / "site-packages" / "\u00dcbung #1 [x] 50%s" / "train.py"
    file.parent.mkdir(parents=True)
    file.write_text(MIXED)
    link = tmp_path / "labkit" / "train.py"
    link.symlink_to(file)
    report = script(link if by_link else file, 2, watch=False)
    assert report.well, report.words()
    places = {(row.origin, row.verb): row.place for row in report.rows}
    lines = MIXED.splitlines()
    assert places["your own", "all_reduce"] == f"train.py:{lines.index('    dist.all_reduce(torch.ones(4))') + 1}"
    assert (
        places["DDP gradients", "all_reduce"]
        == f"train.py:{lines.index('    model(torch.ones(2, 8)).sum().backward()') + 1}"
    )
    assert {(verb, str(frame)) for verb, frame in report.run.messages} == {
        ("send", "train.py:9"),
        ("recv", "train.py:11"),
    }
    frames = {frame for record in report.run.tally.recent[0] for frame in record.frames}
    packages, checkout = Path(torch.__file__).parents[1], Path(shown_by.__code__.co_filename).parents[2]
    for here, elsewhere in (
        (packages, "/v/lib/python3.12/site-packages"),
        (f"{packages}/torch", "/srv/ann/torch/torch"),
    ):
        lies = {str(here): elsewhere, str(tmp_path): "/srv/ann", str(checkout): "/srv/ann/labkit"}
        moved = {moved_to(lies, frame.file): frame.library for frame in frames}
        there = shown_by(moved)
        assert {file: there(file) for file in moved} == moved


UNEVEN = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()
x = torch.ones(12)
few = dist.new_group([0, 1])
for _ in range(3 if rank < 2 else 0):
    dist.all_reduce(x, group=few)
dist.all_reduce(x)
dist.gather(x, [torch.empty(12) for _ in range(n)] if rank == 0 else None, 0)
dist.scatter(torch.empty(12), [x] * n if rank == 0 else None, 0)
dist.broadcast(x, 1)
rows = ([2, 2, 2], [2, 1, 0], [2, 0, 1])[rank]
dist.all_to_all_single(torch.empty(sum(rows)), torch.ones(sum(rows)), rows, rows)
for _ in range(5 if rank == 2 else 0):
    dist.send(x, 0)
for _ in range(5 if rank == 0 else 0):
    dist.recv(x, 2)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_what_ranks_do_differently_is_told_from_the_least_to_the_most(tmp_path, capfd):
    """A bug: "0.667 calls" of "a rank" were three calls of two ranks and none of the third. Would catch a mean that is
    told as what one rank did, a send that is counted once more since torch's calls isend, and bytes of a root that are
    charged to the others."""
    file = tmp_path / "uneven.py"
    file.write_text(UNEVEN)
    report = script(file, 3, watch=False)
    assert report.well, report.words()
    table = report.words().split("Collectives and messages")[1].split("\n\n")[0]
    head, *lines = table.splitlines()
    assert head == " (of each rank in the whole run; from least to most where ranks differ):"
    cells = [re.split(r"  +", line.strip()) for line in lines if ".py:" in line]
    told = {(verb, int(place.rpartition(":")[2])): (sent, calls) for sent, calls, verb, _, place in cells}
    places = {words: 1 + next(k for k, line in enumerate(UNEVEN.splitlines()) if words in line) for words in (
        "group=few", "reduce(x)", "gather", "scatter", "broadcast", "all_to_all", "send", "recv",
    )}  # fmt: skip
    assert told == {
        ("all_reduce", places["group=few"]): ("0 to 144", "0 to 3"),
        ("all_reduce", places["reduce(x)"]): ("64", "1"),
        ("gather", places["gather"]): ("0 to 48", "1"),
        ("scatter", places["scatter"]): ("0 to 96", "1"),
        ("broadcast", places["broadcast"]): ("32", "1"),
        ("all_to_all", places["all_to_all"]): ("8 to 16", "1"),
        ("send", places["send"]): ("0 to 240", "0 to 5"),
        ("recv", places["recv"]): ("0", "0 to 5"),
    }
    assert "a mean over the ranks" in table, "a broadcast's root is not known"
    html = page(report)
    assert ">0 to 3<" in html
    assert ">0 B to 144 B<" in html
    assert "from least to most where ranks differ" in html


def moved_to(lies: dict[str, str], file: str) -> str:
    """The file on a machine where folders lie elsewhere."""
    old = next((folder for folder in lies if file.startswith(f"{folder}/")), "")
    return lies.get(old, "") + file.removeprefix(old)


TALK = """
import argparse, sys
import torch, torch.distributed as dist
parser = argparse.ArgumentParser()
for name in ("--nodes", "--gpus", "--out", "--code", "--by"):
    parser.add_argument(name, default="0")
args = parser.parse_args()
dist.init_process_group("gloo")
x = torch.ones(4)
dist.all_reduce(x)
if dist.get_rank() == 0:
    print("sum", x[0].item(), "given", args.nodes, args.gpus, args.out, flush=True)
dist.barrier()
if args.code != "0" and str(dist.get_rank()) in args.by:
    sys.exit(int(args.code))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_script_gets_its_own_options_and_its_exit_code_is_told(tmp_path):
    """Would catch a lab's options taken from a script that has the same, a file 08 taken for a lab, and a command that
    ends well though a rank has not."""
    (tmp_path / "08").write_text(TALK)
    command = [sys.executable, "-m", "labkit", "script", "./08", "-n", "2", "--nodes", "4", "--gpus", "8", "--out", "x"]
    job = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LONG_S)
    assert job.returncode == 0, job.stderr
    assert "sum 2.0 given 4 8 x" in job.stdout
    assert not (tmp_path / "x").exists()
    job = subprocess.run(
        [*command, "--code", "3", "--by", "1"], cwd=tmp_path, capture_output=True, text=True, timeout=LONG_S
    )
    assert job.returncode == 1
    assert "rank 1 ended with exit code 3 (sys.exit)" in job.stdout


@pytest.mark.slow
def test_ranks_that_all_exit_with_one_code_are_named_together_without_a_traceback(tmp_path, capfd):
    """Would catch sys.exit(3) told as an exception, or as the doing of the first rank alone."""
    file = tmp_path / "ends.py"
    file.write_text(TALK)
    report = script(file, 2, ["--code", "3", "--by", "01"], watch=False)
    assert not report.well
    assert report.first[0] == "ranks 0 and 1 ended with exit code 3 (sys.exit)"
    assert report.run.codes == {0: 3, 1: 3}
    assert "Traceback" not in report.words() + capfd.readouterr().err


@pytest.mark.faults
def test_a_script_without_a_sign_of_life_is_ended_after_the_time_that_it_was_given(tmp_path, capfd):
    """Would catch --timeout that is not heard, and a report that does not say where the silent ranks are."""
    file = tmp_path / "silent.py"
    file.write_text("import time, torch.distributed as dist\ndist.init_process_group('gloo')\ntime.sleep(3600)\n")
    report = script(file, 2, timeout_s=3, watch=False)
    assert report.first[0].startswith("Time-out: for 3 s no rank has called a collective")
    assert "--timeout" in report.first[0]
    assert "silent.py:3" in report.words()
    with pytest.raises(ValueError, match="timeout_s must be a number of more than 0"):
        script(file, 2, timeout_s=-1)


@pytest.mark.slow
def test_a_cluster_runs_a_script_on_ranks_beside_its_own(tmp_path, capfd):
    """Would catch another number of ranks than the cluster's, and a cluster that forgets or hangs after a script."""
    file = tmp_path / "talk.py"
    file.write_text(TALK)
    with Cluster(2, device="cpu", quiet=True) as cluster:
        cluster.run(lambda group: group.state.update(mine=group.rank + 1))
        report = cluster.script(file, "--out", "here", "--gpus", 8, watch=False)
        assert (report.well, report.run.n_ranks) == (True, 2), report.words()
        assert "[rank 0] sum 2.0 given 0 8 here" in capfd.readouterr().out
        (row,) = [row for row in report.rows if row.verb == "all_reduce"]
        line = TALK.splitlines().index("dist.all_reduce(x)") + 1
        assert (row.place, row.calls, row.sent_bytes) == (f"talk.py:{line}", 1, 16)
        assert [reply.value for reply in cluster.run(lambda group: group.state["mine"])] == [1, 2]
        with pytest.raises(ValueError, match="each by itself"):
            cluster.script(file, ["--out", "here"])


@pytest.mark.faults
@pytest.mark.parametrize(
    ("name", "n_ranks", "what", "where"),
    [
        ("fsdp_forgotten.py", 3, r"rank 0 in all_gather #7.*rank 1 in barrier #7.*verb", "weight.full_tensor()"),
        ("ddp_uneven.py", 2, r"rank 1 has ended its script without all_reduce.*rank 0 waited", "sum().backward()"),
        ("left_early.py", 2, r"rank 1 ended the script first.*connections of rank 0 broke", "dist.all_reduce("),
        ("mismatched.py", 2, r"match in sizes: rank 0 calls all_reduce \[90\].*rank 1 calls all_reduce \[81\]",
         "dist.all_reduce(flat)"),
        ("oom_rank.py", 2, r"rank 1 ran out of memory.*1600000000 bytes", "return x @ x"),
        ("pipeline_stuck.py", 2, r"Deadlock: rank 0 waits in recv from rank 1; rank 1 waits in recv", "dist.recv("),
    ],
)  # fmt: skip
def test_a_script_that_fails_is_explained_root_cause_first_with_its_line(name, n_ranks, what, where, capfd):
    """Would catch a report that begins with the ranks whose connections broke, or that waits for torch's time-out."""
    report = script(SCRIPTS / name, n_ranks)
    assert not report.well
    assert re.search(what, report.first[0]), report.words()
    place = line_of(name, where)
    file, _, line = place.partition(":")
    assert place in report.words() or f'{file}", line {line}' in report.words()
    assert "Where everybody was" in page(report)
    if name == "oom_rank.py":
        assert re.match(r"Rank 1 held [\d,]+ B in tensors, most of it activations", report.first[1])


OWN_GROUP = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    dist.new_group([0])
metrics = dist.new_group([0, 1, 2])
dist.all_reduce(torch.ones(2))
"""


@pytest.mark.faults
def test_a_group_that_one_rank_has_made_alone_is_told_as_the_parting_before_the_deadlock(tmp_path, capfd):
    """Would catch a deadlock that is told without its cause, the line above it, and a wait of seconds told as 0.0 s."""
    file = tmp_path / "own_group.py"
    file.write_text(OWN_GROUP)
    report = script(file, 3, watch=False)
    assert report.first[0].startswith("Deadlock: rank 0 in new_group waits for")
    assert "new_group, which was called: rank 0 twice; ranks 1 and 2 once" in report.first[0]
    assert "call 1: rank 0 for [0] at own_group.py:5; rank 1 for [0, 1, 2] at own_group.py:6" in report.first[0]
    waits = report.run.autopsy.ranks[0]
    assert (waits.verb, waits.waits_for) == ("new_group", (1, 2))
    assert waits.seconds > 1


@pytest.mark.faults
def test_a_slow_rank_is_named_by_the_seconds_that_the_others_wait_for_it(capfd):
    """Would catch a page that calls the wire slow where one rank is."""
    report = script(SCRIPTS / "slow_rank.py", 3, watch=False)
    assert report.well, report.words()
    late = report.run.tally.arrivals.late(3)[0]
    assert late.rank == 2
    assert late.seconds > 7 * 0.1  # it sleeps 0.15 s in each of 8 steps
    assert report.run.tally.share == 1.0


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_script_whose_command_is_interrupted_or_killed(tmp_path, number):
    """Would catch ranks, the store or a loader's worker that outlive the command."""
    endless = tmp_path / "endless.py"
    endless.write_text(
        "import os, time, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\nprint('pid', os.getpid(), flush=True)\n"
        "while True:\n    dist.barrier()\n    time.sleep(0.05)\n"
    )
    job = subprocess.Popen(
        [sys.executable, "-m", "labkit", "script", "-n", "2", str(endless)], stdout=subprocess.PIPE, text=True
    )
    assert job.stdout is not None
    pids = []
    while len(pids) < 2:
        line = job.stdout.readline()
        assert line, "it ended by itself"
        pids += [int(pid) for pid in re.findall(r"pid (\d+)", line)]
    below = [child.pid for child in psutil.Process(job.pid).children(recursive=True)]
    job.send_signal(number)
    job.wait(120)
    assert until(lambda: not any(psutil.pid_exists(pid) for pid in {*pids, *below}), 120)


def test_a_script_that_is_not_there_is_refused_in_one_sentence(tmp_path):
    """Would catch a start of processes for nothing, and a command without words."""
    with pytest.raises(ValueError, match="there is no script .*train.py"):
        script(tmp_path / "train.py")
    assert command.__doc__
