"""A run under torchrun's agents that loses one of them, with the losses of the run that lost nobody."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys

import psutil
import pytest

from labkit.course.training import elastic
from labkit.course.training.training import Order
from labkit.plan.job.recipe import Recipe
from labkit.plan.partition.layout import Layout
from labkit.train.config import GPTConfig
from tests.waiting import LONG_S, until

CONFIG = GPTConfig(n_layer=2, d_model=16, n_head=2, vocab=256, seq=8, tied=False)
SIZES = ("--layers", "2", "--width", "16", "--heads", "2", "--seq", "8", "--batch", "12", "--device", "cpu")


@pytest.mark.parametrize(
    ("n", "layout", "recipe", "dp"),
    [
        (4, Layout(), Recipe(batch_size=12), 4), (5, Layout(), Recipe(batch_size=12), 4),
        (7, Layout(tp=2), Recipe(batch_size=12), 3), (6, Layout(pp=2), Recipe(batch_size=12, n_micro=6), 2),
        (5, Layout(dp=9), Recipe("zero3", batch_size=12, shard_ranks=2), 4),
    ],
)  # fmt: skip
def test_dp_is_the_largest_that_the_processes_and_the_batch_allow(n, layout, recipe, dp):
    """Would catch a run that ends because one rank too few is left, and one that changes tp or pp."""
    made = elastic.fitting(Order(CONFIG, recipe, layout, 1), n)
    assert (made.dp, made.pp, made.tp) == (dp, layout.pp, layout.tp)


def test_too_few_processes_no_engine_and_no_folder_are_refused_with_the_mend(monkeypatch):
    """Would catch a worker that waits for ranks that nobody starts."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    order = Order(CONFIG, Recipe(batch_size=12), Layout(tp=4), 1)
    with pytest.raises(ValueError, match="no dp fits 3 processes: 1 stages x 4 tensor-parallel ranks are more than 3"):
        elastic.fitting(order, 3)
    with pytest.raises(ValueError, match="name a folder, --out"):
        elastic.train(order)
    with pytest.raises(ValueError, match=r"no engine has started this process .*torchrun --nnodes"):
        elastic.train(Order(CONFIG, Recipe(batch_size=12), Layout(), 1, "run"))


def listens(process, port):
    """True if a process listens on a port."""
    return any(
        link.status == "LISTEN" and link.laddr.port == port for link in psutil.Process(process.pid).net_connections()
    )


def free_port():
    """A port that was free a moment ago: torchrun wants to be told one."""
    with socket.socket() as some:
        some.bind(("localhost", 0))
        return some.getsockname()[1]


def agent(port, folder, log):
    """One of two agents, with one worker; it ends the job when it is alone for a second."""
    conf = "last_call_timeout=10,keep_alive_interval=1,keep_alive_max_attempt=4"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1"),
        *("--max-restarts", "9", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "run"),
        *("--rdzv-conf", conf, "-m", "labkit", "train", "--elastic", "--strategy", "zero1", *SIZES),
        *("--out", str(folder), "--save-every", "1", "--steps", "4000"),
    ]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)


def end(process):
    """End an agent and its workers, by their ids."""
    family = [process, *psutil.Process(process.pid).children(recursive=True)] if process.poll() is None else []
    for member in family:
        try:
            os.kill(member.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def losses(folder):
    """The losses in the last checkpoint. A run that goes on deletes old ones: then the next look finds a later one."""
    while True:
        try:
            return json.loads(max(folder.glob("step-*[0-9]/whole.json")).read_text())["extra"]["losses"]
        except FileNotFoundError:
            continue


@pytest.mark.rest
@pytest.mark.timeout(900)
def test_when_an_agent_dies_the_other_goes_on_from_the_last_checkpoint(tmp_path):
    """Would catch survivors that wait for ever, meet the dead at their old addresses, begin anew, or go on with the
    data of other steps."""
    folder, port = tmp_path / "run", free_port()
    with (tmp_path / "log").open("w") as log:
        agents = [agent(port, folder, log)]
        try:
            assert until(lambda: listens(agents[0], port), LONG_S)  # it holds the store: the second may die
            agents.append(agent(port, folder, log))
            assert until(lambda: list(folder.glob("step-00000[3-9]")), 3 * LONG_S), (tmp_path / "log").read_text()
            end(agents[1])
            told = "1 processes: Layout(dp=1, pp=1, tp=1), from the last checkpoint"
            assert until(lambda: told in (tmp_path / "log").read_text(), 3 * LONG_S), (tmp_path / "log").read_text()
            before = len(losses(folder))
            assert until(lambda: len(losses(folder)) > before + 3), (tmp_path / "log").read_text()
        finally:
            for process in agents:
                end(process)
    assert "2 processes: Layout(dp=2, pp=1, tp=1)\n" in (tmp_path / "log").read_text()
    kept = losses(folder)
    assert [number for number, _ in kept] == list(range(len(kept)))
    words = ("--dp", "2", "--strategy", "zero1", *SIZES, "--out", str(tmp_path / "straight"), "--steps", str(len(kept)))
    subprocess.run([sys.executable, "-m", "labkit", "train", *words], check=True, stdout=subprocess.DEVNULL)
    straight = losses(tmp_path / "straight")
    assert kept[:3] == straight[:3]  # two ranks, as here: bit by bit
    for (_, here), (_, there) in zip(kept, straight, strict=True):
        assert here == pytest.approx(there, rel=1e-3)


def test_the_store_of_a_round_is_that_of_the_living():
    """Would catch the addresses of dead processes, which an engine's store keeps."""
    import threading

    import torch.distributed as dist

    from labkit.comm.process_groups import _round

    store = dist.HashStore()
    for generation in ("one", "two"):
        parts = {}

        def join(rank, parts=parts):
            parts[rank] = _round(store, rank, 3, 60)

        threads = [threading.Thread(target=join, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not any(parts[rank].check(["address"]) for rank in range(3))
        parts[1].set("address", generation)
        assert [parts[rank].get("address").decode() for rank in range(3)] == [generation] * 3
    assert re.fullmatch(r"[0-9a-f]{16}", store.get("hello/1").decode())
