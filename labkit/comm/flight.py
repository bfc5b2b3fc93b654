"""What torch itself knows of collectives: its flight recorder, for code that does not go through a Group.

The functions that write its dump are private, and absent in some versions of torch: then there is nothing to read.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch.distributed as dist

from labkit.comm.dumps import load, read
from labkit.comm.private import private


def raw(active: bool = False, stacks: bool = True, entries: bool = True) -> bytes:
    """This process's dump as torch pickles it, of all that is kept or of what is in flight; b"" where there is none.

    Stacks take most of a second the first time; without `entries` only the groups' counters are written."""
    write = private("torch._C._distributed_c10d._dump_nccl_trace") if _nccl() else None
    write = write or private("torch._C._distributed_c10d._dump_fr_trace")
    try:
        return write(includeCollectives=entries, includeStackTraces=stacks, onlyActive=active) if write else b""
    except (RuntimeError, TypeError):  # it is switched off, or has other arguments
        return b""


def members() -> dict[str, tuple[int, ...]]:
    """The ranks of every process group that this process has made, by the name that the recorder uses."""
    world = private("torch.distributed.distributed_c10d._world")
    if world is None:
        return {}
    return {
        world.pg_names[group]: tuple(ranks)
        for group, ranks in list(world.pg_group_ranks.items())
        if group is not None and group in world.pg_names
    }


def groups() -> list[Any]:
    """The process groups that this process has made and not destroyed; [] where torch does not tell."""
    world = private("torch.distributed.distributed_c10d._world")
    return list(world.pg_map) if world is not None else []


def enqueued() -> int:
    """The number of collectives that this process has called so far, in all groups."""
    data = raw(stacks=False, entries=False)
    status = pickle.loads(data).get("pg_status", {}) if data else {}
    return sum(group.get("last_enqueued_collective", 0) for group in status.values())


def in_flight() -> list[dict[str, Any]]:
    """Collectives in flight on this rank by torch's flight recorder; [] where there is none.

    Each: group, seq, verb, shapes, dtypes, ranks. Messages (send, recv) are not recorded by torch."""
    data = raw(active=True, stacks=False)
    if not data:
        return []
    dump = read(load(data), 0, members())
    return [
        {
            "group": record.name,
            "seq": record.seq,
            "verb": record.verb,
            "shapes": [list(shape) for shape in record.sizes] or "",
            "dtypes": list(record.dtypes),
            "ranks": dump.members.get(record.group, ()),
        }
        for record in dump.flying
    ]


def _nccl() -> bool:
    return dist.is_initialized() and "nccl" in dist.get_backend_config()  # "cpu:gloo,cuda:nccl", say
