"""Buckets on a time axis: when gradients were ready, when their buckets travel, what is exposed; and other sizes.

gradients  | head | block 3 | block 2 | block 1 | block 0 |
wire              |==== 256 KiB ====||==== 256 KiB ====|:::::|
                                                          |<exposed>

end  |  .                    o        backward and wire over the size of a bucket: the law as a line,
     |    o . . <> . o                measured runs as dots, the chosen size as a diamond
       64 KiB         all in one
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from labkit.plan.collectives import Line
from labkit.plan.replay import Flight, Ready, Replay, replay, sizes_of
from labkit.view.axes import Axes
from labkit.view.svg import PALETTE, WIDTH, Picture, box, headline, line, round_marks, text
from labkit.view.units import binary_text, bytes_text, seconds_text

LEFT, RIGHT, LANE, STEP = 92.0, WIDTH - 16.0, 26.0, 36.0
COMPUTE, WIRE, EXPOSED, LAW, SEEN = PALETTE[0], PALETTE[2], PALETTE[1], "#2B8CD6", PALETTE[6]
MOST_BOXES = 200
"""Gradients of a picture that have a box; of more, every second, third ... is drawn."""


def buckets(
    ready: Sequence[Ready],
    bucket_bytes: float,
    wire: Line,
    backward_s: float = 0.0,
    measured: Mapping[int, float] | None = None,
    title: str = "",
) -> Picture:
    """The replay of a recorded backward with buckets of this size, above the end of the step for every size.

    `ready`, `wire` and `backward_s` as of plan.replay.replay; `measured` maps bucket bytes to seconds from the begin of
    backward to the end of the last bucket, drawn as dots. ValueError as of `replay`."""
    now = replay(ready, bucket_bytes, wire, backward_s)
    n = len(now.flights)
    title = title or f"buckets of {bytes_text(bucket_bytes)}: {n} bucket{'s' * (n > 1)}"
    told = f"{seconds_text(now.exposed_s) if now.exposed_s else '0 s'} exposed, {now.hidden:.0%} of the wire hidden"
    body = [headline(f"{title}; {told}"), *_legend(measured)]
    body += _lanes(ready, now)
    below, best = _sizes(ready, bucket_bytes, wire, backward_s, now, dict(measured or {}))
    label = f"{title}: backward {seconds_text(now.backward_s)}, wire {seconds_text(now.wire_s)}, {told}; {best}"
    for size, seconds in sorted((measured or {}).items()):
        label += f"; measured with buckets of {bytes_text(size)}: {seconds_text(seconds)}"
    return Picture("".join([*body, *below]), 476, label)


def _legend(measured: object) -> list[str]:
    out, x = [], LEFT
    for word, colour in (("computes", COMPUTE), ("on the wire, hidden", WIRE), ("on the wire, exposed", EXPOSED)):
        out += [box(x, 32, 12, 12, colour), text(x + 17, 42, word, size=12)]
        x += 40 + 6.9 * len(word)
    return out


def _lanes(ready: Sequence[Ready], now: Replay) -> list[str]:
    """Backward with its gradients, and the buckets below."""
    scale, top, out = (RIGHT - LEFT) / now.end_s, 60.0, []
    out += [text(LEFT - 8, top + 17, "backward", "end"), text(LEFT - 8, top + STEP + 17, "wire", "end")]
    order, last = sorted(ready, key=lambda each: each.at_s), 0.0
    every = -(-len(order) // MOST_BOXES)
    for each in [*order[every - 1 :: every], *(order[-1:] if len(order) % every else [])]:
        x, wide = LEFT + last * scale, (each.at_s - last) * scale
        word = each.name if wide > 7 * len(each.name) + 4 else ""
        said = f"gradient of {each.name}, {bytes_text(each.n_bytes)}, ready after {seconds_text(each.at_s)}"
        out.append(box(x, top, max(0.5, wide), LANE, COMPUTE, word, said, 0.7))
        last = each.at_s
    if now.backward_s > last:
        out.append(box(LEFT + last * scale, top, (now.backward_s - last) * scale, LANE, COMPUTE, width=0.7))
    for number, flight in enumerate(now.flights):
        out += _flight(number, flight, now.backward_s, scale, top + STEP)
    edge, y = LEFT + now.backward_s * scale, top + STEP + LANE + 6
    out += [line(edge, top - 6, edge, y, "4 3", 1.5), line(LEFT, y, RIGHT, y)]
    for mark in round_marks(now.end_s):
        x = LEFT + mark * scale
        anchor = "end" if x + 20 > RIGHT else "middle"
        out += [line(x, y, x, y + 5), text(x, y + 19, seconds_text(mark) if mark else "0", anchor, 12)]
    return out


def _flight(number: int, flight: Flight, backward_s: float, scale: float, y: float) -> list[str]:
    """One bucket: hidden up to the end of backward, exposed from there on."""
    middle = min(max(backward_s, flight.start_s), flight.end_s)
    took, said = flight.end_s - flight.start_s, bytes_text(flight.n_bytes)
    hover = f"bucket {number}, {said}, {len(flight.names)} gradients: full after {seconds_text(flight.full_s)}, "
    hover += f"on the wire for {seconds_text(took)}"
    out = []
    for t0, t1, colour in ((flight.start_s, middle, WIRE), (middle, flight.end_s, EXPOSED)):
        wide = (t1 - t0) * scale
        word = said if wide > 7.5 * len(said) and (t1 - t0) * 2 >= took else ""
        out += [box(LEFT + t0 * scale, y, max(wide, 0.5), LANE, colour, word, hover, 0.7)] if t1 > t0 else []
    return out


def _sizes(
    ready: Sequence[Ready],
    chosen: float,
    wire: Line,
    backward_s: float,
    now: Replay,
    measured: Mapping[int, float],
) -> tuple[list[str], str]:
    """Backward and what is exposed, over the size of a bucket; and the best size in words."""
    sizes = sizes_of(ready)
    ends = [(float(size), replay(ready, size, wire, backward_s).end_s) for size in sizes]
    high = 1.06 * max([now.end_s, *(end for _, end in ends), *measured.values()])
    low, most = min([sizes[0], chosen, *measured]), max([sizes[-1], chosen, *measured])
    axes = Axes(LEFT, 196, RIGHT - 10, 424, (low * 0.9, max(most, low * 2) * 1.1), (0.0, high), log_x=True)
    marks = [2.0**power for power in range(48) if low * 0.9 <= 2**power <= most * 1.1]
    out = axes.frame(
        "bytes of a bucket", binary_text, lambda t: seconds_text(t) if t else "0", marks[:: 1 + len(marks) // 12]
    )
    out.append(text(LEFT, 184, "begin of backward to end of the last bucket", size=12, bold=True))
    floor = axes.at(low, now.backward_s)[1]
    out += [line(LEFT, floor, RIGHT - 10, floor, "8 4", 1.5), text(RIGHT - 12, floor - 5, "backward alone", "end", 12)]
    out.append(axes.path(ends, LAW))
    out.append(axes.diamond(chosen, now.end_s, PALETTE[4]))
    for size, seconds in measured.items():
        said = f"measured with buckets of {bytes_text(size)}: {seconds_text(seconds)}"
        out.append(axes.dot(size, seconds, SEEN, said))
    x = RIGHT - 330
    out += [line(x, 180, x + 24, 180, "", 2.5, LAW), text(x + 30, 184, "replayed", size=12)]
    out += [f'<path d="M{x + 106:.1f} 172l8 8l-8 8l-8-8z" fill="{PALETTE[4]}" stroke="currentColor"/>']
    out.append(text(x + 120, 184, "chosen", size=12))
    if measured:
        out += [f'<circle cx="{x + 186:.1f}" cy="180" r="5" fill="{SEEN}"/>', text(x + 196, 184, "measured", size=12)]
    best = min(reversed(ends), key=lambda each: each[1])[0]
    words = f"earliest end with buckets of {bytes_text(best)}"
    return [*out, text(RIGHT - 10, 472, words, "end", 12)], words
