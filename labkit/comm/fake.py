"""A fake world: one rank without any peers, for rehearsals on fake tensors.

    real    rank 0 <--- bytes ---> rank 1 ... rank 255        each rank: memory, ledger, time
    fake    rank 0 ---> nobody     (n = 256)                  one rank: the same memory, the same ledger, no values

The same verbs, in a world of any size, in one process. A verb makes the tensors that it would make on gloo
(native.py), gives back one of the right shape, and charges the ledger with the bytes that this rank would send
(charge.py); no value is ever computed, so tensors must be fake ones (torch's FakeTensorMode). Memory of a group: none.

What a collective gives back is known. What a message carries is not: its sender decides. So a fake world takes it from
the first of these that says it:

    into=           it lands there, and so has that shape
    hear            `world(n, hear=f)`: f(axis, source, tag) gives the tensor that global rank `source` would send
    an echo         the k-th message received on an axis looks like the k-th that was sent on it (or the last, if fewer
                    were): ranks run one program, and in it they mostly do the same
    the argument    inside a swapped-in collective that has sent nothing yet: like the tensor it was given

and raises ValueError where none does. A sent tensor is freed at `wait()`, as on a real wire; a message of up to 3,968
bytes is copied into its header and holds nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.comm.charge import charged_bytes
from labkit.comm.group import Group, Work, check_in_place, check_message, check_peer, check_tag
from labkit.comm.ledger import Ledger
from labkit.comm.message import EAGER_BYTES, PIECE_BYTES, as_bytes
from labkit.comm.native import Through, UnderWay
from labkit.plan.words import dtype_name

Hear = Callable[[str, int, int], Tensor | None]
"""(axis, global rank of the sender, tag) -> the tensor that it sends, or None to go by the echo."""


def world(
    n_ranks: int, rank: int = 0, hear: Hear | None = None, ledger: Ledger | None = None, device: str = "cpu"
) -> Group:
    """The group of all `n_ranks` ranks, seen from `rank`; `Mesh.connect` makes those of a layout from it.

    `device` is where its tensors are. Sends nothing, waits for nobody. ValueError for a rank that is not there."""
    if n_ranks < 1 or not 0 <= rank < n_ranks:
        raise ValueError(f"a world of n_ranks={n_ranks} has ranks 0 to {n_ranks - 1}, at least one; got rank={rank}")
    wire: Any = Nobody(n_ranks, hear)
    return FakeGroup("world", tuple(range(n_ranks)), rank, wire, wire.bound, ledger, device)


def along(whole: Group, axis: str, ranks: tuple[int, ...], rank: int) -> Group:
    """A group of some ranks of a fake world, with the same ledger and the same `hear`."""
    wire: Any = Nobody(len(ranks), whole.wire.hear)  # type: ignore[attr-defined]
    return FakeGroup(axis, ranks, rank, wire, wire.bound, whole.ledger, whole.device)


class FakeGroup(Group):
    """A Group of which only this member exists. ValueError for a tensor with values: nobody could add to them."""

    wire: Any

    def send(self, x: Tensor, to: int, tag: int = 0) -> Work:
        """Sends nothing. x is kept alive until `wait()`, as on a real wire."""
        x, tag = _fake(check_message(self, x, to)), check_tag(tag)
        call = self._call("send", x, to, tag)
        if self.tap is not None:
            self.tap("send", self.ranks[to], tag, x)
        sending = self.ledger.keep(Unreceived(x))
        self.wire.sent[self.axis].append((tuple(x.shape), x.dtype))
        number = self.ledger.open("send", self.axis, self.ranks[to], x.nbytes, tag)
        return Work(self.ledger, call, sending, number)

    def recv_start(self, source: int, tag: int = 0, into: Tensor | None = None) -> Work:
        """Receives nothing. Memory for what member `source` would send is taken when you wait, as on a real wire."""
        check_peer(self, source, "receive from")
        if into is not None:
            check_in_place(into, "into=")
        call = self._call("recv", into, source, check_tag(tag))
        return Work(self.ledger, call, self.ledger.keep(Unsent(self, source, tag, into)), tap=self.tap)

    def _collective(self, verb: str, x: Tensor, shape: Any, **options: Any) -> Tensor:
        before, self.wire.argument = self.wire.argument, x
        try:
            result = super()._collective(verb, x if verb == "barrier" else _fake(x), shape, **options)
        finally:
            self.wire.argument = before
        wanted = tuple(x.shape)
        if verb == "all_gather":
            wanted = (x.shape[0] * self.size, *x.shape[1:])
        elif verb == "reduce_scatter":
            wanted = tuple(x.tensor_split(self.size)[self.rank].shape)
        elif "receive_rows" in options:
            wanted = (sum(options["receive_rows"]), *x.shape[1:])
        if tuple(result.shape) != wanted:
            raise ValueError(
                f"in this fake world {verb} of {tuple(x.shape)} gave {tuple(result.shape)}, not {wanted}: it is wrong, "
                "or peers send other shapes; then say which, hear=lambda axis, source, tag: torch.empty(...)"
            )
        return result

    def expects(self, source: int, tag: int, into: Tensor | None) -> Tensor:
        """`into`, or a tensor like the one that member `source` would send. ValueError if nothing says."""
        wire, place = self.wire, self.wire.received[self.axis]
        wire.received[self.axis] += 1
        if into is not None:
            return into
        if wire.hear is not None and (heard := wire.hear(self.axis, self.ranks[source], tag)) is not None:
            return _fake(heard)
        if sent := wire.sent[self.axis]:
            shape, dtype = sent[min(place, len(sent) - 1)]
        elif wire.argument is not None:
            shape, dtype = tuple(wire.argument.shape), wire.argument.dtype
        else:
            raise ValueError(
                f"what would rank {self.ranks[source]} send on axis {self.axis} under tag {tag}? Nobody is there to "
                "say, and this rank has sent nothing yet to go by: receive with into=, or say it, "
                "hear=lambda axis, source, tag: torch.empty(...)"
            )
        return torch.empty(shape, dtype=dtype, device=self.device)


class Prompt:
    """An operation that never waits for a peer."""

    def done(self) -> bool:
        """True: there is no peer to wait for."""
        return True


class Unreceived(Prompt):
    """A message that nobody receives. It keeps its tensor alive until `wait`, as a message on a real wire does."""

    def __init__(self, x: Tensor) -> None:
        """x is contiguous; a small message has been copied into its header."""
        raw = as_bytes(x)
        self.kept = [raw] if raw.numel() > EAGER_BYTES else []

    def wait(self) -> None:
        """Free the tensor."""
        self.kept.clear()


class Unsent(Prompt):
    """A message that nobody sends. Its memory is taken as on a real wire; its values are never computed."""

    def __init__(self, group: FakeGroup, source: int, tag: int, into: Tensor | None) -> None:
        """Memory is taken in `open`, unless there is `into`."""
        self.group, self.source, self.tag, self.into = group, source, tag, into
        self.result: Tensor | None = None

    def open(self) -> None:
        """The announcement has come: there must be room for the payload."""
        if self.result is None:
            self.result = self.group.expects(self.source, self.tag, self.into)

    def arrive(self) -> Iterator[Tensor]:
        """The message in the pieces in which it would arrive."""
        flat = self.wait().view(-1)
        large = flat.nbytes > EAGER_BYTES
        yield from flat.split(PIECE_BYTES // flat.element_size()) if large else (flat,)

    def wait(self) -> Tensor:
        """The whole message."""
        self.open()
        assert self.result is not None
        return self.result


class Nobody:
    """Wire and collectives without peers: what native.py allocates and charges on gloo, and nothing else."""

    def __init__(self, size: int, hear: Hear | None) -> None:
        """For a group of `size` ranks."""
        self.size, self.hear = size, hear
        self.sent: dict[str, list[tuple[tuple[int, ...], torch.dtype]]] = defaultdict(list)
        self.received: dict[str, int] = defaultdict(int)
        self.argument: Tensor | None = None  # the tensor given to the collective under way
        names = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "barrier")
        self.bound = {name: getattr(self, name) for name in names}
        self.__dict__.update(self.bound)  # kept as one object each, so that `is` finds what was swapped in

    def all_reduce_start(self, x: Tensor, op: str) -> UnderWay:
        """As on gloo, an all_reduce in place; the values of x do not change."""
        return UnderWay(Through(), _fake(x), None, self.size if op == "mean" else 1)

    def reduce_scatter_start(self, x: Tensor, op: str) -> UnderWay:
        """Keeps x alive until it is waited for.   [n*k, ...] -> [k, ...]"""
        y = _fake(x).new_empty((x.shape[0] // self.size, *x.shape[1:]))
        return UnderWay(Through(), y, None, self.size if op == "mean" else 1, x)

    def all_gather_start(self, x: Tensor, into: Tensor | None) -> UnderWay:
        """Keeps x alive until it is waited for.   [k, ...] -> [n*k, ...]"""
        y = _fake(x).new_empty((self.size * x.shape[0], *x.shape[1:])) if into is None else into
        return UnderWay(Through(), y, None, 1, x)

    def all_to_all_start(self, x: Tensor) -> UnderWay:
        """Keeps x alive until it is waited for.   [n*k, ...] -> [n*k, ...]"""
        return UnderWay(Through(), torch.empty_like(_fake(x)), None, 1, x)

    def all_reduce(self, x: Tensor, group: Group, op: str = "sum") -> Tensor:
        """Same shape; charges 2(n-1)/n N."""
        group.ledger.charge(charged_bytes("all_reduce", x, group.rank, self.size))
        return _mean(x.clone(memory_format=torch.contiguous_format), op, self.size)

    def reduce_scatter(self, x: Tensor, group: Group, op: str = "sum") -> Tensor:
        """[n*k, ...] -> [k, ...] (ragged: as tensor_split cuts); charges (n-1)/n N."""
        group.ledger.charge(charged_bytes("reduce_scatter", x, group.rank, self.size))
        if x.shape[0] % self.size:
            y = x.clone(memory_format=torch.contiguous_format).tensor_split(self.size)[group.rank].clone()
            return _mean(y, op, self.size)
        return _mean(x.contiguous().new_empty((x.shape[0] // self.size, *x.shape[1:])), op, self.size)

    def all_gather(self, x: Tensor, group: Group) -> Tensor:
        """[k, ...] -> [n*k, ...]; charges (n-1)/n of the result's bytes."""
        group.ledger.charge(charged_bytes("all_gather", x, group.rank, self.size))
        return x.contiguous().new_empty((self.size * x.shape[0], *x.shape[1:]))

    def broadcast(self, x: Tensor, group: Group, source: int = 0) -> Tensor:
        """Same shape; charges N at the source."""
        group.ledger.charge(charged_bytes("broadcast", x, group.rank, self.size, source))
        return x.clone(memory_format=torch.contiguous_format)

    def all_to_all(
        self,
        x: Tensor,
        group: Group,
        send_rows: Sequence[int] | None = None,
        receive_rows: Sequence[int] | None = None,
    ) -> Tensor:
        """Same shape, or ragged: as many rows as come. Charges what leaves."""
        group.ledger.charge(charged_bytes("all_to_all", x, group.rank, self.size, send_rows=send_rows))
        return x.contiguous().new_empty((sum(receive_rows or x.shape[:1]), *x.shape[1:]))

    def barrier(self, x: Tensor, group: Group) -> Tensor:
        """Return at once: there is no peer to wait for."""
        return x


def _mean(y: Tensor, op: str, size: int) -> Tensor:
    return y.div_(size) if op == "mean" else y


def _fake(x: Tensor) -> Tensor:
    if x.numel() and x.untyped_storage().device.type != "meta":  # where a fake tensor's storage lies too
        raise ValueError(
            f"a fake world has nobody to add to the values of a real tensor {tuple(x.shape)} {dtype_name(x.dtype)}: "
            "rehearse the function, labkit.run_fake(fn, n_ranks), or run it on a real world"
        )
    return x
