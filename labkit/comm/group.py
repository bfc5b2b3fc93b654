"""A Group: ranks that talk to each other along one axis, seen from one member.

Every byte that a strategy moves goes through a verb of a Group, and every verb writes to the group's ledger. How a
collective is done is data: `group.using(all_reduce=my_ring)` gives a group on which every strategy runs on `my_ring`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from labkit.comm.ledger import Call, Ledger
from labkit.comm.message import Receiving, Sending, Wire
from labkit.comm.work import Finished, Watched, Work

OPS = ("sum", "mean", "max", "min")
VERBS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "barrier")
Algorithm = Callable[..., Tensor]
Tap = Callable[[str, int, int, Tensor], None]


class Group:
    """`rank` is the index of this member in `ranks` (global ranks, in axis order); `axis` names the group."""

    def __init__(
        self,
        axis: str,
        ranks: tuple[int, ...],
        rank: int,
        wire: Wire,
        algorithms: Mapping[str, Algorithm],
        ledger: Ledger | None = None,
        device: str = "cpu",
        state: dict[str, Any] | None = None,
        tap: Tap | None = None,
    ):
        self.axis, self.ranks, self.rank, self.wire = axis, tuple(ranks), rank, wire
        self.algorithms = MappingProxyType(dict(algorithms))
        self.ledger = Ledger() if ledger is None else ledger
        self.device = device
        self.state = {} if state is None else state
        self.tap = tap
        self.counted = [0]  # collectives so far; a list, since all views of one group share the count

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)

    # -- point to point ----------------------------------------------------------------------------------------------

    def send(self, x: Tensor, to: int, tag: int = 0) -> Work:
        """Start sending x, of any shape, to member `to`. Sends x's bytes; leave x alone until `wait()` returns.

        `wait()` returns when the receiver has taken the message. Raises ValueError for a rank outside the group."""
        self._check_peer(to, "send to")
        x = self._checked(x).contiguous()
        call = self._call("send", x, to, tag)
        n_bytes = x.numel() * x.element_size()
        number = self.ledger.open("send", self.axis, self.ranks[to], n_bytes, tag)
        if self.tap is not None:
            self.tap("send", self.ranks[to], tag, x)
        return Work(self, call, self.ledger.keep(Sending(self.wire, x, to, tag)), number)

    def recv_start(self, source: int, tag: int = 0, into: Tensor | None = None) -> Work:
        """Start receiving from member `source`; `wait()` gives the tensor. With `into` it lands there (same shape).

        A small message is taken as it comes; the payload of a large one when you wait, or look at `done`."""
        self._check_peer(source, "receive from")
        if into is not None and not into.is_contiguous():
            raise ValueError(f"into= must be contiguous, got strides {into.stride()} for shape {tuple(into.shape)}")
        call = self._call("recv", into, source, tag)
        return Work(self, call, Receiving(self.wire, source, tag, into, self.device))

    def recv(self, source: int, tag: int = 0, into: Tensor | None = None) -> Tensor:
        """Wait for the tensor that member `source` sends under `tag`; the message itself tells shape and dtype.

        Raises ValueError if `into` is given and does not match, with both shapes."""
        x = self.recv_start(source, tag, into).wait()
        assert x is not None
        return x

    def exchange(self, x: Tensor, to: int, source: int, tag: int = 0, into: Tensor | None = None) -> Tensor:
        """Send x to member `to` and receive from member `source` at the same time: cannot deadlock on a ring."""
        expected = self.recv_start(source, tag, into)
        sending = self.send(x, to, tag)
        arrived = expected.wait()
        assert arrived is not None
        sending.wait()
        return arrived

    # -- collectives -------------------------------------------------------------------------------------------------

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        """Sum (mean, max, min) of x over the group, on every rank.   same shape -> same shape, x unchanged

        A ring sends 2(n-1)/n of x's bytes. Raises ValueError for a mean of integers, a sparse tensor, differing shapes.
        """
        self._check_op(x, op)
        return self._collective("all_reduce", x, x.shape, op=op)

    def all_reduce_start(self, x: Tensor, op: str = "sum") -> Work:
        """Start an all-reduce in place on a contiguous buffer that you own; `wait()` returns it."""
        self._check_op(x, op)
        if not x.is_contiguous():
            raise ValueError(
                f"an in-place all_reduce needs a contiguous tensor, got strides {x.stride()}: use x.contiguous()"
            )
        begin = getattr(self.wire, "all_reduce_start", None)
        if (
            begin is None
            or self.size == 1
            or self.algorithms["all_reduce"] is not getattr(self.wire, "all_reduce", None)
        ):
            with torch.no_grad():
                x.copy_(self.all_reduce(x, op))
            return Work(self, self._call("all_reduce", x), Finished(x))
        self.counted[0] += 1
        call = self._call("all_reduce", x, shape=tuple(x.shape), op=op)
        with Watched(self.ledger, call):  # a mismatch is seen here, before anything is sent
            number = self.ledger.open("all_reduce", self.axis, None, 2 * (self.size - 1) * _n_bytes(x) // self.size)
        return Work(self, call, begin(x, op), number)

    def reduce_scatter(self, x: Tensor, op: str = "sum") -> Tensor:
        """The sum over the group, cut along dim 0; this rank keeps its part.   [n*k, ...] -> [k, ...]

        If n does not divide dim 0 the first parts have one row more: rank r gets `x.tensor_split(n)[r]`.
        A ring sends (n-1)/n of x's bytes."""
        self._check_op(x, op)
        if x.dim() == 0:
            raise ValueError("reduce_scatter cuts dim 0, and a scalar has none: use all_reduce")
        return self._collective("reduce_scatter", x, x.shape, op=op)

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's x, one after the other along dim 0, in rank order.   [k, ...] -> [n*k, ...]

        A ring sends (n-1)/n of the result's bytes. Parts of different lengths want `ring.all_gather`."""
        if self._checked(x).dim() == 0:
            raise ValueError("all_gather joins along dim 0, and a scalar has none: use x.reshape(1)")
        ragged = self.algorithms["all_gather"] is not getattr(self.wire, "all_gather", None)
        return self._collective("all_gather", x, (-1, *x.shape[1:]) if ragged else x.shape)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Member `source`'s x, on every rank (the others pass a tensor of that shape and dtype).   same shape"""
        self._check_peer(source, "broadcast from", itself=True)
        return self._collective("broadcast", self._checked(x), x.shape, source=source)

    def all_to_all(self, x: Tensor) -> Tensor:
        """Part j of x goes to rank j; part i of the result came from rank i.   [n*k, ...] -> [n*k, ...]

        Sends (n-1)/n of x's bytes. Raises ValueError if n does not divide dim 0."""
        if self._checked(x).dim() == 0 or x.shape[0] % self.size:
            raise ValueError(
                f"all_to_all over {self.size} ranks needs dim 0 divisible by {self.size}, got shape {tuple(x.shape)}"
            )
        return self._collective("all_to_all", x, x.shape)

    def barrier(self) -> None:
        """Wait until every rank of the group is here. Sends no payload."""
        self._collective("barrier", torch.zeros(0), None)

    # -- other groups on the same ranks ------------------------------------------------------------------------------

    def using(self, **algorithms: Algorithm) -> Group:
        """The same group with other algorithms: `using(all_reduce=ring.all_reduce)`. Each is called as f(x, group).

        (`op=` and `source=` are passed on when they are not the defaults.) Raises ValueError for an unknown verb."""
        unknown = sorted(set(algorithms) - set(VERBS))
        if unknown:
            raise ValueError(f"{', '.join(unknown)} is no collective; there are {', '.join(VERBS)}")
        return self._with(algorithms={**self.algorithms, **algorithms})

    def tapped(self, tap: Tap) -> Group:
        """The same group, with `tap(event, peer, tag, tensor)` called for every message: event "send" or "recv", peer
        a global rank. For films and tests."""
        return self._with(tap=tap)

    def _with(self, **changes: Any) -> Group:
        kept = {
            name: getattr(self, name)
            for name in ("axis", "ranks", "rank", "wire", "algorithms", "ledger", "device", "state", "tap")
        }
        view = type(self)(**{**kept, **changes})
        view.counted = self.counted
        return view

    def __repr__(self) -> str:
        return f"Group({self.axis}: rank {self.rank} of {self.size}, {self.device})"

    # -- behind the verbs --------------------------------------------------------------------------------------------

    def _collective(self, verb: str, x: Tensor, shape: Any, **options: Any) -> Tensor:
        x = self._checked(x)
        self.counted[0] += 1
        if self.size == 1:
            return x.clone()
        given = {key: value for key, value in options.items() if value not in ("sum", 0)}
        call = self._call(verb, x, shape=None if shape is None else tuple(shape), op=options.get("op", "sum"))
        number = self.ledger.open(verb, self.axis, None, 0)
        self.ledger.within.append((verb, number))
        try:
            with Watched(self.ledger, call):
                return self.algorithms[verb](x, self, **given)
        finally:
            if self.ledger.within:
                self.ledger.within.pop()
            self.ledger.close(number)

    def _call(
        self, verb: str, x: Tensor | None, peer: int | None = None, tag: int = 0, shape: Any = None, op: str = "sum"
    ) -> Call:
        if peer is not None and x is not None:
            shape = tuple(x.shape)
        dtype = "" if x is None or shape is None else str(x.dtype)[6:]
        return Call(verb, self.axis, self.ranks, self.rank, peer, tag, shape, dtype, self.counted[0], op)

    def _checked(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor):
            raise ValueError(f"verbs of a group take a tensor, got {type(x).__name__}: wrap it, torch.tensor({x!r})")
        if x.layout is not torch.strided:
            raise ValueError(f"cannot send a sparse tensor ({x.layout}, shape {tuple(x.shape)}): send x.to_dense()")
        if x.numel() and x.device.type != torch.device(self.device).type:
            raise ValueError(
                f"this group talks on {self.device}, the tensor is on {x.device}: use x.to({self.device!r})"
            )
        return x.detach()

    def _check_op(self, x: Tensor, op: str) -> None:
        self._checked(x)
        if op not in OPS:
            raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r}")
        if op == "mean" and not (x.is_floating_point() or x.is_complex()):
            raise ValueError(
                f"the mean of {str(x.dtype)[6:]} tensors is not a whole number: "
                'use x.float(), or op="sum" and divide yourself'
            )

    def _check_peer(self, peer: int, what: str, itself: bool = False) -> None:
        if not isinstance(peer, int) or isinstance(peer, bool) or not 0 <= peer < self.size:
            raise ValueError(f"cannot {what} {peer!r}: ranks of the {self.axis} group are 0 to {self.size - 1}")
        if peer == self.rank and not itself:
            raise ValueError(f"rank {peer} cannot {what} itself")


def _n_bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
