"""torch's own sharding on a labkit Group: a mesh of its ranks, a DTensor on it, and modules that `fully_shard` has cut.

Everything here is torch's; only the wire is labkit's (bridge.py), so that the ledger has what torch sends.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from labkit.comm import bridge
from labkit.comm.group import Group


def device_mesh(group: Group, name: str = "dp") -> Any:
    """A DeviceMesh of one dim, called `name`, over the ranks of the group. Every member must call this."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(bridge.process_group(group), "cpu", mesh_dim_names=(name,))


def sharded_tensor(x: Tensor, mesh: Any) -> Any:
    """A DTensor whose ranks hold the chunks of x along dim 0. Rank 0's x is scattered, as `distribute_tensor` does."""
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(x, mesh, [Shard(0)])


def fully_sharded(modules: Iterable[nn.Module], mesh: Any, reshard: bool | None) -> None:
    """Call `fully_shard` on each module in this order, inner ones before outer ones; `reshard` is its
    `reshard_after_forward`."""
    from torch.distributed.fsdp import fully_shard

    for module in modules:
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
