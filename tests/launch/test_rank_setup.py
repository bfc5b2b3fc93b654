"""What a rank finds in its environment, and on which GPU its threads are."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from labkit.launch.rank_setup import variables
from labkit.launch.rank_spec import RankSpec
from labkit.launch.worker import WorkerRank

SPEC = RankSpec(rank=2, n_ranks=4, interface="lo", backend="gloo", environment={"TERM": "xterm"})
NCCLS = {
    "NCCL_SOCKET_IFNAME": "lo",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",
}
PLACE = {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}
OWN = {"GLOO_SOCKET_IFNAME": "lo", "RANK": "2", "WORLD_SIZE": "4"}


def test_ranks_on_nccl_get_what_labkit_needs_of_it():
    """Would catch a port that listens beyond this machine, and torch's watchdog, which ends ranks that labkit frees."""
    assert variables(SPEC) == {"TERM": "xterm", **OWN, **PLACE}
    assert variables(replace(SPEC, backend="nccl")) == {"TERM": "xterm", **NCCLS, **OWN, **PLACE}


def test_ranks_that_share_a_gpu_are_machines_of_their_own_for_nccl():
    """Would catch two ranks that NCCL refuses as duplicates, and a user's name for the machine that all ranks get."""
    spec = replace(SPEC, backend="nccl", one_gpu=True, environment={"NCCL_HOSTID": "mine"})
    names = [variables(replace(spec, rank=rank))["NCCL_HOSTID"] for rank in range(3)]
    assert len(set(names)) == 3
    assert variables(spec)["NCCL_NET"] == "Socket"
    assert variables(replace(spec, one_gpu=False))["NCCL_HOSTID"] == "mine"


def test_what_the_user_has_set_stays():
    """Would catch a network or a watchdog that somebody has chosen and that is chosen again."""
    chosen = dict.fromkeys(NCCLS, "mine")
    got = variables(replace(SPEC, backend="nccl", environment=chosen))
    assert got == {**chosen, **OWN, **PLACE}


def test_ranks_of_several_machines_are_not_bound_to_loopback():
    """Would catch joined ranks whose NCCL cannot reach the other nodes."""
    place = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    got = variables(replace(SPEC, backend="nccl", on_node=place, interface="eth0"))
    assert "NCCL_SOCKET_IFNAME" not in got
    assert (got["GLOO_SOCKET_IFNAME"], got["LOCAL_RANK"], got["RANK"]) == ("eth0", "0", "2")


@pytest.mark.parametrize(("device", "calls"), [("cuda:2", ["cuda:2", "abort"]), ("cpu", ["abort"])])
def test_the_thread_that_frees_a_rank_is_on_the_ranks_gpu(device, calls, monkeypatch):
    """Would catch a rank that aborts NCCL from GPU 0, where a thread begins, and leaves half a gigabyte there."""
    seen = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: seen.append(str(device)))
    rank = object.__new__(WorkerRank)
    rank.box, rank.generation, rank.spec = None, 1, RankSpec(device=device)
    rank.groups = SimpleNamespace(abort=lambda: seen.append("abort"))
    assert rank.cut(1, frozenset()) == 0
    assert seen == calls
