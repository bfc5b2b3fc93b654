"""ZeRO-1: every rank has all weights and all gradients, and steps on 1/n of them.

    backward    |g g g g g g|                    whole gradients, different on each rank
    finish      reduce_scatter:  |m m m|         rank r gets the mean of part r alone
    step        the optimizer:   |w w w|         momentum, variance, ...: 1/n of them on each rank
    step        all_gather:      |w w w w w w|   everybody's new part

An all_reduce is a reduce_scatter and an all_gather; ZeRO-1 puts the step between the two, so it sends as much as DDP.
(Reducing all gradients everywhere first, as torch's DDP does under a ZeroRedundancyOptimizer, sends half as much again:
3(n-1)/n N.) As in DDP, parameters are laid into buckets from the last to the first, and a bucket leaves when its
gradients are complete, while backward goes on.

    bytes sent per rank and step    (n-1)/n N gradients + (n-1)/n N weights, whatever the number of micro-batches
    memory                          weights N, gradients N while backward runs and N/n afterwards (p.grad is None then),
                                    optimizer state 1/n of it                                  N = bytes of weights

Source: Rajbhandari et al., arXiv:1910.02054, sections 5.1 and 7.2.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from labkit.comm.group import Group
from labkit.parallel.data_parallel import MakeOptimizer
from labkit.parallel.sharded import BUCKET_BYTES, InBuckets


class ZeRO1(InBuckets):
    """ZeRO-1: shards the optimizer's state (interface: data_parallel.py)."""

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        make_optimizer: MakeOptimizer,
        bucket_bytes: int = BUCKET_BYTES,
        *,
        broadcast_buffers: bool = True,
    ) -> None:
        """Copy rank 0's weights and buffers to every rank, and watch for gradients until `close()`.

        bucket_bytes        a bucket is full at this size; a larger parameter has one to itself
        broadcast_buffers   buffers are rank 0's after every `finish`; False: only at the start

        Raises ValueError on every rank if ranks hold different modules or options, and for an optimizer that cannot be
        sharded."""
        super().__init__(module, group, make_optimizer, bucket_bytes, broadcast_buffers)
        self._accumulating = False

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward passes inside this context add to this rank's gradients and send nothing."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def finish(self) -> None:
        """Send the buckets that have not left, wait for all: every rank has its part of the mean gradients."""
        self.order.flush()
        self._wait_for_buckets()

    def _arrive(self, p: Tensor) -> None:
        super()._arrive(p)
        if not self._accumulating:
            self.order.arrived(p)
