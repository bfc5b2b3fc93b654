"""The ledger: every byte that a rank hands to the wire, written down as it goes.

Strategies talk only through Groups, and every verb of a Group writes here. Laws are proved against the ledger, pictures
are drawn from it, and the cost model is corrected by it. Its bytes are of two sorts:

    counted    the payload of messages, which labkit sent itself: those of `send`, and those of which a collective
               consists on shaped links, on threads, and where an algorithm of one's own was swapped in
    charged    a collective that a backend carried out (gloo, NCCL, memory that the ranks share): it does not say what
               it sends, so the bytes of a ring are written down for it (charge.py)

The 128-byte headers with which point-to-point messages announce their shape are the wire's own business.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

FOOTNOTE = "charged: a ring's bytes, since the backend does not say what it sent; the rest was counted."
"""The footnote below a table in which some bytes are charged and not counted."""


class Transfer(NamedTuple):
    """One message, or one collective, as seen by the rank that sent it.

    verb      "send", or the collective's name
    axis      which group: "world", "dp", "pp", "tp"
    to        global rank of the receiver; None for a collective that the backend carries out
    n_bytes   payload handed to the wire by this rank
    t0, t1    seconds (time.perf_counter): handed over, done
    within    the verbs whose swapped-in algorithms sent it, outermost first: "", "all_reduce", "all_reduce/broadcast"
    tag       the tag of a message
    next      global rank of the next member of the group, to which a ring sends; None for a message
    line      file and line of the caller, where another thread carries out the collective; ("", 0) elsewhere
    charged   True: a collective, whose bytes a law says (charge.py). False: a message, whose bytes were counted
    """

    verb: str
    axis: str
    to: int | None
    n_bytes: int
    t0: float
    t1: float
    within: str = ""
    tag: int = 0
    next: int | None = None
    line: tuple[str, int] = ("", 0)

    @property
    def charged(self) -> bool:
        """Whether a law says the bytes. A collective that is carried out by messages has none of its own."""
        return self.to is None


@dataclass(frozen=True)
class PendingOperation:
    """The operation that a rank is about to wait for. `peer` is an index in `ranks`, None for a collective; `seq`
    counts the collectives of this group from 1 (for a message it is the count of collectives so far)."""

    verb: str
    axis: str
    ranks: tuple[int, ...]
    rank: int
    peer: int | None
    tag: int
    shape: tuple[int, ...] | None
    dtype: str
    seq: int
    op: str = "sum"
    line: tuple[str, int] = ("", 0)
    """File and line of the caller, where another thread carries the call out; ("", 0): the caller itself does."""


class Witness(Protocol):
    """An object that is told of every wait. `enter` may raise ValueError if the ranks' calls do not match."""

    def enter(self, call: PendingOperation) -> None:
        """The rank is about to wait for `call`."""

    def leave(self, call: PendingOperation) -> None:
        """The wait for `call` is over."""


class Ledger:
    """The transfers of one rank, as they began; `received[r]` counts the messages that came from rank r."""

    def __init__(self, witness: Witness | None = None):
        self.witness = witness
        self.transfers: list[Transfer] = []
        self.within: list[tuple[str, int]] = []
        self.received: Counter[int] = Counter()
        self.under_way: dict[int, Any] = {}
        self.line = ("", 0)
        self.rank, self.nodes = 0, tuple[str, ...]()

    def place(self, rank: int, nodes: tuple[str, ...]) -> None:
        """Say on which machine each rank lives, by rank, and whose ledger this is."""
        self.rank, self.nodes = rank, nodes

    def sent_bytes(self, verb: str | None = None, axis: str | None = None) -> int:
        """Bytes that this rank sent. A message sent by a swapped-in all_reduce counts for "send" and for "all_reduce";
        the total counts it once. The axis "node" has the bytes that left this rank's machine, whatever their axis."""
        if axis == "node":
            own_node = self.nodes[self.rank] if self.nodes else ""
            return sum(n_bytes for (_, node), n_bytes in self.between_nodes(verb).items() if node != own_node)
        return sum(t.n_bytes for t in self.transfers if _is(t, verb) and axis in (None, t.axis))

    def charged_bytes(self, verb: str | None = None, axis: str | None = None) -> int:
        """That part of the bytes sent which was not counted but charged, by the law of a ring (see above)."""
        return sum(t.n_bytes for t in self.transfers if t.charged and _is(t, verb) and axis in (None, t.axis))

    def between_nodes(self, verb: str | None = None) -> dict[tuple[str, str], int]:
        """Bytes that this rank sent, by (its node, the receiver's); {} where all ranks are on one machine.

        What a backend sends inside a collective is charged as a ring sends it: to the next rank of the group."""
        bytes_of: Counter[tuple[str, str]] = Counter()
        for t in self.transfers if self.nodes else ():
            if _is(t, verb) and t.n_bytes:
                to = t.next if t.to is None else t.to
                bytes_of[self.nodes[self.rank], self.nodes[self.rank if to is None else to]] += t.n_bytes
        return dict(bytes_of)

    def calls(self, verb: str | None = None) -> int:
        """The number of calls of a verb: a collective by its name, whatever algorithm carries it out, or "send"."""
        return sum(verb in (None, t.verb) for t in self.transfers)

    def open(
        self, verb: str, axis: str, to: int | None, n_bytes: int, tag: int = 0, following: int | None = None
    ) -> int:
        """Record a transfer that begins now; returns its number for `close`."""
        now = time.perf_counter()
        within = "/".join(verb for verb, _ in self.within)
        transfers = self.transfers
        transfer = Transfer(verb, axis, to, n_bytes, now, now, within, tag, following, self.line)
        number = len(transfers)
        transfers.append(transfer)
        while transfers[number] is not transfer:  # another thread has written one in between
            number += 1
        return number

    def charge(self, n_bytes: int) -> None:
        """Record the bytes that a backend sends for the innermost collective that is open."""
        _, number = self.within[-1]
        self.transfers[number] = self.transfers[number]._replace(n_bytes=n_bytes)

    def close(self, number: int) -> None:
        """Record that a transfer is done."""
        if number < len(self.transfers):  # the ledger may have been cleared under a message on its way
            self.transfers[number] = self.transfers[number]._replace(t1=time.perf_counter())

    def keep(self, message: Any) -> Any:
        """Keep a message alive until it is done, also when nobody waits for it: the wire uses its memory."""
        if len(self.under_way) > 256:  # a program that never waits: drop what is done
            for key, old in list(self.under_way.items()):  # a list: another thread may keep one meanwhile
                if old.done():
                    self.under_way.pop(key, None)
        self.under_way[id(message)] = message
        return message

    def let_go(self, message: Any) -> None:
        """Forget a message that is done."""
        self.under_way.pop(id(message), None)

    def clear(self) -> None:
        """Forget everything written so far."""
        self.transfers = []
        self.within = []
        self.received.clear()
        self.under_way.clear()

    def __iter__(self) -> Iterator[Transfer]:
        return iter(self.transfers)

    def __len__(self) -> int:
        return len(self.transfers)

    def __getstate__(self) -> dict[str, Any]:
        empty: dict[str, Any] = {"witness": None, "within": [], "under_way": {}}
        return {**vars(self), **empty}

    def __repr__(self) -> str:
        """A line for each verb of each axis, and whether its bytes were counted or charged."""
        rows = Counter[tuple[str, str]]((t.verb, t.axis) for t in self.transfers)
        bytes_of = Counter[tuple[str, str]]()
        for t in self.transfers:
            bytes_of[t.verb, t.axis] += t.n_bytes
        charged = {(t.verb, t.axis) for t in self.transfers if t.charged}
        lines = [f"Ledger: {_many(len(self.transfers), 'transfer')}, {_many(self.sent_bytes(), 'byte')} sent"]
        for (verb, axis), calls in sorted(rows.items()):
            n_bytes = bytes_of[verb, axis]
            how = ("charged *" if n_bytes else "") if (verb, axis) in charged else "counted"
            lines.append(f"  {verb:15s} {axis:6s} {_many(calls, 'call'):>12} {n_bytes:14,d} bytes {how}".rstrip())
        if self.charged_bytes():
            lines.append("* " + FOOTNOTE)
        return "\n".join(lines)


class Aside(Ledger):
    """The same ledger for another thread: transfers are written to `whole`, but verbs nest by themselves, and no
    witness is told of the waits inside a call that the other thread has announced."""

    def __init__(self, whole: Ledger):
        self.whole, self.witness, self.within, self.line = whole, None, [], ("", 0)

    def __getattr__(self, name: str) -> Any:
        if name in ("transfers", "received", "under_way"):  # looked up each time: `clear` of the whole renews them
            return getattr(self.whole, name)
        raise AttributeError(name)

    def clear(self) -> None:
        """Forget everything that both have written so far."""
        self.whole.clear()
        self.within = []


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _is(transfer: Transfer, verb: str | None) -> bool:
    return verb is None or verb == transfer.verb or verb in transfer.within.split("/")
