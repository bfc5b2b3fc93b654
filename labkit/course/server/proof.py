"""A proof in one call: ranks start, the ring gives the right sum, and the ledger agrees with the law."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from labkit.comm.group import Group
from labkit.launch.cluster import BareCluster
from labkit.plan.machine.collectives import sent_bytes


class Proof(NamedTuple):
    """The result of `prove`: `processes` is the number of different process ids, `seconds` the time from nothing to the
    first sum; `sent_bytes` and `law_bytes` are by rank."""

    n_ranks: int
    processes: int
    seconds: float
    right: bool
    n_bytes: int
    sent_bytes: tuple[int, ...]
    law_bytes: tuple[int, ...]

    @property
    def holds(self) -> bool:
        """True if sum, processes and bytes are all right."""
        return self.right and self.processes == self.n_ranks and self.sent_bytes == self.law_bytes

    def sentences(self) -> tuple[str, str]:
        """The result in words: the ranks, then the bytes."""
        sent, law = (" ".join(map(str, sorted(set(n_bytes)))) for n_bytes in (self.sent_bytes, self.law_bytes))
        return (
            f"{self.processes} ranks, each a process of its own, from nothing to their first sum in "
            f"{self.seconds:.2f} s; the sum is {'right' if self.right else 'wrong'}",
            f"ring all_reduce of {self.n_bytes} bytes: each rank sent {sent}, the law says {law}",
        )


def prove(n_ranks: int = 4, n_items: int = 1000) -> Proof:
    """Start a cluster, run the ring all_reduce on it, compare with the arithmetic and with the law of its bytes."""
    started = time.perf_counter()
    with BareCluster(n_ranks, device="cpu", quiet=True) as cluster:
        replies = cluster.run(_sum, n_items)
        seconds = time.perf_counter() - started
        processes = len(set(cluster.pids))
    law = tuple(sent_bytes("ring", "all_reduce", n_ranks, 4 * n_items, rank, 4) for rank in range(n_ranks))
    sent = tuple(reply.ledger.sent_bytes() for reply in replies)
    right = all(reply.value for reply in replies)
    return Proof(n_ranks, processes, seconds, right, 4 * n_items, sent, law)


def _sum(group: Group, n_items: int) -> Any:
    import torch

    from labkit.comm import ring

    count = torch.arange(n_items, dtype=torch.float32)
    expected = group.size * count + sum(range(group.size))  # whole numbers below 2**24: exact in any order
    return torch.equal(ring.all_reduce(count + group.rank, group), expected)
