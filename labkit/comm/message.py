"""Messages between two ranks that say what they carry, over a wire that only moves bytes.

    small (up to 3,968 bytes)   one wire message of 4,096 bytes:  [ header | payload ]
    large                       more: [ header | - ]  [ piece ] [ piece ] ...  each piece goes straight into its place

The pieces of a large message are all on their way at once, and a receiver may use one while the next arrive. It needs
to know nothing in advance, a shape that is not the expected one is an error that names both, and a small message costs
one trip.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from labkit.comm.checked_loan import Lent
from labkit.plan.words import dtype_name

SLAB_BYTES = 4096
HEADER = struct.Struct("<BB8q3d")  # dtype code, number of dims, up to 8 sizes, stamp of the lane
MOST_DIMS = 8
EAGER_BYTES = SLAB_BYTES - 128
PIECE_BYTES = 4 << 20
"""Large enough that a piece costs no more than its bytes, small enough that adding it overlaps the next one."""
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip


Stamp = tuple[float, float, float]
UNSTAMPED: Stamp = (0.0, 0.0, 0.0)


class Handle(Protocol):
    """A wire message that has been started."""

    def wait(self) -> Tensor | None:
        """Block until the wire has finished with it."""

    def done(self) -> bool:
        """True if `wait` would return at once."""


class Wire(Protocol):
    """Point to point within one group, by index in the group. Tags keep message streams apart; each is in order."""

    def isend(self, x: Tensor, to: int, tag: int) -> Handle:
        """Start sending the bytes of x."""

    def irecv(self, buffer: Tensor, source: int, tag: int) -> Handle:
        """Start receiving into `buffer`."""


class Lane(Protocol):
    """The timing of one directed edge: on a shaped wire a message arrives at the time in its stamp (traffic.py)."""

    def book(self, n_bytes: int) -> Stamp:
        """The stamp of a message of `n_bytes` that is handed over now; it travels in the header."""

    def rest(self, stamp: Stamp, behind: int = 0) -> None:
        """Sleep until all but the last `behind` bytes of the message have arrived."""

    def here(self, stamp: Stamp) -> bool:
        """True if `rest` would return at once."""


class Free:
    """The lane of a wire whose timing is not shaped: every message is there when the wire says so."""

    def book(self, n_bytes: int) -> Stamp:
        """An empty stamp."""
        return UNSTAMPED

    def rest(self, stamp: Stamp, behind: int = 0) -> None:
        """Return at once."""
        return None

    def here(self, stamp: Stamp) -> bool:
        """True."""
        return True


class Sending:
    """A message on its way out; keeps its tensors alive until the wire no longer needs them.

    On a wire that `lends`, a tensor that has changed meanwhile is an error when it is waited for."""

    def __init__(self, wire: Wire, x: Tensor, to: int, tag: int):
        x = x.detach()
        raw = as_bytes(x).cpu()  # which waits for a GPU to finish x: only then does the message leave, by its stamp too
        memory = bytearray(SLAB_BYTES)
        self.lane = _lane(wire, to, True)
        self.stamp = self.lane.book(raw.numel())
        HEADER.pack_into(memory, 0, code_of(x.dtype), x.dim(), *x.shape, *(0,) * (8 - x.dim()), *self.stamp)
        slab = torch.frombuffer(memory, dtype=torch.uint8)
        self.kept: list[Tensor] = [slab]
        self.lent = Lent(raw, f"the tensor that was sent to member {to}") if getattr(wire, "lends", False) else None
        if not travels_apart(wire, raw.numel()):
            slab[128 : 128 + raw.numel()] = raw
            self.handles = [wire.isend(slab, to, _announcing(tag))]
        else:
            self.kept.append(raw)
            pieces = (wire.isend(piece, to, _carrying(tag, raw)) for piece in _cut(raw))
            self.handles = [wire.isend(slab, to, _announcing(tag)), *pieces]

    def wait(self) -> None:
        """Block until the receiver has taken it. ValueError if the tensor has changed, where that can be known."""
        for handle in self.handles:
            handle.wait()
        self.lane.rest(self.stamp)
        if self.lent is not None:
            self.lent.give_back()
        self.kept.clear()

    def done(self) -> bool:
        """True if the receiver has taken it."""
        return all(handle.done() for handle in self.handles) and self.lane.here(self.stamp)


class Receiving:
    """A message expected from `source`: the header is asked for at once, the payload when its size is known."""

    def __init__(self, wire: Wire, source: int, tag: int, into: Tensor | None, device: str):
        self.wire, self.source, self.tag, self.into, self.device = wire, source, tag, into, device
        self.memory = bytearray(SLAB_BYTES)
        self.slab = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.header = wire.irecv(self.slab, source, _announcing(tag))
        self.pieces: list[Handle] = []
        self.lane, self.stamp = _lane(wire, source, False), UNSTAMPED
        n_bytes = 0 if into is None else into.nbytes
        if into is not None and n_bytes and travels_apart(wire, n_bytes):
            self._ask(as_bytes(into))  # the size is known: the payload need not wait for the header
        self.result: Tensor | None = None

    def open(self) -> None:
        """Wait for the header and ask for the payload. ValueError if the message does not fit `into`."""
        if self.result is not None:
            return
        self.header.wait()
        code, dims, *rest = HEADER.unpack_from(self.memory)
        sizes, self.stamp = rest[:MOST_DIMS], (rest[-3], rest[-2], rest[-1])
        dtype, shape = DTYPES[code], tuple(sizes[:dims])
        out = self.into
        if out is None:
            out = torch.empty(shape, dtype=dtype, device=self.device)
        elif words := misfit(self.source, shape, dtype, out):
            raise ValueError(words)
        raw = as_bytes(out)
        if not travels_apart(self.wire, raw.numel()):
            raw.copy_(self.slab[128 : 128 + raw.numel()])
        elif not self.pieces:
            self._ask(raw)
        self.result = out

    def _ask(self, raw: Tensor) -> None:
        self.pieces = [self.wire.irecv(piece, self.source, _carrying(self.tag, raw)) for piece in _cut(raw)]

    def arrive(self) -> Iterator[Tensor]:
        """The message piece by piece, as flat views of the result, each as soon as it has arrived."""
        self.open()
        assert self.result is not None
        flat = self.result.view(-1)
        step = PIECE_BYTES // flat.element_size()
        if not self.pieces:
            self.lane.rest(self.stamp)
            yield flat
        for k, piece in enumerate(self.pieces):
            piece.wait()
            self.lane.rest(self.stamp, max(0, flat.numel() - (k + 1) * step) * flat.element_size())
            yield flat[k * step : (k + 1) * step]
        self.pieces = []

    def wait(self) -> Tensor:
        """The whole message."""
        for _ in self.arrive():
            pass
        assert self.result is not None
        return self.result

    def done(self) -> bool:
        """True if the whole message has arrived."""
        if self.result is None and not self.header.done():
            return False
        self.open()
        return all(piece.done() for piece in self.pieces) and self.lane.here(self.stamp)


def sending(wire: Any, x: Tensor, to: int, tag: int) -> Any:
    """A message on its way out: the wire's own kind, if it has one, or a `Sending`."""
    method = getattr(wire, "sending", None)
    return Sending(wire, x, to, tag) if method is None else method(x, to, tag)


def receiving(wire: Any, source: int, tag: int, into: Tensor | None, device: str) -> Any:
    """A message that is expected: the wire's own kind, if it has one, or a `Receiving`."""
    method = getattr(wire, "receiving", None)
    return Receiving(wire, source, tag, into, device) if method is None else method(source, tag, into, device)


def misfit(source: int, shape: tuple[int, ...], dtype: torch.dtype, into: Tensor) -> str:
    """The words for a message of this shape and dtype that does not fit `into`; "" if it does."""
    if tuple(into.shape) == shape and into.dtype == dtype:
        return ""
    return (
        f"rank {source} of the group sent shape {shape} {dtype_name(dtype)}, this rank expected shape "
        f"{tuple(into.shape)} {dtype_name(into.dtype)} (into=): make them equal, or receive without into="
    )


def _lane(wire: Any, peer: int, outgoing: bool) -> Lane:
    shaped = getattr(wire, "lane", None)
    return Free() if shaped is None else shaped(peer, outgoing)


def _announcing(tag: int) -> int:
    return tag << 10


def _carrying(tag: int, raw: Tensor) -> int:
    # The size (modulo a prime, to fit into ten bits) is part of the wire's tag, because gloo aborts the process if a
    # message meets a buffer of another size. This way the message waits for a receive that never comes, while the
    # header tells the receiver of the mismatch.
    return (tag << 10) + 1 + raw.numel() % 1021


def _cut(raw: Tensor) -> tuple[Tensor, ...]:
    return raw.split(PIECE_BYTES)


def travels_apart(wire: Any, n_bytes: int) -> bool:
    """True if a payload of this size is a wire message of its own, and no part of the header's.

    A wire that `reads_late` wants them all apart: what is copied into a header has been read at once."""
    if n_bytes > EAGER_BYTES:
        return True
    return n_bytes > 0 and bool(getattr(wire, "reads_late", False))


def as_bytes(x: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, as a view.   any shape -> [n_bytes]"""
    return x.detach().reshape(-1).view(torch.uint8) if x.numel() else torch.empty(0, dtype=torch.uint8, device=x.device)


def code_of(dtype: torch.dtype) -> int:
    """The number that stands for a dtype in a header. ValueError for dtypes that cannot be sent."""
    try:
        return DTYPES.index(dtype)
    except ValueError:
        known = ", ".join(map(dtype_name, DTYPES))
        raise ValueError(f"cannot send {dtype_name(dtype)}; can send {known}") from None
