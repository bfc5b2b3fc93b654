"""ZeRO-2: as ZeRO-1, but a gradient lives only until its bucket has left.

    backward of    block 3        block 2        block 1        block 0
    bucket 0       | fill |pack, reduce_scatter |-> 1/n stays
    bucket 1                      | fill |pack, reduce_scatter |-> 1/n stays
    bucket 2                                     | fill |pack, reduce_scatter |-> ...

When the gradients of a bucket are complete they are packed into one buffer, dropped, and sent; the bucket before must
have come through by then, so that two buckets are alive at most. What it trades: there is no place where whole
gradients of several micro-batches could add up, so every backward pass sends its own, and only the parts are added.

    bytes sent per rank and step    m (n-1)/n N gradients + (n-1)/n N weights      m micro-batches, N = bytes of weights
    memory                          weights N, gradients N/n + 2 buckets, optimizer state 1/n of it

Ranks must agree on the order in which buckets leave, also when one rank has no gradient for some parameter: the bucket
that misses it leaves with a zero when the pass is over. A pass is over at the end of `accumulate()`, at `finish()`, and
where a forward begins after a backward.

Source: Rajbhandari et al., arXiv:1910.02054, sections 5.2 and 7.2.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from labkit.comm.group import Group
from labkit.comm.private import private
from labkit.parallel.data_parallel import MakeOptimizer
from labkit.parallel.sharded import BUCKET_BYTES, InBuckets

graph_task: Any = private("torch._C._current_graph_task_id")


class ZeRO2(InBuckets):
    """ZeRO-2: shards optimizer state and gradients (interface: data_parallel.py)."""

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

        bucket_bytes        a bucket is full at this size; smaller ones save memory, larger ones latency
        broadcast_buffers   buffers are rank 0's after every `finish`; False: only at the start

        Raises ValueError on every rank if ranks hold different modules or options, and for an optimizer that cannot be
        sharded."""
        super().__init__(module, group, make_optimizer, bucket_bytes, broadcast_buffers)
        self._passes = 0
        # on every layer with parameters: a pipeline or a learner may call a part of the module directly
        holders = [part for part in module.modules() if part is module or any(True for _ in part.parameters(False))]
        self._hooks += [part.register_forward_pre_hook(lambda module, args: self._forward_begins()) for part in holders]

    def zero_grad(self) -> None:
        """Drop the gradients. If some are on their way, wait for them first."""
        super().zero_grad()
        self._passes = 0

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Each backward pass inside this context sends its gradients and adds what comes back to this rank's part."""
        yield
        self._pass_ends()

    def finish(self) -> None:
        """Send what has not been sent, wait for all: every rank has its part of the mean gradients."""
        if self.order.begun or not self._passes:  # a rank without any gradient still answers the others
            self._end_pass()
        self._wait_for_buckets()

    def _arrive(self, p: Tensor) -> None:
        super()._arrive(p)
        self.order.arrived(p)  # inside `accumulate` too: there is no place where whole gradients could wait

    def _forward_begins(self) -> None:
        # -1 outside of backward; inside, this forward is a checkpointed block that runs again, and backward is not over
        if graph_task() == -1:
            self._pass_ends()

    def _pass_ends(self) -> None:
        if self.order.begun:
            self._end_pass()

    def _end_pass(self) -> None:
        self._passes += 1
        self.order.flush()
