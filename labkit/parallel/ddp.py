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

What has no gradient on a rank counts as zero there. Buffers (running means) are those of rank 0 after every `finish`:
what torch does before the next forward, in a place where all ranks meet, so that one rank may evaluate alone.
Between backward and `finish` the group is taken: other collectives on it wait until after `finish`.

Source: Li 2020, arXiv:2006.15704, sections 3.2 (bucketing, overlap, accumulation) and 4.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from labkit.comm.group import Group
from labkit.parallel.bucket import Bucket, as_on_rank_0, in_buckets
from labkit.parallel.compress import Reduce, exact
from labkit.parallel.offload import stepped_on
from labkit.parallel.sync import MakeOptimizer, Piece, Watch, check_free, check_module, check_options


class DDP:
    """A strategy (see sync.py) in which every rank owns all gradients, all weights and all of the optimizer's state."""

    sharded = False

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
        """Take rank 0's weights and buffers on every rank, and watch for gradients until `close()`.

        bucket_bytes       a bucket is full at this size; a larger parameter has one to itself
        broadcast_buffers  False: every rank keeps its own after the start
        skip_unused        True: a parameter that no rank used has p.grad None after `finish`, so that the optimizer
                           leaves it alone (one more all_reduce, of a byte a parameter); False: its gradient is zero
        compress           what to do with a bucket instead of an exact sum: `HalfGradients()`, `TopK(0.01)`

        Raises ValueError on every rank if ranks hold different modules or options, or the module is wrapped already."""
        check_module(module, group)
        options = {"broadcast_buffers": broadcast_buffers, "skip_unused": skip_unused}
        check_options(group, bucket_bytes=int(bucket_bytes), **options)
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes={bucket_bytes}: a bucket holds 1 byte or more")
        trainable = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        for name, p in trainable:
            check_free(name, p)
            if not p.is_contiguous():
                raise ValueError(f"{name} has strides {p.stride()}: make it contiguous, p.data = p.data.contiguous()")
        self.module, self.group = module, group
        self.buckets = tuple(Bucket(named) for named in in_buckets(trainable, bucket_bytes))
        self.compress: Reduce = compress or exact
        self.broadcast_buffers, self.skip_unused = broadcast_buffers, skip_unused
        self._started = 0  # buckets under way
        self._touched = self._sending = self._accumulating = False
        self._roll = _roll(module)
        for bucket in self.buckets:
            as_on_rank_0(bucket.flat.params, group)
        as_on_rank_0([*(p for p in module.parameters() if not p.requires_grad), *module.buffers()], group)
        self._hooks = [
            Watch(p, self._arrive, number, k)
            for number, bucket in enumerate(self.buckets)
            for k, p in enumerate(bucket.flat.params)
        ]
        self.optimizer = make_optimizer([p for _, p in trainable])

    def zero_grad(self) -> None:
        """Forget the gradients: every p.grad is None. If some are on their way, first let them come through."""
        if self._sending:
            self._reduce()
        self._touched = False
        for bucket in self.buckets:
            for p in bucket.flat.params:
                p.grad = None

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward passes in here add to this rank's gradients and send nothing."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def finish(self) -> None:
        """Start the buckets that have not started, wait for all: every p.grad is the mean over the group.

        Sends what backward has not sent, and rank 0's buffers. Raises ValueError, after its part is done and so without
        leaving another rank waiting, if parameters were frozen, added or replaced, or gradients cut from the bucket."""
        params = [p for bucket in self.buckets for p in bucket.flat.params]
        used = [p.grad is not None for p in params] if self.skip_unused else []
        cut = self._reduce()
        if self.skip_unused:
            flags = torch.tensor(used, dtype=torch.uint8, device=self.group.device)
            for p, anywhere in zip(params, self.group.all_reduce(flags, "max").tolist(), strict=True):
                p.grad = p.grad if anywhere else None
        if self.broadcast_buffers:
            as_on_rank_0(list(self.module.buffers()), self.group)
        if cut:
            raise ValueError(
                f"p.grad of {', '.join(cut[:3])} was replaced between backward and finish(): call "
                "zero_grad() of the strategy at the start of a step, and change gradients after finish()"
            )
        now = _roll(self.module)
        if now != self._roll:
            name = next(name for name in {**self._roll, **now} if self._roll.get(name) != now.get(name))
            raise ValueError(
                f"{name} was added, removed, replaced or had requires_grad changed since DDP was made: "
                "close() this one and make a new DDP"
            )

    def grads(self) -> Iterable[Tensor]:
        """The buckets: flat tensors that hold all gradients."""
        return [bucket.buffer for bucket in self.buckets]

    def step(self) -> None:
        """The optimizer's step, the same on every rank. Raises ValueError if `finish` was forgotten."""
        if self._touched:
            raise ValueError("gradients have come since the last finish(): call finish() before step()")
        self.optimizer.step()

    def pieces(self) -> Iterable[Piece]:
        """Every trainable parameter, whole, in the module's order."""
        kept = self.optimizer.state
        windows = {
            key for p in kept if p.dim() for key, each in kept[p].items() if isinstance(each, Tensor) and each.dim()
        }
        for name, p in self.module.named_parameters():
            if p.requires_grad:
                own = stepped_on(self.optimizer, p)
                state = {key: _flat(name, key, each, p, windows) for key, each in kept.get(own, {}).items()}
                grad = None if p.grad is None or self._touched else p.grad.view(-1)
                cut = getattr(p, "shard_dim", None)
                yield Piece(name, tuple(p.shape), 0, own.detach().view(-1), grad, state, cut)

    def load(self, name: str, start: int, value: Tensor, state: dict[str, Any]) -> None:
        """Put `value` [k] at elements `start`, ... of a parameter, and its optimizer state ([k] tensors and scalars).

        Raises ValueError, before anything is changed, for an unknown name, elements outside the parameter, or state of
        another length."""
        p = dict(self.module.named_parameters()).get(name)
        odd = [key for key, x in state.items() if isinstance(x, Tensor) and x.dim() and x.shape != value.shape]
        if odd:
            raise ValueError(f"{name}: {value.numel()} elements, but {odd[0]!r} has shape {tuple(state[odd[0]].shape)}")
        if p is None or not 0 <= start <= start + value.numel() <= p.numel():
            size = "there is no such parameter" if p is None else f"it has {p.numel()}"
            raise ValueError(f"cannot load elements {start} to {start + value.numel()} of {name}: {size}")
        part = slice(start, start + value.numel())
        own = stepped_on(self.optimizer, p)
        own.detach().view(-1)[part] = value.to(own.device)
        kept = self.optimizer.state[own] if state else {}
        for key, each in state.items():
            if isinstance(each, Tensor) and each.dim():
                if key not in kept:
                    kept[key] = torch.zeros_like(own, dtype=each.dtype)
                kept[key].view(-1)[part] = each.to(own.device)
            else:
                kept[key] = each.clone() if isinstance(each, Tensor) else each

    def loaded(self) -> None:
        """The module computes with what was loaded; gradients of the old weights are forgotten."""
        if hasattr(self.optimizer, "masters_to_params"):
            self.optimizer.masters_to_params()
        self.zero_grad()

    def close(self) -> None:
        """Let go of the module: gradients are no longer watched, and it may be wrapped again."""
        for hook in self._hooks:
            hook.remove()

    def _arrive(self, p: Tensor, number: int, k: int) -> None:
        """Autograd has just added to p.grad of member k of a bucket."""
        bucket = self.buckets[number]
        if k in bucket.arrived:  # its bucket may be on its way, and it holds a share already
            raise ValueError(
                f"a second gradient for {bucket.flat.names[k]} came before finish(), when the first may have left: "
                "put every backward but the last inside accumulate() (all of them, if one backward gives it twice)"
            )
        bucket.take(k, 1.0 if self._accumulating else 1 / self.group.size)
        self._touched = True
        if not self._accumulating:
            self._sending = True
            bucket.arrived.add(k)
            while self._started < len(self.buckets) and self._next_is_full():
                self._start()

    def _next_is_full(self) -> bool:
        bucket = self.buckets[self._started]
        return len(bucket.arrived) == len(bucket.windows)

    def _start(self) -> None:
        bucket = self.buckets[self._started]
        self._started += 1
        bucket.work = self.compress(bucket.buffer, self.group)

    def _reduce(self) -> list[str]:
        while self._started < len(self.buckets):
            self.buckets[self._started].complete(1 / self.group.size)
            self._start()
        cut = [name for bucket in self.buckets for name in bucket.end()]
        self._started, self._touched, self._sending = 0, False, False
        return cut


def _roll(module: nn.Module) -> dict[str, tuple[int, bool]]:
    return {name: (id(p), p.requires_grad) for name, p in module.named_parameters()}


def _flat(name: str, key: str, each: Any, p: nn.Parameter, windows: set[str]) -> Any:
    # of a parameter without dims a moment has none either: what it is for the others tells it from a scalar
    if not isinstance(each, Tensor) or not (each.dim() or (key in windows and not p.dim())):
        return each
    if each.shape != p.shape:
        raise ValueError(
            f"the optimizer keeps {key!r} of shape {tuple(each.shape)} for {name} {tuple(p.shape)}: state must have "
            "the parameter's shape or be a scalar"
        )
    return each.view(-1)
