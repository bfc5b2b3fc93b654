"""Flat buffers and buckets: tensors laid end to end, so that they travel together.

    a [2, 3]      b [5]        c [2]      pad
    |a a a a a a|b b b b b|c c|0|          14 elements on 2 ranks
    |-- rank 0: 7 elements --|-- rank 1: 7 elements --|

A collective on one large tensor costs one latency, on a hundred small ones a hundred. The padding makes all shards
equal, which is what reduce_scatter and all_gather want.

    parameters     embedding | block 0        | block 1        | head
    expected         last                                        first          in backward
    buckets        |     bucket 2     |     bucket 1     | bucket 0 |

But a buffer of all gradients is complete only when backward is over, so nothing overlaps. Buckets are the compromise:
some 25 MB each (Li 2020, arXiv:2006.15704, section 3.2.2). Memory: the bytes of the gradients, since each p.grad of a
`Bucket` is a window into its buffer and has no memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from labkit.comm.group import Group
from labkit.comm.message import as_bytes
from labkit.plan.contracts import group_of, shard_dim_of
from labkit.plan.partition.buckets import fill
from labkit.plan.words import dtype_name

Named = tuple[str, nn.Parameter]


class Pending(Protocol):
    """A reduction under way."""

    def wait(self) -> Any:
        """Block until the sum over the group is in the buffer."""


Reduce = Callable[[Tensor, Group], Pending]
"""Starts the sum of a flat buffer over a group, in place."""


@dataclass(frozen=True)
class Flat:
    """The map between named parameters and one flat buffer of `numel` elements (padded: n_shards divides it)."""

    names: tuple[str, ...]
    params: tuple[nn.Parameter, ...]
    starts: tuple[int, ...]
    numel: int
    n_shards: int

    @classmethod
    def of(cls, named: Sequence[Named], n_shards: int = 1) -> Flat:
        """The map for these parameters, in this order. ValueError if they differ in dtype or device."""
        names, params = tuple(name for name, _ in named), tuple(p for _, p in named)
        kinds = {(p.dtype, p.device) for p in params}
        if len(kinds) != 1:
            listed = ", ".join(sorted(f"{dtype_name(dtype)} on {device}" for dtype, device in kinds))
            raise ValueError(f"one flat buffer holds one dtype on one device, got {listed or 'no parameters'}")
        ends = tuple(accumulate(p.numel() for p in params))
        # -x % n is the padding: what is missing to the next multiple of n
        return cls(names, params, (0, *ends[:-1]), ends[-1] + -ends[-1] % n_shards, n_shards)

    @property
    def shard_numel(self) -> int:
        """Elements of one shard."""
        return self.numel // self.n_shards

    def empty(self, dtype: torch.dtype | None = None) -> Tensor:
        """A zeroed flat buffer [numel] on the parameters' device, in their dtype unless another is asked for."""
        return torch.zeros(self.numel, dtype=dtype or self.params[0].dtype, device=self.params[0].device)

    def windows(self, buffer: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter with its window of `buffer` [numel], in the parameter's shape; no copies."""
        for p, start in zip(self.params, self.starts, strict=True):
            yield p, buffer[start : start + p.numel()].view(p.shape)

    def pack(self, dtype: torch.dtype | None = None) -> Tensor:
        """The parameters' values as one flat buffer [numel]."""
        buffer = self.empty(dtype)
        for p, window in self.windows(buffer):
            window.copy_(p.detach())
        return buffer

    def shard(self, buffer: Tensor, rank: int) -> Tensor:
        """The part of `buffer` that belongs to `rank`: a view [numel / n_shards]."""
        return buffer[rank * self.shard_numel : (rank + 1) * self.shard_numel]

    def owned(self, rank: int) -> Iterator[tuple[str, nn.Parameter, int, int, int]]:
        """The parameters in a rank's shard: (name, parameter, first element of it, first place in the shard, count)."""
        low, high = rank * self.shard_numel, (rank + 1) * self.shard_numel
        for name, p, start in zip(self.names, self.params, self.starts, strict=True):
            first, last = max(low, start), min(high, start + p.numel())
            if first < last:  # a shard's border may lie inside a parameter: then two ranks own a part of it
                yield name, p, first - start, first - low, last - first


class Bucket:
    """Gradients that travel together: one flat buffer, and a window of it for each parameter."""

    def __init__(self, named: Sequence[Named]) -> None:
        """Parameters of one dtype on one device, in the order in which their gradients are expected."""
        self.flat = Flat.of(named)
        self.buffer = self.flat.empty(sum_dtype(self.flat.params[0]))
        self.windows = tuple(window for _, window in self.flat.windows(self.buffer))
        self.arrived: set[int] = set()
        self.work: Pending | None = None

    def take(self, k: int, share: float = 1.0) -> None:
        """Make p.grad of member k its window, holding `share` times the gradient. ValueError if it does not fit in."""
        p, window = self.flat.params[k], self.windows[k]
        if p.grad is None:
            window.zero_()  # the window still holds the last step's sum
        elif p.grad is window:
            if share != 1.0:  # autograd added in place: the only case in which scaling costs a pass of its own
                window.mul_(share)
        elif p.grad.layout is not torch.strided or (p.grad.dtype, p.device) != (window.dtype, window.device):
            raise ValueError(
                f"{self.flat.names[k]} has a {p.grad.layout} gradient {dtype_name(p.grad.dtype)} on {p.device}, a "
                f"bucket is dense {dtype_name(window.dtype)} on {window.device}: convert the module before DDP, use "
                "sparse=False"
            )
        else:
            torch.mul(p.grad.detach(), share, out=window)  # a new gradient is copied anyway: scaling it is free
        p.grad = window

    def complete(self, share: float) -> None:
        """Take in gradients that did not arrive in this pass: of earlier passes, or set by hand; zero for none."""
        for k in range(len(self.windows)):
            if k not in self.arrived:
                self.take(k, share)

    def end(self) -> list[str]:
        """Wait for the sum; every p.grad is its window. Returns the names whose p.grad was replaced meanwhile."""
        assert self.work is not None
        self.work.wait()
        replaced = [self.flat.names[k] for k in sorted(self.arrived) if self.flat.params[k].grad is not self.windows[k]]
        for p, window in zip(self.flat.params, self.windows, strict=True):
            p.grad = window
        self.arrived, self.work = set(), None
        return replaced


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
        return self.next > 0 or any(self.arrivals)

    def arrived(self, p: Tensor) -> None:
        """The gradient of p is complete; sends the buckets whose turn has come."""
        b = self.home[p]
        if b < self.next:  # it has left without this gradient, which must travel too
            self.late.add(b)
        self.arrivals[b].add(p)
        # collectives are paired by their order: a bucket that is complete early waits for those before it
        while self.next < len(self.sizes) and self._may_leave(self.next):
            self._leave()

    def flush(self) -> None:
        """Send the buckets that have not left, and those that are late; then begin anew."""
        # every bucket leaves on every rank, complete or not: the other ranks wait in its collective
        while self.next < len(self.sizes):
            self._leave()
        for b in sorted(self.late):  # late on one rank is late on all: they run the same model
            self.send(b)
        self.patient |= self.late
        self._begin()

    def _may_leave(self, b: int) -> bool:
        return len(self.arrivals[b]) == self.sizes[b] and b not in self.patient

    def _leave(self) -> None:
        self.next += 1
        self.send(self.next - 1)

    def _begin(self) -> None:
        self.next = 0
        self.arrivals: list[set[Tensor]] = [set() for _ in self.sizes]
        self.late: set[int] = set()


def in_buckets(named: Sequence[Named], bucket_bytes: int, cut_apart: bool = False) -> list[list[Named]]:
    """Parameters from last to first in buckets of one dtype, device and parameter group.

    They are sorted by when their last member is expected. A bucket holds `bucket_bytes` at most, unless one parameter
    is larger; the first of each kind is full at 1 MiB. With `cut_apart` those that tensor parallelism has cut and those
    that are whole on its ranks share none: what becomes of a whole one must not depend on a neighbour that is another
    on each rank.
    Raises ValueError for a bucket of less than one byte."""
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes={bucket_bytes}: a bucket holds 1 byte or more")
    kinds = [
        (p.dtype, sum_dtype(p), p.device, group_of(p), cut_apart and shard_dim_of(p) is not None) for _, p in named
    ]
    sizes = [(kind, p.numel() * sum_dtype(p).itemsize) for kind, (_, p) in zip(kinds, named, strict=True)]
    return [[named[k] for k in members] for members in fill(sizes, bucket_bytes)]


def sum_dtype(p: Tensor) -> torch.dtype:
    """The dtype in which p's gradients are added up: `p.grad_dtype`, which is p's own unless it was set."""
    return p.grad_dtype or p.dtype


def by_kind(named: Iterable[Named]) -> list[list[Named]]:
    """Parameters grouped by dtype, device, parameter group, and whether they train, in order of first appearance: each
    can share a flat buffer."""
    kinds: dict[Hashable, list[Named]] = {}
    for name, p in named:
        kinds.setdefault((p.dtype, sum_dtype(p), p.device, p.requires_grad, group_of(p)), []).append((name, p))
    return list(kinds.values())


def as_on_rank_0(tensors: Sequence[Tensor], group: Group, run_bytes: int = 2**20) -> None:
    """Give tensors of any dtype rank 0's values, small ones together. Sends their bytes from rank 0.

    Memory meanwhile: three times `run_bytes`, or three times the largest tensor."""
    run: list[Tensor] = []
    held = 0
    for k, x in enumerate(tensors if group.size > 1 else ()):
        run.append(x)
        held += x.nbytes
        if held < run_bytes and k + 1 < len(tensors):
            continue
        # as bytes: one message may carry floats, integers and flags together
        raw = group.broadcast(torch.cat([as_bytes(y.detach().contiguous()).to(group.device) for y in run]))
        if group.rank:
            for y, part in zip(run, raw.split([y.nbytes for y in run]), strict=True):
                # through .data, which leaves the version counter alone: a graph that has saved y may still run backward
                y.data.copy_(part.clone().view(y.dtype).view(y.shape))
        run, held = [], 0
