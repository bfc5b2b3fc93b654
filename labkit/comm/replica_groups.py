"""The ranks that ought to hold the same tensor: those of DDP's group, and those along a DTensor's replicated dims.

    mesh (dp 2, tp 2)   placed (Shard, Replicate)    rank 0: pieces [0] on (0, 1)       rank 2: pieces [1] on (2, 3)
    ranks  0 1
           2 3

`hear_entrance` hands on what enters a mesh by `DTensor.from_local`, where torch believes the script that all is equal.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.comm.private import private


def ranks_of(group: Any) -> tuple[int, ...]:
    """The ranks of a process group of torch's, in the world."""
    return tuple(dist.get_process_group_ranks(group))


def world() -> tuple[int, ...]:
    """All ranks; () before there is a world of torch's, and after it was destroyed."""
    return tuple(range(dist.get_world_size())) if dist.is_available() and dist.is_initialized() else ()


def is_placed(tensor: Any) -> bool:
    """True of a DTensor."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def sharing(tensor: Any) -> tuple[int, ...]:
    """The ranks that ought to hold the same piece of a DTensor as this one; () on a rank outside of its mesh."""
    mesh, place = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if place is None:
        return ()
    pairs = zip(tensor.placements, place, strict=True)
    along = tuple(slice(None) if placement.is_replicate() else coordinate for placement, coordinate in pairs)
    return tuple(sorted(int(rank) for rank in mesh.mesh[along].flatten().tolist()))


def is_piece(parameter: Any) -> bool:
    """True of a parameter of FSDP1, of which this rank holds a part."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return False
    flat = private("torch.distributed.fsdp._common_utils._is_fsdp_flattened")
    return isinstance(parameter, fsdp.FlatParameter) or bool(flat(parameter))


def has_own_hook(ddp: Any) -> bool:
    """True if somebody has told this DDP how to send gradients."""
    facts = private("torch.nn.parallel.DistributedDataParallel._get_ddp_logging_data")(ddp)
    return bool(facts) and bool(facts.get("comm_hook"))


def hear_entrance(note: Callable[[Tensor, tuple[int, ...]], None]) -> None:
    """From now on, call `note` with each plain tensor that is declared to be the same on ranks, and these ranks."""
    from torch.distributed.tensor import DTensor

    enter = DTensor.from_local

    @functools.wraps(enter)
    def from_local(local_tensor: Any, device_mesh: Any = None, placements: Any = None, **options: Any) -> Any:
        entered = enter(local_tensor, device_mesh, placements, **options)
        if not torch.compiler.is_compiling() and type(local_tensor) in (Tensor, torch.nn.Parameter):
            ranks = sharing(entered)
            if len(ranks) > 1:
                note(local_tensor.detach(), ranks)
        return entered

    DTensor.from_local = staticmethod(from_local)  # type: ignore[method-assign, assignment]
