"""F30 to F40 and F44: code and data on their way, output, and who may listen."""

from __future__ import annotations

import functools
import inspect
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

import labkit
from labkit import Cluster, WorkerError
from labkit.launch import rank_processes
from tests.faults.conftest import all_well, gone
from tests.waiting import LONG_S, until

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def warm():
    """One cluster of 4 for tests that do no harm."""
    with Cluster(4, device="cpu", quiet=True) as made:
        yield made


def test_f30_functions_travel_with_their_helpers_classes_and_closures(warm):
    """Would catch code that is sent by name and is not known on the ranks."""
    namespace: dict = {"__name__": "__main__"}
    source = (
        "import math\n"
        "class Point:\n    def __init__(self, x): self.x = x\n    def double(self): return helper(self.x)\n"
        "def helper(x): return math.floor(x) * 2\n"
        "def make(k):\n    def inner(group): return Point(group.rank + k).double()\n    return inner\n"
    )
    exec(source, namespace)
    assert [reply.value for reply in warm.run(namespace["make"](10))] == [20, 22, 24, 26]
    add = functools.partial(lambda k, group: group.rank + k, 5)
    assert [reply.value for reply in warm.run(add)] == [5, 6, 7, 8]


def test_f31_the_cells_lines_arrive_with_the_code(warm):
    """Would catch a traceback without source and `inspect.getsource` failing, which Triton and torch.compile need."""
    import linecache

    name = "<ipython-input-7-abc>"
    source = "def cell_function(group):\n    value = group.rank\n    return 1 / (value - value)  # the line\n"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    namespace: dict = {"__name__": "__main__"}
    exec(compile(source, name, "exec"), namespace)
    with pytest.raises(WorkerError) as caught:
        warm.run(namespace["cell_function"])
    assert "return 1 / (value - value)  # the line" in caught.value.remote_traceback
    assert "~~^~~~~" in caught.value.remote_traceback
    assert f'File "{name}", line 3' in caught.value.remote_traceback
    fn = namespace["cell_function"]
    assert warm.run(lambda group: inspect.getsource(fn))[3].value == source


def test_f32_what_cannot_be_sent_is_named_with_its_path(warm):
    """Would catch "cannot pickle '_thread.lock' object" without a word of where it is."""
    lock = threading.Lock()
    with pytest.raises(ValueError, match="closed-over 'lock'.*_thread.lock"):
        warm.run(lambda group: lock)
    with pytest.raises(ValueError, match=r"argument 0 -> \['a'\] -> \[1\]"):
        warm.run(lambda group, x: None, {"a": [1, lock]})
    with pytest.raises(WorkerError, match=r"rank \d cannot send back .*\['deep'\] -> \[0\]"):
        warm.run(lambda group: {"deep": [threading.Lock()]})

    class Awkward(Exception):
        def __init__(self, a, b):
            super().__init__(f"{a} and {b}")

    def raises(group):
        raise Awkward("this", "that")

    with pytest.raises(WorkerError, match="Awkward: this and that") as caught:
        warm.run(raises)
    assert caught.value.__cause__ is None
    all_well(warm, remembers=False)


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_f33_tensors_of_every_dtype_come_back_as_they_were(warm, dtype):
    """Would catch bf16 that numpy does not know, views that lose their order, and lost requires_grad."""
    x = torch.arange(24).reshape(4, 6).to(dtype)

    def back(group, x):
        return x.T, x[:0], torch.nn.Parameter(x.float()), x[1, 2]

    turned, empty, parameter, scalar = warm.run(back, x)[2].value
    assert torch.equal(turned, x.T)
    assert turned.dtype == dtype
    assert empty.shape == (0, 6)
    assert isinstance(parameter, torch.nn.Parameter)
    assert parameter.requires_grad
    assert scalar == x[1, 2]


def test_f33_large_results_and_arguments_come_through_shared_memory_and_may_be_changed(warm):
    """Would catch a result that is read-only, or that changes when another rank's does."""
    x = torch.arange(1 << 20, dtype=torch.float32)
    replies = warm.run(lambda group, x: x + group.rank, x)
    replies[0].value.zero_()
    assert all(torch.equal(replies[rank].value, x + rank) for rank in (1, 2, 3))
    kept = replies[3].value
    warm.run(lambda group: torch.ones(1 << 20))
    assert torch.equal(kept, x + 3)


def test_f33_tensors_without_bytes_are_refused(warm):
    """Would catch a fake tensor that arrives as garbage."""

    def fake(group):
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            return torch.empty(3)

    with pytest.raises(WorkerError, match="FakeTensor of shape"):
        warm.on(0).run(fake)
    all_well(warm, remembers=False)


def test_f34_a_flood_of_prints_is_bounded_and_marked(warm, capsys):
    """Would catch a full pipe that blocks the rank, and a browser that is flooded."""

    def flood(group):
        for i in range(5_000):
            print(f"line {i} " + "x" * 200)
        return "done"

    replies = warm.run(flood)
    assert [reply.value for reply in replies] == ["done"] * 4
    printed, budget = capsys.readouterr().out, warm._processes.tails[0].budget_bytes
    assert 4 * budget < len(printed) < 5 * budget, "a megabyte from each; the lines have their rank's name, too"
    assert "more bytes not shown" in replies[0].output
    shown = [line for line in replies[0].output.splitlines() if line.startswith("line ")]
    assert [int(line.split()[1]) for line in shown[:-1]] == list(range(len(shown) - 1))


def test_f35_output_from_python_c_and_children_is_attributed_and_whole(warm, capsys):
    """Would catch lines torn between ranks, and text from C or from a child that is lost or comes late."""

    def noisy(group):
        import ctypes

        print("python", group.rank)
        os.write(1, b"descriptor\n")
        ctypes.CDLL(None).puts(b"from C")
        subprocess.run([sys.executable, "-c", "import sys; sys.stderr.write('child\\n')"])
        print("10%\r50%\r100%")
        os.write(2, b"bad \xff byte\n")
        print("no newline at the end", end="")

    replies = warm.run(noisy)
    expected = {"descriptor", "from C", "child", "100%", "bad \ufffd byte", "no newline at the end"}
    for reply in replies:
        lines = reply.output.splitlines()
        assert set(lines) == expected | {f"python {reply.rank}"}
    printed = capsys.readouterr().out.splitlines()
    assert all(line.startswith("[rank ") for line in printed)
    assert sum(line == "[rank 2] from C" for line in printed) == 1


def test_f36_a_late_print_is_not_shown_under_the_next_cell(warm, capsys, tmp_path):
    """Would catch a thread of an earlier cell writing into a later one, between cells or during one."""

    def later(group, folder):
        def late():
            for when in ("between", "during"):
                while not (folder / when).exists():
                    time.sleep(0.01)
                print("LATE")
                (folder / f"{when} {group.rank}").touch()

        threading.Thread(target=late, daemon=True).start()

    def now(group, folder):
        (folder / "during").touch()
        while not (folder / f"during {group.rank}").exists():
            time.sleep(0.01)
        print("now")

    warm.run(later, tmp_path)
    (tmp_path / "between").touch()
    assert until(lambda: len(list(tmp_path.glob("between *"))) == 4)
    assert [reply.output for reply in warm.run(now, tmp_path)] == ["now\n"] * 4
    assert "LATE" not in capsys.readouterr().out


def test_f38_ranks_share_directory_path_environment_seeds_and_dtype(monkeypatch):
    """Would catch ranks that differ, or that do not see what the notebook sees."""
    monkeypatch.setenv("LABKIT_TEST_COLOUR", "blue")
    with Cluster(3, device="cpu", quiet=True) as cluster:

        def setting(group):
            import random

            return (
                os.getcwd(),
                tuple(sys.path),
                os.environ["LABKIT_TEST_COLOUR"],
                random.random(),
                torch.rand(1).item(),
                torch.get_default_dtype(),
                torch.initial_seed(),
            )

        values = {reply.value for reply in cluster.run(setting)}
        assert len(values) == 1
        (value,) = values
        assert value[0] == os.getcwd()
        assert value[1] == tuple(sys.path)
        assert value[2] == "blue"


def test_f40_nothing_listens_beyond_loopback_and_the_folder_is_private(warm):
    """Would catch a store or a gloo device bound to all interfaces, and a folder that others may read."""
    warm.run(lambda group: group.all_reduce(torch.ones(1)))
    family = [*warm.pids, psutil.Process(warm.pids[0]).ppid(), os.getpid()]
    listening = [
        connection.laddr
        for pid in family
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening, "gloo listens somewhere, else this test looks in the wrong place"
    assert {address.ip for address in listening} <= {"127.0.0.1", "::1"}
    assert stat.S_IMODE(os.stat(warm._processes.folder).st_mode) == 0o700


@pytest.mark.rest
def test_200_mb_of_output_and_a_gib_come_back_while_dev_shm_is_tiny(tmp_path):
    """Would catch results that lie in /dev/shm (a container gives it 64 MB), output that fills memory or a disk, and
    a result that is cut at 2^31 bytes or copied until memory ends. The namespace of mounts is the program's own."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip("needs root for a namespace of mounts")
    program = (
        "import os, torch, labkit\n"
        "tiny = os.system('mount -t tmpfs -o size=64k tmpfs /dev/shm') == 0\n"
        "def flood(group):\n"
        "    for _ in range(50):\n"
        "        os.write(1, b'x' * 999_999 + b'\\n')\n"
        "    return torch.full((1 << 28,), float(group.rank)) if group.rank == 1 else None\n"
        "with labkit.Cluster(4, device='cpu', quiet=True) as c:\n"
        "    replies = c.run(flood)\n"
        "    big = replies[1].value\n"
        "    print()\n"
        "    shown = len(replies[0].output)\n"
        "    print('tiny' if tiny else 'as it is', big.nbytes, bool((big == 1).all()), shown < 1 << 22)\n"
    )
    command = ["unshare", "--mount", sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, cwd=os.getcwd())
    if "unshare failed" in done.stderr or "Operation not permitted" in done.stderr:
        pytest.skip(f"cannot make a namespace of mounts here: {done.stderr.strip()[:100]}")
    assert done.stdout.splitlines()[-1] == f"tiny {1 << 30} True True", done.stderr
    assert len(done.stdout) < 50_000_000


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root for a network namespace")
def test_f44_a_machine_without_network_or_name_can_start_a_cluster(tmp_path):
    """Would catch a rendezvous that resolves the host's name or wants a route to somewhere."""
    program = (
        "import os; os.system('ip link set lo up 2>/dev/null || ifconfig lo up 2>/dev/null')\n"
        "import socket; socket.sethostname('no-such-name.invalid')\n"
        "import labkit\n"
        "def total(group):\n"
        "    import torch\n"
        "    return group.all_reduce(torch.ones(1)).item()\n"
        "with labkit.Cluster(2, device='cpu', quiet=True) as c:\n"
        "    print([r.value for r in c.run(total)])\n"
    )
    command = ["unshare", "--net", "--uts", sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, cwd=os.getcwd())
    if "unshare failed" in done.stderr or "Operation not permitted" in done.stderr:
        pytest.skip(f"cannot make a network namespace here: {done.stderr.strip()[:100]}")
    assert "[2.0, 2.0]" in done.stdout, done.stderr


NOBODYS = """
import glob, os, tempfile
import labkit
from labkit.course.exercises.catalogue import problem
from labkit.course.judge import judge_source
from labkit.course.judge.walls import rights

def total(group):
    import torch
    return group.all_reduce(torch.ones(1)).item(), os.geteuid()

before = glob.glob(tempfile.gettempdir() + "/labkit-*")
with labkit.Cluster(2, device="cpu", quiet=True) as cluster:
    print([reply.value for reply in cluster.run(total)], any(rights()))
print(judge_source("00.1", problem("00.1").solution))
print([path for path in glob.glob(tempfile.gettempdir() + "/labkit-*") if path not in before and os.stat(path).st_uid])
"""


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root to become another user")
def test_a_user_without_any_rights_can_start_a_cluster_and_have_a_program_judged(tmp_path):
    """Would catch a folder, a limit or a wall that only root can set up. The user is 65534, without capabilities. Where
    Python lies in a folder that only root may enter, it sees an open one in its place, with nothing else in it."""
    needed = sorted(
        {Path(sys.base_prefix), Path(sys.prefix), *(Path(it.__file__).parents[1] for it in (torch, labkit))}
    )
    hidden: dict[Path, list[Path]] = {}
    for path in needed:
        for above in [folder for folder in reversed(path.parents) if not folder.stat().st_mode & 0o001][:1]:
            hidden.setdefault(above, []).append(path)
    steps = ["mount --make-rprivate /"]
    for above, paths in hidden.items():
        kept = {path: tmp_path / str(needed.index(path)) for path in paths}
        for path, aside in kept.items():
            aside.mkdir()
            steps.append(f"mount --bind '{path}' '{aside}'")
        steps.append(f"mount -t tmpfs -o mode=755 none '{above}'")
        steps += [f"mkdir -p '{path}'; mount --bind '{aside}' '{path}'" for path, aside in kept.items()]
    user = "--reuid 65534 --regid 65534 --clear-groups --inh-caps=-all --bounding-set=-all"
    steps.append(f"exec setpriv {user} '{sys.executable}' -c \"$PROGRAM\"")
    environment = {"PATH": os.environ["PATH"], "HOME": "/", "PROGRAM": NOBODYS}
    command = ["unshare", "--mount", "sh", "-ec", "\n".join(steps)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LONG_S, env=environment, cwd="/", check=False
    )
    if any(words in done.stderr for words in ("unshare: ", "mount: ", "setpriv: ")):
        pytest.skip(f"cannot become another user here: {done.stderr.strip()[:100]}")
    first, *report, last = done.stdout.strip().splitlines()
    assert (first, last) == ("[(2.0, 65534), (2.0, 65534)] False", "[]"), done.stderr
    assert "all five verdicts hold" in report[0]
    assert not any("this machine" in line for line in report), report


def test_sockets_of_the_learner_survive_the_freeing_of_ranks(warm):
    """Would catch a stop that cuts every connection of a rank in place of gloo's."""

    def connect(group):
        import socket

        a = socket.create_server(("127.0.0.1", 0))
        b = socket.create_connection(a.getsockname())
        group.state["pair"] = (a, b, a.accept()[0])

    warm.run(connect)
    with pytest.raises(WorkerError):
        warm.run(lambda group: group.all_reduce(torch.ones(1)) if group.rank else None)

    def talk(group):
        _, b, c = group.state["pair"]
        b.sendall(b"still here")
        return c.recv(100)

    assert [reply.value for reply in warm.run(talk)] == [b"still here"] * 4


@pytest.mark.parametrize("n", [12, pytest.param(64, marks=pytest.mark.rest)])
def test_many_ranks_start_and_sum_on_two_cores(n, monkeypatch):
    """Would catch a design whose cost grows with the square of the ranks."""
    monkeypatch.setattr(rank_processes, "JOIN_S", LONG_S)
    with Cluster(n, device="cpu", quiet=True) as cluster:
        totals = {reply.value for reply in cluster.run(lambda group: group.all_reduce(torch.ones(1)).item())}
        assert totals == {float(n)}
        pids = cluster.pids
    assert gone(pids)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each rank imports torch")
def test_a_rank_takes_less_than_20_mb_of_its_own():
    """Would catch a rank that imports torch again, or a collector that copies every page."""
    with Cluster(2, device="cpu", quiet=True) as cluster:
        cluster.run(lambda group: group.all_reduce(torch.ones(1)))
        assert max(row.private_bytes for row in cluster.status()) < 20e6
