"""Data parallel in one process: what came before DDP, kept for comparison.

    device 0   inputs --cut--> x0      weights ==> replica 0 (the module itself) --y0--> outputs -> loss
    device 1             \\---> x1  \\===copy===> replica 1 ----------------------y1--/
    device 2              \\--> x2   \\==copy===> replica 2 ----------------------y2-/

    backward: gradients of replicas 1 and 2 are copied to device 0 and added there; the optimizer knows device 0 only

All of it goes through device 0's links, every step, where DDP's weights never travel and its gradients go round a ring:

    bytes a step      out of device 0                 into device 0
    replicate         (n-1) (N + buffers)
    scatter           (n-1)/n of the inputs
    gather                                            (n-1)/n of the outputs
    reduce                                            (n-1) N
    gather's backward (n-1)/n of the outputs' gradients (not in the ledger: autograd moves them)

    DDP, each rank    2(n-1)/n N                      N = bytes of the weights
    memory            device 0: weights, gradients, optimizer, all outputs, and (on a CPU) everybody's replica

The replicas' forward passes run in threads of one process, so Python's lock serialises what is not inside a kernel.
Source: the scheme is that of Krizhevsky 2014, arXiv:1404.5997, section 4; why it was left: Li 2020, arXiv:2006.15704,
section 2.2.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from labkit.comm.ledger import Ledger
from labkit.parallel.data_parallel import MakeOptimizer

AXIS = "replicas"


class DataParallelReplicas:
    """A module and its replicas on `devices`; `devices[0]` holds the module. `ledger` counts what moves between them.

        sync.zero_grad()
        loss(sync(x), y).backward()          as often as you like: gradients add up
        sync.finish()                        the replicas' gradients are added to the module's
        sync.step()

    The loss sees all outputs together, so gradients are exactly those of the whole batch, however ragged the cut.
    Devices may repeat: `["cpu"] * 4` makes the same copies in one memory.
    """

    def __init__(
        self, module: nn.Module, make_optimizer: MakeOptimizer, devices: Sequence[str | torch.device] = ("cpu", "cpu")
    ) -> None:
        """Copy the module once to each other device. ValueError if it is not on devices[0], or there are no devices."""
        if not devices:
            raise ValueError("give at least one device, such as ['cuda:0', 'cuda:1'] or ['cpu'] * 2")
        self.devices = tuple(torch.empty(0, device=device).device for device in devices)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if tensor.device != self.devices[0]:
                raise ValueError(
                    f"{name} is on {tensor.device}, the first device is {self.devices[0]}: "
                    f"module.to({str(devices[0])!r})"
                )
        self.module = module
        self.replicas = (module, *(copy.deepcopy(module).to(device) for device in self.devices[1:]))
        self.optimizer = make_optimizer([p for p in module.parameters() if p.requires_grad])
        self.ledger = Ledger()

    def __call__(self, x: Tensor) -> Tensor:
        """The module's outputs for a batch, on device 0.   [B, ...] -> [B, ...], cut along dim 0

        Weights and buffers are copied to the replicas first. A batch of fewer rows than devices leaves some idle."""
        self._replicate()
        parts = [part for part in x.tensor_split(len(self.replicas)) if len(part)] or [x]
        parts = [self._copy("scatter", part, k) for k, part in enumerate(parts)]
        grad, autocast = torch.is_grad_enabled(), torch.is_autocast_enabled(self.devices[0].type)
        dtype = torch.get_autocast_dtype(self.devices[0].type)

        def forward(k: int) -> Tensor:
            # grad mode and autocast belong to a thread: a fresh one does not have the caller's
            context = torch.autocast(self.devices[k].type, dtype, enabled=autocast)
            with torch.set_grad_enabled(grad), context, torch.cuda.device_of(parts[k]):
                return self.replicas[k](parts[k])

        # threads and not a loop: kernels of several GPUs overlap only if somebody launches them at the same time
        with ThreadPoolExecutor(len(parts)) as threads:
            outputs = list(threads.map(forward, range(len(parts))))
        if any(y.dim() == 0 for y in outputs):
            raise ValueError(
                "a replica's output is a scalar, which cannot be gathered: compute the loss outside the module"
            )
        return torch.cat([self._copy("gather", y, k, to=0) for k, y in enumerate(outputs)])

    def zero_grad(self) -> None:
        """Forget the gradients, the replicas' too."""
        for replica in self.replicas:
            replica.zero_grad(set_to_none=True)

    def finish(self) -> None:
        """Add the replicas' gradients to the module's, on device 0; the replicas' are gone."""
        for k, replica in enumerate(self.replicas[1:], 1):
            for p, copied in zip(self.module.parameters(), replica.parameters(), strict=True):
                if copied.grad is not None:
                    arrived = self._copy("reduce", copied.grad, k, to=0)
                    p.grad = arrived if p.grad is None else p.grad.add_(arrived)
                    copied.grad = None  # or the next finish would add it once more

    def step(self) -> None:
        """The optimizer's step on device 0; the replicas learn of it at the next forward."""
        self.optimizer.step()

    @torch.no_grad()
    def _replicate(self) -> None:
        for k, replica in enumerate(self.replicas[1:], 1):
            replica.train(self.module.training)
            for p, copied in zip(self.module.parameters(), replica.parameters(), strict=True):
                copied.requires_grad_(p.requires_grad)  # a parameter that was frozen since must get no gradient here
            sources = [*self.module.parameters(), *self.module.buffers()]
            for source, target in zip(sources, [*replica.parameters(), *replica.buffers()], strict=True):
                number = self._open("replicate", source, k)
                target.data.copy_(source)  # .data: an earlier forward's graph may have saved the weights
                self.ledger.close(number)

    def _copy(self, verb: str, x: Tensor, k: int, to: int | None = None) -> Tensor:
        """x, which is or goes to replica k's device, on device `to` (None: k's own). Replica 0 moves nothing."""
        if k == 0:
            return x
        number = self._open(verb, x, k if to is None else to)
        moved = x.to(self.devices[k if to is None else to], copy=True)
        self.ledger.close(number)
        return moved

    def _open(self, verb: str, x: Tensor, to: int) -> int:
        return self.ledger.open(verb, AXIS, to, x.nbytes)
