"""A Group for processes that an engine has started: torchrun, Slurm with torch's names, or anything else that sets

    RANK   WORLD_SIZE   LOCAL_RANK   MASTER_ADDR   MASTER_PORT

labkit places no process here, and starts none again: that is the engine's. Where an engine has more processes than a
job can use, the last ones are spares. They wait until the job is over, or until the engine starts all of them anew.

What the ranks then say to each other (gloo, NCCL, torch's store) is not encrypted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from labkit.comm import native
from labkit.comm.group import Group
from labkit.comm.ledger import Ledger
from labkit.comm.process_groups import by_agent
from labkit.launch.engine import gpu_of

NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def n_started() -> int:
    """Processes that the engine has started for this job. ValueError where none has started this one."""
    missing = [name for name in NAMES if name not in os.environ]
    if missing:
        raise ValueError(
            f"no engine has started this process ({', '.join(missing)} not set): start it with torchrun, such as "
            "torchrun --nnodes 1 --nproc-per-node 4 --max-restarts 3 -m labkit train --elastic --out runs/first"
        )
    return int(os.environ["WORLD_SIZE"])


@contextmanager
def agent_world(size: int, device: str = "auto", timeout_s: float = 600) -> Iterator[Group | None]:
    """The group of the first `size` processes that the engine has started. None in a spare, after the others' end.

    `device`: "cpu" (gloo), "cuda" (NCCL, the GPU of LOCAL_RANK), or "auto". A rank that dies makes the others' next
    collective raise RuntimeError, at once on one machine, and after `timeout_s` where the network just goes silent.
    ValueError for more ranks than there are processes."""
    if not 1 <= size <= n_started():
        raise ValueError(f"the engine has started {n_started()} processes: {size} ranks are too many")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        local, seen = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        index = gpu_of(local, os.environ.get("CUDA_VISIBLE_DEVICES"))
        if index >= seen:
            raise ValueError(
                f"rank {os.environ['RANK']} is number {local} on its node, which shows it {seen} GPUs, and NCCL wants "
                f"a GPU for each rank: start at most {seen} ranks on a node, or say --device cpu"
            )
        device = f"cuda:{index}"
        torch.cuda.set_device(torch.device(device))
    rank = int(os.environ["RANK"])
    with by_agent(rank, size, device, timeout_s, os.environ.get("NCCL_HOSTID", "")) as groups:
        yield None if groups is None else native.world(rank, size, device, Ledger(), groups=groups)
