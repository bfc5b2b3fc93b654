"""What each rank did when, and what follows from it: plain values, no clock and no wire.

    rank 0   main thread   |### compute ###|.... bubble ....|== exposed ==|## compute ##|
             wire                |------ all_reduce started here ---------|
                                                            |<-- moving ->|
    rank 1   main thread   |########### compute ############|== exposed ==|## compute ##|
                                                            ^ the last rank has come: from here on bytes can move

    compute    the main thread is not blocked in a verb of a group; sleeping and reading data count, too
    exposed    it is blocked, and every rank that the verb needs has come: it waits for the wire
    bubble     it is blocked, and a rank has not come yet; and the time before a rank begins and after it ends
    wire       something is on its way from or to this rank, whatever its main thread does meanwhile

The first three add up to the whole, the time from the first rank's begin to the last one's end. "Has come" means: all
members of a collective have called it; the sender of a message has sent it; its receiver has begun to wait for it. A
rank that the recording lacks counts as come.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from labkit.comm.ledger import Transfer
from labkit.probe.intervals import Interval, common, union, without


class ProgramSpan(NamedTuple):
    """A named piece of a rank's program, in seconds. `phase` is "" for your own, "forward", "backward" or "recompute"
    for a watched module, "gpu" for the time between two events on the device."""

    name: str
    t0: float
    t1: float
    phase: str = ""


class OperationSpan(NamedTuple):
    """A rank was in a verb from t0 to t1: the start of an asynchronous one and the wait for it are two entries of one
    `call`. `peer` is a global rank, None for a collective; `blocks` if the main thread was in it, in no verb around it,
    and not just starting it; `inside` if a swapped-in collective called it; `number` is the place of its transfer, -1
    if it has none."""

    call: int
    verb: str
    axis: str
    ranks: tuple[int, ...]
    peer: int | None
    tag: int
    seq: int
    t0: float
    t1: float
    blocks: bool
    inside: bool
    number: int = -1


class RankTimeline(NamedTuple):
    """One rank between `begin` and `end`: its spans, the verbs it was in and what it sent, in seconds.

    Its clock was `offset_s` ahead of that of rank `reference`, with an error of at most `error_s`. `earlier` has (peer,
    messages sent to it, messages received from it) before `begin`; `unseen` are the ranks from which messages came that
    nobody waited for (`Work.done` saw them). `queued`: verbs return as soon as the device has them in its queue, so
    times are those of the host."""

    rank: int
    begin: float
    end: float
    spans: tuple[ProgramSpan, ...] = ()
    entries: tuple[OperationSpan, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    offset_s: float = 0.0
    error_s: float = 0.0
    reference: int = 0
    earlier: tuple[tuple[int, int, int], ...] = ()
    unseen: tuple[int, ...] = ()
    queued: bool = False

    def shifted(self, by: float) -> RankTimeline:
        """The same row with `by` seconds added to every time."""
        return self._replace(
            begin=self.begin + by,
            end=self.end + by,
            spans=tuple(span._replace(t0=span.t0 + by, t1=span.t1 + by) for span in self.spans),
            entries=tuple(entry._replace(t0=entry.t0 + by, t1=entry.t1 + by) for entry in self.entries),
            transfers=tuple(transfer._replace(t0=transfer.t0 + by, t1=transfer.t1 + by) for transfer in self.transfers),
        )


class MatchedMessage(NamedTuple):
    """Both ends of a message: handed over at t0, known to be through at t1; the receiver began to wait at `came` and
    had it at `left`. `number` is the sender's transfer, `call` the receiver's call."""

    source: int
    to: int
    axis: str
    tag: int
    n_bytes: int
    inside: bool
    t0: float
    t1: float
    came: float
    left: float
    number: int
    call: int

    @property
    def moving(self) -> Interval:
        """The interval in which it was on the wire. It begins when both ends were there or, if the message was through
        before its receiver waited for it, when it was handed over. Before, it lies in the sender's memory or a mailbox.
        """
        return (max(self.t0, self.came) if self.came < self.t1 else self.t0), self.t1


class Parts(NamedTuple):
    """The time of one rank, each part as disjoint intervals in order."""

    compute: tuple[Interval, ...]
    exposed: tuple[Interval, ...]
    bubble: tuple[Interval, ...]
    wire: tuple[Interval, ...]


# -- who met whom ------------------------------------------------------------------------------------------------------


def messages(rows: Sequence[RankTimeline]) -> list[MatchedMessage]:
    """Every message of which the recording has both ends. Sends and receives of one sender, receiver, axis and tag are
    paired in order.

    A message that was on its way when the recording began belongs to a receive that ended before the recording's first
    send. Where a rank took in messages that nobody waited for, the order is not known: messages from that sender to it
    are left out."""
    sent: dict[tuple[object, ...], list[tuple[int, Transfer]]] = defaultdict(list)
    for row in rows:
        for number, transfer in enumerate(row.transfers):
            if transfer.verb == "send":
                sent[row.rank, transfer.to, transfer.axis, transfer.tag, bool(transfer.within)].append(
                    (number, transfer)
                )
    at: Counter[tuple[object, ...]] = Counter()
    error = {row.rank: row.error_s for row in rows}
    flying: Counter[tuple[int, int]] = Counter()  # sent before the recording, and not received yet
    for row in rows:
        for peer, n_sent, n_had in row.earlier:
            flying[row.rank, peer] += n_sent
            flying[peer, row.rank] -= n_had
    paired = []
    for row in rows:
        for first, left in _calls(row):
            source = first.peer
            key = (source, row.rank, first.axis, first.tag, first.inside)
            if first.verb != "recv" or source in row.unseen or at[key] >= len(sent[key]):
                continue
            number, transfer = sent[key][at[key]]
            pair = source or 0, row.rank
            if flying[pair] > 0 and left < transfer.t0 - row.error_s - error[source or 0]:
                flying[pair] -= 1
                continue
            at[key] += 1
            # the ledger notes a send when it is under way, and the sender may have been paused before that
            t0 = min(transfer.t0, left)
            t1 = max(t0, min(left, transfer.t1) if transfer.t1 > transfer.t0 else left)
            header = (*pair, transfer.axis, transfer.tag, transfer.n_bytes, first.inside)
            paired.append(MatchedMessage(*header, t0, t1, first.t0, left, number, first.call))
    return paired


def parts(rows: Sequence[RankTimeline], met: Sequence[MatchedMessage]) -> dict[int, Parts]:
    """rank -> compute, exposed, bubble and wire, as the head of this file defines them. `met` are `messages(rows)`."""
    window = min(row.begin for row in rows), max(row.end for row in rows)
    sent = {(message.source, message.number): message for message in met}
    coming: dict[int, list[MatchedMessage]] = defaultdict(list)
    for incoming in met:
        coming[incoming.to].append(incoming)
    last_came, by_rank = _last_to_come(rows), {}
    for row in rows:
        arrivals = {message.call: message.t0 for message in coming[row.rank]}
        sends = _sends_by_end(row)
        blocked, late = [], [(window[0], row.begin), (row.end, window[1])]
        for entry in row.entries:
            if entry.blocks:
                t0, t1 = max(entry.t0, row.begin), min(entry.t1, row.end)
                ready = last_came.get((row.rank, entry.call), arrivals.get(entry.call, t0))
                if entry.verb == "send":
                    message = sent.get((row.rank, _send_of(entry, sends)))
                    ready = message.came if message and message.came < entry.t1 else t0
                blocked.append((t0, t1))
                late.append((t0, min(max(ready, t0), t1)))
        calls = {
            entry.number: last_came.get((row.rank, entry.call), entry.t0) for entry in row.entries if entry.number >= 0
        }
        moving = [message.moving for message in coming[row.rank] if not message.inside]
        for number, transfer in enumerate(row.transfers):
            if not transfer.within and transfer.t1 > transfer.t0:
                message, came = sent.get((row.rank, number)), calls.get(number, transfer.t0)
                moving.append(message.moving if message else (max(transfer.t0, came), transfer.t1))
        busy, waits, bubble = union([(row.begin, row.end)]), union(blocked), union(late)
        exposed = without(waits, bubble)
        wire = common(union((*moving, *exposed)), busy)
        by_rank[row.rank] = Parts(without(busy, waits), exposed, bubble, wire)
    return by_rank


def _calls(row: RankTimeline) -> Iterator[tuple[OperationSpan, float]]:
    """The first entry of each call, in order, and when its last one ended."""
    ends = {entry.call: entry.t1 for entry in row.entries}
    seen: set[int] = set()
    for entry in row.entries:
        if entry.call not in seen:
            seen.add(entry.call)
            yield entry, ends[entry.call]


def _last_to_come(rows: Sequence[RankTimeline]) -> dict[tuple[int, int], float]:
    """(rank, call) of each collective -> when the last of its members called it."""
    met: dict[tuple[object, ...], list[tuple[int, int, float]]] = defaultdict(list)
    for row in rows:
        formed: Counter[tuple[object, ...]] = Counter()  # a group formed anew counts its collectives from 1 again
        for first, _ in _calls(row):
            if first.peer is None:
                key = (first.axis, first.ranks, first.seq)
                met[*key, formed[key]].append((row.rank, first.call, first.t0))
                formed[key] += 1
    return {(rank, call): max(t0 for _, _, t0 in members) for members in met.values() for rank, call, _ in members}


def _sends_by_end(row: RankTimeline) -> dict[tuple[object, ...], list[tuple[float, int]]]:
    sends: dict[tuple[object, ...], list[tuple[float, int]]] = defaultdict(list)
    for number, transfer in enumerate(row.transfers):
        if transfer.verb == "send":
            sends[transfer.to, transfer.axis, transfer.tag].append((transfer.t1, number))
    return {key: sorted(ends) for key, ends in sends.items()}


def _send_of(entry: OperationSpan, sends: dict[tuple[object, ...], list[tuple[float, int]]]) -> int:
    """The transfer that a wait for a send ended: the ledger closes it just after the wait."""
    ended = sends.get((entry.peer, entry.axis, entry.tag), [])
    place = bisect_left(ended, (entry.t1, -1))
    return ended[place][1] if place < len(ended) else -1
