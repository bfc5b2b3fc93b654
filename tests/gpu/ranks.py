"""Clusters for tests of GPUs: a GPU for each rank, or one for all where there are too few, with NCCL between them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from labkit import Cluster
from labkit.launch.cluster import BareCluster


def place(device: str, n_ranks: int) -> dict[str, Any]:
    """What a cluster of `n_ranks` is given to be on "cpu", or over NCCL on "cuda"."""
    if device == "cuda" and torch.cuda.device_count() < n_ranks:
        return {"device": "cuda:0", "wire": "nccl"}
    return {"device": device}


def cluster_on(device: str, n_ranks: int, **more: Any) -> Cluster:
    """A quiet cluster of `n_ranks` on "cpu", or over NCCL on "cuda"."""
    where = place(device, n_ranks)
    return Cluster(n_ranks, device=where.pop("device"), **{"quiet": True, **where, **more})


def maker(device: str, n_ranks: int) -> tuple[Any, str]:
    """What makes the ranks of a self-test, and on which device."""
    where = place(device, n_ranks)
    there = where.pop("device")
    return partial(BareCluster, **where), there


def over_nccl() -> None:
    """From now on, clusters of this process whose ranks share a GPU have NCCL between them."""
    from labkit.launch import cluster

    chosen = cluster.choose

    def choose(n_ranks: int, device: str = "auto", **more: Any) -> Any:
        shared = device.startswith("cuda:") and more.get("links") is None
        return chosen(n_ranks, device, **more | ({"wire": "nccl"} if shared else {}))

    cluster.choose = choose
