"""The ledgers of all ranks as edges: how many bytes and messages went from one rank to another.

rank 0: send 400 B to 1, send 400 B to 1        edges      (0, 1): 800 B in 2 messages
rank 1: all_reduce 64 B by the backend          unplaced   1: 64 B, which have no receiver
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from labkit.comm.ledger import Transfer
from labkit.launch.reply import Reply
from labkit.view.places import Edge

Ledgers = Sequence[Iterable[Transfer] | Reply]


@dataclass(frozen=True)
class Flow:
    """The traffic between ranks: `edges` (from, to) -> (bytes, messages), and `unplaced` rank -> bytes of collectives
    that the backend carried out, which have no receiver."""

    ranks: tuple[int, ...]
    edges: Mapping[Edge, tuple[int, int]]
    unplaced: Mapping[int, int]

    @classmethod
    def of(cls, ledgers: Ledgers, axis: str | None = None) -> Flow:
        """The sum of the ledgers (or replies) of ranks 0, 1, ..., of one axis or of all. ValueError for no ledgers."""
        if not ledgers:
            raise ValueError("a picture of traffic needs the ledger of every rank, and there are none")
        counts: dict[Edge, list[int]] = defaultdict(lambda: [0, 0])
        unplaced: dict[int, int] = defaultdict(int)
        ranks = [ledger.rank if isinstance(ledger, Reply) else place for place, ledger in enumerate(ledgers)]
        for rank, ledger in zip(ranks, ledgers, strict=True):
            for transfer in ledger.ledger if isinstance(ledger, Reply) else ledger:
                if axis not in (None, transfer.axis):
                    continue
                if transfer.to is None:
                    unplaced[rank] += transfer.n_bytes
                else:
                    counts[rank, transfer.to][0] += transfer.n_bytes
                    counts[rank, transfer.to][1] += 1
        known = sorted({*ranks, *(to for _, to in counts)})
        edges = {edge: (n_bytes, messages) for edge, (n_bytes, messages) in sorted(counts.items())}
        return cls(tuple(known), edges, {rank: n for rank, n in unplaced.items() if n})

    def sent(self, rank: int) -> int:
        """Bytes that this rank sent, collectives of the backend included."""
        return sum(n for (a, _), (n, _) in self.edges.items() if a == rank) + self.unplaced.get(rank, 0)

    def through(self, rank: int) -> int:
        """Bytes that this rank sent and received."""
        return self.sent(rank) + self.took(rank)

    def took(self, rank: int) -> int:
        """Bytes of the messages that this rank received."""
        return sum(n for (_, b), (n, _) in self.edges.items() if b == rank)


def axes_of(ledgers: Ledgers) -> tuple[str, ...]:
    """The axes along which anything was sent, in the order of their first message."""
    axes = (t.axis for ledger in ledgers for t in (ledger.ledger if isinstance(ledger, Reply) else ledger))
    return tuple(dict.fromkeys(axes))
