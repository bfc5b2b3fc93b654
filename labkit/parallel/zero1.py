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

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from labkit.comm.group import Group
from labkit.parallel.bucket import Pending, in_buckets
from labkit.parallel.data_parallel import MakeOptimizer
from labkit.parallel.sharded import Shard, Sharded

BUCKET_BYTES = 8 * 2**20
"""Smaller than DDP's: a bucket is packed into a buffer of its own, which lives beside what is not yet packed."""


class ZeRO1(Sharded):
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
        super().__init__(module, group, broadcast_buffers, bucket_bytes=bucket_bytes)
        trainable = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        buckets = in_buckets(trainable, bucket_bytes)
        self._own([Shard(named, group) for named in buckets], make_optimizer)
        self.order = InOrder([shard.flat.params for shard in self.shards], self._send)
        self._accumulating = False
        self._leaving: Shard | None = None  # the bucket that is on its way

    def zero_grad(self) -> None:
        """Drop the gradients. If some are on their way, wait for them first."""
        if self.order.begun:
            self.order.flush()  # the other ranks send these buckets: leaving now would pair theirs with the next step's
        self._drop_grads()

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

    def step(self) -> None:
        """Run the optimizer on this rank's part, then gather everybody's new weights.

        Raises ValueError if `finish` was forgotten, or the optimizer keeps a state that cannot be cut."""
        self._optimize()
        self._gather()

    def refresh(self) -> None:
        """Drop the gradients of the old weights, gather the new ones. Sends (n-1)/n of their bytes."""
        self.zero_grad()
        self._gather()

    def _arrive(self, p: Tensor) -> None:
        super()._arrive(p)
        if not self._accumulating:
            self.order.arrived(p)

    def _send(self, b: int) -> None:
        if self._leaving is not None:
            self._leaving.reduce_wait()  # or packed buckets would pile up behind a slow wire
        self._leaving = self.shards[b]
        self._leaving.reduce_start()

    def _wait_for_buckets(self) -> None:
        for shard in self.shards:
            shard.reduce_wait()
        self._touched = False
        self._buffers_as_on_rank_0()

    def _gather(self) -> None:
        before: Pending | None = None
        for shard in self.shards:
            work = shard.gather_start()
            if before is not None:
                before.wait()  # two are under way at a time: a backend may need scratch memory for each
            before = work
        assert before is not None
        before.wait()


class InOrder:
    """Sends buckets when they are complete, but only in the order 0, 1, 2, ...: ranks must agree on it.

        gradients arrive       0a 0b      2a    1a 1b    (2b is not used on this rank)
        buckets leave               0              1                      flush: 2

    A bucket that gets a gradient after it has left (a weight used twice, each time inside a backward of its own) leaves
    once more at the flush, and from then on waits for it."""

    def __init__(self, buckets: Sequence[Sequence[nn.Parameter]], send: Callable[[int], None]) -> None:
        """The members of each bucket; `send(b)` sends bucket b."""
        self.sizes, self.send = tuple(map(len, buckets)), send
        self.home: dict[Tensor, int] = {p: b for b, members in enumerate(buckets) for p in members}
        self.patient: set[int] = set()  # buckets that wait for the flush: once they left too early
        self._begin()

    @property
    def begun(self) -> bool:
        """True if anything has left or arrived since the last flush."""
        return self.next > 0 or any(self.here)

    def arrived(self, p: Tensor) -> None:
        """The gradient of p is complete; sends the buckets whose turn has come."""
        b = self.home[p]
        if b < self.next:  # it has left without this gradient, which must travel too
            self.late.add(b)
        self.here[b].add(p)
        # collectives are paired by their order: a bucket that is complete early waits for those before it
        while self.next < len(self.sizes) and self._may_leave(self.next):
            self._leave()

    def flush(self) -> None:
        """Send the buckets that have not left, and those that are late; then begin anew."""
        # every bucket leaves on every rank, complete or not: the other ranks wait for its reduce_scatter
        while self.next < len(self.sizes):
            self._leave()
        for b in sorted(self.late):  # late on one rank is late on all: they run the same model
            self.send(b)
        self.patient |= self.late
        self._begin()

    def _may_leave(self, b: int) -> bool:
        return len(self.here[b]) == self.sizes[b] and b not in self.patient

    def _leave(self) -> None:
        self.next += 1
        self.send(self.next - 1)

    def _begin(self) -> None:
        self.next = 0
        self.here: list[set[Tensor]] = [set() for _ in self.sizes]
        self.late: set[int] = set()
