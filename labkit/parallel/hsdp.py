"""HSDP: ZeRO-3 inside groups of ranks (a node, say), and a copy of the model in each group.

    dp = 4, groups of 2        node 0                node 1                     N = bytes of the weights
                          rank 0    rank 1       rank 2    rank 3
    holds                 |first half|second half|first half|second half|       N/s,   s = 2 ranks of a group
    gathers               0 <-------> 1          2 <-------> 3                  axis dp_shard      fast links
    reduce-scatters       0 <-------> 1          2 <-------> 3                  axis dp_shard
    all-reduces           0 <-------------------> 2                             axis dp_replicate  slow links, N/s
                                    1 <-------------------> 3

Plain ZeRO-3 gathers each unit over all n ranks, so that nearly N crosses the slow links three times a micro-batch. Here
weights move within a group alone. What crosses are gradients, after the reduce-scatter, 1/s of them, once a step: they
are added up over the micro-batches first. It costs memory: N/s and not N/n, whatever the number of groups.

    bytes sent per rank and step    dp_shard        3m (s-1)/s N          as ZeRO-3 on s ranks, m micro-batches
                                    dp_replicate    2 (r-1)/r N/s         one all_reduce of the part, r = n/s groups
    memory                          that of ZeRO-3 on s ranks

Where cp cuts rows, a group is s/cp neighbours along dp, each with its cp ranks: all of them see other tokens.

The all_reduce of a unit begins when its last reduce_scatter is through, while backward goes on. Everything else is
ZeRO-3 (zero3.py).

Source: Zhao et al. (PyTorch FSDP), arXiv:2304.11277, section 3.2.2, "hybrid sharding"; the same idea with a name of its
own: Zhang et al. (MiCS), arXiv:2205.00119, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from labkit.comm.group import Group, Work
from labkit.parallel.bucket import Named
from labkit.parallel.data_parallel import MakeOptimizer
from labkit.parallel.sharded import Shard
from labkit.parallel.zero3 import Unit, ZeRO3


class HSDP(ZeRO3):
    """Hybrid sharding: ZeRO-3 over `inside`, gradients summed over `across` (interface: data_parallel.py)."""

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        make_optimizer: MakeOptimizer,
        inside: Group,
        across: Group,
        **options: Any,
    ) -> None:
        """Copy rank 0's weights and buffers to every rank of `group` and shard them; the rest is as in ZeRO3.

        inside    the ranks that share one copy of the state: `mesh.cut(s).shard`
        across    those that hold this rank's part in the other copies: `mesh.cut(s).replicate`

        ValueError if the two do not cut `group`, and for what ZeRO3 refuses."""
        if inside.size * across.size != group.size or not {*inside.ranks, *across.ranks} <= {*group.ranks}:
            raise ValueError(
                f"groups of {inside.size} ranks, {across.size} times, do not make up the {group.size} ranks of "
                f"{group.axis}: take those of one mesh, cut = mesh.cut({inside.size}), cut.shard and cut.replicate"
            )
        self.inside, self.across, self._accumulating = inside, across, False
        super().__init__(module, group, make_optimizer, **options)

    @property
    def replica(self) -> int:
        """The number of this rank's copy: the first answers for all."""
        return self.across.rank

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Each backward pass inside this context sends its gradients inside the group, and nothing across."""
        before, self._accumulating = self._accumulating, True
        try:
            with super().accumulate():
                yield
        finally:
            self._accumulating = before

    def finish(self) -> None:
        """Wait for all gradients: every rank has its part of the mean over the whole group. All units are sharded."""
        super().finish()
        shards = [shard for unit in self.units for shard in unit.shards if isinstance(shard, CopiedShard)]
        for shard in shards:
            shard.sum_start()  # what no pass outside of `accumulate` has brought
        for shard in shards:
            shard.sum_wait()

    def _cut(self, named: Sequence[Named]) -> Shard:
        return CopiedShard(named, self.inside, self.across, apart=True, **self._options(named))

    def _reduce(self, unit: Unit) -> None:
        leaves = unit.has_grads
        super()._reduce(unit)
        for shard in unit.shards if leaves else ():
            assert isinstance(shard, CopiedShard)
            # now and not when it arrives: by then the next micro-batch, which is the last one, may have begun
            shard.is_last = not self._accumulating


class CopiedShard(Shard):
    """A shard of which each group has a copy: the way of its gradients ends with a mean over the copies.

        reduce_start, reduce_wait     inside the group: added to master.grad        for each micro-batch
        sum_start, sum_wait           master.grad, in place, over the copies        after the last one

    is_last    no micro-batch comes after the one whose gradients are on their way
    summed     master.grad is the mean over the copies, or on its way to be
    """

    def __init__(self, named: Sequence[Named], inside: Group, across: Group, **options: Any) -> None:
        """As a Shard over `inside`; `across` joins the ranks with the same part of other copies."""
        super().__init__(named, inside, **options)
        self.across, self.is_last, self.summed = across, False, False
        self.sum: Work | None = None

    def reduce_wait(self) -> None:
        """Add what has come from inside the group; after the last micro-batch start the mean over the copies."""
        if self.work is None:
            return
        if not self.summed:
            super().reduce_wait()
            if self.is_last:
                self.sum_start()
            return
        # a late one: a backward after the last, or one unit in two passes. The mean so far must not be taken again
        part, self.work = self.work.wait(), None
        self.sum_wait()
        assert part is not None
        assert self.master.grad is not None
        self.master.grad.add_(self.across.all_reduce(part, op="mean"))

    def sum_start(self) -> None:
        """Start the mean of this part's gradient over the copies, if there is one that is not summed yet.

        Sends 2(r-1)/r of its bytes."""
        if self.master.grad is not None and not self.summed:
            self.summed = True
            self.sum = self.across.all_reduce_start(self.master.grad, op="mean")

    def sum_wait(self) -> None:
        """If that mean is on its way, wait for it."""
        if self.sum is not None:
            self.sum.wait()
            self.sum = None

    def drop_grads(self) -> None:
        """Drop all gradients, those on their way too."""
        self.reduce_wait()
        self.sum_wait()
        super().drop_grads()
        self.summed = False
