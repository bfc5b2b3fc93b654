"""Shard: one rank's part of parameters that lie in one flat buffer, and the way of their gradients to it.

    backward     g g g   g g       each parameter's own p.grad, for as long as the strategy lets it live
    send         |g g g|g g 0|     packed into one buffer and dropped; then reduce_scatter
    settle       |m m m|           the mean, on the rank that owns this part: added to master.grad
    step         |w w w|           the optimizer on `master`
    gather       |w w w|w w .|     all_gather: everybody's part, in `weights`

`send` and `gather` move (n-1)/n of the buffer's bytes each. Which of these buffers live, and for how long, is what
tells the stages of ZeRO apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from labkit.comm.group import Group, Work
from labkit.parallel.bucket import Named
from labkit.parallel.flat import Flat


class Shard:
    """This rank's part of parameters that lie in one flat buffer, and the way of their gradients to it.

    weights   [numel] all of them, in the dtype they compute in (ZeRO3 frees its memory while nobody computes)
    master    [numel / n] this rank's part: of `weights` itself, or a copy (`apart`)
    work      the reduce_scatter that is under way, if there is one
    """

    def __init__(
        self,
        named: Sequence[Named],
        group: Group,
        *,
        apart: bool = False,
        compute_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        """Lay the parameters' values into `weights`; each parameter is a window of it from here on.

        `compute_dtype` is that of `weights`, None for the parameters' own; gradients travel in `reduce_dtype`, None
        for the master's."""
        self.group, self.flat = group, Flat.of(named, group.size)
        self.trains = self.flat.params[0].requires_grad
        full = self.flat.pack()
        mine = self.flat.shard(full, group.rank)
        self.master = nn.Parameter(mine.clone() if apart else mine, requires_grad=self.trains)
        self.weights = full if compute_dtype is None or not full.is_floating_point() else full.to(compute_dtype)
        self.reduce_dtype = reduce_dtype or full.dtype
        for p, window in self.flat.windows(self.weights):
            p.data = window
        self.work: Work | None = None

    @property
    def has_grads(self) -> bool:
        """Whether there are gradients that were not sent."""
        return self.trains and any(p.grad is not None for p in self.flat.params)

    def gather_start(self) -> Work:
        """Start bringing everybody's new part into `weights`. Sends (n-1)/n of the bytes of `weights`."""
        return self.group.all_gather_start(self.master.detach().to(self.weights.dtype), into=self.weights)

    def send(self) -> None:
        """Pack and drop the gradients, start their mean over the group. Sends (n-1)/n of the bytes.

        A parameter without a gradient counts as zero. Raises ValueError for a sparse gradient."""
        self.settle()
        whole = torch.empty(self.flat.numel, dtype=self.reduce_dtype, device=self.master.device)
        whole[self.flat.starts[-1] + self.flat.params[-1].numel() :] = 0  # the padding: it counts in a norm
        for name, (p, window) in zip(self.flat.names, self.flat.windows(whole), strict=True):
            if p.grad is None:
                window.zero_()
            elif p.grad.layout is not torch.strided:
                raise ValueError(f"{name} has a {p.grad.layout} gradient, a flat buffer is dense: use sparse=False")
            else:
                window.copy_(p.grad.detach())
                p.grad = None
        self.work = self.group.reduce_scatter_start(whole, op="mean")

    def settle(self) -> None:
        """If something was sent, wait until this rank's part of the mean is here; it is added to `master.grad`."""
        if self.work is not None:
            part = self.work.wait()
            self.work = None
            assert part is not None
            if self.master.grad is None:
                self.master.grad = part.to(self.master.grad_dtype or part.dtype)
            else:
                self.master.grad.add_(part)

    def forget(self) -> None:
        """Drop all gradients, whole or not."""
        self.settle()
        self.master.grad = None
        for p in self.flat.params:
            p.grad = None

    def narrow(self, dtype: torch.dtype) -> None:
        """Keep `master` in a smaller dtype, since the optimizer has one of its own; gradients stay as they are."""
        if self.trains and self.master.is_floating_point():
            self.master.grad_dtype = self.master.dtype
            self.master.data = self.master.data.to(dtype)
