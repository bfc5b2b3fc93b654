"""`Cluster`, `%%ranks` and the pieces below them, on good and bad input."""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from labkit import Cluster, Layout, Mesh, WorkerError, run, track
from labkit.launch import call, hang_diagnosis, worker
from labkit.launch.blackbox import BlackBox, Page
from labkit.launch.cluster import BareCluster
from labkit.launch.device_choice import choose
from labkit.launch.hang_diagnosis import Whereabouts, diagnose
from labkit.launch.magic import run_cell
from labkit.launch.progress import CallBar
from labkit.launch.reply import Failure
from labkit.plan.machine.topology import Links
from tests.waiting import LONG_S, come, here, once, until


@pytest.fixture(scope="module")
def cluster():
    with Cluster(3, device="cpu", quiet=True) as made:
        yield made


def test_replies_hold_value_output_ledger_and_seconds_by_rank(cluster):
    """Would catch replies in order of arrival."""

    def work(group, base, *, add):
        time.sleep(0.02 * (group.size - group.rank))
        print("rank", group.rank)
        group.all_reduce(torch.ones(4))
        return base + add + group.rank

    started = time.perf_counter()
    replies = cluster.run(work, 10, add=5)
    whole_s = time.perf_counter() - started
    assert [reply.rank for reply in replies] == [0, 1, 2]
    assert [reply.value for reply in replies] == [15, 16, 17]
    assert [reply.output for reply in replies] == ["rank 0\n", "rank 1\n", "rank 2\n"]
    assert [reply.ledger.sent_bytes("all_reduce") for reply in replies] == [20, 24, 20]  # of 4 numbers rank 0 keeps two
    assert all(0.02 * (3 - reply.rank) <= reply.seconds <= whole_s for reply in replies)


def test_one_shot_run_leaves_nothing_open():
    """Would catch a helper that forgets its cluster."""
    assert [reply.value for reply in run(lambda group: group.size, n_ranks=2, device="cpu")] == [2, 2]


BAD = [
    (lambda: Cluster(0, device="cpu"), "at least 1 rank, got n_ranks=0"),
    (lambda: Cluster(-3, device="cpu"), "got n_ranks=-3"),
    (lambda: Cluster(2.0, device="cpu"), "got n_ranks=2.0"),
    (lambda: Cluster(2, device="tpu"), "unknown device 'tpu'"),
    (lambda: Cluster(2, device="cpu", timeout_s=0), "timeout_s must be a number of more than 0"),
    (lambda: Cluster(2, device="cpu", timeout_s="5"), "timeout_s must be a number of more than 0 .* got '5'"),
    (lambda: choose(4, "cuda", gpus=("a", "b")), "4 ranks want a GPU each, this machine has 2: use n_ranks=2"),
    (lambda: choose(2, "cuda:5", gpus=("a",)), "names GPU 5, this machine has 1"),
    (lambda: choose(2, "auto", gpus=(), wire="nccl"), "is between GPUs, got device='auto'"),
    (
        lambda: choose(2, "cuda:0", gpus=("a",), wire="nccl", links=Links.uniform(2, bytes_per_s=1e9)),
        "NCCL would carry none of them",
    ),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_impossible_clusters_are_refused_with_numbers_and_a_mend(make, message):
    """Would catch processes that are started first and found impossible later."""
    with pytest.raises(ValueError, match=message):
        make()


def test_the_choice_of_device_and_backend():
    """Would catch NCCL on a GPU that ranks share, and a silent fall back to the CPU."""
    assert choose(2, "auto", gpus=()).backend == "gloo"
    assert choose(2, "auto", gpus=("a", "b")).devices == ("cuda:0", "cuda:1")
    assert choose(2, "auto", gpus=("a", "b")).backend == "nccl"
    one = choose(4, "auto", gpus=("a",))
    assert one.devices == ("cpu",) * 4
    assert "1 GPU cannot give 4 ranks one each" in one.sentence
    assert choose(3, "cuda:0", gpus=("a",))[:2] == ("gloo", ("cuda:0",) * 3)
    shared = choose(3, "cuda:0", gpus=("a",), wire="nccl")
    assert shared[:2] == ("nccl", ("cuda:0",) * 3)
    assert (shared.device, shared.carrier, shared.one_gpu) == ("cuda:0", "nccl", True)
    assert choose(2, "cuda", gpus=("a", "b"), wire="nccl").one_gpu is False


def test_a_closed_cluster_says_so():
    """Would catch a call that waits for ranks that are gone."""
    made = Cluster(2, device="cpu", quiet=True)
    made.close()
    made.close()
    for use in (lambda: made.run(print), made.restart, made.status, lambda: made.state["x"], made.interrupt):
        with pytest.raises(ValueError, match="closed: make a new one"):
            use()
    assert "closed" in repr(made)


def test_only_functions_can_be_run(cluster):
    """Would catch `cluster.run(fn())`, the most common slip, ending in a riddle on the ranks."""
    with pytest.raises(ValueError, match="run takes a function, got int 3"):
        cluster.run(3)
    with pytest.raises(ValueError, match="ranks of this cluster are 0 to 2"):
        cluster.on(3)


def test_a_message_that_nobody_received_is_named_and_not_found_by_the_next_call(cluster, capsys):
    """Would catch a stale message from an earlier cell turning up as the answer to a later one."""

    def careless(group):
        if group.rank == 0:
            group.send(torch.full((3,), 13.0), 1)
            group.send(torch.full((3,), 14.0), 1)

    def careful(group):
        if group.rank == 0:
            group.send(torch.full((3,), 7.0), 1).wait()
        return group.recv(0)[0].item() if group.rank == 1 else None

    cluster.run(careless)
    assert "never received: 2 from rank 0 to rank 1" in capsys.readouterr().out
    assert cluster.run(careful)[1].value == 7.0


def test_some_ranks_run_and_the_others_stay_idle(cluster, monkeypatch):
    """Would catch a subset that is counted as the world, and an idle rank that is waited for."""
    monkeypatch.setattr(call, "SURE_S", 0.2)
    monkeypatch.setattr(call, "LOOK_S", 0.1)
    assert [reply.rank for reply in cluster.on(2, 0).run(lambda group: group.rank)] == [0, 2]
    with pytest.raises(WorkerError) as caught:
        cluster.on(0, 1).run(lambda group: group.barrier())
    assert "rank 2, which is not part of this call" in caught.value.reason


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc can be asked to give back")
def test_an_idle_rank_gives_back_what_malloc_keeps(cluster):
    """Would catch ten learners on a machine whose ranks all hold the highest byte they ever needed."""

    def fill(group):
        held = [bytes(50_000) for _ in range(2_000)]  # too small each to be given back at once
        held.append(bytearray(8))  # the last one stays, and malloc can give back nothing below it
        group.state["last"] = held[-1]
        return os.getpid()

    def full(pid):
        return psutil.Process(pid).memory_info().rss

    before = [full(pid) for pid in cluster.pids]
    pids = [reply.value for reply in cluster.run(fill)]
    assert pids == cluster.pids
    grown = lambda: max(full(pid) - was for pid, was in zip(pids, before, strict=True))  # noqa: E731
    assert until(lambda: grown() < 40e6), "a rank keeps what was freed"
    assert [reply.value for reply in cluster.run(lambda group: group.rank)] == [0, 1, 2]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody can tell gloo's threads to sleep")
def test_idle_ranks_sleep(cluster):
    """Would catch threads that look a hundred times a second whether there is something to do, for as long as a
    notebook is open: those of the world, or those of the groups of a mesh. A slow machine looks less often, never
    more."""

    def woken() -> int:
        tasks = [task for pid in cluster.pids for task in Path(f"/proc/{pid}/task").iterdir()]
        lines = [line for task in tasks for line in (task / "status").read_text().splitlines()]
        return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))

    def idle():
        before, began = woken(), time.monotonic()
        time.sleep(1.0)
        return (woken() - before) / (time.monotonic() - began) < 100 * cluster.n_ranks

    cluster.run(lambda group: Mesh.connect(Layout(dp=group.size), group).dp.barrier())
    assert until(idle), "a thread of gloo wakes a hundred times a second"


def test_state_persists_and_restart_forgets():
    """Would catch names that vanish between calls, or survive a restart."""
    with Cluster(2, device="cpu", quiet=True) as cluster:
        cluster.state["lr"] = 0.1
        cluster.run(lambda group: group.state.update(me=group.rank))
        assert cluster.state["me"] == [0, 1]
        assert sorted(cluster.state) == ["lr", "me"]
        pids = cluster.pids
        cluster.restart(1)
        assert cluster.pids[0] == pids[0]
        assert cluster.pids[1] != pids[1]
        assert "lr" not in cluster.state
        with pytest.raises(WorkerError, match="'lr' is not known on rank 1"):
            cluster.state["lr"]
        cluster.restart()
        assert cluster.pids[0] != pids[0]


def test_interrupt_from_another_thread_stops_the_call(cluster, monkeypatch):
    """Would catch a stop that only works from the keyboard."""
    monkeypatch.setattr(call, "RELEASE_S", 60.0)  # a busy machine frees ranks late
    pids = cluster.pids
    with pytest.raises(KeyboardInterrupt) as stopped, once(come(cluster), cluster.interrupt):
        cluster.run(lambda group: here(group) or time.sleep(600))
    first, *_, last = stopped.value._render_traceback_()  # what a notebook shows, in place of frames inside labkit
    assert (first, last) == ("KeyboardInterrupt: Stopped.", "All ranks are still there, with their names.")
    cluster.interrupt()
    assert cluster.pids == pids
    assert cluster.run(lambda group: group.rank)[2].value == 2


def test_what_stands_around_a_call_is_made_once_a_rank_and_entered_for_each():
    """Would catch a context that forgets from call to call, that an error skips, or that a new rank lacks."""

    class Counting:
        words = "calls are counted"
        cap_bytes = 100

        def __init__(self):
            self.entered = self.left = 0

        def __call__(self, device):
            made = type(self)()
            made.device = device
            return made

        @property
        def held_bytes(self):
            return self.entered

        def __enter__(self):
            self.entered += 1
            sys.modules["__main__"].around = self

        def __exit__(self, kind, error, trace):
            self.left += 1

    def seen(group):
        import sys

        found = sys.modules["__main__"].around
        return found.device, found.entered, found.left

    with BareCluster(2, device="cpu", quiet=True, around=Counting()) as made:
        assert made.choice.sentence.endswith("; calls are counted")
        assert [reply.value for reply in made.run(seen)] == [("cpu", 1, 0)] * 2
        with pytest.raises(WorkerError):
            made.run(lambda group: 1 / 0)
        assert [reply.value for reply in made.on(1).run(seen)] == [("cpu", 3, 2)]
        assert [(each.held_bytes, each.cap_bytes) for each in made.status()] == [(2, 100), (3, 100)]
        made.restart(0)
        assert made.status()[0].held_bytes == 0
        assert [reply.value[1:] for reply in made.run(seen)] == [(1, 0), (4, 3)]


@pytest.mark.slow
def test_fresh_ranks_work_where_forking_is_not_to_be_had():
    """Would catch a way of starting that only the forked ranks understand, and links that only travel by fork."""
    links = Links.uniform(2, alpha_s=2e-3, bytes_per_s=1e9)

    def total(group):
        return group.all_reduce(torch.ones(1)).item(), group.wire.traffic.links == links

    with Cluster(2, device="cpu", fresh=True, links=links, quiet=True) as cluster:
        assert [reply.value for reply in cluster.run(total)] == [(2.0, True)] * 2


def test_the_bar_follows_the_slowest_rank(tmp_path):
    """Would catch a bar that shows the fastest rank."""
    box, bar, drawn = BlackBox(str(tmp_path / "box"), 3, create=True), CallBar(3), []
    bar.bar.draw = lambda share, words: drawn.append((share, words))
    for rank, steps in enumerate((15, 5, 10)):
        page = Page(box, rank)
        page.begin(1)
        page.track(steps, 20)
    for seconds in (0.9, 2.0, 2.1):  # not before a second, and not ten times a second
        bar.update(box, range(3), 0, seconds, end=False)
    assert drawn == [(0.25, "2 s, 5 of 20 steps, 0 of 3 ranks have finished, 0 verbs")]
    box.close()


def test_progress_is_told_to_the_notebook_while_the_ranks_are_in_their_loops(cluster, tmp_path):
    """Would catch a bar that is never told, or told when all is over."""
    box, flag = cluster._processes.box, tmp_path / "seen"

    def loop(group, flag):
        for step in track(range(20), group):
            while step == 5 * group.rank and not flag.exists():
                time.sleep(0.01)

    steps = lambda: [box.read(rank).progress for rank in range(3)]  # noqa: E731
    with once(lambda: steps() == [0, 5, 10] and box.read(0).total == 20, flag.touch):
        cluster.run(loop, flag)
    assert steps() == [20] * 3


def test_a_cell_on_the_ranks_keeps_its_names(capsys):
    """Would catch names that are lost between cells, and a last expression that is not shown."""
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "labkit")
    with Cluster(2, device="cpu", quiet=True) as made:
        shell.user_ns["cluster"] = made
        shell.run_cell_magic("ranks", "", "x = torch.ones(2) * rank\nx")
        shell.run_cell_magic("ranks", "1", "x += 5")
        shell.run_cell_magic("ranks", "", "group.all_reduce(x)")
        out = capsys.readouterr().out
        assert "rank 0: tensor([0., 0.])\nrank 1: tensor([1., 1.])" in out
        assert "rank 0: tensor([6., 6.])\nrank 1: tensor([6., 6.])" in out
        with pytest.raises(SyntaxError):
            shell.run_cell_magic("ranks", "", "x = = 1")
        with pytest.raises(UsageError, match="0 to 1"):
            shell.run_cell_magic("ranks", "0,7", "1")
        with pytest.raises(WorkerError) as caught:
            shell.run_cell_magic("ranks", "", "y = 1\nz = nothing_here")
        assert "z = nothing_here" in caught.value.remote_traceback
        with pytest.raises(NameError):
            raise caught.value.__cause__
    shell.user_ns.pop("cluster")
    shell.run_line_magic("unload_ext", "labkit")


def waits(rank, *others, axis="world", seq=1, verb="all_reduce"):
    return Whereabouts(rank, "waiting", f"{verb} #{seq} on {axis}", waits_for=others, axis=axis, seq=seq, verb=verb)


def test_diagnosis_knows_who_can_never_go_on():
    """Would catch a slow rank taken for a hang, and a hang taken for slowness."""
    runs, done = Whereabouts(2, "running"), Whereabouts(2, "finished")
    assert diagnose([waits(0, 2), waits(1, 2), runs]) is None
    assert diagnose([waits(0, 2), waits(1, 2), done]).stuck == (0, 1)
    assert diagnose([waits(0, 1), waits(1, 2), runs]) is None, "a chain that ends in somebody who runs"
    assert diagnose([waits(0, 1), waits(1, 0), runs]).stuck == (0, 1)
    assert diagnose([waits(0), waits(1)]) is None, "everybody has come"


def test_a_send_and_the_receive_that_meets_it_are_no_deadlock():
    """Would catch a large message on its way being given up."""
    assert diagnose([waits(0, 1, verb="send"), waits(1, 0, verb="recv")]) is None
    assert diagnose([waits(0, 1, verb="recv"), waits(1, 0, verb="recv")]).headline.startswith("Deadlock")


def test_ranks_are_named_in_words():
    """Would catch a list of 63 numbers in a headline."""
    assert hang_diagnosis.name_ranks([3]) == "rank 3"
    assert hang_diagnosis.name_ranks([3, 0]) == "ranks 0 and 3"
    assert hang_diagnosis.name_ranks(range(63)) == "ranks 0 to 62"


def test_the_ranks_have_processes_sessions_and_directories_of_their_own(cluster):
    """Would catch ranks in the notebook's process group, which Jupyter signals as a whole."""
    replies = cluster.run(lambda group: (os.getpid(), os.getsid(0), os.getpgid(0)))
    assert len({reply.value[0] for reply in replies} | {os.getpid()}) == 4
    assert all(reply.value[0] == reply.value[1] == reply.value[2] for reply in replies)


@pytest.mark.slow
def test_a_cluster_does_not_import_torch_into_the_notebook():
    """A bug: the zygote's greeting carried torch's own version class, and reading it cost the kernel a second."""
    import subprocess
    import sys

    program = (
        "import sys, labkit\n"
        "with labkit.Cluster(2, device='cpu', quiet=True) as cluster:\n"
        "    cluster.run(lambda group: group.rank)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=LONG_S)


def mistake(cluster, fn, *args):
    """What is said of it."""
    with pytest.raises((ValueError, WorkerError)) as error:
        cluster.run(fn, *args)
    return str(error.value)


def test_what_everybody_does_wrong_once_is_answered_with_what_to_do(cluster):
    """Would catch a traceback of torch's, or of labkit's own, in place of one sentence; and a cluster that stays
    broken."""

    def differentiates(group):
        x = torch.ones(2, requires_grad=True)
        group.all_reduce(x).sum().backward()

    def destroys(group):
        dist.destroy_process_group()

    assert "your function gets `group` first" in mistake(cluster, lambda: 1)
    assert "too many positional arguments" in mistake(cluster, lambda group: 1, 1)
    assert "labkit has called init_process_group already" in mistake(cluster, lambda group: dist.init_process_group())
    assert "Ranks have no keyboard" in mistake(cluster, lambda group: input())
    assert "reduce_from(x, group)" in mistake(cluster, differentiates)
    cluster.run(destroys)
    assert "leave destroy_process_group() out" in mistake(cluster, lambda group: group.barrier())
    assert [reply.value for reply in cluster.run(lambda group: group.rank)] == [0, 1, 2]
    assert 'cluster.state["total"] = total' in mistake(cluster, run_cell, "total + 1", "a cell")


def test_ranks_that_stand_at_the_same_place_share_a_line(cluster):
    """Would catch 63 lines that say the same, and ranks that raised what the first line names already."""

    def first_raises(group):
        if group.rank == 0:
            raise ValueError("no")
        group.barrier()

    with Cluster(5, device="cpu", quiet=True) as five:
        assert "\n  ranks 1, 2, 3 and 4 have been in barrier #1 on world for " in mistake(five, first_raises)
    same = Failure("ValueError", "no", "Traceback ...", False, None)
    stood = tuple(Whereabouts(rank, "raised", detail=str(same)) for rank in range(3))
    error = WorkerError(0, "ranks 0, 1 and 2 raised ValueError: no", {0: same}, hang_diagnosis.Autopsy("", stood))
    assert "Meanwhile" not in str(error)


def poisoned(group):
    """As if a kernel of rank 1 had ended in an assertion, after which CUDA refuses every call of the process."""
    if group.rank == 1:
        worker.device_answers = lambda device: False
        raise RuntimeError("CUDA error: device-side assert triggered")
    group.barrier()


def divided(group):
    return 1 / (group.rank - 1)


def test_a_rank_whose_gpu_answers_no_more_is_replaced_and_the_others_go_on():
    """Would catch a rank that fails in every call from then on, and advice to look at the wrong line."""
    with Cluster(3, device="cpu", quiet=True) as three:
        pids = three.pids
        words = mistake(three, poisoned)
        assert words.startswith("rank 1 raised RuntimeError: CUDA error: device-side assert triggered")
        assert "A fresh process took the place of rank 1" in words
        assert "The GPU of rank 1 answers nothing more" in words
        assert "CUDA_LAUNCH_BLOCKING" in words
        assert "SIGKILL" not in words
        assert [pid == was for pid, was in zip(three.pids, pids, strict=True)] == [True, False, True]
        assert [reply.value for reply in three.run(lambda group: group.all_reduce(torch.ones(1)).item())] == [3.0] * 3
        assert "took the place" not in mistake(three, divided)
