"""A timeline of the transfers of all ranks, from their ledgers."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.comm.ledger import Transfer
from labkit.launch.reply import Reply
from labkit.view import chart
from labkit.view.svg import PALETTE, WIDTH, width_of
from labkit.view.units import bytes_text, seconds_text

LEFT, TOP, LANE, TALL, THIN = 70, 56, 16, 1100, 3
"""The left end and the top of the bars, the height of a lane, the height of all rows above which lanes get thinner, and
the height of the thinnest lane."""
COLOURS = (*PALETTE[:5], *PALETTE[6:])
"""A colour for each verb. The dark blue is not among them, since dark words on it cannot be read."""
MOST = 400
"""The most bars of a rank. A line below the picture says how many are left out."""


@chart.style()
def timeline(replies: Sequence[Reply]) -> chart.Chart:
    """A row for each rank, a bar for each transfer from its start to its end; overlapping bars have lanes of their own.

    A bar is as long as the transfer took, waiting for the other side included; the pointer over it shows bytes, peer
    and time. The ranks' times can be compared only if they share a machine. ValueError if nothing was sent."""
    shown = [(reply.rank, sorted(reply.ledger, key=lambda t: (t.t0, -t.t1))) for reply in replies]
    begins = [t.t0 for _, transfers in shown for t in transfers]
    if not begins:
        raise ValueError(f"a timeline needs a transfer, and the ledgers of {len(replies)} ranks hold none")
    first = min(begins)
    span = max(t.t1 for _, transfers in shown for t in transfers) - first or 1e-9
    verbs = list(dict.fromkeys(t.verb for _, transfers in shown for t in transfers))
    colour = {verb: COLOURS[k % len(COLOURS)] for k, verb in enumerate(verbs)}
    edge = 1 if max(len(transfers) for _, transfers in shown) < 80 else 0  # edges of narrow bars hide their colours
    room = max(LANE, TALL / len(shown) - 8)  # for one rank; many ranks, or many transfers at a time, make thin lanes
    counts = [min(_lanes(transfers[:MOST]), max(1, int(room // THIN))) for _, transfers in shown]
    highs = [min(LANE, room / count) for count in counts]
    bottom = TOP + sum(max(LANE, count * high) + 8 for count, high in zip(counts, highs, strict=True))
    left_out = sum(max(0, len(transfers) - MOST) for _, transfers in shown)
    total = sum(reply.ledger.sent_bytes() for reply in replies)
    label = f"{total:,} bytes sent by {len(replies)} ranks in {seconds_text(span)}"
    figure = chart.Chart(bottom + (48 if left_out else 26), "", label)
    figure.words(4, 20, f"transfers of {len(replies)} ranks in {seconds_text(span)}", fontsize=14, weight="bold")
    figure.swatches(4, 31, colour.items())
    if sum(34 + width_of(verb, 12) for verb in verbs) < 400:
        figure.words(WIDTH - 4, 42, "a bar: from handed over to done, waiting included", "right", fontsize=12)
    axes = figure.panel(LEFT, TOP, WIDTH - 12, bottom, xlim=(0, span), ylim=(bottom, TOP))
    y = float(TOP)
    for (rank, transfers), count, high in zip(shown, counts, highs, strict=True):
        figure.words(4, y + 12, f"rank {rank}", weight="bold")
        free: list[float] = []  # when each lane of this rank is free again
        for t in transfers[:MOST]:
            lane = next((k for k, until in enumerate(free) if until <= t.t0), len(free))
            lane = min(lane, count - 1)  # more bars at a time than lanes lie over each other
            free[lane : lane + 1] = [t.t1]
            whom = "everybody" if t.to is None else f"rank {t.to}"
            inside = f", within {t.within}" if t.within else ""
            took = f"{seconds_text(t.t1 - t.t0)} from {seconds_text(t.t0 - first)}"
            hover = f"rank {rank}: {t.verb} to {whom}, {t.n_bytes:,} bytes{inside}, {took}"
            wide = max(t.t1 - t.t0, span * 1.5 / (WIDTH - LEFT - 12))
            words = bytes_text(t.n_bytes) if t.n_bytes and high == LANE else ""
            place = t.t0 - first, y + lane * high, wide, 0.875 * high
            chart.box(axes, *place, colour[t.verb], words, hover, edge=edge if high > 6 else 0)
        y += max(LANE, count * high) + 8
    axes.set_yticks([])
    chart.lanes(axes)
    if left_out:
        words = f"the first {MOST} transfers of a rank are drawn; {left_out:,} are not"
        figure.words(LEFT, bottom + 40, words, fontsize=12)
    return figure


def _lanes(transfers: Sequence[Transfer]) -> int:
    """The largest number of transfers that are under way at a time; at least 1."""
    ends: list[float] = []
    for t in transfers:
        lane = next((k for k, until in enumerate(ends) if until <= t.t0), len(ends))
        ends[lane : lane + 1] = [t.t1]
    return max(1, len(ends))
