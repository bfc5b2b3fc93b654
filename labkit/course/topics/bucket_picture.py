"""Buckets of gradients over time, hidden and exposed on the wire; and the end of the step over the size of a bucket.

gradients  | head | block 3 | block 2 | block 1 | block 0 |
wire              |==== 256 KiB ====||==== 256 KiB ====|:::::|
                                                          |<exposed>

end  |  .                    o        backward and wire over the size of a bucket: the law as a line,
     |    o . . <> . o                measured runs as dots, the chosen size as a diamond
       64 KiB         all in one
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from labkit.plan.machine.collectives import Line
from labkit.plan.pocket.bucket_replay import Flight, Ready, Replay, replay, sizes_of
from labkit.view import chart
from labkit.view.svg import PALETTE, WIDTH, round_marks
from labkit.view.units import binary_text, bytes_text, seconds_text

LEFT, RIGHT, LANE, STEP = 92.0, WIDTH - 16.0, 26.0, 36.0
COMPUTE, WIRE, EXPOSED, LAW, SEEN = PALETTE[0], PALETTE[2], PALETTE[1], chart.LINES[0], PALETTE[6]
MOST_BOXES = 100
"""The most gradients that have a box; of more, every second or third and so on is drawn."""


@chart.style()
def buckets(
    ready: Sequence[Ready],
    bucket_bytes: float,
    wire: Line,
    backward_s: float = 0.0,
    measured: Mapping[int, float] | None = None,
    title: str = "",
) -> chart.Chart:
    """The replay of a recorded backward with buckets of this size, above the end of the step for every size.

    `ready`, `wire` and `backward_s` as of plan.pocket.bucket_replay.replay; `measured` maps bucket bytes to seconds
    from the begin of backward to the end of the last bucket, drawn as dots. ValueError as of `replay`."""
    now = replay(ready, bucket_bytes, wire, backward_s)
    n = len(now.flights)
    title = title or f"buckets of {bytes_text(bucket_bytes)}: {n} bucket{'s' * (n > 1)}"
    facts = f"{seconds_text(now.exposed_s) if now.exposed_s else '0 s'} exposed, {now.hidden:.0%} of the wire hidden"
    label = f"{title}: backward {seconds_text(now.backward_s)}, wire {seconds_text(now.wire_s)}, {facts}"
    for size, seconds in sorted((measured or {}).items()):
        label += f"; measured with buckets of {bytes_text(size)}: {seconds_text(seconds)}"
    figure = chart.Chart(476, f"{title}; {facts}")
    _lanes(figure, ready, now)
    figure.label = f"{label}; {_sizes(figure, ready, bucket_bytes, wire, backward_s, now, dict(measured or {}))}"
    return figure


def _lanes(figure: chart.Chart, ready: Sequence[Ready], now: Replay) -> None:
    """Draw backward with its gradients, and the buckets below."""
    keys = (("computes", COMPUTE), ("on the wire, hidden", WIRE), ("on the wire, exposed", EXPOSED))
    figure.swatches(LEFT, 32, keys)
    axes = figure.panel(LEFT, 54, RIGHT, 128, xlim=(0, now.end_s), ylim=(74, 0))
    order, last = sorted(ready, key=lambda gradient: gradient.at_s), 0.0
    step = -(-len(order) // MOST_BOXES)
    for gradient in [*order[step - 1 :: step], *(order[-1:] if len(order) % step else [])]:
        hover = (
            f"gradient of {gradient.name}, {bytes_text(gradient.n_bytes)}, ready after {seconds_text(gradient.at_s)}"
        )
        chart.box(axes, last, 6, gradient.at_s - last, LANE, COMPUTE, gradient.name, hover, edge=0.7)
        last = gradient.at_s
    if now.backward_s > last:
        chart.box(axes, last, 6, now.backward_s - last, LANE, COMPUTE, edge=0.7)
    for number, flight in enumerate(now.flights):
        _flight(axes, number, flight, now.backward_s)
    axes.plot([now.backward_s] * 2, [0, 74], color="black", linestyle=(0, (4, 3)), linewidth=1.5, clip_on=False)
    chart.marks(axes, round_marks(now.end_s), [19, 19 + STEP], lambda t: seconds_text(t) if t else "0",
                lambda y: "backward" if y < STEP else "wire")  # fmt: skip
    axes.tick_params("y", labelsize=13)
    axes.spines["left"].set_visible(False)
    axes.grid(False)


def _flight(axes: chart.Axes, number: int, flight: Flight, backward_s: float) -> None:
    """Draw one bucket: hidden up to the end of backward, exposed from there on."""
    middle = min(max(backward_s, flight.start_s), flight.end_s)
    took, words = flight.end_s - flight.start_s, bytes_text(flight.n_bytes)
    hover = f"bucket {number}, {words}, {len(flight.names)} gradients: full after {seconds_text(flight.full_s)}, "
    hover += f"on the wire for {seconds_text(took)}"
    for t0, t1, colour in ((flight.start_s, middle, WIRE), (middle, flight.end_s, EXPOSED)):
        if t1 > t0:
            chart.box(axes, t0, 6 + STEP, t1 - t0, LANE, colour, words * ((t1 - t0) * 2 >= took), hover, edge=0.7)


def _sizes(
    figure: chart.Chart,
    ready: Sequence[Ready],
    chosen: float,
    wire: Line,
    backward_s: float,
    now: Replay,
    measured: Mapping[int, float],
) -> str:
    """Draw the end of the last bucket over the size of a bucket; return the best size in words."""
    sizes = sizes_of(ready)
    ends = [replay(ready, size, wire, backward_s).end_s for size in sizes]
    low, most = min([sizes[0], chosen, *measured]), max([sizes[-1], chosen, *measured])
    axes = figure.panel(LEFT, 196, RIGHT - 10, 424, xscale="log", xlim=(low * 0.9, max(most, low * 2) * 1.1))
    axes.set(ylim=(0, 1.06 * max([now.end_s, *ends, *measured.values()])), xlabel="bytes of a bucket")
    figure.words(LEFT, 184, "begin of backward to end of the last bucket", weight="bold", fontsize=12)
    axes.axhline(now.backward_s, color="black", linestyle=chart.DASHES[1], linewidth=1.5)
    axes.annotate(
        "backward alone", (1, now.backward_s), (-2, 5), ("axes fraction", "data"), "offset points", ha="right"
    )
    axes.plot(sizes, ends, color=LAW, linestyle="-", label="replayed")
    chart.dot(axes, chosen, now.end_s, f"chosen: {bytes_text(chosen)}", "chosen", **chart.CHOSEN)
    for k, (size, seconds) in enumerate(measured.items()):
        hover = f"measured with buckets of {bytes_text(size)}: {seconds_text(seconds)}"
        chart.dot(axes, size, seconds, hover, "" if k else "measured", color=SEEN)
    marks = [2.0**power for power in range(48) if low * 0.9 <= 2**power <= most * 1.1]
    chart.marks(axes, marks[:: 1 + len(marks) // 12], None, binary_text, lambda t: seconds_text(t) if t else "0")
    figure.keys(RIGHT - 330, 180, axes)
    best, _ = min(reversed([*zip(sizes, ends, strict=True)]), key=lambda pair: pair[1])
    words = f"earliest end with buckets of {bytes_text(best)}"
    figure.words(RIGHT - 10, 472, words, "right", fontsize=12)
    return words
