"""The piece of a DTensor that a rank holds, in the form in which a TensorProbe keeps pieces of parameters.

    mesh dim    placement          the rank holds                                     kept as
    tp          Shard(k)           an equal part along dim k                          local_shape, cut along k
    dp          Shard(0)           consecutive rows of that part, perhaps none        its elements from `offset` on
    any         Replicate          the same as the others                             nothing changes

`fully_shard` places parameters along dp, `parallelize_module` along tp, and with both the tp cut comes first: so
torch's own FSDP2 and tensor parallelism fit the two ways in which labkit's strategies cut (ZeRO-3, split). A mesh dim
called "tp" is tp, and another name means dp; where a mesh has no names, the sizes that the probe was given tell.
"""

from __future__ import annotations

from typing import Any

import torch

from labkit.probe.tensor_record import KeptPiece, RankPlace


def is_partial(x: Any) -> bool:
    """True of a DTensor whose ranks hold terms of a sum that nobody has made yet."""
    return any(placement.is_partial() for placement in x.placements)


def piece_of_placed(x: Any, name: str, dp: RankPlace, tp: RankPlace) -> KeptPiece:
    """A copy of the elements of DTensor `x`, the parameter or gradient `name`, that this rank holds.

    Sends nothing. Raises ValueError for terms of a sum, for uneven cuts along tp, for cuts along dp that are not by
    rows, and where neither names nor sizes tell which axis a mesh dim is."""
    mesh, place = x.device_mesh, x.device_mesh.get_coordinate()
    if is_partial(x):
        raise ValueError(
            f"{name} is a DTensor of terms of a sum (Partial): redistribute it before the optimizer's step"
        )
    shape, cut, offset = list(x.shape), None, 0
    rows: tuple[int, int] | None = None
    for number, placement in enumerate(x.placements):
        size = mesh.size(number)
        if not _cuts(placement) or size == 1:
            continue
        if _axis(mesh, number, dp, tp) == "tp":
            cut = int(placement.dim)
            if shape[cut] % size:
                raise ValueError(f"{name}: dim {cut} of {shape[cut]} is cut over {size} ranks, which do not divide it")
            shape[cut] //= size
        elif placement.dim:
            raise ValueError(f"{name} is cut along dim {placement.dim} over data-parallel ranks: only rows, dim 0, do")
        else:
            rows = place[number], size
    if rows is not None:
        rank, size = rows
        height = -(-shape[0] // size)
        offset = min(rank * height, shape[0]) * torch.Size(shape[1:]).numel()
    flat = x.detach().to_local().reshape(-1).to("cpu", copy=True)
    return KeptPiece(flat, offset, tuple(shape), cut)


def _cuts(placement: Any) -> bool:
    return not placement.is_replicate() and not placement.is_partial()


def _axis(mesh: Any, number: int, dp: RankPlace, tp: RankPlace) -> str:
    names = mesh.mesh_dim_names
    if names:
        return "tp" if names[number] == "tp" else "dp"
    size = mesh.size(number)
    fitting = [axis for axis, place in (("dp", dp), ("tp", tp)) if place.size == size]
    if len(fitting) != 1:
        raise ValueError(
            f"a DTensor is cut over {size} ranks, and the probe was told of dp {dp.size} and tp {tp.size}: give it the "
            "place of this rank, dp=RankPlace(rank, size) or tp=, or name the dims of the mesh"
        )
    return fitting[0]
