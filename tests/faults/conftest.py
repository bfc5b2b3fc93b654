"""Clusters that are broken on purpose. Every process that is ended here was started here, and is ended by its id.

No test here compares seconds. What is waited for is asked for until it is there; a stop is pressed when the ranks are
where it should find them; and what the library itself takes for long or short is set here (`labkit.launch.call`): ranks
that are to survive get a minute to come free, since a busy machine frees them late.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from labkit import Cluster
from labkit.launch import call
from labkit.launch.zygote import zygote
from tests.waiting import until


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is not freed within this time is replaced; and who waits for ever in a test does so from the first moment."""
    monkeypatch.setattr(call, "RELEASE_S", 60.0)
    monkeypatch.setattr(call, "SURE_S", 0.2)
    monkeypatch.setattr(call, "LOOK_S", 0.1)


@pytest.fixture(
    params=[
        (3, "shared"),
        pytest.param((2, "gloo"), marks=pytest.mark.rest),
        pytest.param((5, "shared"), marks=pytest.mark.rest),
    ],
    ids=["3", "2-gloo", "5"],
)
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A fresh cluster that remembers k = 5 on every rank, and must leave nothing behind."""
    n_ranks, wire = request.param
    with Cluster(n_ranks, device="cpu", quiet=True, wire=wire) as made:
        made.state["k"] = 5
        folder, pids = Path(made._processes.folder), list(made.pids)
        yield made
        pids += made.pids
    assert gone(pids), "ranks outlived their cluster"
    assert not folder.exists(), "the private folder outlived its cluster"


@pytest.fixture
def four() -> Iterator[Cluster]:
    """A fresh cluster of 4 that remembers k = 5."""
    with Cluster(4, device="cpu", quiet=True) as made:
        made.state["k"] = 5
        yield made


def gone(pids: list[int]) -> bool:
    """Whether all these processes end."""
    return until(lambda: not any(pid and psutil.pid_exists(pid) and _running(pid) for pid in pids))


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
    """What this process and its zygote hold: file descriptors, threads, processes, folders of clusters."""
    import tempfile

    me, forker = psutil.Process(), zygote().process
    return {
        "fds": me.num_fds(),
        "threads": me.num_threads(),
        "processes": len(me.children(recursive=True)),
        "zygote fds": psutil.Process(forker.pid).num_fds() if forker.poll() is None else 0,
        "temp": sum(name.startswith("labkit-") for name in os.listdir(tempfile.gettempdir())),
    }
