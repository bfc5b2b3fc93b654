"""Groups of ranks on one machine: messages and blocking collectives through shared memory (mailbox.py).

A rank shows the others where its tensor lies, and each takes from there what it needs, once:

                   reads by each rank      what happens
    all_reduce     2(n-1)/n N              sum one's own part of everybody's x, then take the other sums
      small          (n-1) N               sum the whole of everybody's x: one round fewer
    reduce_scatter  (n-1)/n N              sum one's own part of everybody's x
    all_gather      (n-1)/n N              take everybody's x
    all_to_all      (n-1)/n N              take one's own part of everybody's x
    broadcast        N, the source 0       take the source's x             N = bytes of the whole tensor

Sums are taken in the order of the ranks, so that every verb and every size gives the same bits. The ledger is charged
as by every backend, with the bytes of a ring (charge.py). What is read is copied into a page that is no tensor's.

A collective that is started and waited for later stays with gloo, whose thread carries it out while this rank
computes; one of Python's would take turns with the computing thread instead.
"""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.comm.charge import charged_bytes
from labkit.comm.group import Group
from labkit.comm.mailbox import PIECE_BYTES, In, Letter, Mailbox, Out
from labkit.comm.message import EAGER_BYTES
from labkit.comm.native import Native, UnderWay
from labkit.comm.process_groups import Pair, ProcessGroups
from labkit.comm.ring import combine

WHOLE_BYTES = 256 << 10
"""Up to so many bytes that it reads, each rank sums everything itself: more to read, but one round fewer."""
_COLLECTIVE = -1
_NOTHING = torch.empty(0, dtype=torch.uint8)


def share(group: Group, box: Mailbox) -> Group:
    """The same group, whose messages and blocking collectives go through shared memory."""
    box.sweep()
    native: Native = group.wire  # type: ignore[assignment]
    wire = Shared(box, native.pg, group.device, group.ranks, native.groups)
    return Group(group.axis, group.ranks, group.rank, wire, wire.algorithms(), group.ledger, group.device, group.state)


class Patient:
    """A collective of gloo's under way. While it is waited for, messages are taken that this rank has asked for.

    gloo says of some collectives (reduce_scatter) that they are done only if a thread waits for them."""

    def __init__(self, under_way: UnderWay, box: Mailbox):
        self.under_way, self.box = under_way, box
        self.over: threading.Event | None = None

    def wait(self) -> Tensor | None:
        """Block until gloo is through."""
        if self.box.expecting and not self.done():
            self.box.wait(self.done)
        return self.under_way.wait()

    def done(self) -> bool:
        """True if `wait` would return at once."""
        if self.under_way.done():
            return True
        if self.over is None:
            self.over = threading.Event()
            threading.Thread(target=self._wait_for_gloo, args=(self.under_way.work, self.over), daemon=True).start()
        return self.over.is_set()

    def _wait_for_gloo(self, work: Any, over: threading.Event) -> None:
        with contextlib.suppress(BaseException):  # raised where the collective itself is waited for
            work.wait()
        over.set()
        self.box.ring(self.box.rank)


class Shared(Native):
    """Wire and collectives of one group; members by their index in it."""

    def __init__(
        self, box: Mailbox, process_group: Any, device: str, ranks: tuple[int, ...], groups: ProcessGroups | None
    ):
        self.box, self.ranks = box, ranks
        name = str(process_group.group_name)  # torch gives a group the same name on all of its ranks
        self.key, self.raw_key = zlib.crc32(name.encode()), zlib.crc32(f"bytes of {name}".encode())
        super().__init__(Pair(process_group, process_group), device, len(ranks), groups)
        self.peers = [member for member in range(self.size) if member != self.rank]

    # -- messages ----------------------------------------------------------------------------------------------------

    def sending(self, x: Tensor, to: int, tag: int) -> Out:
        """Start sending x to member `to`."""
        return Out(self.box, x.detach(), self.ranks[to], self.key, tag)

    def receiving(self, source: int, tag: int, into: Tensor | None, device: str) -> In:
        """Expect a message from member `source`."""
        return In(self.box, self.ranks[source], self.key, tag, into, device, source)

    def isend(self, x: Tensor, to: int, tag: int) -> Any:
        """Start sending the bytes of x."""
        return Out(self.box, x, self.ranks[to], self.raw_key, tag)

    def irecv(self, buffer: Tensor, source: int, tag: int) -> Any:
        """Start receiving into `buffer`."""
        return In(self.box, self.ranks[source], self.raw_key, tag, buffer, self.device, source)

    # -- collectives under way ---------------------------------------------------------------------------------------

    def all_reduce_start(self, x: Tensor, op: str) -> Any:
        """Start the sum of x over the group, in place, on gloo."""
        return Patient(super().all_reduce_start(x, op), self.box)

    def reduce_scatter_start(self, x: Tensor, op: str) -> Any:
        """Start a reduce_scatter on gloo.   [n*k, ...] -> [k, ...]"""
        return Patient(super().reduce_scatter_start(x, op), self.box)

    def all_gather_start(self, x: Tensor, into: Tensor | None) -> Any:
        """Start an all_gather on gloo.   [k, ...] -> [n*k, ...]"""
        return Patient(super().all_gather_start(x, into), self.box)

    def all_to_all_start(self, x: Tensor) -> Any:
        """Start an all_to_all of equal parts on gloo.   [n*k, ...] -> [n*k, ...]"""
        return Patient(super().all_to_all_start(x), self.box)

    # -- collectives: f(x, group) -> new tensor ----------------------------------------------------------------------

    def all_reduce(self, x: Tensor, group: Group, op: str = "sum") -> Tensor:
        """Sum of x over the group, the same bits on every rank.   same shape"""
        n, me, n_bytes = self.size, self.rank, x.nbytes
        group.ledger.charge(charged_bytes("all_reduce", x, me, n))
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        own, out = (x if x.is_contiguous() else _aside(x)).view(-1), y.view(-1)
        shown = self._show(own)
        if (n - 1) * n_bytes <= WHOLE_BYTES:
            self._reduce(shown, own, 0, out, op)
            self._over(n_bytes)
            return y
        start, stop = _cut(out.numel(), n, me)
        self._reduce(shown, own[start:stop], start, out[start:stop], op)
        size, at = out.element_size(), out.data_ptr()
        for member, letter in self._show(out).items():
            start, stop = _cut(out.numel(), n, member)
            self._take(letter, start * size, (stop - start) * size, at + start * size)
        self._over(n_bytes)
        return y

    def reduce_scatter(self, x: Tensor, group: Group, op: str = "sum") -> Tensor:
        """This rank's part of the sum.   [n*k, ...] -> [k, ...]"""
        if x.shape[0] % self.size:
            return super().reduce_scatter(x, group, op)
        n_bytes = x.nbytes
        group.ledger.charge(charged_bytes("reduce_scatter", x, self.rank, self.size))
        source = x.contiguous()
        y = source.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        start, stop = _cut(x.numel(), self.size, self.rank)
        self._reduce(self._show(source), source.view(-1)[start:stop], start, y.view(-1), op)
        self._over(n_bytes)
        return y

    def all_gather(self, x: Tensor, group: Group) -> Tensor:
        """Everybody's x, joined along dim 0.   [k, ...] -> [n*k, ...]"""
        n_bytes = x.nbytes
        group.ledger.charge(charged_bytes("all_gather", x, self.rank, self.size))
        source = x.contiguous()
        y = source.new_empty((self.size * x.shape[0], *x.shape[1:]))
        for member, letter in self._show(source).items():
            self._take(letter, 0, n_bytes, y.data_ptr() + member * n_bytes)
        y.view(self.size, *x.shape)[self.rank].copy_(source)
        self._over(n_bytes)
        return y

    def all_to_all(
        self,
        x: Tensor,
        group: Group,
        send_rows: Sequence[int] | None = None,
        receive_rows: Sequence[int] | None = None,
    ) -> Tensor:
        """Part j of x goes to rank j; part i of the result came from rank i.   [n*k, ...] -> [n*k, ...], or ragged"""
        group.ledger.charge(charged_bytes("all_to_all", x, self.rank, self.size, send_rows=send_rows))
        if send_rows is not None and receive_rows is not None:
            return self._exchange(x.contiguous().split(list(send_rows)), receive_rows)
        n_bytes = x.nbytes
        source, part = x.contiguous(), n_bytes // self.size
        y = torch.empty_like(source)
        for member, letter in self._show(source).items():
            self._take(letter, self.rank * part, part, y.data_ptr() + member * part)
        y.tensor_split(self.size)[self.rank].copy_(source.tensor_split(self.size)[self.rank])
        self._over(n_bytes)
        return y

    def broadcast(self, x: Tensor, group: Group, source: int = 0) -> Tensor:
        """The source's x.   same shape"""
        n_bytes = x.nbytes
        group.ledger.charge(charged_bytes("broadcast", x, self.rank, self.size, source))
        y = x.clone(memory_format=torch.contiguous_format)
        if self.rank == source:
            self._tell(y, self.peers)
            if n_bytes > EAGER_BYTES:
                self._hear(self.peers)
        else:
            self._take(self._hear([source])[source], 0, n_bytes, y.data_ptr())
            if n_bytes > EAGER_BYTES:
                self._tell(_NOTHING, [source])
        return y

    def barrier(self, x: Tensor, group: Group) -> Tensor:
        """Wait for everybody."""
        self._show(_NOTHING)
        return x

    def _exchange(self, parts: Sequence[Tensor], receive_rows: Sequence[int]) -> Tensor:
        """Show each member its part alone: nobody knows where in another's x its own part begins."""
        own = parts[self.rank]
        y = own.new_empty((sum(receive_rows), *own.shape[1:]))
        places = y.split(list(receive_rows))
        for member in self.peers:
            self._tell(parts[member], [member])
        for member, letter in self._hear(self.peers).items():
            if letter.n_bytes != _n_bytes(places[member]):
                raise ValueError(
                    f"rank {letter.source} sends {letter.n_bytes:,} bytes of shape {letter.shape}, and receive_rows "
                    f"{list(receive_rows)} want {tuple(places[member].shape)} from it: its send_rows must say the same"
                )
            self._take(letter, 0, letter.n_bytes, places[member].data_ptr())
        places[self.rank].copy_(own)
        # as `_over`, pair by pair: who has taken a large part says so to its owner, who leaves it alone until then
        self._tell(_NOTHING, [member for member in self.peers if _n_bytes(places[member]) > EAGER_BYTES])
        self._hear([member for member in self.peers if _n_bytes(parts[member]) > EAGER_BYTES])
        return y

    # -- what they are made of ---------------------------------------------------------------------------------------

    def _show(self, x: Tensor) -> dict[int, Letter]:
        """Show x to everybody, and see what the others show, by member. Leave x alone until `_over`."""
        self._tell(x, self.peers)
        return self._hear(self.peers)

    def _over(self, n_bytes: int) -> None:
        """Wait until nobody reads any more what was shown. A small tensor was shown as a copy."""
        if n_bytes > EAGER_BYTES:
            self._show(_NOTHING)

    def _tell(self, x: Tensor, members: list[int]) -> None:
        for member in members:
            Out(self.box, x, self.ranks[member], self.key, _COLLECTIVE, marked=False)

    def _hear(self, members: list[int]) -> dict[int, Letter]:
        return {member: self.box.hear(self.ranks[member], self.key, _COLLECTIVE) for member in members}

    def _take(self, letter: Letter, start: int, n_bytes: int, to: int) -> None:
        if start + n_bytes > letter.n_bytes:
            raise ValueError(
                f"rank {letter.source} brings {letter.n_bytes:,} bytes of shape {letter.shape}, from byte {start:,} on "
                f"{n_bytes:,} were expected: every rank of a group must bring the same shape and dtype"
            )
        self.box.read(letter, start, n_bytes, to)

    def _reduce(self, shown: dict[int, Letter], own_part: Tensor, start: int, out: Tensor, op: str) -> None:
        """out = mine (op) what the others show from element `start` on, in the order of ranks, piece by piece."""
        size = out.element_size()
        step = PIECE_BYTES // size
        for a in range(0, out.numel(), step):
            sums, own = out[a : a + step], own_part[a : a + step]
            # Not a slice of one tensor over the whole scratch: an operator of torch gives a slice back, and who listens
            # to operators, to count what a rank holds, would take the scratch for memory of the program's.
            theirs = torch.frombuffer(self.box.scratch, dtype=out.dtype, count=len(sums))
            left: Tensor | None = None
            for member in range(self.size):
                right = own
                if member != self.rank:
                    right = sums if left is None else theirs
                    self._take(shown[member], (start + a) * size, len(sums) * size, right.data_ptr())
                if left is None:
                    left = right
                else:
                    combine(left, right, sums, op)
                    left = sums
        if op == "mean":
            out.div_(self.size)


def _n_bytes(x: Tensor) -> int:
    return x.nbytes


def _aside(x: Tensor) -> Tensor:
    """A contiguous copy of x that, like the buffers of gloo, is no memory of torch's."""
    if not x.numel():
        return x.contiguous()
    copy = torch.frombuffer(bytearray(x.nbytes), dtype=x.dtype).view(x.shape)
    return copy.copy_(x)


def _cut(n: int, parts: int, part: int) -> tuple[int, int]:
    """First element of a part and of the next, as `tensor_split` cuts."""
    least, longer = divmod(n, parts)
    start = part * least + min(part, longer)
    return start, start + least + (part < longer)
