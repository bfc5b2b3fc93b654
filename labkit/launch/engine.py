"""What an engine (torchrun, Slurm, Kubernetes, Ray) tells a process in its environment: which rank it is, and where."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass

_NAMES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", ""),
)


@dataclass(frozen=True)
class NodePosition:
    """Which rank a process is, of how many, and where: number `local` of the `n_local` on its node.

    node      the node's name
    group     the engine's number of the node; "" if it gives none
    restart   how often torchrun has started the ranks again; "0" under other engines
    """

    rank: int
    n_ranks: int
    local: int = 0
    n_local: int = 1
    node: str = ""
    group: str = ""
    restart: str = "0"


def gpu_of(local: int, visible: str | None) -> int:
    """The number of a rank's GPU as its own process counts them, from its number on its node and CUDA_VISIBLE_DEVICES.

    torchrun shows all GPUs of a node to each rank. Slurm (`--gpus-per-task=1`) and Ray show each rank one, its own: it
    is number 0 there."""
    return 0 if visible is not None and len([name for name in visible.split(",") if name.strip()]) == 1 else local


def position_from(environment: Mapping[str, str], rank: int | None = None, n_ranks: int | None = None) -> NodePosition:
    """ValueError if neither the environment nor the arguments say which rank this is."""
    for names in _NAMES:
        values = [environment.get(name) for name in names]
        if values[0] is not None and values[1] is not None:
            rank, n_ranks = int(values[0]), int(values[1])
            local, n_local = int(values[2] or 0), int(values[3] or 1)
            break
    else:
        local, n_local = 0, 1
    if rank is None or n_ranks is None:
        raise ValueError(
            "which rank is this? Start it with torchrun or srun, which set RANK and WORLD_SIZE (or SLURM_PROCID and "
            "SLURM_NTASKS), or say --rank 0 --n-ranks 2"
        )
    return NodePosition(
        rank=rank,
        n_ranks=n_ranks,
        local=local,
        n_local=n_local,
        node=environment.get("SLURMD_NODENAME") or socket.gethostname(),
        group=environment.get("GROUP_RANK") or environment.get("SLURM_NODEID") or "",
        restart=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )
