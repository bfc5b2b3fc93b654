"""Offload: the optimizer lives somewhere else, usually in the memory of the CPU.

    device (GPU)    gradient [N/n] ---copy--+          +--copy---> weights [N/n]
                                            |          |
    CPU                                  gradient -> optimizer -> master
                                                     momentum, variance, ...

`Offload(make_optimizer)` is itself a make_optimizer, for any strategy: under ZeRO the parameters it is given are this
rank's 1/n, so n CPUs share the work. The optimizer steps on masters: copies of the parameters, in fp32 at least, so
that weights may be kept in bf16 without losing the small updates. With `device=None` the masters stay where the
parameters are, as those of MasterWeights (labkit.train.precision) do. That one frees gradients as it widens them, so
that clipping sees fp32; here they are clipped as backward left them, and copied into room that stays.

    bytes copied per step     gradients there, weights back (over PCIe, not over the wire between ranks)
    device memory             nothing but weights and gradients;     CPU memory: master, gradient, optimizer's state

On a GPU the CPU's side is pinned memory and all copies are under way at once; the step waits for the gradients, the
device does not wait for the weights until somebody reads them.

Source: Ren et al. (ZeRO-Offload), arXiv:2101.06840, sections 3 and 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from labkit.plan.contracts import mark_as
from labkit.train.precision import OnMasters


class Offload:
    """A make_optimizer whose optimizer works on copies of the parameters: `ZeRO2(module, group, Offload(make))`."""

    def __init__(
        self,
        make_optimizer: Callable[[Any], torch.optim.Optimizer],
        device: torch.device | str | None = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        """`device` of the masters, None for the parameters' own; `dtype` of the masters, None for fp32 at least."""
        self.make_optimizer, self.device, self.dtype = make_optimizer, device, dtype

    def __call__(self, params: list[nn.Parameter]) -> Offloaded:
        """The optimizer for these parameters."""
        return Offloaded(params, self.make_optimizer, self.device, self.dtype)


class Offloaded(OnMasters):
    """An optimizer of masters elsewhere. Each parameter has one, however wide it is."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        make_optimizer: Callable[[Any], torch.optim.Optimizer],
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        """Copy the parameters, and make the optimizer for the copies."""
        self.masters = {p: _master(p, device, dtype) for p in params}
        self.incoming = {p: _room(m.detach(), p) for p, m in self.masters.items()}
        super().__init__(list(self.masters.values()), make_optimizer)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:  # type: ignore[override]
        """Copy gradients to the masters, step, copy weights back. A parameter without a gradient is left alone."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for p, master in self.masters.items():
            master.grad = None if p.grad is None else self.incoming[p].copy_(p.grad, non_blocking=True)
        for device in {p.device for p in self.masters if p.is_cuda}:
            torch.cuda.current_stream(device).synchronize()  # the CPU is about to read what the copies bring
        self.inner.step()
        for p, master in self.masters.items():
            if master.grad is not None:  # the optimizer has not touched the others
                p.copy_(master, non_blocking=True)
        return loss


def _master(p: nn.Parameter, device: torch.device | str | None, dtype: torch.dtype | None) -> nn.Parameter:
    # fp32 at least: an update below 1/256 of a bf16 weight would be rounded away
    exact = dtype or torch.promote_types(p.dtype, torch.float32)
    copy = p.detach().to(device=device or p.device, dtype=exact, copy=True)
    # pinned: copies between GPU and CPU are asynchronous only to and from pinned memory
    master = nn.Parameter(copy.pin_memory() if p.is_cuda and not copy.is_cuda else copy)
    mark_as(master, p)
    return master


def _room(master: Tensor, p: Tensor) -> Tensor:
    return torch.empty_like(master, pin_memory=p.is_cuda and not master.is_cuda)
