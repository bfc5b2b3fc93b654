"""Joined clusters: ranks that torchrun has started, over loopback; on two machines made of network namespaces (`rest`).

Every process that is ended here was started here, and is ended by its id. No test compares seconds.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import zmq
from IPython.core.interactiveshell import InteractiveShell

from labkit import Cluster, WorkerError
from labkit.launch import call, join_file, serialize
from labkit.launch.engine import NodePosition, gpu_of, position_from
from labkit.launch.reliable_messages import Letters
from tests.waiting import LONG_S, once, stop_button, until, waiting

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def torchrun(cluster: Cluster, *before: str, log: Path, **swaps: str) -> subprocess.Popen:
    """The command of this cluster, as its own process group; `before` it a command that runs it elsewhere."""
    words = cluster.command.split()[1:]
    words = [swaps.get(word, word) for word in words]
    command = [*before, sys.executable, "-m", "torch.distributed.run", *words]
    with log.open("ab") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, env=ENVIRONMENT, stdin=subprocess.DEVNULL)


def end(process: subprocess.Popen) -> None:
    """End an engine that a failed test has left behind; the posts see that and end their ranks."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(LONG_S)
        except subprocess.TimeoutExpired:
            process.kill()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the file of keys and the engine's output go."""
    return tmp_path_factory.mktemp("join")


@pytest.fixture(scope="module")
def joined(folder: Path) -> Iterator[Cluster]:
    """Two ranks under torchrun. At the end they leave nothing behind, and torchrun says that all went well."""
    cluster = Cluster.join(2, file=folder / "keys.json", host="127.0.0.1", quiet=True, timeout_s=LONG_S)
    engine = torchrun(cluster, log=folder / "log")
    try:
        cluster.run(lambda group: None)
        yield cluster
        descendants = psutil.Process(engine.pid).children(recursive=True)
        cluster.close()
        assert engine.wait(LONG_S) == 0, (folder / "log").read_text()
        assert not psutil.wait_procs(descendants, LONG_S)[1], "processes outlived their cluster"
        assert not (folder / "keys.json").exists(), "the keys outlived their cluster"
    finally:
        cluster.close()
        end(engine)


@pytest.mark.slow
def test_joined_ranks_compute_print_remember_and_book_as_those_at_home_do(joined, folder, capsys, monkeypatch):
    """Would catch large tensors that are sent as a path of this machine, output that stays on the node, a world that
    does not add up, a cell that has names of its own, and keys that a list of processes shows."""
    big = torch.arange(1 << 19, dtype=torch.float32)

    monkeypatch.setattr(serialize.Parcel, "_shared", None)  # on one machine a path would be found

    def work(group, big):
        serialize.Parcel._shared = None
        print("rank", group.rank, "prints")
        os.system("echo a child prints")
        return big * group.rank, group.all_reduce(big)[-1].item(), int(os.environ["LOCAL_RANK"])

    replies = joined.run(work, big)
    assert [torch.equal(reply.value[0], big * reply.rank) for reply in replies] == [True, True]
    assert [reply.value[1:] for reply in replies] == [(2 * big[-1].item(), 0), (2 * big[-1].item(), 1)]
    assert all(sorted(r.output.splitlines()) == ["a child prints", f"rank {r.rank} prints"] for r in replies)
    assert [reply.ledger.sent_bytes("all_reduce") for reply in replies] == [big.numel() * 4] * 2
    assert replies[0].ledger.sent_bytes(axis="node") == 0, "both ranks are on one machine"
    keys = json.loads((folder / "keys.json").read_text())
    processes = psutil.Process(os.getpid()).children(recursive=True)
    shown = " ".join(
        [joined.command, repr(join_file.read(folder / "keys.json")), *(" ".join(p.cmdline()) for p in processes)]
    )
    assert not any(keys[name] in shown for name in ("secret", "server", "public"))
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "labkit")
    shell.user_ns["joined"] = joined
    capsys.readouterr()
    for cell in ("x = rank + 1", "x * 10"):
        shell.run_cell_magic("ranks", "", cell)
    assert capsys.readouterr().out.splitlines() == ["rank 0: 10", "rank 1: 20"]
    assert joined.state["x"] == [1, 2]


@pytest.mark.slow
def test_a_joined_rank_is_debugged_in_the_notebook(joined, monkeypatch, capsys):
    """Would catch a post that does not pass on what a debugger says, and lines that go to another rank."""

    def sum_of_ranks(group):
        x = torch.ones(1) * (group.rank + 1)
        if group.rank == 1:
            breakpoint()
            x = x * 10
        return group.all_reduce(x).item()

    def type_line(prompt):
        # what `others` says must not depend on speed
        return lines.pop(0) if lines[0] != "others" or waiting(joined, 0)() else "p 'too early'"

    lines = ["others", "p x + 5", "n", "c", "q"]
    monkeypatch.setattr(joined, "read_line", type_line)
    assert [reply.value for reply in joined.run(sum_of_ranks)] == [21.0, 21.0]
    printed = capsys.readouterr().out
    assert "tensor([7.])" in printed
    assert re.search(r"rank 0 has been in all_reduce #1 on world .*, waiting for rank 1", printed)
    with pytest.raises(KeyboardInterrupt, match="All ranks are still there"):
        joined.run(sum_of_ranks)


@pytest.mark.slow
def test_the_axis_node_has_the_bytes_that_leave_a_machine(joined):
    """Would catch a table by node that forgets what a backend sends inside a collective, or books it within a node."""

    def both(group):
        group.all_reduce(torch.ones(8))
        if group.rank == 0:
            group.send(torch.ones(4), 1).wait()
        else:
            group.recv(0)

    first, second = (reply.ledger for reply in joined.run(both))
    first.place(0, ("a", "b"))
    second.place(1, ("a", "b"))
    assert first.between_nodes() == {("a", "b"): 32 + 16}
    assert second.between_nodes() == {("b", "a"): 32}
    assert first.sent_bytes("send", axis="node") == 16
    assert first.sent_bytes(axis="node") == first.sent_bytes() == 48


@pytest.mark.slow
def test_an_error_and_a_hang_and_the_stop_button_name_the_rank_and_keep_it(joined, monkeypatch):
    """Would catch a root cause that is a broken connection, a rank that nothing gets out of a collective on another
    machine, an autopsy without what the rank there waits for, and names that are lost with the world."""
    monkeypatch.setattr(call, "RELEASE_S", 60.0)
    joined.state["k"] = 5
    pids = joined.pids

    def fails(group):
        if group.rank == 1:
            raise KeyError("seven")
        group.all_reduce(torch.ones(3))

    def skips(group):
        if group.rank == 0:
            group.all_reduce(torch.ones(3))

    with pytest.raises(WorkerError, match=f"rank 1 on node {socket.gethostname()} raised KeyError: 'seven'"):
        joined.run(fails)
    with pytest.raises(WorkerError, match="rank 0 waits in all_reduce #1 on world for rank 1, which has finished"):
        joined.run(skips)
    with once(waiting(joined, 0), stop_button), pytest.raises(KeyboardInterrupt, match="rank 0 has been in recv"):
        joined.run(lambda group: group.recv(1) if group.rank == 0 else time.sleep(LONG_S))
    values = [reply.value for reply in joined.run(lambda group: group.all_reduce(torch.ones(1)).item())]
    assert (values, joined.pids, joined.state["k"]) == ([2.0, 2.0], pids, [5, 5])


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.slow
def test_who_has_no_key_is_not_listened_to(joined, folder, capsys):
    """Would catch a port that unpickles before it knows who is there: no key, another key, plain bytes."""
    bomb = [
        Letters().write([b"p", pickle.dumps(Bomb(folder / "exploded"))]),
        [b"", pickle.dumps(Bomb(folder / "boom"))],
    ]
    address = join_file.read(folder / "keys.json").addresses[0]
    context = zmq.Context()
    strangers = [context.socket(zmq.DEALER) for _ in range(2)]
    public, secret = zmq.curve_keypair()
    strangers[1].curve_serverkey = join_file.read(folder / "keys.json").server.encode()
    strangers[1].curve_publickey, strangers[1].curve_secretkey = public, secret
    for stranger in strangers:
        stranger.connect(address)
        for frames in bomb:
            stranger.send_multipart(frames[:3])
    with socket.create_connection(address.removeprefix("tcp://").split(":")) as plain:
        plain.sendall(pickle.dumps(Bomb(folder / "plain")) * 100)
        assert until(lambda: joined.run(lambda group: 1) and joined._processes.gate.allowed.refused)
    assert [reply.value for reply in joined.run(lambda group: group.rank)] == [0, 1]
    assert "Somebody without the key" in capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir()) == ["keys.json", "log"], "a stranger's bytes were unpickled"
    for stranger in strangers:
        stranger.close(0)
    context.term()


@pytest.mark.faults
@pytest.mark.parametrize("victim", ["rank", "post"])
def test_a_rank_or_its_post_that_dies_is_named_and_comes_anew_from_its_engine(joined, victim, capsys):
    """Would catch a notebook that waits for the dead, that blames the rank which the engine ended on its account, that
    starts ranks by itself, and one that listens to the ghost of the generation before."""
    joined.state["k"] = 5
    posts = [joined._processes.peers[rank].hello.pid for rank in range(2)]

    def dies(group, pid):
        if group.rank == 1:
            os.kill(pid or os.getpid(), signal.SIGKILL)
        group.all_reduce(torch.ones(3))

    with pytest.raises(WorkerError) as caught:
        joined.run(dies, posts[1] if victim == "post" else 0)
    words = {"rank": "was killed by SIGKILL", "post": "cannot be reached any more"}[victim]
    assert (caught.value.rank, words in str(caught.value)) == (1, True), str(caught.value)
    values = [reply.value for reply in joined.run(lambda group: group.all_reduce(torch.ones(1)).item())]
    assert values == [2.0, 2.0]
    assert "came anew from the engine" in capsys.readouterr().out
    assert "k" not in joined.state
    assert all(before != joined._processes.peers[rank].hello.pid for rank, before in enumerate(posts))


def test_a_file_that_others_can_read_is_refused_with_the_mend(tmp_path):
    """Would catch keys that lie open, on either side, and a second cluster that writes over the keys of the first."""
    path = tmp_path / "keys.json"
    cluster = Cluster.join(2, file=path, host="127.0.0.1", quiet=True, start_s=0.1)
    try:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(ValueError, match="take another file="):
            Cluster.join(2, file=path, quiet=True)
        with pytest.raises(RuntimeError, match=r"0 of 2 ranks have joined[^$]*rank 1 has not come"):
            cluster.run(lambda group: None)
        path.chmod(0o640)
        with pytest.raises(ValueError, match="chmod 600"):
            join_file.read(path)
    finally:
        cluster.close()
    assert not path.exists()
    with pytest.raises(ValueError, match="deleted by close"):
        join_file.read(path)


def test_numbers_that_do_not_fit_are_refused_before_anything_listens(tmp_path):
    """Would catch a line that starts more ranks than the cluster waits for, and a rank that guesses who it is."""
    with pytest.raises(ValueError, match="take a divisor"):
        Cluster.join(5, nodes=2)
    with pytest.raises(ValueError, match="no address of this machine"):
        Cluster.join(2, host="192.0.2.1", file=tmp_path / "keys.json")
    with pytest.raises(ValueError, match="--rank 0 --n-ranks 2"):
        position_from({})
    slurm = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURMD_NODENAME": "n2"}
    assert position_from(slurm) == NodePosition(3, 4, local=1, node="n2")
    assert position_from({}, 1, 2).rank == 1


def test_a_correspondence_survives_whatever_its_connection_loses():
    """Would catch a message that is handled twice, out of order, or never, and letters that are kept for ever."""
    ours, theirs, read = Letters(), Letters(), []
    for number in range(20):
        frames = ours.write([number])
        if number % 3:  # the others are lost with the connection
            read += frames[1:] if theirs.opened(frames[0]) else []
    for frames in ours.again():
        read += frames[1:] if theirs.opened(frames[0]) else []
    assert read == list(range(20))
    assert ours.opened(theirs.note([])[0])
    assert not ours.kept


@pytest.mark.rest
@pytest.mark.timeout(1200)
def test_ranks_that_ray_has_placed_join_as_those_of_torchrun_do(tmp_path):
    """Would catch a worker that finds its number in torchrun's names only, and an example that does not run."""
    pytest.importorskip("ray", reason="the package ray is not installed")
    cluster = Cluster.join(2, file=tmp_path / "keys.json", host="127.0.0.1", quiet=True, start_s=5 * LONG_S)
    example = Path(__file__).resolve().parents[2] / "examples" / "join" / "ray_tasks.py"
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path), "RAY_USAGE_STATS_ENABLED": "0"}
    with (tmp_path / "log").open("ab") as out:
        command = [sys.executable, str(example), str(tmp_path / "keys.json"), "2"]
        engine = subprocess.Popen(command, stdout=out, stderr=out, env=environment, stdin=subprocess.DEVNULL)
    try:
        replies = cluster.run(lambda group: group.all_reduce(torch.ones(3)).tolist())
        assert [reply.value for reply in replies] == [[2.0] * 3] * 2
        cluster.close()
        assert engine.wait(LONG_S) == 0, (tmp_path / "log").read_text()
    finally:
        cluster.close()
        end(engine)


@pytest.mark.parametrize(
    ("local", "visible", "index"), [(3, None, 3), (3, "0,1,2,3", 3), (3, "2", 0), (1, "GPU-5d5ba0d6", 0), (1, "", 1)]
)
def test_a_rank_that_is_shown_one_gpu_takes_that_one(local, visible, index):
    """Would catch cuda:3 in a task to which Slurm or Ray shows a single GPU, its own, as number 0."""
    assert gpu_of(local, visible) == index
