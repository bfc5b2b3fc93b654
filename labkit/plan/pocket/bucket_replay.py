"""Replay of one backward pass with other buckets: when each bucket is full, when it travels, and what cannot be hidden.

    time -->     backward of block 3 | block 2 | block 1 | block 0 |
    gradients                        a         b         c         d      each ready at a recorded moment
    wire                               |== bucket 0: a, b not yet |
                                                 |===== a b =====||===== c d =====|
                                                                  |<-- exposed -->|

A bucket leaves when its last gradient is ready and the bucket before it is through: one wire, one verb after the other,
as a stream of NCCL works. A bucket of b bytes takes alpha + b beta seconds, a line through the measured seconds of the
collective (for a ring on n ranks: 2(n-1) latencies, and 2(n-1)/n bytes of wire for each byte of the bucket).

    one bucket a parameter   travels at once, and pays the latency as often as there are parameters
    one bucket for all       one latency, and nothing is hidden: it is full when backward ends
    in between               only what is still on its way at the end of backward is exposed

Pure arithmetic on recorded moments. Source: Li et al., arXiv:2006.15704, section 3.2.3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from labkit.plan.machine.collectives import Line
from labkit.plan.partition.buckets import fill


class Ready(NamedTuple):
    """One gradient: whose, how many bytes, and how many seconds after the begin of backward it was ready."""

    name: str
    n_bytes: int
    at_s: float


class Flight(NamedTuple):
    """One bucket: its gradients, its bytes, when it was full, and when it was on the wire (seconds)."""

    names: tuple[str, ...]
    n_bytes: int
    full_s: float
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Replay:
    """The result: the buckets in the order in which they left, and how long backward itself took."""

    flights: tuple[Flight, ...]
    backward_s: float

    @property
    def end_s(self) -> float:
        """The moment at which backward is over and all buckets have been reduced, in seconds."""
        return max(self.backward_s, *(flight.end_s for flight in self.flights))

    @property
    def wire_s(self) -> float:
        """Seconds during which a bucket is on the wire."""
        return sum(flight.end_s - flight.start_s for flight in self.flights)

    @property
    def exposed_s(self) -> float:
        """Seconds of the wire after backward: what a rank waits for."""
        return self.end_s - self.backward_s

    @property
    def hidden(self) -> float:
        """Share of the time on the wire that lies beside backward, 0 to 1."""
        return 1 - self.exposed_s / self.wire_s if self.wire_s else 1.0


def replay(ready: Sequence[Ready], bucket_bytes: float, wire: Line, backward_s: float = 0.0) -> Replay:
    """Gradients in the module's order, laid in buckets of `bucket_bytes` from last to first, and sent over `wire`.

    Backward ends at `backward_s`, or with the last gradient if that is later. ValueError for no gradients, for buckets
    of less than a byte and for moments before the begin."""
    if not ready or any(not 0 <= gradient.at_s < math.inf or gradient.n_bytes < 1 for gradient in ready):
        raise ValueError(f"a replay needs gradients of 1 byte or more, ready at 0 s or later; got {list(ready)[:3]}")
    if not 1 <= bucket_bytes < math.inf:
        raise ValueError(f"a bucket holds 1 byte or more, got {bucket_bytes:g}")
    flights: list[Flight] = []
    free = 0.0
    for members in fill([("", gradient.n_bytes) for gradient in ready], int(bucket_bytes)):
        gradients = [ready[k] for k in members]
        n_bytes, full = sum(gradient.n_bytes for gradient in gradients), max(gradient.at_s for gradient in gradients)
        start = max(full, free)
        free = start + wire.seconds(n_bytes)
        flights.append(Flight(tuple(gradient.name for gradient in gradients), n_bytes, full, start, free))
    return Replay(tuple(flights), max(backward_s, *(gradient.at_s for gradient in ready)))


def sizes_of(ready: Sequence[Ready]) -> list[int]:
    """Bucket sizes worth a look: doublings from the smallest gradient's bytes to all of them together."""
    least, whole = min(gradient.n_bytes for gradient in ready), sum(gradient.n_bytes for gradient in ready)
    return [*(least << k for k in range(40) if least << k < whole), whole]


def best_bytes(ready: Sequence[Ready], wire: Line, backward_s: float = 0.0) -> int:
    """Of `sizes_of`, the bucket size with the earliest end; of equals the largest, which sends fewest buckets."""
    return min(reversed(sizes_of(ready)), key=lambda size: replay(ready, size, wire, backward_s).end_s)
