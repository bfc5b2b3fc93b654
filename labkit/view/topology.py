"""Who sent how much to whom: the ledgers of all ranks as one table."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.launch.reply import Reply
from labkit.view.svg import Picture, box, bytes_text, text


def topology(replies: Sequence[Reply]) -> Picture:
    """A matrix of bytes sent, from the row's rank to the column's. Darker is more; the number is in the box.

    Only messages have a receiver: a collective that the backend carries out counts in the last column alone."""
    ranks = [reply.rank for reply in replies]
    sent = {(a, b): 0 for a in ranks for b in ranks}
    for reply in replies:
        for transfer in reply.ledger:
            if transfer.to in ranks:
                sent[reply.rank, transfer.to] += transfer.n_bytes
    top = max(sent.values(), default=0) or 1
    side = min(84.0, 600 / max(1, len(ranks)))
    body = [text(4, 18, "bytes sent, from row to column", size=14, bold=True)]
    for column, b in enumerate(ranks):
        body.append(text(90 + column * side + side / 2, 42, f"to {b}", "middle"))
    body.append(text(98 + len(ranks) * side, 42, "all sent", size=13, bold=True))
    for row, reply in enumerate(replies):
        y = 50 + row * 34
        body.append(text(4, y + 20, f"rank {reply.rank}", bold=True))
        for column, b in enumerate(ranks):
            n_bytes = sent[reply.rank, b]
            shade = f"rgba(86,180,233,{0.15 + 0.75 * n_bytes / top:.2f})" if n_bytes else "none"
            title = f"rank {reply.rank} sent {n_bytes:,} bytes to rank {b}"
            x = 90 + column * side
            frame = f'x="{x:g}" y="{y}" width="{side - 4:g}" height="28" rx="3"'
            shape = f'<rect {frame} fill="{shade}" stroke="currentColor"/>'
            words = text(x + side / 2 - 2, y + 19, bytes_text(n_bytes) if n_bytes else "·", "middle", 12)
            body.append(f"<g><title>{title}</title>{shape}{words}</g>")
        total = reply.ledger.sent_bytes()
        body.append(box(98 + len(ranks) * side, y, 84, 28, "none", bytes_text(total), f"{total:,} bytes"))
    return Picture("".join(body), 60 + 34 * len(ranks), f"bytes sent between {len(ranks)} ranks")
