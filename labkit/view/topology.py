"""Who sent how much to whom: the ledgers of all ranks as one table."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.launch.reply import Reply
from labkit.view.svg import WIDTH, Picture, box, text
from labkit.view.units import bytes_text

LEFT, TOP, ROW, HIGH, TOTAL = 70, 52, 34, 28, 92
PALE, FULL = (236, 246, 253), (86, 180, 233)


def topology(replies: Sequence[Reply]) -> Picture:
    """A matrix of bytes sent, from the row's rank to the column's. Darker is more; the number is in the box.

    Only messages have a receiver: a collective that the backend carries out counts in the last column alone."""
    ranks = [reply.rank for reply in replies]
    sent = {(a, b): 0 for a in ranks for b in ranks}
    for reply in replies:
        for transfer in reply.ledger:
            if transfer.to in ranks:
                sent[reply.rank, transfer.to] += transfer.n_bytes
    most = max(sent.values(), default=0) or 1
    side = min(84.0, (WIDTH - LEFT - TOTAL - 12) / max(1, len(ranks)))
    last = LEFT + len(ranks) * side + 8
    body = [text(4, 20, "bytes sent, from row to column", size=14, bold=True)]
    body += [text(LEFT + k * side + side / 2 - 2, TOP - 8, f"to {b}", "middle") for k, b in enumerate(ranks)]
    body.append(text(last + TOTAL / 2, TOP - 8, "all sent", "middle", bold=True))
    told = []
    for row, reply in enumerate(replies):
        a, y = reply.rank, TOP + row * ROW
        body.append(text(4, y + 19, f"rank {a}", bold=True))
        for column, b in enumerate(ranks):
            n_bytes, x = sent[a, b], LEFT + column * side
            if not n_bytes:
                body.append(box(x, y, side - 4, HIGH, "none", "·", f"rank {a} sent nothing to rank {b}"))
                continue
            title = f"rank {a} sent {n_bytes:,} bytes to rank {b}"
            body.append(box(x, y, side - 4, HIGH, _shade(n_bytes / most), bytes_text(n_bytes), title))
            told.append(title)
        total = reply.ledger.sent_bytes()
        body.append(box(last, y, TOTAL, HIGH, "none", bytes_text(total), f"rank {a} sent {total:,} bytes in all"))
    label = f"bytes sent between {len(ranks)} ranks: {'; '.join(told) or 'no messages'}"
    return Picture("".join(body), TOP + 4 + ROW * len(ranks), label, max(300, last + TOTAL + 4))


def _shade(part: float) -> str:
    """From pale to full blue; both light enough for dark text, on a page of any colour."""
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in zip(PALE, FULL, strict=True))
