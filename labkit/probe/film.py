"""A film of a collective: every message of a real run, put in order, with what each rank held at every step.

    def shoot(group):
        return film.record(ring.all_reduce, x, group)[1]
    Film.of([reply.value for reply in cluster.run(shoot)])

Nothing is taken from theory. A recording holds the first number of every message as it was sent and received; the film
follows those numbers and refuses a recording that does not add up.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from labkit.comm.group import Group


class Event(NamedTuple):
    """One rank's end of a message. `value` is the first number of the payload, nan if it is empty."""

    kind: str
    peer: int
    chunk: int
    n_bytes: int
    value: float
    t: float


class Recording(NamedTuple):
    """What one rank saw: the first number of each of its chunks before, and its events in order."""

    rank: int
    before: tuple[float, ...]
    events: tuple[Event, ...]


class Cell(NamedTuple):
    """A chunk as one rank holds it: its first number, and which ranks' contributions are summed in it."""

    value: float
    origins: tuple[int, ...]


class Message(NamedTuple):
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
    """`states[k][rank][chunk]` is what was held before step k; `steps[k]` are the messages of step k."""

    name: str
    n_ranks: int
    n_chunks: int
    steps: tuple[tuple[Message, ...], ...]
    states: tuple[tuple[tuple[Cell, ...], ...], ...]

    @property
    def n_bytes(self) -> int:
        """Bytes sent by all ranks."""
        return sum(message.n_bytes for step in self.steps for message in step)

    @classmethod
    def of(cls, recordings: Sequence[Recording], name: str = "all_reduce") -> Film:
        """Put the recordings of all ranks together. ValueError if they are not the two ends of the same messages."""
        by_rank = {each.rank: each for each in recordings}
        if sorted(by_rank) != list(range(len(recordings))):
            raise ValueError(f"a film needs the recording of every rank, got ranks {sorted(by_rank)}")
        n_ranks, n_chunks = len(recordings), len(recordings[0].before)
        steps = _steps(_pair(by_rank))
        held = [[Cell(value, (rank,)) for value in by_rank[rank].before] for rank in range(n_ranks)]
        states = [_frozen(held)]
        for step in steps:
            before = [list(row) for row in held]
            for message in step:
                sent, mine = before[message.source][message.chunk], held[message.to][message.chunk]
                if not _close(sent.value, message.value):
                    raise ValueError(
                        f"rank {message.source} sent {message.value:g} where it held {sent.value:g}: {message}"
                    )
                held[message.to][message.chunk] = _receive(mine, sent)
            states.append(_frozen(held))
        return cls(name, n_ranks, n_chunks, tuple(map(tuple, steps)), tuple(states))


def record(collective: Callable[..., Tensor], x: Tensor, group: Group, **options: Any) -> tuple[Tensor, Recording]:
    """Run `collective(x, group)` on this rank and keep its end of every message. Returns (result, recording).

    Messages of a ring carry the number of their chunk as tag; other collectives move x as one chunk."""
    n_chunks = group.size if collective.__module__.endswith("ring") else 1
    before = tuple(map(_first, x.reshape(-1).tensor_split(n_chunks)))
    events: list[Event] = []

    def tap(kind: str, peer: int, tag: int, payload: Tensor) -> None:
        n_bytes = payload.numel() * payload.element_size()
        events.append(Event(kind, peer, tag % n_chunks, n_bytes, _first(payload), time.monotonic()))

    result = collective(x, group.tapped(tap), **options)
    return result, Recording(group.rank, before, tuple(events))


def _first(x: Tensor) -> float:
    return float(x.reshape(-1)[0]) if x.numel() else math.nan


def _pair(by_rank: dict[int, Recording]) -> list[tuple[Message, int, int]]:
    """Messages with the place of their two ends in the ranks' own order of events."""
    sent: dict[tuple[int, int, int], deque[tuple[Event, int]]] = defaultdict(deque)
    for rank, each in by_rank.items():
        for place, event in enumerate(each.events):
            if event.kind == "send":
                sent[rank, event.peer, event.chunk].append((event, place))
    pairs = []
    for rank, each in by_rank.items():
        for place, event in enumerate(each.events):
            if event.kind == "recv":
                queue = sent[event.peer, rank, event.chunk]
                if not queue:
                    raise ValueError(
                        f"rank {rank} received chunk {event.chunk} from {event.peer}, which did not send it"
                    )
                start, started = queue.popleft()
                message = Message(event.peer, rank, event.chunk, event.n_bytes, start.value, start.t, event.t)
                pairs.append((message, started, place))
    if left := [key for key, queue in sent.items() if queue]:
        raise ValueError(f"messages were sent and never received: (source, to, chunk) {left}")
    return sorted(pairs, key=lambda pair: pair[0].t0)


def _steps(pairs: list[tuple[Message, int, int]]) -> list[list[Message]]:
    """A message belongs to the first step after everything that its sender had received before sending it."""
    step_of: dict[tuple[int, str, int], int] = {}
    steps: dict[int, list[Message]] = defaultdict(list)
    waiting = list(pairs)
    while waiting:
        rest = []
        for message, started, place in waiting:
            earlier = [(m, s, p) for m, s, p in pairs if m.to == message.source and p < started]
            earlier_here = [(m, s, p) for m, s, p in pairs if m.to == message.to and p < place]
            needed = [step_of.get((m.to, "recv", p)) for m, s, p in earlier + earlier_here]
            if None in needed:
                rest.append((message, started, place))
                continue
            step = 1 + max((each for each in needed if each is not None), default=-1)
            step_of[message.to, "recv", place] = step
            steps[step].append(message)
        if len(rest) == len(waiting):
            raise ValueError("the recordings contradict each other: some messages were received before they were sent")
        waiting = rest
    return [sorted(steps[k]) for k in sorted(steps)]


def _receive(mine: Cell, sent: Cell) -> Cell:
    if set(mine.origins) & set(sent.origins):  # what came holds my part already: it takes the place of mine
        return sent
    return Cell(mine.value + sent.value, tuple(sorted({*mine.origins, *sent.origins})))


def _frozen(held: list[list[Cell]]) -> tuple[tuple[Cell, ...], ...]:
    return tuple(map(tuple, held))


def _close(a: float, b: float) -> bool:
    return (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=1e-2, abs_tol=1e-2)
