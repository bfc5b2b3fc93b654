"""When was what on the wire? The ledgers of all ranks along one clock."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.comm.ledger import Transfer
from labkit.launch.reply import Reply
from labkit.view.svg import PALETTE, WIDTH, Picture, box, line, round_marks, text, width_of
from labkit.view.units import bytes_text, seconds_text

LEFT, TOP, LANE, TALL, THIN = 70, 56, 16, 1100, 3
"""Where bars begin, how high a lane is, how high all rows together before lanes get thinner, and the thinnest lane."""
COLOURS = (*PALETTE[:5], *PALETTE[6:])
"""One for each verb; without the dark blue, on which dark words are lost."""
MOST = 400
"""Bars of a rank; below them the picture says how many are left out."""


def timeline(replies: Sequence[Reply]) -> Picture:
    """A row for each rank, a bar for each transfer from its start to its end; those that overlap go under each other.

    A bar is as long as the transfer took, waiting for the other side included; resting the pointer on it tells bytes,
    peer and time. The ranks' clocks are one clock only where they share a machine. ValueError if nothing was sent."""
    shown = [(reply.rank, sorted(reply.ledger, key=lambda t: (t.t0, -t.t1))) for reply in replies]
    begins = [t.t0 for _, transfers in shown for t in transfers]
    if not begins:
        raise ValueError(f"a timeline needs a transfer, and the ledgers of {len(replies)} ranks hold none")
    first = min(begins)
    span = max(t.t1 for _, transfers in shown for t in transfers) - first or 1e-9
    verbs = list(dict.fromkeys(t.verb for _, transfers in shown for t in transfers))
    colour = {verb: COLOURS[k % len(COLOURS)] for k, verb in enumerate(verbs)}
    scale = (WIDTH - LEFT - 12) / span
    edge = 1 if max(len(transfers) for _, transfers in shown) < 80 else 0  # edges of narrow bars hide their colours
    body, y = (
        [text(4, 20, f"transfers of {len(replies)} ranks in {seconds_text(span)}", size=14, bold=True)],
        float(TOP),
    )
    right = 4.0
    for verb in verbs:
        body += [box(right, 31, 12, 12, colour[verb]), text(right + 17, 42, verb)]
        right += 32 + 7.2 * len(verb)
    if right < 400:
        body.append(text(WIDTH - 4, 42, "a bar: from handed over to done, waiting included", "end", 12))
    room = max(LANE, TALL / len(shown) - 8)  # of one rank: many ranks, or many transfers at a time, have thin lanes
    for rank, transfers in shown:
        lanes = min(_lanes(transfers[:MOST]), max(1, int(room // THIN)))
        high = min(LANE, room / lanes)
        free: list[float] = []  # when each lane of this rank is free again
        for t in transfers[:MOST]:
            lane = next((k for k, until in enumerate(free) if until <= t.t0), len(free))
            lane = min(lane, lanes - 1)  # beyond, bars lie over each other
            free[lane : lane + 1] = [t.t1]
            whom = "everybody" if t.to is None else f"rank {t.to}"
            inside = f", within {t.within}" if t.within else ""
            took = f"{seconds_text(t.t1 - t.t0)} from {seconds_text(t.t0 - first)}"
            title = f"rank {rank}: {t.verb} to {whom}, {t.n_bytes:,} bytes{inside}, {took}"
            wide = max(1.5, (t.t1 - t.t0) * scale)
            said = bytes_text(t.n_bytes)
            word = said if t.n_bytes and high == LANE and wide > width_of(said) + 6 else ""
            x = LEFT + (t.t0 - first) * scale
            body.append(
                box(x, y + lane * high, wide, 0.875 * high, colour[t.verb], word, title, edge if high > 6 else 0)
            )
        body.append(text(4, y + 12, f"rank {rank}", bold=True))
        y += max(LANE, len(free) * high) + 8
    body.append(line(LEFT, y, WIDTH - 12, y))
    for mark in round_marks(span):
        x, said = LEFT + mark * scale, seconds_text(mark) if mark else "0"
        anchor = "end" if x + width_of(said, 12) / 2 > WIDTH else "middle"
        body += [line(x, y, x, y + 5), text(x, y + 19, said, anchor, 12)]
    if left_out := sum(max(0, len(transfers) - MOST) for _, transfers in shown):
        body.append(
            text(LEFT, y + 40, f"the first {MOST} transfers of a rank are drawn; {left_out:,} are not", size=12)
        )
    total = sum(reply.ledger.sent_bytes() for reply in replies)
    return Picture(
        "".join(body),
        y + (48 if left_out else 26),
        f"{total:,} bytes sent by {len(replies)} ranks in {seconds_text(span)}",
    )


def _lanes(transfers: Sequence[Transfer]) -> int:
    """How many are under way at a time, at most; at least 1."""
    ends: list[float] = []
    for t in transfers:
        lane = next((k for k, until in enumerate(ends) if until <= t.t0), len(ends))
        ends[lane : lane + 1] = [t.t1]
    return max(1, len(ends))
