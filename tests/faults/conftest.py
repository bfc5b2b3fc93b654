"""Clusters that are broken on purpose. Every process that is ended here was started here, and is ended by its id."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from labkit import Cluster
from labkit.launch.zygote import zygote


@pytest.fixture(params=[2, 4])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A fresh cluster that remembers k = 5 on every rank, and must leave nothing behind."""
    with Cluster(request.param, quiet=True) as made:
        made.state["k"] = 5
        folder, pids = Path(made._crew.folder), list(made.pids)
        yield made
        pids += made.pids
    assert gone(pids), "ranks outlived their cluster"
    assert not folder.exists(), "the private folder outlived its cluster"


@pytest.fixture
def four() -> Iterator[Cluster]:
    """A fresh cluster of 4 that remembers k = 5."""
    with Cluster(4, quiet=True) as made:
        made.state["k"] = 5
        yield made


BUSY_S = 6.0
"""What a busy machine may add to a recovery; far from the minute after which a time-out would have helped."""


def gone(pids: list[int], within_s: float = BUSY_S) -> bool:
    """Whether all these processes end in time."""
    deadline = time.monotonic() + within_s
    while any(pid and psutil.pid_exists(pid) and _running(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def all_well(cluster: Cluster, remembers: bool = True) -> None:
    """The next collective gives the right sum on every rank, and names are kept."""
    values = [reply.value for reply in cluster.run(_sum_and_name)]
    assert [value[0] for value in values] == [cluster.n_ranks] * cluster.n_ranks
    if remembers:
        assert [value[1] for value in values] == [5] * cluster.n_ranks


def _sum_and_name(group):
    return group.all_reduce(torch.ones(2))[0].item(), group.state.get("k")


def belongings() -> dict[str, int]:
    """What this process and its zygote hold: file descriptors, threads, processes, files in shared memory and temp."""
    import tempfile

    me = psutil.Process()
    shm = len(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else 0
    temp = sum(name.startswith("labkit-") for name in os.listdir(tempfile.gettempdir()))
    return {
        "fds": me.num_fds(),
        "threads": me.num_threads(),
        "processes": len(me.children(recursive=True)),
        "zygote fds": psutil.Process(zygote().process.pid).num_fds(),
        "shm": shm,
        "temp": temp,
    }
