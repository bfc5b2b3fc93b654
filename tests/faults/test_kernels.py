"""F20 to F29: the notebook's kernel lives, is interrupted, restarted, killed; a real ipykernel each time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

import nbformat
import psutil
import pytest
import torch

from labkit import Cluster, WorkerError
from labkit.launch import call
from labkit.launch.call import Call
from tests.faults.conftest import all_well, belongings, gone
from tests.kernels import fresh_kernel
from tests.waiting import LONG_S, come, here, once, replaced, stop_button, until, waiting

pytestmark = pytest.mark.faults

START = "%load_ext labkit\nimport os, time, labkit\ncluster = labkit.Cluster(3, device='cpu', quiet=True)\n"


class Kernel:
    """A real kernel and its client."""

    def __init__(self) -> None:
        self.manager, self.client = fresh_kernel()

    def run(self, code: str, timeout: float = LONG_S) -> tuple[str, str | None]:
        """What a cell printed, and the name of its error."""
        out: list[str] = []

        def hear(message):
            if message["msg_type"] == "stream":
                out.append(message["content"]["text"])

        reply = self.client.execute_interactive(code, timeout=timeout, output_hook=hear, allow_stdin=False)
        return "".join(out), reply["content"].get("ename")

    def family(self) -> list[int]:
        """Zygote, warden and ranks."""
        return [child.pid for child in psutil.Process(self.manager.provisioner.pid).children(recursive=True)]

    def close(self) -> None:
        self.client.stop_channels()
        if self.manager.is_alive():
            self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    made = Kernel()
    yield made
    made.close()


@pytest.mark.parametrize("with_fork", [True, pytest.param(False, marks=pytest.mark.rest)])
def test_f20_a_killed_kernel_leaves_nothing(kernel, with_fork):
    """Would catch orphans, also when a fork of the kernel keeps its sockets open."""
    kernel.run(START)
    extra = []
    if with_fork:
        out, _ = kernel.run("pid = os.fork()\nif pid == 0:\n    time.sleep(600); os._exit(0)\nprint(pid)")
        extra = [int(out)]
    family = [pid for pid in kernel.family() if pid not in extra]
    assert len(family) >= 5
    os.kill(kernel.manager.provisioner.pid, signal.SIGKILL)
    try:
        assert gone(family)
    finally:
        for pid in extra:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.rest
def test_three_kernels_work_side_by_side_and_one_that_is_killed_takes_nothing_of_the_others():
    """Would catch a zygote, a folder or a port that kernels share."""
    kernels = [Kernel() for _ in range(3)]
    try:
        total = "print(cluster.run(lambda g: g.all_reduce(__import__('torch').ones(1)).item())[0].value)"
        for one in kernels:
            one.run(START)
        families = [one.family() for one in kernels]
        assert len(set().union(*families)) == sum(map(len, families)) >= 3 * 5
        assert [one.run(total)[0].strip() for one in kernels] == ["3.0"] * 3
        os.kill(kernels[1].manager.provisioner.pid, signal.SIGKILL)
        assert gone(families[1])
        assert [kernels[k].run(total)[0].strip() for k in (0, 2)] == ["3.0"] * 2
        assert [kernels[k].family() for k in (0, 2)] == [families[0], families[2]]
    finally:
        for one in kernels:
            one.close()
    assert gone([pid for family in families for pid in family])


def test_f21_restart_and_shutdown_leave_nothing_and_a_new_cluster_starts_at_once(kernel):
    """Would catch a port or a folder that the old cluster still holds."""
    kernel.run(START)
    family = kernel.family()
    kernel.manager.restart_kernel(now=False)
    kernel.client.wait_for_ready(timeout=LONG_S)
    assert gone(family)
    out, error = kernel.run(START + "print(cluster.run(lambda g: g.barrier() or g.size)[0].value)")
    assert (out.strip(), error) == ("3", None)
    family = kernel.family()
    kernel.manager.shutdown_kernel(now=False)
    assert gone(family)


def test_f22_ranks_that_ignore_the_stop_or_hold_the_gil_in_c_are_replaced_alone(four, monkeypatch):
    """Would catch an interrupt that gives up, one that ends everybody, and a ladder whose every rung needs the rank's
    own Python. Two ranks come free at once, and have three seconds for it."""
    monkeypatch.setattr(call, "RELEASE_S", 3.0)
    before = four.pids

    def stubborn(group):
        if group.rank == 2:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        here(group)
        if group.rank == 1:
            sum(range(10**12))  # one bytecode for an hour: no signal handler runs, no thread gets the GIL
        while True:
            time.sleep(0.05)

    with pytest.raises(KeyboardInterrupt), once(come(four), stop_button):
        four.run(stubborn)
    assert replaced(before, four) == [1, 2]
    all_well(four, remembers=False)


def test_f23_interrupts_during_recovery_do_no_harm(four, monkeypatch):
    """Would catch a state that is half repaired when impatience strikes. The third interrupt returns at once: the ranks
    get a minute to come free, and are still there."""
    releases, release = [], Call.release

    def counted(self):
        releases.append(self)
        release(self)

    monkeypatch.setattr(Call, "release", counted)
    before = four.pids

    def stubborn(group):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        here(group)
        while True:
            time.sleep(0.05)

    def tried(n):
        return lambda: len(releases) == n

    with (
        pytest.raises(KeyboardInterrupt),
        once(come(four), stop_button, tried(1), stop_button, tried(2), stop_button),
    ):
        four.run(stubborn)
    assert len(releases) == 2
    assert four.pids == before
    all_well(four, remembers=False)
    assert replaced(before, four) == [0, 1, 2, 3]


STUCK = """
def stuck(group, folder):
    open(f"{folder}/{group.rank}", "w").close()
    while group.rank == 0:
        time.sleep(0.05)
    group.barrier()
def call():
    cluster.run(stuck, FOLDER)
def stop(number, frame):
    while frame is not None:
        if frame.f_code is call.__code__:
            raise KeyboardInterrupt
        frame = frame.f_back
import signal
signal.signal(signal.SIGINT, stop)  # a press after the call would break off what follows, or ipykernel's own work
try:
    call()
except KeyboardInterrupt as error:
    while not os.path.exists(f"{FOLDER}/pressed"):
        time.sleep(0.01)
    print(type(error).__name__)
"""


def test_f23_one_to_six_interrupts_in_a_row_stop_one_cell_and_nothing_else(kernel, tmp_path):
    """Would catch a stop that comes while the last one is still at work, or when the cell has just ended, and tears
    what the next cell needs: it runs, on the same number of processes, and they all end with the kernel."""
    kernel.run(START)
    n_processes = len(kernel.family())

    def press(n: int) -> None:
        for _ in range(n):
            kernel.manager.interrupt_kernel()
            time.sleep(0.05)
        (tmp_path / str(n) / "pressed").touch()

    for n in range(1, 7):
        folder = tmp_path / str(n)
        folder.mkdir()
        with once(lambda: len(list(folder.iterdir())) == 3, lambda: press(n)):  # noqa: B023 - over before the next
            told, error = kernel.run(f"FOLDER = {str(folder)!r}\n{STUCK}")
        assert error is None, (n, error, told)
        assert told.split()[-1] in ("KeyboardInterrupt", "Stopped"), (n, told)  # the latter is labkit's, with words
        assert kernel.run("print(sum(reply.value for reply in cluster.run(lambda group: group.rank)))") == ("3\n", None)
        assert until(lambda: len(kernel.family()) == n_processes)
    family = kernel.family()
    kernel.close()
    assert gone(family)


def test_f24_the_kernels_signal_handlers_are_untouched():
    """Would catch what torch elastic does: replace them and never give them back."""
    watched = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD)
    before = [signal.getsignal(each) for each in watched]
    with Cluster(2, device="cpu", quiet=True) as cluster:
        cluster.run(lambda group: None)
        with pytest.raises(WorkerError):
            cluster.run(lambda group: 1 / 0)
    assert [signal.getsignal(each) for each in watched] == before


def test_f25_run_all_stops_at_a_failing_cell_and_nbconvert_leaves_nothing(tmp_path):
    """Would catch an error that is printed and not raised."""
    notebook = nbformat.v4.new_notebook()
    cells = [START, "open('pids', 'w').write(str(cluster.pids))", "cluster.run(lambda g: 1 / 0)", "open('after', 'w')"]
    notebook.cells = [nbformat.v4.new_code_cell(cell) for cell in cells]
    nbformat.write(notebook, tmp_path / "a.ipynb")
    command = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", "a.ipynb", "--output", "b.ipynb"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LONG_S)
    assert done.returncode != 0
    assert "ZeroDivisionError" in done.stderr
    assert not (tmp_path / "after").exists()
    assert gone([int(pid) for pid in (tmp_path / "pids").read_text().strip("[]").split(",")])


def test_f26_a_kernel_with_threads_can_start_a_cluster():
    """Would catch forking the kernel itself, whose other threads' locks the child would inherit held."""
    stop = threading.Event()
    threads = [threading.Thread(target=stop.wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    torch.set_num_threads(2)
    torch.randn(500, 500) @ torch.randn(500, 500)
    try:
        with Cluster(2, device="cpu", quiet=True) as cluster:
            all_well(cluster, remembers=False)
    finally:
        stop.set()


def test_f27_a_stopped_rank_is_waited_for_and_goes_on(four):
    """Would catch ranks that take a busy kernel, or a suspended laptop, for a dead one."""
    pids, box = four.pids, four._processes.box

    def long_enough():  # five times what the watch needs to be sure
        return (
            waiting(four, 0, 1, 2)() and time.monotonic() - max(box.read(r).entered for r in range(3)) > 5 * call.SURE_S
        )

    os.kill(pids[3], signal.SIGSTOP)
    with once(long_enough, lambda: os.kill(pids[3], signal.SIGCONT)):
        all_well(four)
    assert four.pids == pids


def test_f28_two_threads_that_call_at_once_take_turns(four):
    """Would catch two calls whose messages are mixed up."""
    results: list[list[int]] = []

    def call(k):
        for _ in range(10):
            results.append([reply.value for reply in four.run(lambda group, k: (k, group.rank), k)])

    threads = [threading.Thread(target=call, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert len(results) == 30
    assert all(len({k for k, _ in each}) == 1 and [r for _, r in each] == [0, 1, 2, 3] for each in results)


@pytest.mark.parametrize("n_clusters", [12, pytest.param(100, marks=pytest.mark.rest)])
def test_f29_clusters_in_a_row_leave_nothing(n_clusters, monkeypatch):
    """Would catch one descriptor, thread, process or file left behind by each cluster."""
    folder = tempfile.mkdtemp(prefix="f29-")  # our own: others may be making clusters at the same time
    monkeypatch.setattr(tempfile, "tempdir", folder)

    def make(n):
        for _ in range(n):
            with Cluster(2, device="cpu", quiet=True) as cluster:
                cluster.run(lambda group: group.all_reduce(torch.ones(1)))
                pids = cluster.pids
            assert gone(pids)

    make(3)
    before = belongings()
    make(n_clusters)
    assert until(lambda: all(now <= was for now, was in zip(belongings().values(), before.values(), strict=True)), 60)
    os.rmdir(folder)
