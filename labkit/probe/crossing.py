"""The traffic of one training step, axis by axis, on real ranks: what `labkit.plan.step.wire_time` says in seconds.

cluster.run(traffic_s, layout, "tp", count, n_bytes)      seconds of `count` calls along one axis, on every rank
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from labkit.comm.group import Group
from labkit.comm.mesh import Mesh
from labkit.plan.machine.topology import Links
from labkit.plan.partition.layout import Layout
from labkit.plan.step.wire_time import Demand, call_s, on_wires

PIECE_S = 1.0
"""Predicted seconds of the longest piece, unless a single call takes longer."""


def pieces(run: Callable[..., Any], layout: Layout, demand: Demand, links: Links) -> Iterator[tuple[str, float, float]]:
    """Measure one step's traffic with a cluster's `run`: (axis, seconds, share of the whole) for each piece of it.

    The ranks' wires must be `links`, which say how long a piece may be; the caller may stop between two pieces."""
    whole = on_wires(layout, demand, links).total or 1.0
    for axis in ("tp", "pp", "dp"):
        left, n_bytes = demand[axis]
        one_call_s = call_s(layout, axis, n_bytes, links)
        while left:
            count = min(left, max(1, int(PIECE_S / one_call_s)))
            replies = run(traffic_s, layout, axis, count, n_bytes)
            yield axis, max(reply.value for reply in replies), count * one_call_s / whole
            left -= count


def traffic_s(group: Group, layout: Layout, axis: str, count: int, n_bytes: float) -> float:
    """Seconds of `count` all_reduces of `n_bytes` along dp or tp, or of as many round trips through all stages of pp.

    Every rank of the world calls it; all groups of the axis are at work at the same time. The first call is not timed:
    it makes the connections. Sends what the calls send, and the bytes of one more."""
    mesh = Mesh.connect(layout, group)
    along = getattr(mesh, axis)
    x = torch.zeros(max(1, round(n_bytes / 4)), device=group.device)
    call = round_trip if axis == "pp" else Group.all_reduce
    call(along, x)
    group.barrier()
    started = time.perf_counter()
    for _ in range(count):
        call(along, x)
    return time.perf_counter() - started


def round_trip(pp: Group, x: torch.Tensor) -> None:
    """x from the first stage to the last and back, hop by hop."""
    first, last = pp.rank == 0, pp.rank == pp.size - 1
    if not first:
        pp.recv(pp.rank - 1)
    if not last:
        pp.send(x, pp.rank + 1).wait()
        pp.recv(pp.rank + 1)
    if not first:
        pp.send(x, pp.rank - 1).wait()
