"""Local SGD and DiLoCo: each rank trains alone for H steps, then all agree on one step that they take together.

    anchor a        the weights on which all ranks agreed last, the same on every rank
    rank r          w_r = a, then H steps of its own optimizer on its own rows
    every H steps   d = mean over ranks of (a - w_r)       one all-reduce of the size of the weights
                    a = outer optimizer(a, d)              d is taken for a gradient
                    w_r = a                                the inner optimizer keeps its moments

    local SGD       outer step: SGD with lr 1, which is the plain mean of the weights
    DiLoCo          outer step: SGD with Nesterov momentum (lr 0.7, momentum 0.9), inner AdamW, H about 500

    bytes sent      2(n-1)/n N every H steps, 1/H of DDP's       N = bytes of the trained weights
    memory          2N more: the anchor and the outer momentum (N for plain local SGD); N for the difference at a sync

With H = 1 and plain SGD inside this is DDP: the mean of w - lr g_r is w - lr mean(g_r). With H > 1 it is another
algorithm: ranks drift apart between the syncs, and the outer momentum makes up for what averaging loses. A rank that
is late holds the others up once in H steps; one that dies costs at most H steps of its own work. Weights that travel in
fragments and behind the steps that follow, so that nobody has to wait: streaming_diloco.py.

Sources: Stich 2018, arXiv:1805.09767 (local SGD); Douillard 2023, arXiv:2311.08105, algorithm 1 (DiLoCo).

    sync = LocalSGD(model, group, lambda params: torch.optim.AdamW(params, lr=4e-4), every=500, make_outer=diloco)
    for rows in batches:
        sync.zero_grad()
        loss(model, rows).backward()
        sync.step()
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from labkit.comm.group import Group
from labkit.parallel.bucket import Flat, as_on_rank_0, by_kind
from labkit.parallel.data_parallel import MakeOptimizer, check_arguments


def mean_of_weights(anchors: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The outer step of local SGD: lr 1 makes the anchor the mean of the ranks' weights."""
    return torch.optim.SGD(anchors, lr=1.0)


def diloco(anchors: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The outer step of DiLoCo: SGD with Nesterov momentum, lr 0.7 and momentum 0.9 (arXiv:2311.08105)."""
    return torch.optim.SGD(anchors, lr=0.7, momentum=0.9, nesterov=True)


class LocalSGD:
    """Ranks that train alone and meet every `every` steps. `steps` counts this rank's own, `syncs` the meetings.

    `optimizer` is the inner one, `outer` the one that steps on `anchors`: a flat tensor for each dtype and device."""

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        make_optimizer: MakeOptimizer,
        every: int,
        make_outer: MakeOptimizer = mean_of_weights,
    ) -> None:
        """`module` starts everywhere as on rank 0; buffers stay a rank's own afterwards.

        Raises ValueError on every rank for `every` below 1, and if ranks hold different modules."""
        if every < 1:
            raise ValueError(f"every is a number of steps, 1 or more; got {every}")
        check_arguments(module, group, every=every)
        as_on_rank_0([*module.parameters(), *module.buffers()], group)
        self.module, self.group, self.every = module, group, every
        trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self.flats = [Flat.of(named) for named in by_kind(trained)]
        self.anchors = [nn.Parameter(flat.pack()) for flat in self.flats]
        self.optimizer = make_optimizer([p for flat in self.flats for p in flat.params])
        self.outer = make_outer(self.anchors)
        self.steps = self.syncs = 0

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self.optimizer.zero_grad()

    def step(self) -> bool:
        """One step of this rank's own optimizer; sends nothing, except for every H-th. True if that was one."""
        self.optimizer.step()
        self.steps += 1
        if self.steps % self.every:
            return False
        self.sync()
        return True

    def sync(self) -> None:
        """Agree: the outer step on the mean difference. Every rank calls it; after a run's last step, once more if
        `steps` is no multiple of H. Sends 2(n-1)/n N bytes."""
        for flat, anchor in zip(self.flats, self.anchors, strict=True):
            difference = anchor.detach() - flat.pack()
            self.group.all_reduce_start(difference, op="mean").wait()
            anchor.grad = difference
        self.outer.step()
        self.outer.zero_grad()
        for flat, anchor in zip(self.flats, self.anchors, strict=True):
            self._take(flat, anchor.detach())
        self.syncs += 1

    def drift(self) -> float:
        """How far this rank's weights are from the anchor, relative to its length. Sends nothing."""
        far = [flat.pack() - anchor.detach() for flat, anchor in zip(self.flats, self.anchors, strict=True)]
        return float(_length(far) / _length([anchor.detach() for anchor in self.anchors]))

    @staticmethod
    def _take(flat: Flat, anchor: Tensor) -> None:
        for p, window in flat.windows(anchor):
            p.data.copy_(window)  # p.data, so that autograd counts no change: no graph is kept between steps


def sent_bytes(n_bytes: float, n_ranks: int, every: int, steps: int) -> float:
    """Bytes that a rank sends in `steps` steps: 2(n-1)/n N for each whole H of them."""
    return 2 * (n_ranks - 1) / n_ranks * n_bytes * (steps // every)


def _length(tensors: list[Tensor]) -> Tensor:
    return torch.stack([tensor.double().square().sum() for tensor in tensors]).sum().sqrt()
