"""Buckets: gradients that travel together.

    parameters     embedding | block 0        | block 1        | head
    expected         last                                        first
    buckets        |     bucket 2     |     bucket 1     | bucket 0 |

A collective on one large tensor costs one latency, on a hundred small ones a hundred; but what waits to be sent with
all the others cannot overlap. Buckets are the compromise: some 25 MB each (Li 2020, arXiv:2006.15704, section 3.2.2).
Memory: the bytes of the gradients, since each p.grad is a window into its bucket and has no memory of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from labkit.comm.group import Group
from labkit.comm.message import as_bytes
from labkit.parallel.compress import Pending
from labkit.parallel.flat import Flat
from labkit.plan.buckets import fill

Named = tuple[str, nn.Parameter]


class Bucket:
    """Gradients that travel together: one flat buffer, and a window of it for each parameter."""

    def __init__(self, named: Sequence[Named]) -> None:
        """Parameters of one dtype on one device, in the order in which their gradients are expected."""
        self.flat = Flat.of(named)
        self.buffer = self.flat.empty()
        self.windows = tuple(window for _, window in self.flat.windows(self.buffer))
        self.arrived: set[int] = set()
        self.work: Pending | None = None

    def take(self, k: int, share: float = 1.0) -> None:
        """Make p.grad of member k its window, holding `share` times the gradient. ValueError for one that cannot.

        A new gradient is scaled as it is copied, which costs nothing; only one that was added up in place costs a pass.
        """
        p, window = self.flat.params[k], self.windows[k]
        if p.grad is None:
            window.zero_()
        elif p.grad is window:
            if share != 1.0:
                window.mul_(share)
        elif p.grad.layout is not torch.strided or (p.dtype, p.device) != (window.dtype, window.device):
            raise ValueError(
                f"{self.flat.names[k]} has a {p.grad.layout} gradient {str(p.dtype)[6:]} on {p.device}, its bucket is "
                f"dense {str(window.dtype)[6:]} on {window.device}: convert the module before DDP, and use sparse=False"
            )
        else:
            torch.mul(p.grad.detach(), share, out=window)
        p.grad = window

    def complete(self, share: float) -> None:
        """Take in what has not arrived: what came in earlier backward passes or was set by hand; zero for nothing."""
        for k in range(len(self.windows)):
            if k not in self.arrived:
                self.take(k, share)

    def end(self) -> list[str]:
        """Wait for the sum; every p.grad is its window. Names of those that were cut from it since they arrived."""
        assert self.work is not None
        self.work.wait()
        cut = [self.flat.names[k] for k in sorted(self.arrived) if self.flat.params[k].grad is not self.windows[k]]
        for p, window in zip(self.flat.params, self.windows, strict=True):
            p.grad = window
        self.arrived, self.work = set(), None
        return cut


def in_buckets(named: Sequence[Named], bucket_bytes: int) -> list[list[Named]]:
    """Parameters from last to first in buckets of one dtype and device; sorted by when their last member is expected.

    A bucket holds `bucket_bytes` at most, unless one parameter is larger; the first of each kind is full at 1 MiB."""
    sizes = [((p.dtype, p.device), p.numel() * p.element_size()) for _, p in named]
    return [[named[k] for k in members] for members in fill(sizes, bucket_bytes)]


def as_on_rank_0(tensors: Sequence[Tensor], group: Group, run_bytes: int = 2**20) -> None:
    """Give tensors of any dtype rank 0's values, small ones together; sends their bytes from rank 0. Holds three times
    `run_bytes`, or the largest tensor, meanwhile."""
    run: list[Tensor] = []
    held = 0
    for k, x in enumerate(tensors if group.size > 1 else ()):
        run.append(x)
        held += x.numel() * x.element_size()
        if held < run_bytes and k + 1 < len(tensors):
            continue
        raw = group.broadcast(torch.cat([as_bytes(each.detach().contiguous()).to(group.device) for each in run]))
        if group.rank:
            for each, part in zip(run, raw.split([each.numel() * each.element_size() for each in run]), strict=True):
                # through .data: a graph that has saved the tensor may still want its backward
                each.data.copy_(part.clone().view(each.dtype).view(each.shape))
        run, held = [], 0
