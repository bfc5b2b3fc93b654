"""A film of a collective: every message of a real run, put in order, with what each rank held at every step.

    def shoot(group):
        return film.record(ring.all_reduce, x, group)[1]
    Film.of([reply.value for reply in cluster.run(shoot)])

Nothing is taken from theory. A recording holds the first number of every message as it was sent. The film follows
those numbers from rank to rank, and refuses recordings whose numbers do not add up.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from labkit.comm.group import Group

VERBS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")


class MessageEnd(NamedTuple):
    """One rank's end of a message. `value` is the first number of the payload, nan if it is empty."""

    kind: str
    peer: int
    chunk: int
    n_bytes: int
    value: float
    t: float


class CollectiveRecording(NamedTuple):
    """One rank's end of a collective: the first number of each of its chunks before and after (nan where it holds none,
    () where the result is not cut that way), its events in order, and how exact its numbers are."""

    rank: int
    before: tuple[float, ...]
    events: tuple[MessageEnd, ...]
    after: tuple[float, ...] = ()
    verb: str = "all_reduce"
    op: str = "sum"
    eps: float = 1e-7


class Cell(NamedTuple):
    """A chunk as one rank holds it: its first number, and which ranks' contributions are in it."""

    value: float
    origins: tuple[int, ...]


class ChunkMessage(NamedTuple):
    """A message of the film: chunk `chunk`, from `source` to `to`, between t0 and t1 (seconds, one clock)."""

    source: int
    to: int
    chunk: int
    n_bytes: int
    value: float
    t0: float
    t1: float


@dataclass(frozen=True)
class Film:
    """`states[k][rank][chunk]` is what was held before step k; `steps[k]` are the messages of step k.

    In one step every rank sends at most one message and takes at most one, and nobody sends what it receives in the
    same step: the steps of the alpha-beta model."""

    name: str
    n_ranks: int
    n_chunks: int
    steps: tuple[tuple[ChunkMessage, ...], ...]
    states: tuple[tuple[tuple[Cell, ...], ...], ...]

    @property
    def n_bytes(self) -> int:
        """Bytes sent by all ranks."""
        return sum(message.n_bytes for step in self.steps for message in step)

    @classmethod
    def of(cls, recordings: Sequence[CollectiveRecording], name: str = "") -> Film:
        """Put the recordings of all ranks together. ValueError if a rank is missing, a message has only one end, or a
        rank sends or ends with a number that is not the one it must hold."""
        by_rank = {recording.rank: recording for recording in recordings}
        if not by_rank or sorted(by_rank) != list(range(len(recordings))):
            raise ValueError(
                f"a film needs the recording of every rank, once; got ranks {[r.rank for r in recordings]}"
            )
        n_ranks = len(recordings)
        chunks = {rank: len(recording.before) for rank, recording in by_rank.items()}
        if len(set(chunks.values())) > 1:
            raise ValueError(f"the ranks cut their tensors into different numbers of chunks, by rank: {chunks}")
        held = [_start(by_rank[rank]) for rank in range(n_ranks)]
        steps = _steps(_pair(by_rank))
        states = [_frozen(held)]
        for step in steps:
            before = _frozen(held)  # what is received in a step leaves in the next one
            for message in step:
                recording = by_rank[message.source]
                sent = _agreed(before[message.source][message.chunk], message.value, recording, n_ranks, "sent")
                held[message.source][message.chunk] = sent
            for message in step:
                own, sent = held[message.to][message.chunk], held[message.source][message.chunk]
                held[message.to][message.chunk] = _receive(own, sent, by_rank[message.to])
            states.append(_frozen(held))
        for rank, recording in by_rank.items():
            for chunk, value in enumerate(recording.after):
                if recording.verb != "reduce_scatter" or chunk == rank:
                    held[rank][chunk] = _agreed(held[rank][chunk], value, recording, n_ranks, "ended with")
        states[-1] = _frozen(held)
        return cls(name or by_rank[0].verb, n_ranks, chunks[0], tuple(map(tuple, steps)), tuple(states))


def record(
    collective: Callable[..., Tensor], x: Tensor, group: Group, verb: str = "", n_chunks: int = 0, **options: Any
) -> tuple[Tensor, CollectiveRecording]:
    """Run `collective(x, group)` on this rank and keep its end of every message. Returns (result, recording).

    The tag of a message is the number of its chunk, as in labkit's ring; if all tags are 0 the tensor moves as one.
    `verb` is read from the function's name; options such as op="max" are passed on. Raises ValueError for a tree's or a
    star's reduce_scatter and all_gather, whose messages hold several chunks at a time."""
    name = getattr(collective, "__name__", "")
    verb = verb or next((candidate for candidate in VERBS if candidate in name), "all_reduce")
    seen: list[MessageEnd] = []

    def tap(kind: str, peer: int, tag: int, payload: Tensor) -> None:
        n_bytes = payload.nbytes
        seen.append(MessageEnd(kind, group.ranks.index(peer), tag, n_bytes, _first(payload), time.monotonic()))

    result = collective(x, group.tapped(tap), **options)
    n_chunks = n_chunks or (group.size if any(event.chunk for event in seen) else 1)
    if n_chunks == 1 < group.size and verb in ("reduce_scatter", "all_gather"):
        raise ValueError(f"a film of {verb} needs messages of one chunk each, with its number as tag: film the ring's")
    events = tuple(event._replace(chunk=event.chunk % n_chunks) for event in seen)
    flat = x if verb == "reduce_scatter" else x.reshape(-1)
    if verb == "all_gather":
        before = tuple(_first(x) if chunk == group.rank else math.nan for chunk in range(n_chunks))
        after: tuple[float, ...] = ()  # the parts may differ in length, so the result does not say where each begins
    else:
        before = tuple(map(_first, flat.tensor_split(n_chunks)))
        alone = [math.nan] * n_chunks
        if verb == "reduce_scatter":
            alone[group.rank] = _first(result)
        after = (
            tuple(alone) if verb == "reduce_scatter" else tuple(map(_first, result.reshape(-1).tensor_split(n_chunks)))
        )
    eps = torch.finfo(x.dtype).eps if x.is_floating_point() else 1e-15
    return result, CollectiveRecording(group.rank, before, events, after, verb, str(options.get("op", "sum")), eps)


def _first(x: Tensor) -> float:
    return float(x.reshape(-1)[0]) if x.numel() else math.nan


def _start(recording: CollectiveRecording) -> list[Cell]:
    absent = (lambda chunk: chunk != recording.rank) if recording.verb == "all_gather" else (lambda chunk: False)
    return [Cell(value, () if absent(chunk) else (recording.rank,)) for chunk, value in enumerate(recording.before)]


def _pair(by_rank: Mapping[int, CollectiveRecording]) -> dict[tuple[int, int], tuple[ChunkMessage, int]]:
    """(receiver, place of its event) -> the message, and the place of the sender's event in its own order."""
    sent: dict[tuple[int, int, int], deque[tuple[MessageEnd, int]]] = defaultdict(deque)
    for rank, recording in by_rank.items():
        for place, event in enumerate(recording.events):
            if event.kind == "send":
                sent[rank, event.peer, event.chunk].append((event, place))
    pairs = {}
    for rank, recording in by_rank.items():
        for place, event in enumerate(recording.events):
            if event.kind == "recv":
                queue = sent[event.peer, rank, event.chunk]
                if not queue:
                    raise ValueError(
                        f"rank {rank} received chunk {event.chunk} from {event.peer}, which did not send it"
                    )
                start, started = queue.popleft()
                message = ChunkMessage(event.peer, rank, event.chunk, event.n_bytes, start.value, start.t, event.t)
                pairs[rank, place] = (message, started)
    if left := [key for key, queue in sent.items() if queue]:
        raise ValueError(f"messages were sent and never received: (source, to, chunk) {left}")
    return pairs


def _steps(pairs: Mapping[tuple[int, int], tuple[ChunkMessage, int]]) -> list[list[ChunkMessage]]:
    """Each message goes into the first step in which its sender has everything that it had received before it sent,
    and in which neither end is busy. Every rank's events are walked through in their own order."""
    arrives = {(message.source, started): end for end, (message, started) in pairs.items()}
    walk: dict[int, list[int]] = defaultdict(list)
    for rank, place in sorted([*arrives, *pairs]):
        walk[rank].append(place)
    leaves: dict[tuple[int, int], int] = {}  # (receiver, place) -> the first step in which the message can travel
    sending: dict[int, int] = defaultdict(lambda: -1)  # rank -> the last step in which it sent
    taking: dict[int, int] = defaultdict(lambda: -1)
    steps: dict[int, list[ChunkMessage]] = defaultdict(list)
    at = dict.fromkeys(walk, 0)
    while any(at[rank] < len(walk[rank]) for rank in walk):
        moved = False
        for rank in sorted(walk):
            while at[rank] < len(walk[rank]):
                key = (rank, walk[rank][at[rank]])
                if key in arrives:
                    leaves[arrives[key]] = sending[rank] = 1 + max(taking[rank], sending[rank])
                elif key in leaves:
                    step = max(leaves[key], 1 + taking[rank])
                    source = pairs[key][0].source
                    taking[rank], sending[source] = step, max(step, sending[source])
                    steps[step].append(pairs[key][0])
                else:
                    break  # its sender has not reached this message yet
                at[rank], moved = at[rank] + 1, True
        if not moved:
            raise ValueError("the recordings contradict each other: a message was received before it was sent")
    return [sorted(steps[k]) for k in sorted(steps)]


def _receive(own: Cell, sent: Cell, recording: CollectiveRecording) -> Cell:
    """The cell of a rank after a message: both combined (sum, max or min), or the one that came if they overlap."""
    if not own.origins or recording.verb == "broadcast" or set(own.origins) & set(sent.origins):
        return sent
    joined = {"max": max, "min": min}.get(recording.op, lambda a, b: a + b)
    return Cell(joined(own.value, sent.value), tuple(sorted({*own.origins, *sent.origins})))


def _agreed(cell: Cell, value: float, report: CollectiveRecording, n_ranks: int, did: str) -> Cell:
    """The cell with the number that was really seen; ValueError if it cannot be the one that the film expects."""
    if value == cell.value or (math.isnan(value) and math.isnan(cell.value)):
        return cell
    room = 4 * n_ranks * report.eps * max(1.0, abs(cell.value), *(abs(b) for b in report.before if not math.isnan(b)))
    is_complete = len(cell.origins) == n_ranks and report.op == "mean"  # a mean divides when the sum is complete
    if abs(value - cell.value) <= room or (is_complete and abs(value - cell.value / n_ranks) <= room):
        return Cell(value, cell.origins)
    raise ValueError(
        f"rank {report.rank} {did} {value:g} where its messages add up to {cell.value:g}: either it adds wrongly, "
        "or its messages do not carry the number of their chunk as tag"
    )


def _frozen(held: list[list[Cell]]) -> tuple[tuple[Cell, ...], ...]:
    return tuple(map(tuple, held))
