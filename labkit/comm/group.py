"""A Group: ranks that talk to each other along one axis, seen from one member.

Every byte that a strategy moves goes through a verb of a Group, and every verb writes to the group's ledger. How a
collective is done is data: `group.using(all_reduce=my_ring)` gives a group on which every strategy runs on `my_ring`.

    Group       the verbs
    Work        what a verb has started, to be waited for
    check_...   what a verb refuses before anything is sent, with the numbers and the remedy

Long because every verb stands here once, beside what it refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from labkit.comm.charge import charged_bytes
from labkit.comm.ledger import Ledger, PendingOperation
from labkit.comm.message import MOST_DIMS, Wire, code_of, receiving, sending
from labkit.plan.checks import is_whole
from labkit.plan.words import dtype_name

VERBS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "barrier")
OPS = ("sum", "mean", "max", "min")
TAGS = 1 << 20
"""Tags are below this. A wire's tag has 31 bits: 20 for the caller's tag, one for its parity (see `_stream`), ten for a
remainder of the message's size (message.py)."""
Algorithm = Callable[..., Tensor]
Tap = Callable[[str, int, int, Tensor], None]
"""A function that is called for every message: event ("send" or "recv"), peer (a global rank), tag, tensor."""


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
        # Collectives so far, by which a hang report tells who is ahead of whom. A list, so that the views that `using`
        # and `tapped` make of this group share the count.
        self.counted = [0]

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)

    # -- point to point ----------------------------------------------------------------------------------------------

    def send(self, x: Tensor, to: int, tag: int = 0) -> Work:
        """Start sending x, of any shape, to member `to`. Sends x's bytes; leave x alone until `wait()` returns.

        `wait()` returns when the receiver has taken the message. Raises ValueError for a rank outside the group."""
        x, tag = check_message(self, x, to), check_tag(tag)
        call = self._call("send", x, to, tag)
        if self.tap is not None:  # before the message leaves, or the receiver's tap may be called first
            self.tap("send", self.ranks[to], tag, x)
        message = self.ledger.keep(sending(self.wire, x, to, self._stream(tag)))
        number = self.ledger.open("send", self.axis, self.ranks[to], _n_bytes(x), tag)
        return Work(self.ledger, call, message, number)

    def recv_start(self, source: int, tag: int = 0, into: Tensor | None = None) -> Work:
        """Start receiving from member `source`; `wait()` gives the tensor. With `into` it lands there (same shape).

        A small message is taken as it comes; the payload of a large one when you wait, or look at `done`."""
        check_peer(self, source, "receive from")
        if into is not None:
            check_in_place(into, "into=")
        call = self._call("recv", into, source, check_tag(tag))
        expected = receiving(self.wire, source, self._stream(tag), into, self.device)
        return Work(self.ledger, call, self.ledger.keep(expected), tap=self.tap)

    def recv(self, source: int, tag: int = 0, into: Tensor | None = None) -> Tensor:
        """Wait for the tensor that member `source` sends under `tag`; the message itself tells shape and dtype.

        Raises ValueError if `into` is given and does not match, with both shapes."""
        x = self.recv_start(source, tag, into).wait()
        assert x is not None
        return x

    def exchange(self, x: Tensor, to: int, source: int, tag: int = 0, into: Tensor | None = None) -> Tensor:
        """Send x to member `to` and receive from member `source` at the same time: cannot deadlock on a ring."""
        # Checked before the receive is posted: a posted receive cannot be taken back, so an exchange that is refused
        # after it would swallow the message that belongs to the next receive.
        x = check_message(self, x, to)
        expected = self.recv_start(source, tag, into)
        sent = self.send(x, to, tag)
        arrived = expected.wait()
        assert arrived is not None
        sent.wait()
        return arrived

    # -- collectives -------------------------------------------------------------------------------------------------

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        """Sum (mean, max, min) of x over the group, on every rank.   same shape -> same shape, x unchanged

        A ring sends 2(n-1)/n of x's bytes. Raises ValueError for a mean of integers, a sparse tensor, differing shapes.
        """
        check_op(self, x, op)
        return self._collective("all_reduce", x, x.shape, op=op)

    def all_reduce_start(self, x: Tensor, op: str = "sum") -> Work:
        """Start an all-reduce in place on a contiguous buffer that you own; `wait()` returns it."""
        check_op(self, x, op)
        check_in_place(x, "an in-place all_reduce")
        if self._asynchronous("all_reduce"):
            return self._begin("all_reduce", x, op=op)
        if self.size > 1:
            x.detach().copy_(self.all_reduce(x, op))
        return Work.finished_with(self.ledger, self._call("all_reduce", x), x)

    def reduce_scatter(self, x: Tensor, op: str = "sum") -> Tensor:
        """The sum over the group, cut along dim 0; this rank keeps its part.   [n*k, ...] -> [k, ...]

        If n does not divide dim 0 the first parts have one row more: rank r gets `x.tensor_split(n)[r]`.
        A ring sends (n-1)/n of x's bytes."""
        check_op(self, x, op)
        if x.dim() == 0:
            raise ValueError("reduce_scatter cuts dim 0, and a scalar has none: use all_reduce")
        return self._collective("reduce_scatter", x, x.shape, op=op)

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's x, one after the other along dim 0, in rank order.   [k, ...] -> [n*k, ...]

        A ring sends (n-1)/n of the result's bytes. Parts of different lengths want `ring.all_gather`."""
        if checked(self, x).dim() == 0:
            raise ValueError("all_gather joins along dim 0, and a scalar has none: use x.reshape(1)")
        # a swapped-in algorithm may take parts of different lengths: dim 0 is then -1, so that the shapes compare equal
        ragged = self.algorithms["all_gather"] is not getattr(self.wire, "all_gather", None)
        return self._collective("all_gather", x, (-1, *x.shape[1:]) if ragged else x.shape)

    def reduce_scatter_start(self, x: Tensor, op: str = "sum") -> Work:
        """Start a reduce_scatter; leave x alone until `wait()` gives this rank's part.   [n*k, ...] -> [k, ...]"""
        check_op(self, x, op)
        if x.dim() and x.shape[0] % self.size == 0 and self._asynchronous("reduce_scatter"):
            return self._begin("reduce_scatter", x.detach().contiguous(), op=op)
        return Work.finished_with(self.ledger, self._call("reduce_scatter", x), self.reduce_scatter(x, op))

    def all_gather_start(self, x: Tensor, into: Tensor | None = None) -> Work:
        """Start an all_gather of a tensor that you leave alone; `wait()` gives the whole.   [k, ...] -> [n*k, ...]

        With `into`, a contiguous [n*k, ...] that you own, the whole lands there."""
        checked(self, x)
        if into is not None:
            check_in_place(into, "into=", (self.size * x.shape[0], *x.shape[1:]), x)
        if x.dim() and self._asynchronous("all_gather"):
            return self._begin("all_gather", x.detach().contiguous(), into=into)
        alone = into is not None and self.size == 1 and x.dim() > 0  # x is the whole: no copy of it besides `into`
        whole = x if alone else self.all_gather(x)
        if into is not None:
            with torch.no_grad():
                whole = into.copy_(whole)
        return Work.finished_with(self.ledger, self._call("all_gather", x), whole)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Member `source`'s x, on every rank (the others pass a tensor of that shape and dtype).   same shape"""
        check_peer(self, source, "broadcast from", itself=True)
        return self._collective("broadcast", checked(self, x), x.shape, source=source)

    def all_to_all(
        self, x: Tensor, send_rows: Sequence[int] | None = None, receive_rows: Sequence[int] | None = None
    ) -> Tensor:
        """Part j of x goes to rank j; part i of the result came from rank i.   [n*k, ...] -> [n*k, ...]

        Parts are equal, or ragged: part j has send_rows[j] rows, and receive_rows[i] rows come from rank i. Then
        [sum(send_rows), ...] -> [sum(receive_rows), ...]; send_rows[j] here is receive_rows[i] on rank j, seen from
        i = this rank, and ranks that do not know it tell each other first (an all_to_all of the counts).

        Sends x's bytes but for the part that stays: (n-1)/n of them where parts are equal. Raises ValueError if n does
        not divide dim 0, and for rows that are not n counts with the sum dim 0."""
        if send_rows is not None or receive_rows is not None:
            rows = check_rows(self, x, send_rows, receive_rows)
            return self._collective("all_to_all", x, (-1, *x.shape[1:]), send_rows=rows[0], receive_rows=rows[1])
        if checked(self, x).dim() == 0 or x.shape[0] % self.size:
            raise ValueError(
                f"all_to_all over {self.size} ranks needs dim 0 divisible by {self.size}, got shape {tuple(x.shape)}"
            )
        return self._collective("all_to_all", x, x.shape)

    def all_to_all_start(self, x: Tensor) -> Work:
        """Start an all_to_all of equal parts; leave x alone until `wait()` gives what came.   [n*k, ...] -> [n*k, ...]

        Sends (n-1)/n of x's bytes. Raises ValueError if n does not divide dim 0."""
        if checked(self, x).dim() and x.shape[0] % self.size == 0 and self._asynchronous("all_to_all"):
            return self._begin("all_to_all", x.detach().contiguous())
        return Work.finished_with(self.ledger, self._call("all_to_all", x), self.all_to_all(x))

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

    def _asynchronous(self, verb: str) -> bool:
        # Only the wire's own algorithm has a `..._start`. One that was swapped in runs at once, to its end.
        native = getattr(self.wire, verb, None)
        return self.size > 1 and hasattr(self.wire, f"{verb}_start") and self.algorithms[verb] is native

    def _begin(self, verb: str, x: Tensor, **options: Any) -> Work:
        check_dtype(self, verb, x)
        self.counted[0] += 1
        call = self._call(verb, x, shape=tuple(x.shape), op=options.get("op", "sum"))
        sent = charged_bytes(verb, x, self.rank, self.size)
        with WatchedOperation(self.ledger, call):  # the witness compares shapes here, before anything is sent
            number = self.ledger.open(verb, self.axis, None, sent, 0, self.ranks[(self.rank + 1) % self.size])
        return Work(self.ledger, call, getattr(self.wire, f"{verb}_start")(x, **options), number)

    def _collective(self, verb: str, x: Tensor, shape: Any, **options: Any) -> Tensor:
        x = checked(self, x)
        check_dtype(self, verb, x)
        self.counted[0] += 1
        if self.size == 1:
            return x.clone()
        named = {key: value for key, value in options.items() if value not in ("sum", 0)}
        call = self._call(verb, x, shape=None if shape is None else tuple(shape), op=options.get("op", "sum"))
        number = self.ledger.open(verb, self.axis, None, 0, 0, self.ranks[(self.rank + 1) % self.size])
        # meanwhile messages are booked under this verb, too; a backend that sends by itself charges `number`
        self.ledger.within.append((verb, number))
        try:
            with WatchedOperation(self.ledger, call):
                return self.algorithms[verb](x, self, **named)
        finally:
            if self.ledger.within:  # empty if the algorithm cleared the ledger
                self.ledger.within.pop()
            self.ledger.close(number)

    def _stream(self, tag: int) -> int:
        # The parity of tags: even for the caller's own messages, odd for those inside a swapped-in collective. Without
        # it a ring all_reduce that uses tag 0 could receive the message that the caller has sent under tag 0 and that
        # nobody has received yet: both go between the same two ranks, and the wire keeps order only within a tag.
        return 2 * tag + bool(self.ledger.within)

    def _call(
        self, verb: str, x: Tensor | None, peer: int | None = None, tag: int = 0, shape: Any = None, op: str = "sum"
    ) -> PendingOperation:
        if peer is not None and x is not None:
            shape = tuple(x.shape)
        dtype = "" if x is None or shape is None else dtype_name(x.dtype)
        return PendingOperation(verb, self.axis, self.ranks, self.rank, peer, tag, shape, dtype, self.counted[0], op)


class Work:
    """A started operation. `wait()` returns its tensor (None for a send) when it is done; `done` only looks."""

    def __init__(
        self, ledger: Ledger, call: PendingOperation, under_way: Any, number: int | None = None, tap: Tap | None = None
    ):
        self.ledger, self.call, self.under_way, self.number, self.tap = ledger, call, under_way, number, tap
        self.result: Tensor | None = None
        self.finished = False

    @classmethod
    def finished_with(cls, ledger: Ledger, call: PendingOperation, x: Tensor) -> Work:
        """Work that is done already: `wait()` returns x at once."""
        work = cls(ledger, call, None)
        work.result, work.finished = x, True
        return work

    def wait(self) -> Tensor | None:
        """Block until done. For a send this means that the receiver has taken it; the tensor may be changed again."""
        if not self.finished:
            with WatchedOperation(self.ledger, self.call):
                self.result = self.under_way.wait()
            self._finish()
        return self.result

    def pieces(self) -> Iterator[Tensor]:
        """The message as flat pieces in order, each as soon as it has arrived, so that it can be used at once."""
        with WatchedOperation(self.ledger, self.call):
            yield from self.under_way.arrive()
        self.result = self.under_way.result
        self._finish()

    @property
    def done(self) -> bool:
        """True if `wait()` would return at once."""
        if not self.finished and self.under_way.done():
            self.result = self.under_way.wait()
            self._finish()
        return self.finished

    def _finish(self) -> None:
        self.ledger.let_go(self.under_way)  # until now it kept the tensors alive that the wire reads from or writes to
        self.finished, self.under_way = True, None
        if self.number is not None:
            self.ledger.close(self.number)
        if self.call.verb == "recv" and self.call.peer is not None:
            self.ledger.received[self.call.ranks[self.call.peer]] += 1
        if self.call.verb == "recv" and self.tap is not None and self.call.peer is not None:
            assert self.result is not None
            self.tap("recv", self.call.ranks[self.call.peer], self.call.tag, self.result)


class WatchedOperation:
    """Tells the ledger's witness before and after an operation that may block, so that a hang can be named."""

    def __init__(self, ledger: Ledger, call: PendingOperation):
        self.witness, self.call = ledger.witness, call

    def __enter__(self) -> None:
        if self.witness is not None:
            self.witness.enter(self.call)

    def __exit__(self, *_: object) -> None:
        if self.witness is not None:
            self.witness.leave(self.call)


# What a verb refuses


def checked(group: Group, x: Tensor) -> Tensor:
    """x without its graph. ValueError if x is no tensor, is sparse, or lies on another kind of device."""
    if not isinstance(x, Tensor):
        raise ValueError(f"verbs of a group take a tensor, got {type(x).__name__}{_as_a_tensor(x)}")
    if x.layout is not torch.strided:
        raise ValueError(f"cannot send a sparse tensor ({x.layout}, shape {tuple(x.shape)}): send x.to_dense()")
    if x.numel() and x.device.type != torch.device(group.device).type:
        raise ValueError(f"this group talks on {group.device}, the tensor is on {x.device}: use x.to({group.device!r})")
    return x.detach()


def _as_a_tensor(x: Any) -> str:
    """What to do with a thing that is no tensor. Nothing is said of what torch.tensor would not take either."""
    if x is None:
        return ": a function without `return` gives None, and so does a verb that changes its argument"
    text = repr(x)
    numbers = isinstance(x, int | float | complex) or (isinstance(x, list | tuple) and x and len(text) <= 60)
    return f": wrap it, torch.tensor({text})" if numbers else ": a tensor, or several of them one after the other"


def check_op(group: Group, x: Tensor, op: str) -> None:
    """ValueError if x cannot be reduced by `op`."""
    checked(group, x)
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r}")
    if op in ("max", "min") and x.is_complex():
        raise ValueError(f"complex numbers have no {op}, for they have no order: use x.abs()")
    if op == "mean" and not (x.is_floating_point() or x.is_complex()):
        raise ValueError(
            f"the mean of {dtype_name(x.dtype)} tensors is not a whole number: "
            'use x.float(), or op="sum" and divide yourself'
        )


def check_dtype(group: Group, verb: str, x: Tensor) -> None:
    """ValueError if the wire's own algorithm carries the verb out, and takes no tensors of this dtype."""
    method = getattr(group.wire, verb, None)
    if method is not None and group.algorithms[verb] is method and hasattr(group.wire, "check_dtype"):
        group.wire.check_dtype(verb, x.dtype)


def check_peer(group: Group, peer: int, what: str, itself: bool = False) -> None:
    """ValueError unless `peer` is another member of the group or, with `itself`, any member."""
    if not is_whole(peer, 0) or peer >= group.size:
        raise ValueError(f"cannot {what} {peer!r}: ranks of the {group.axis} group are 0 to {group.size - 1}")
    if peer == group.rank and not itself:
        raise ValueError(f"rank {peer} cannot {what} itself")


def check_message(group: Group, x: Tensor, to: int) -> Tensor:
    """x as it goes to member `to`: contiguous. ValueError for what cannot be announced in a header."""
    check_peer(group, to, "send to")
    x = checked(group, x).contiguous()
    code_of(x.dtype)
    if x.dim() > MOST_DIMS:
        raise ValueError(f"cannot send {x.dim()} dims, at most {MOST_DIMS}: send x.flatten() and reshape it there")
    return x


def check_tag(tag: int) -> int:
    """The tag itself. ValueError if it is not a whole number from 0 to 2^20 - 1."""
    if not is_whole(tag, 0) or tag >= TAGS:
        raise ValueError(f"a tag is a whole number from 0 to {TAGS - 1:,}, got {tag!r}")
    return tag


def check_rows(
    group: Group, x: Tensor, send_rows: Sequence[int] | None, receive_rows: Sequence[int] | None
) -> tuple[list[int], list[int]]:
    """The rows of each part that x is cut into, and of each part that comes. ValueError for counts that cannot be."""
    n, me = group.size, group.rank
    if checked(group, x).dim() == 0 or send_rows is None or receive_rows is None:
        raise ValueError("a ragged all_to_all cuts dim 0 and wants both send_rows= and receive_rows=, n counts each")
    for name, rows in (("send_rows", send_rows), ("receive_rows", receive_rows)):
        if len(rows) != n or not all(type(count) is int and count >= 0 for count in rows):
            raise ValueError(f"{name} are {n} whole numbers from 0 on, one for each rank, got {list(rows)}")
    if sum(send_rows) != x.shape[0]:
        raise ValueError(
            f"send_rows {list(send_rows)} add up to {sum(send_rows)}, x has {x.shape[0]} rows of shape "
            f"{tuple(x.shape[1:])}: every row goes to one rank"
        )
    if send_rows[me] != receive_rows[me]:
        raise ValueError(
            f"rank {me} keeps send_rows[{me}] = {send_rows[me]} rows and expects receive_rows[{me}] = "
            f"{receive_rows[me]} from itself: the two must be equal"
        )
    return list(send_rows), list(receive_rows)


def check_in_place(x: Tensor, what: str, shape: tuple[int, ...] | None = None, like: Tensor | None = None) -> None:
    """ValueError if x is no buffer that a verb may write to: contiguous, and of the given shape and dtype."""
    if not x.is_contiguous():
        raise ValueError(f"{what} needs a contiguous tensor, got strides {x.stride()}: use x.contiguous()")
    if like is not None and (tuple(x.shape) != shape or x.dtype != like.dtype):
        raise ValueError(
            f"{what} must have shape {shape} {dtype_name(like.dtype)}, got {tuple(x.shape)} {dtype_name(x.dtype)}"
        )


def _n_bytes(x: Tensor) -> int:
    return x.nbytes
