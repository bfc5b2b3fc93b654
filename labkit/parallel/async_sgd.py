"""Asynchronous SGD: a server holds the weights, each worker pushes gradients and pulls weights at its own pace.

    server   v0 -------------- v1 ---- v2 ------- v3 ---- v4         v: how many gradients have been applied
    rank 1     \\_v0_ compute _/ \\_v1_ compute ___/ \\_...            staleness 0, then 1
    rank 2     \\_v0_______ compute _____/ \\_v2_ ... _____/           staleness 1, then 1

A gradient that was computed from version a and is applied to version b has staleness b - a. The gain: nobody waits for
the slowest worker. The price: a gradient is applied to weights that have changed since. On a quadratic of curvature 1,
SGD with constant staleness t diverges from a learning rate of 2 sin(pi / (2(2t + 1))) on, 2 for t = 0.

    bytes sent    worker   N a push                    N = bytes of the weights, plus 16 bytes a message of control
                  server   N a pull: (n-1) N when every worker does a step, all over one link
    memory        server   N weights, N one gradient, N the last snapshot, the optimizer's state;  worker 3N

    bound=s              stale synchronous: a worker that is more than s steps ahead of the slowest waits for its pull
    staleness_aware      the learning rate of a gradient with staleness t is divided by 1 + t

Sources: Dean 2012 (DistBelief, section 4.1); Ho 2013 (stale synchronous parallel, section 3); Zhang 2016,
arXiv:1511.05950 (learning rate by staleness; there it is divided by t, where t > 0).

    if group.rank == 0:
        history = ParameterServer(module, group, make_optimizer).serve()
    else:
        with Worker(module, group) as worker:
            for batch in batches:
                worker.pull()
                loss(module, batch).backward()
                worker.push()
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from torch import Tensor, nn

from labkit.comm.group import Group, Work
from labkit.parallel.bucket import Flat, as_on_rank_0, by_kind
from labkit.parallel.data_parallel import MakeOptimizer, check_module

PULL, PUSH, BYE = range(3)
CONTROL, VERSION, PAYLOAD = range(3)  # tags
NAP_S = 2e-4


class Applied(NamedTuple):
    """One gradient that the server has applied: whose, computed from which version, applied to which."""

    worker: int
    computed_from: int
    applied_to: int

    @property
    def staleness(self) -> int:
        """The number of gradients of other workers that were applied since the weights were fetched."""
        return self.applied_to - self.computed_from


class ParameterServer:
    """Rank 0: holds the weights and the optimizer, applies gradients one by one as they come."""

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        make_optimizer: MakeOptimizer,
        bound: int | None = None,
        staleness_aware: bool = False,
    ) -> None:
        """`bound` in steps ahead of the slowest worker, None for no bound, 0 for lockstep.

        Raises ValueError on a rank other than 0, in a group of one, or for a negative bound."""
        _check_place(group, serves=True)
        if bound is not None and bound < 0:
            raise ValueError(f"bound is a number of steps, 0 or more (None for no bound), got {bound}")
        check_module(module, group)
        as_on_rank_0([*module.parameters(), *module.buffers()], group)
        self.module, self.group, self.bound, self.staleness_aware = module, group, bound, staleness_aware
        self.flats = _flats(module)
        self.optimizer = make_optimizer([p for flat in self.flats for p in flat.params])
        self.history: list[Applied] = []
        self._grads = [flat.empty() for flat in self.flats]
        self._snapshot: tuple[int, list[Tensor]] = (-1, [])

    @property
    def version(self) -> int:
        """The number of gradients that have been applied."""
        return len(self.history)

    def serve(self) -> list[Applied]:
        """Answer the workers until each of them has closed. Returns what was applied, in order."""
        workers = range(1, self.group.size)
        expected = {worker: self._expect(worker) for worker in workers}
        clock = dict.fromkeys(workers, 0)  # steps of each worker that has not closed
        waiting: list[int] = []
        while expected:
            ready = [worker for worker, work in expected.items() if work.done]
            for worker in ready:
                request, computed_from = _control(expected[worker])
                if request == BYE:
                    del expected[worker], clock[worker]
                    continue
                if request == PUSH:
                    self._apply(worker, computed_from)
                    clock[worker] += 1
                else:
                    waiting.append(worker)
                expected[worker] = self._expect(worker)
            # asked again after every push: it may have moved the slowest worker on
            for worker in [worker for worker in waiting if self._may_go_on(worker, clock)]:
                waiting.remove(worker)
                self._answer(worker)
            if not ready:
                time.sleep(NAP_S)  # polled: there is no wait for the first of several messages
        return self.history

    def _expect(self, worker: int) -> Work:
        return self.group.recv_start(worker, CONTROL)

    def _may_go_on(self, worker: int, clock: dict[int, int]) -> bool:
        # the slowest is always let on, so this never blocks all of them
        return self.bound is None or clock[worker] - min(clock.values()) <= self.bound

    def _apply(self, worker: int, computed_from: int) -> None:
        for flat, grads in zip(self.flats, self._grads, strict=True):
            self.group.recv(worker, PAYLOAD, into=grads)
            for p, window in flat.windows(grads):
                p.grad = window
        applied = Applied(worker, computed_from, self.version)
        factor = 1 / (1 + applied.staleness) if self.staleness_aware else 1.0
        groups = self.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * factor
        self.optimizer.step()
        for group, rate in zip(groups, rates, strict=True):  # the factor is this gradient's alone
            group["lr"] = rate
        self.history.append(applied)

    def _answer(self, worker: int) -> None:
        # a copy: sends go on while the next gradient is applied, and workers of one version share it
        if self._snapshot[0] != self.version:
            self._snapshot = (self.version, [flat.pack() for flat in self.flats])
        version, weights = self._snapshot
        sent = [self.group.send(torch.tensor([version], device=self.group.device), worker, VERSION)]
        sent += [self.group.send(buffer, worker, PAYLOAD) for buffer in weights]
        for work in sent:
            work.wait()


class Worker:
    """A rank other than 0: pulls weights, computes, pushes gradients. A context: leaving it tells the server."""

    def __init__(self, module: nn.Module, group: Group) -> None:
        """`module` has the server's shape; its start is the server's. Later its buffers are its own.

        Raises ValueError on rank 0."""
        _check_place(group, serves=False)
        check_module(module, group)
        as_on_rank_0([*module.parameters(), *module.buffers()], group)
        self.module, self.group, self.version = module, group, -1
        self.flats = _flats(module)
        self._buffers = [flat.empty() for flat in self.flats]
        self._closed = False

    def pull(self) -> int:
        """Ask for the weights, wait for them (with a bound: until the slowest has caught up). Returns their version."""
        self._request(PULL)
        self.version = int(self.group.recv(0, VERSION))
        for flat, buffer in zip(self.flats, self._buffers, strict=True):
            self.group.recv(0, PAYLOAD, into=buffer)
            for p, window in flat.windows(buffer):
                p.data.copy_(window)
        return self.version

    def push(self) -> None:
        """Hand the gradients over, zero for a parameter that has none; afterwards every p.grad is None.

        Raises ValueError before the first `pull`: nobody knows which weights they belong to."""
        if self.version < 0:
            raise ValueError("pull() before push(): gradients of weights that the server never had mean nothing")
        self._request(PUSH)
        for flat, buffer in zip(self.flats, self._buffers, strict=True):
            for p, window in flat.windows(buffer):
                window.zero_() if p.grad is None else window.copy_(p.grad.detach())
                p.grad = None
            self.group.send(buffer, 0, PAYLOAD).wait()

    def close(self) -> None:
        """Tell the server that nothing more will come. A second call does nothing."""
        if not self._closed:
            self._request(BYE)
            self._closed = True

    def _request(self, kind: int) -> None:
        if self._closed:
            raise ValueError("this worker is closed, and the server no longer listens: make a new pair")
        self.group.send(torch.tensor([kind, self.version], device=self.group.device), 0, CONTROL).wait()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _control(work: Work) -> tuple[int, int]:
    message = work.wait()
    assert message is not None
    request, version = message.tolist()
    return request, version


def _flats(module: nn.Module) -> list[Flat]:
    """One flat map for each dtype and device of the trainable parameters, in order of first appearance."""
    return [Flat.of(named) for named in by_kind((name, p) for name, p in module.named_parameters() if p.requires_grad)]


def _check_place(group: Group, serves: bool) -> None:
    if group.size < 2:
        raise ValueError("a parameter server needs a worker: use 2 ranks or more")
    if serves != (group.rank == 0):
        raise ValueError(f"rank 0 is the ParameterServer and all others are a Worker; this is rank {group.rank}")
