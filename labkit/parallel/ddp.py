"""Data parallel: the same weights on every rank, gradients averaged while backward still runs.

    time -->            backward of block 3 | block 2 | block 1 | block 0 |
    bucket 0 (block 3)                      |=== all_reduce ===>
    bucket 1 (block 2, block 1)                                 |=== all_reduce ===>
    bucket 2 (block 0)                                                    |=== all_reduce ===> finish

Backward reaches the last layer first, so parameters are laid into buckets from the last to the first. A bucket is one
flat buffer; `p.grad` of each of its parameters is a window into it. When the last gradient of a bucket has arrived, and
all buckets before it have started (ranks must agree on the order), its all_reduce starts.

`zero_grad` sets every p.grad to None and touches no memory: autograd then hands a new gradient over instead of adding
it to zeros, and it is written into its window once, as g/n: the sum over the ranks is the mean.

    bytes sent per rank and step    2(n-1)/n N, whatever the number of micro-batches    N = bytes of the gradients
    memory                          N: the buckets are the gradients

A parameter without a gradient on some rank counts as zero there. Buffers (running means) are those of rank 0 after
every `finish`: torch does it before the next forward; here all ranks meet anyway, and one rank may evaluate alone.
Between backward and `finish` the group is busy: other collectives on it must wait until after `finish`.

Source: Li 2020, arXiv:2006.15704, sections 3.2 (bucketing, overlap, accumulation) and 4.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from labkit.comm.group import Group
from labkit.parallel.bucket import Bucket, InOrder, Reduce, as_on_rank_0, in_buckets
from labkit.parallel.data_parallel import GradientWatch, MakeOptimizer, Owned, check_arguments
from labkit.plan.contracts import shard_dim_of


class DDP:
    """Data parallel: every rank owns all gradients, weights and optimizer state (interface: data_parallel.py)."""

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        make_optimizer: MakeOptimizer,
        bucket_bytes: int = 25 * 2**20,
        *,
        broadcast_buffers: bool = True,
        skip_unused: bool = False,
        compress: Reduce | None = None,
    ) -> None:
        """Copy rank 0's weights and buffers to every rank, and watch for gradients until `close()`.

        bucket_bytes       a bucket is full at this size; a larger parameter has one to itself
        broadcast_buffers  False: every rank keeps its own after the start
        skip_unused        True: a parameter that no rank used has p.grad None after `finish`, so that the optimizer
                           leaves it alone (one more all_reduce, of a byte a parameter); False: its gradient is zero
        compress           how a bucket is summed if not exactly: `HalfGradients()`, `TopK(0.01)` (compress.py),
                           `EightBitGradients()` (eight_bit_gradients.py)

        Raises ValueError on every rank if ranks hold different modules or options, or the module is wrapped already."""
        options = {"broadcast_buffers": broadcast_buffers, "skip_unused": skip_unused}
        check_arguments(module, group, bucket_bytes=int(bucket_bytes), **options)
        trainable = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        for name, p in trainable:
            if not p.is_contiguous():
                raise ValueError(f"{name} has strides {p.stride()}: make it contiguous, p.data = p.data.contiguous()")
        self.module, self.group = module, group
        # one unit, or one choice of the largest, for numbers of which some are a tp rank's own would round the others
        # differently on each of these ranks
        in_order = in_buckets(trainable, bucket_bytes, cut_apart=compress is not None)
        self.buckets = tuple(Bucket(named) for named in in_order)
        self.compress: Reduce | None = compress
        self.broadcast_buffers, self.skip_unused = broadcast_buffers, skip_unused
        self.order = InOrder([bucket.flat.params for bucket in self.buckets], self.send_bucket)
        self._touched = self._accumulating = False
        self._parameters = _parameter_list(module)
        for bucket in self.buckets:  # ranks may have drawn different weights: the same gradients keep equal ones equal
            as_on_rank_0(bucket.flat.params, group)
        as_on_rank_0([*(p for p in module.parameters() if not p.requires_grad), *module.buffers()], group)
        self._hooks = [
            GradientWatch(p, self.on_gradient, number, k)
            for number, bucket in enumerate(self.buckets)
            for k, p in enumerate(bucket.flat.params)
        ]
        self.optimizer = make_optimizer([p for _, p in trainable])

    def zero_grad(self) -> None:
        """Drop the gradients: every p.grad is None. If some are on their way, wait for them first."""
        if self.order.begun:
            self._reduce()  # the other ranks are in these sums: leaving now would pair them with the next step's
        self._touched = False
        for bucket in self.buckets:
            for p in bucket.flat.params:
                p.grad = None

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward passes inside this context add to this rank's gradients and send nothing."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def finish(self) -> None:
        """Start the buckets that have not started, wait for all: every p.grad is the mean over the group.

        Sends what backward has not sent, and rank 0's buffers. Raises ValueError if parameters were frozen, added or
        replaced, or a p.grad was replaced by another tensor."""
        params = [p for bucket in self.buckets for p in bucket.flat.params]
        used = [p.grad is not None for p in params] if self.skip_unused else []
        replaced = self._reduce()
        if self.skip_unused:
            flags = torch.tensor(used, dtype=torch.uint8, device=self.group.device)
            for p, anywhere in zip(params, self.group.all_reduce(flags, "max").tolist(), strict=True):
                p.grad = p.grad if anywhere else None
        if self.broadcast_buffers:
            as_on_rank_0(list(self.module.buffers()), self.group)
        # errors come last: a rank that raised before the collectives would leave the others waiting in them
        if replaced:
            raise ValueError(
                f"p.grad of {', '.join(replaced[:3])} was replaced between backward and finish(): call "
                "zero_grad() of the strategy at the start of a step, and change gradients after finish()"
            )
        before, now = self._parameters, _parameter_list(self.module)
        if now != before:
            name = next(name for name in {**before, **now} if before.get(name) != now.get(name))
            raise ValueError(
                f"{name} was added, removed, replaced or had requires_grad changed since DDP was made: "
                "close() this one and make a new DDP"
            )

    @property
    def replica(self) -> int:
        """The rank in the group: each rank owns all."""
        return self.group.rank

    def grads(self) -> Iterable[Tensor]:
        """The buckets: flat tensors that hold all gradients."""
        return [bucket.buffer for bucket in self.buckets]

    def step(self) -> None:
        """The optimizer's step, the same on every rank. Raises ValueError if `finish` was forgotten."""
        if self._touched:
            raise ValueError("gradients have come since the last finish(): call finish() before step()")
        self.optimizer.step()

    def owned(self) -> Iterable[Owned]:
        """Every trainable parameter, whole, in the module's order."""
        for name, p in self.module.named_parameters():
            if p.requires_grad:
                grad = None if p.grad is None or self._touched else p.grad.view(-1)
                yield Owned(name, tuple(p.shape), 0, p, slice(0, p.numel()), grad, shard_dim_of(p))

    def refresh(self) -> None:
        """Drop the gradients of the old weights: the module computes with what was loaded already."""
        self.zero_grad()

    def close(self) -> None:
        """Stop watching the module's gradients; it may be wrapped again."""
        for hook in self._hooks:
            hook.remove()

    def on_gradient(self, p: Tensor, number: int, k: int) -> None:
        """Autograd calls this when it has added to p.grad of member k of a bucket: put it into the bucket.

        Sends the bucket if it is full and all before it have left. Raises ValueError for a second gradient."""
        bucket = self.buckets[number]
        if k in bucket.arrived:  # its bucket may be on its way, and its window holds g/n already, not g
            raise ValueError(
                f"a second gradient for {bucket.flat.names[k]} came before finish(), when the first may have left: "
                "put every backward but the last inside accumulate() (all of them, if one backward gives it twice)"
            )
        # divided before the sum: n shares add up to the mean, and in fp16 that cannot overflow where the mean would not
        # inside accumulate() it stays whole: the last backward adds to the same window and divides the sum once
        bucket.take(k, 1.0 if self._accumulating else 1 / self.group.size)
        self._touched = True
        if not self._accumulating:
            bucket.arrived.add(k)
            # starts what is complete, in order: bucket 1 waits for bucket 0 even if its gradients come first here
            self.order.arrived(p)

    def send_bucket(self, number: int) -> None:
        """Start the sum of a bucket over the group, while backward goes on.   sends 2(n-1)/n of its bytes"""
        bucket = self.buckets[number]
        # every rank sends every bucket, with zeros for what it has not used: another rank may have used it
        bucket.complete(1 / self.group.size)
        if self.compress is None:
            bucket.work = self.group.all_reduce_start(bucket.buffer)
        else:
            bucket.work = self.compress(bucket.buffer, self.group)

    def _reduce(self) -> list[str]:
        """Start what has not started, wait for all; names of gradients that were replaced since they arrived."""
        self.order.flush()
        replaced = [name for bucket in self.buckets for name in bucket.end()]
        self._touched = False
        return replaced


def _parameter_list(module: nn.Module) -> dict[str, tuple[int, bool]]:
    return {name: (id(p), p.requires_grad) for name, p in module.named_parameters()}
