"""Groups over torch.distributed: gloo between processes on CPUs (or on one shared GPU), NCCL between GPUs.

Only this file knows how torch spells its collectives. What a backend sends inside of a collective it does not say
(gloo's reduce_scatter, for one, is an all_reduce in disguise). So the ledger is charged what a ring would send
(charge.py).

NCCL carries collectives only. A message of a CUDA tensor goes by way of host memory, over gloo, under its tag: NCCL
knows no tags and has one queue for each pair of ranks, so that messages that are received in another order than they
were sent would be taken for one another, and ranks that send to each other in a circle would wait for ever. Without
NCCL all else is staged through host memory, too: right numbers on any machine, not the speed of a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.comm.charge import charged_bytes
from labkit.comm.group import Group
from labkit.comm.ledger import Ledger
from labkit.comm.process_groups import Pair, ProcessGroups, adopted

# a mean is a sum that is divided afterwards, on every backend
_REDUCE = (
    ("sum", dist.ReduceOp.SUM),
    ("mean", dist.ReduceOp.SUM),
    ("max", dist.ReduceOp.MAX),
    ("min", dist.ReduceOp.MIN),
)
_ON_GLOO = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8,
    torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
_ON_NCCL = (*_ON_GLOO, torch.float8_e4m3fn, torch.float8_e5m2)
_COMPLEX = torch.complex64, torch.complex128
"""What torch's collectives take. The others end in an error from its depth, on some ranks after others have begun."""


def world(
    rank: int,
    size: int,
    device: str,
    ledger: Ledger,
    state: dict[str, Any] | None = None,
    groups: ProcessGroups | None = None,
) -> Group:
    """The group of all ranks, over torch's process group, whoever has formed it.

    Without the `groups` of a generation every rank must call this, once: with NCCL it forms a group for messages."""
    groups = adopted(rank, size, device) if groups is None else groups
    return over(groups.world, "world", tuple(range(size)), rank, device, ledger, state, groups)


def over(
    pair: Pair,
    axis: str,
    ranks: tuple[int, ...],
    rank: int,
    device: str,
    ledger: Ledger,
    state: dict[str, Any] | None = None,
    groups: ProcessGroups | None = None,
) -> Group:
    """A group over two of torch's process groups, or one twice; `rank` is the index in `ranks`. A mesh can be connected
    over it only where it knows the `groups` of its generation."""
    wire = Native(pair, device, len(ranks), groups)
    return Group(axis, ranks, rank, wire, wire.algorithms(), ledger, device, state)


class UnderWay:
    """torch's handle, the tensors it works on, and what remains to be done when it is through."""

    def __init__(
        self,
        work: Any,
        x: Tensor | None = None,
        back_to: Tensor | None = None,
        divide: int = 1,
        source: Tensor | None = None,
        finish: Callable[[], None] | None = None,
    ):
        self.work, self.x, self.back_to, self.divide, self.source = work, x, back_to, divide, source
        self.finish = finish

    def wait(self) -> Tensor | None:
        """Block until torch is through, then finish the rest."""
        if self.work is not None:
            self.work.wait()
            self.work = self.source = None
            if self.divide > 1 and self.x is not None:
                self.x.div_(self.divide)
            if self.back_to is not None and self.x is not None:
                self.back_to.copy_(self.x)
            if self.finish is not None:
                self.finish()
        return self.x if self.back_to is None else self.back_to

    def done(self) -> bool:
        """True if `wait` would return at once."""
        return self.work is None or bool(self.work.is_completed())


class Through:
    """The handle of what is done already. It takes the place of one of gloo's that has been waited for, which would
    wait for one more message."""

    def wait(self) -> None:
        """Return at once."""
        return None

    def is_completed(self) -> bool:
        """True."""
        return True


class GlooMessage(UnderWay):
    """A message under gloo. Its handle says that it is done only if a thread waits for it, so `done` starts one."""

    asking: threading.Thread | None = None
    error: BaseException | None = None

    def wait(self) -> Tensor | None:
        """Block until the message is through."""
        if self.asking is not None:
            self.asking.join()
            self.asking = None
        if self.error is not None:
            raise self.error
        return super().wait()

    def done(self) -> bool:
        """True if the message is through."""
        if self.work is None or self.work.is_completed():
            return True
        if self.asking is None:
            self.asking = threading.Thread(target=self._ask, daemon=True)
            self.asking.start()
        self.asking.join(1e-3)  # so that the first call already sees a message that has arrived
        return not self.asking.is_alive()

    def _ask(self) -> None:
        try:
            self.work.wait()  # no more: what remains is done by whoever waits, on that thread's device and stream
            self.work = Through()
        except BaseException as error:
            self.error = error


class Native:
    """Wire and collectives over one process group. Peers are indexes in the group."""

    def __init__(self, pair: Pair, device: str, size: int, groups: ProcessGroups | None = None):
        self.pg, self.messages = pair
        self.device, self.size, self.groups = device, size, groups
        self.on_device = groups is not None and groups.on_device
        self.finish = None if groups is None else groups.finish
        self.queues = self.on_device and groups is not None and not groups.blocking  # verbs return before they are over
        self.rank = 0 if self.pg is None else self.pg.rank()  # None: a group of one rank
        names = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "barrier")
        self.bound = {name: getattr(self, name) for name in names}
        self.__dict__.update(self.bound)  # kept as one object each, so that `is` finds what was swapped in

    def algorithms(self) -> dict[str, Any]:
        """{verb: the function that carries it out on this backend}."""
        return dict(self.bound)

    def check_dtype(self, verb: str, dtype: torch.dtype) -> None:
        """ValueError for a dtype that the backend's own collectives do not take."""
        lacking = _COMPLEX if self.on_device and verb == "reduce_scatter" else ()
        carried = [known for known in (_ON_NCCL if self.on_device else _ON_GLOO) if known not in lacking]
        if dtype not in carried:
            hint = "torch.view_as_real(x)" if dtype.is_complex else "x.to(torch.int64)"
            mend = "x.float()" if dtype.is_floating_point else hint
            raise ValueError(
                f"{verb} over {'NCCL' if self.on_device else 'gloo'} takes no {_name(dtype)}: use {mend}, or move the "
                f"bits as they are with x.view(torch.uint8); it takes {', '.join(map(_name, carried))}"
            )

    # -- messages ----------------------------------------------------------------------------------------------------

    def isend(self, x: Tensor, to: int, tag: int) -> UnderWay:
        """Start sending to member `to`; a CUDA tensor goes by way of host memory."""
        if not x.numel():
            return UnderWay(None)
        x = x.cpu()
        return GlooMessage(self.messages.send([x], to, tag), x)

    def irecv(self, buffer: Tensor, source: int, tag: int) -> UnderWay:
        """Start receiving from member `source` into `buffer`."""
        if not buffer.numel():
            return UnderWay(None)
        if buffer.is_cuda:
            staged = torch.empty_like(buffer, device="cpu", pin_memory=True)
            return GlooMessage(self.messages.recv([staged], source, tag), staged, buffer)
        return GlooMessage(self.messages.recv([buffer], source, tag), buffer)

    # -- collectives under way ---------------------------------------------------------------------------------------

    def all_reduce_start(self, x: Tensor, op: str) -> UnderWay:
        """Start the sum of x over the group, in place."""
        staged = self._staged(x)
        work = dist.all_reduce(staged, _op(op), self.pg, async_op=True)
        back, divide = None if staged is x else x, self.size if op == "mean" else 1
        return UnderWay(work, staged, back, divide, finish=self.finish)

    def reduce_scatter_start(self, x: Tensor, op: str) -> UnderWay:
        """Start a reduce_scatter; x is kept alive until it is done.   [n*k, ...] -> [k, ...]"""
        source = self._staged(x)
        y = source.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        work = _reduce_scatter()(y, source, _op(op), group=self.pg, async_op=True)
        back = None if source is x else torch.empty_like(y, device=x.device)
        return UnderWay(work, y, back, self.size if op == "mean" else 1, source, self.finish)

    def all_gather_start(self, x: Tensor, into: Tensor | None) -> UnderWay:
        """Start an all_gather; x is kept alive until it is done.   [k, ...] -> [n*k, ...]"""
        source = self._staged(x)
        out = x.new_empty((self.size * x.shape[0], *x.shape[1:])) if into is None else into
        y = out if source is x else torch.empty_like(out, device=source.device)
        work = _all_gather()(y, source, group=self.pg, async_op=True)
        return UnderWay(work, y, None if y is out else out, 1, source, self.finish)

    def all_to_all_start(self, x: Tensor) -> UnderWay:
        """Start an all_to_all of equal parts; x is kept alive until it is done.   [n*k, ...] -> [n*k, ...]"""
        source = self._staged(x)
        y = torch.empty_like(source)
        work = dist.all_to_all_single(y, source, group=self.pg, async_op=True)
        return UnderWay(work, y, None if source is x else torch.empty_like(x), 1, source, self.finish)

    # -- collectives: f(x, group) -> new tensor ----------------------------------------------------------------------

    def all_reduce(self, x: Tensor, group: Group, op: str = "sum") -> Tensor:
        """Sum of x over the group.   same shape"""
        group.ledger.charge(charged_bytes("all_reduce", x, group.rank, self.size))
        y = self._staged(x).clone(memory_format=torch.contiguous_format)
        dist.all_reduce(y, _op(op), self.pg)
        return self._back_on(_mean(y, op, self.size), x)

    def reduce_scatter(self, x: Tensor, group: Group, op: str = "sum") -> Tensor:
        """This rank's part of the sum.   [n*k, ...] -> [k, ...]"""
        group.ledger.charge(charged_bytes("reduce_scatter", x, group.rank, self.size))
        if x.shape[0] % self.size:  # torch wants equal parts; ours are those of tensor_split
            y = self._staged(x).clone(memory_format=torch.contiguous_format)
            dist.all_reduce(y, _op(op), self.pg)
            y = y.tensor_split(self.size)[group.rank].clone()
        else:
            source = self._staged(x).contiguous()
            y = source.new_empty((x.shape[0] // self.size, *x.shape[1:]))
            _reduce_scatter()(y, source, _op(op), group=self.pg)
        return self._back_on(_mean(y, op, self.size), x)

    def all_gather(self, x: Tensor, group: Group) -> Tensor:
        """Everybody's x, joined along dim 0.   [k, ...] -> [n*k, ...]"""
        group.ledger.charge(charged_bytes("all_gather", x, group.rank, self.size))
        source = self._staged(x).contiguous()
        y = source.new_empty((self.size * x.shape[0], *x.shape[1:]))
        _all_gather()(y, source, group=self.pg)
        return self._back_on(y, x)

    def broadcast(self, x: Tensor, group: Group, source: int = 0) -> Tensor:
        """The source's x.   same shape"""
        group.ledger.charge(charged_bytes("broadcast", x, group.rank, self.size, source))
        y = self._staged(x).clone(memory_format=torch.contiguous_format)
        dist.broadcast(y, group=self.pg, group_src=source)
        return self._back_on(y, x)

    def all_to_all(
        self,
        x: Tensor,
        group: Group,
        send_rows: Sequence[int] | None = None,
        receive_rows: Sequence[int] | None = None,
    ) -> Tensor:
        """Part j of x goes to rank j; part i of the result came from rank i.   [n*k, ...] -> [n*k, ...], or ragged"""
        source = self._staged(x).contiguous()
        group.ledger.charge(charged_bytes("all_to_all", x, group.rank, self.size, send_rows=send_rows))
        y = source.new_empty((sum(receive_rows or source.shape[:1]), *x.shape[1:]))
        receives, sends = (None if rows is None else list(rows) for rows in (receive_rows, send_rows))
        dist.all_to_all_single(y, source, receives, sends, group=self.pg)
        return self._back_on(y, x)

    def barrier(self, x: Tensor, group: Group) -> Tensor:
        """Wait for everybody."""
        dist.barrier(self.pg)
        return self._back_on(x, x)

    def _staged(self, x: Tensor) -> Tensor:
        return x.cpu() if x.is_cuda and not self.on_device else x

    def _back_on(self, y: Tensor, like: Tensor) -> Tensor:
        y = y.to(like.device)
        if self.finish is not None:
            self.finish()
        return y


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _op(op: str) -> Any:
    return dict(_REDUCE)[op]


def _mean(y: Tensor, op: str, size: int) -> Tensor:
    return y.div_(size) if op == "mean" else y


def _reduce_scatter() -> Any:
    # torch 2.13 renames reduce_scatter_tensor and all_gather_into_tensor, and warns about the old names
    return getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _all_gather() -> Any:
    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
