"""A recording as a trace file that https://ui.perfetto.dev and chrome://tracing open.

    rank 0   spans             |-------- step --------|        a process for each rank, a thread for each lane;
                                 |forward| |backward|          what overlaps goes into lanes of its own
             compute           |####|      |#########|
             waiting                |recv 1|
             communication     |send to 1|                     arrows lead from each send to the receive
             receiving              |recv 1|                   that took it

The file is JSON: `{"traceEvents": [...]}` with complete events ("X": ts and dur in microseconds), flows ("s", "f") and
names ("M"). Source: Google, Trace Event Format, sections "Complete Events", "Flow Events" and "Metadata Events".
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from labkit.probe.rows import MatchedMessage, Parts, RankTimeline

LANES = ("spans", "compute", "waiting", "communication", "receiving", "device")
"""The kinds of lanes of a rank, from the top; the k-th lane of the i-th kind is thread 1000 i + k."""


Place = tuple[int, str, int]
"""Rank, "send" or "recv", and which of them."""


class Slice(NamedTuple):
    """A bar: t0 and t1 in whole nanoseconds, since a trace that rounds twice shows bars that overlap."""

    t0: int
    t1: int
    name: str
    args: dict[str, Any]
    key: tuple[str, int] | None = None


def trace_events(
    rows: Sequence[RankTimeline], parts: Mapping[int, Parts], met: Sequence[MatchedMessage]
) -> list[dict[str, Any]]:
    """The events of a trace, names first, then bars and arrows in the order of time. The first rank's begin is 0."""
    origin = min(row.begin for row in rows)
    names: list[dict[str, Any]] = []
    bars: list[dict[str, Any]] = []
    places: dict[Place, tuple[int, Slice]] = {}
    for row in rows:
        leaves = {message.number: message.t0 for message in met if message.source == row.rank}
        names.append(_meta(row.rank, 0, "process_name", {"name": f"rank {row.rank}"}))
        names.append(_meta(row.rank, 0, "process_sort_index", {"sort_index": row.rank}))
        for i, kind in enumerate(LANES):
            for k, lane in enumerate(_lanes(_slices(kind, row, parts[row.rank], leaves, origin), kind)):
                thread = 1000 * i + k
                names.append(_meta(row.rank, thread, "thread_name", {"name": kind if k == 0 else f"{kind} {k + 1}"}))
                names.append(_meta(row.rank, thread, "thread_sort_index", {"sort_index": thread}))
                for bar in lane:
                    bars.append(_event("X", row.rank, thread, bar.t0, bar.name, kind, args=bar.args))
                    bars[-1]["dur"] = (bar.t1 - bar.t0) / 1e3
                    if bar.key is not None:
                        places[row.rank, *bar.key] = (thread, bar)
    bars += _arrows(met, places)
    return [*names, *sorted(bars, key=lambda event: (event["ts"], -event.get("dur", 0.0)))]


def write(
    path: str | Path, rows: Sequence[RankTimeline], parts: Mapping[int, Parts], met: Sequence[MatchedMessage]
) -> Path:
    """Write the trace to `path` and return it. OSError if that cannot be written."""
    path = Path(path)
    offsets = {f"rank {row.rank}": f"{row.offset_s:+.6f} s, give or take {row.error_s:.6f} s" for row in rows}
    content = {
        "traceEvents": trace_events(rows, parts, met),
        "displayTimeUnit": "ms",
        "otherData": {"corrected clock offsets": offsets},
    }
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def write_spans(path: str | Path, spans: Mapping[int, Sequence[tuple[str, int, int, str]]]) -> Path:
    """Write a trace of bare spans, rank -> (name, begin and end in nanoseconds, kind of lane); returns the path.

    OSError if that cannot be written."""
    origin = min(begin for some in spans.values() for _, begin, _, _ in some)
    events: list[dict[str, Any]] = []
    for rank, some in spans.items():
        events.append(_meta(rank, 0, "process_name", {"name": f"rank {rank}"}))
        for i, kind in enumerate(LANES):
            bars = [Slice(a - origin, b - origin, name, {}) for name, a, b, lane in some if lane == kind]
            for k, lane in enumerate(_lanes(bars, kind)):
                thread = 1000 * i + k
                events.append(_meta(rank, thread, "thread_name", {"name": kind if k == 0 else f"{kind} {k + 1}"}))
                for bar in lane:
                    events.append(_event("X", rank, thread, bar.t0, bar.name, kind, dur=(bar.t1 - bar.t0) / 1e3))
    path = Path(path)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
    return path


def _slices(kind: str, row: RankTimeline, parts: Parts, leaves: Mapping[int, float], origin: float) -> Iterator[Slice]:
    def bar(t0: float, t1: float, name: str, key: tuple[str, int] | None = None, **args: Any) -> Slice:
        a, b = max(0, round((t0 - origin) * 1e9)), max(0, round((t1 - origin) * 1e9))
        return Slice(a, max(a, b), name, args, key)

    if kind in ("spans", "device"):
        for span in row.spans:
            if (span.phase == "gpu") == (kind == "device"):
                yield bar(span.t0, span.t1, f"{span.phase} {span.name}".strip(), phase=span.phase)
    elif kind == "compute":
        yield from (bar(t0, t1, "compute") for t0, t1 in parts.compute)
    elif kind == "waiting":
        for entry in row.entries:
            if entry.blocks:
                peer = "" if entry.peer is None else f" {entry.peer}"
                yield bar(entry.t0, entry.t1, f"{entry.verb}{peer}", axis=entry.axis, tag=entry.tag)
    elif kind == "communication":
        for number, transfer in enumerate(row.transfers):
            name = transfer.verb if transfer.to is None else f"{transfer.verb} to {transfer.to}"
            details: dict[str, Any] = {
                "axis": transfer.axis,
                "bytes": transfer.n_bytes,
                "tag": transfer.tag,
                "within": transfer.within,
            }
            yield bar(leaves.get(number, transfer.t0), transfer.t1, name, ("send", number), **details)
    else:
        last = {entry.call: entry.t1 for entry in row.entries}
        for entry in row.entries:
            if entry.verb == "recv" and entry.call in last:
                name, until = f"recv from {entry.peer}", last.pop(entry.call)
                yield bar(entry.t0, until, name, ("recv", entry.call), axis=entry.axis, tag=entry.tag)


def _lanes(slices: Iterable[Slice], kind: str) -> list[list[Slice]]:
    """As few lanes as possible: in a lane bars follow each other; spans may also lie wholly in one another."""
    lanes: list[list[Slice]] = []
    around: list[list[int]] = []  # for each lane, the ends of the bars that are still open
    for bar in sorted(slices, key=lambda bar: (bar.t0, -bar.t1)):
        for ends in around:
            while ends and ends[-1] <= bar.t0:
                ends.pop()
        fits = (k for k, ends in enumerate(around) if not ends or (kind == "spans" and bar.t1 <= ends[-1]))
        k = next(fits, len(lanes))
        if k == len(lanes):
            lanes.append([])
            around.append([])
        lanes[k].append(bar)
        around[k].append(bar.t1)
    return lanes


def _arrows(met: Sequence[MatchedMessage], places: Mapping[Place, tuple[int, Slice]]) -> Iterator[dict[str, Any]]:
    """An arrow for each message, from the begin of its send to the end of its receive, each within a bar."""
    for number, message in enumerate(met):
        sender, start = places[message.source, "send", message.number]
        receiver, end = places[message.to, "recv", message.call]
        yield {**_event("s", message.source, sender, start.t0, "message", "message"), "id": number}
        arrives = max(start.t0, end.t0, end.t1 - 1)
        yield {**_event("f", message.to, receiver, arrives, "message", "message"), "id": number, "bp": "e"}


def _event(phase: str, rank: int, thread: int, at: int, name: str, category: str, **fields: Any) -> dict[str, Any]:
    return {"ph": phase, "pid": rank, "tid": thread, "ts": at / 1e3, "name": name, "cat": category, **fields}


def _meta(rank: int, thread: int, name: str, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": thread, "ts": 0, "name": name, "args": args}
