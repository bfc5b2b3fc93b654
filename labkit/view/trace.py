"""One training step of one rank, from its ledger: its transfers in order, axis by axis, and the bytes in all.

    tp     [ 20 x 16 MiB ][ 20 x ]      [ 40 x 16 MiB ]      all_reduces inside the layers
    pp                   |                            |      activations on, gradients back
    dp                                   [  80 x 54 MiB  ]   gradients, while the last backward goes on
           0                                         569     transfers, one after the other

Transfers are in the order in which the rank began them, not on a scale of time, since a rehearsal has no clock.
Messages to the rank are in the ledgers of their senders. (Narayanan et al., arXiv:2104.04473, section 3.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from labkit.comm.ledger import Transfer
from labkit.plan.partition.layout import SHORT
from labkit.view.cube import COLOURS, DASHES
from labkit.view.panels import Column, Panel, below, beside, over, page, phrase, sample, table, tile
from labkit.view.svg import PALETTE, WIDTH, Picture, box, line, width_of
from labkit.view.units import bytes_text, plural

LANES = ("tp", "pp", "dp", "dp_shard", "dp_replicate", "world")
NAME, LANE, TALL = 62.0, WIDTH - 74.0, 26.0
"""The widths of an axis' name and of its lane, and the height of a box."""
GAP = 6
"""A run goes on over up to so many transfers of other axes, but not over a message."""


@dataclass(frozen=True)
class TransferRun:
    """Transfers of one verb along one axis with few others between them: numbers `first` to `last` of the ledger.
    `charged` of the bytes were charged by a law, the others counted."""

    axis: str
    verb: str
    first: int
    last: int
    calls: int
    n_bytes: int
    charged: int
    to: int | None


def runs(ledger: Iterable[Transfer]) -> list[TransferRun]:
    """The ledger in runs, in the order in which they began. Messages inside a collective count as part of it."""
    out: list[TransferRun] = []
    open_: dict[str, int] = {}
    whole: dict[int, int] = {}
    tops: list[Transfer] = []
    for transfer in ledger:
        if transfer.within and tops:  # a message of labkit's own ring: its bytes belong to the collective before it
            whole[len(tops) - 1] = whole.get(len(tops) - 1, 0) + transfer.n_bytes
        else:
            tops.append(transfer)
    for number, transfer in enumerate(tops):
        n_bytes, charged = transfer.n_bytes + whole.get(number, 0), transfer.n_bytes * transfer.charged
        if transfer.verb == "send":  # a message from stage to stage separates two micro-batches
            open_ = {axis: at for axis, at in open_.items() if axis == transfer.axis}
        at = open_.get(transfer.axis)
        last = out[at] if at is not None else None
        if (
            last
            and at is not None
            and last.verb == transfer.verb
            and last.to == transfer.to
            and number - last.last <= GAP
        ):
            out[at] = replace(
                last, last=number, calls=last.calls + 1, n_bytes=last.n_bytes + n_bytes, charged=last.charged + charged
            )
        else:
            open_[transfer.axis] = len(out)
            out.append(TransferRun(transfer.axis, transfer.verb, number, number, 1, n_bytes, charged, transfer.to))
    return out


def trace(ledger: Iterable[Transfer], title: str = "what one rank sends in one step") -> Picture:
    """Lanes by axis with a box for each run of transfers, then the sums of each axis. The title tells if nothing was
    sent."""
    parts = runs(ledger)
    count = max((run.last for run in parts), default=-1) + 1
    lanes = [axis for axis in LANES if any(run.axis == axis for run in parts)]
    lanes += sorted({run.axis for run in parts} - set(LANES))
    head = f"{title}: {plural(count, 'transfer')}" if parts else f"{title}: nothing was sent"
    rows = [
        beside(phrase(SHORT.get(axis, axis), bold=True, width=NAME), _lane([r for r in parts if r.axis == axis], count))
        for axis in lanes
    ]
    if parts:
        first, last = phrase("first", 12), phrase("last, in the order of the program", 12, anchor="end", width=LANE)
        rows.append(over(first, last).padded(left=NAME))
    sums, facts = _sums(parts, lanes)
    return page(head, below(*rows, gap=14), sums, gap=20, label="; ".join([head, *facts]))


def _lane(runs_: Sequence[TransferRun], count: int) -> Panel:
    """The runs of one axis in the order of all `count` transfers."""
    unit = LANE / max(1, count)

    def draw(x: float, y: float) -> str:
        boxes = (_run(r, x + r.first * unit, y, max(3.0, (r.last + 1 - r.first) * unit - 1)) for r in runs_)
        return line(x, y + TALL / 2, x + LANE, y + TALL / 2, "1 5") + "".join(boxes)

    return Panel(LANE, TALL, draw)


def _run(run: TransferRun, x: float, y: float, wide: float) -> str:
    """The box of a run, with as many words as fit."""
    size = bytes_text(run.n_bytes / run.calls)
    words = next((w for w in (f"{run.calls} x {size}", f"{run.calls} x", "") if width_of(w, 12) + 6 <= wide), "")
    whom = "" if run.to is None else f" to rank {run.to}"
    title = f"{run.axis}: {run.calls:,} {run.verb}{whom}, {size} sent by each, transfer {run.first} to {run.last}"
    return box(x, y, wide, TALL, COLOURS.get(run.axis, PALETTE[7]), words, title)


def _sums(parts: Sequence[TransferRun], lanes: Sequence[str]) -> tuple[Panel, list[str]]:
    """A row for each verb of each axis, with a bar of its bytes; and the same in words."""
    rows, facts = [], []
    sums = {
        (axis, verb): [run for run in parts if (run.axis, run.verb) == (axis, verb)]
        for axis in lanes
        for verb in dict.fromkeys(run.verb for run in parts if run.axis == axis)
    }
    most = max((sum(run.n_bytes for run in of) for of in sums.values()), default=0) or 1
    total = sum(run.n_bytes for run in parts) or 1
    for (axis, verb), of in sums.items():
        calls, n_bytes = sum(run.calls for run in of), sum(run.n_bytes for run in of)
        amount = f"{bytes_text(n_bytes)}, {100 * n_bytes / total:.3g}%"
        if n_bytes:
            charged = sum(run.charged for run in of)
            amount += (
                f", {bytes_text(charged)} charged" if 0 < charged < n_bytes else ", charged" if charged else ", counted"
            )
        colour = COLOURS.get(axis, PALETTE[7])
        bar = beside(tile(max(2.0, 330 * n_bytes / most), 19, colour, "", amount), phrase(amount), gap=8)
        name = phrase(SHORT.get(axis, axis), bold=True)
        rows.append((sample(32, 4, DASHES.get(axis, ""), colour), name, verb, plural(calls, "call"), bar))
        facts.append(f"{axis} {verb}: {plural(calls, 'call')}, {n_bytes:,} bytes sent")
    columns = (Column(), Column(width=38), Column(), Column(anchor="end"), Column())
    return table(columns, rows, gap=10, lead=8), facts
