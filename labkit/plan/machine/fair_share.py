"""How edges that are in use at the same time share what they have in common.

    two senders on one node, one network card of 50 MB/s          0 -> 2   25 MB/s
                                                                  1 -> 3   25 MB/s
    a third that stays inside the node                            0 -> 1   what rank 0's port has left

Fair shares, max-min: all edges grow at the same pace until one of them, or a trunk that it is part of, is full; that
one stops and the rest go on. Nobody can then be given more without taking from somebody who has less (Bertsekas and
Gallager, Data Networks, 1992, section 6.5.2). TCP flows and network cards with fair queues come close to it.
"""

from __future__ import annotations

from collections.abc import Iterable

from labkit.plan.machine.topology import Links


def rates(links: Links, active: Iterable[tuple[int, int]]) -> dict[tuple[int, int], float]:
    """Bytes a second of each edge (a, b) while exactly the edges `active` are in use. ValueError for unknown edges."""
    rising = {edge: links.link(*edge).bytes_per_s for edge in active}
    settled: dict[tuple[int, int], float] = {}
    while rising:
        limits: list[tuple[float, tuple[tuple[int, int], ...]]] = [(width, (edge,)) for edge, width in rising.items()]
        for trunk in links.trunks:
            users = tuple(edge for edge in trunk.edges if edge in rising)
            if users:
                rest = trunk.bytes_per_s - sum(settled.get(edge, 0.0) for edge in trunk.edges)
                limits.append((rest / len(users), users))
        pace = min(width for width, _ in limits)
        for edge in [edge for width, users in limits if width <= pace * (1 + 1e-12) for edge in users]:
            settled[edge] = pace
            rising.pop(edge, None)
    return settled
