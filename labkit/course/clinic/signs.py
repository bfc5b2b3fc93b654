"""Puts what the tests of a chart saw into words, in the same way for every program, healthy or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MappingProxyType

from labkit.course.clinic.chart import Chart
from labkit.probe.grads import GradientTable
from labkit.view.units import bytes_text


def signs(chart: Chart) -> dict[str, str]:
    """A sentence for every test that this chart has."""
    return {test: sentence for test, read in READERS.items() if (sentence := read(chart))}


def _autopsy(chart: Chart) -> str:
    if chart.error is None:
        return "nobody waits for ever: all ranks have finished" if chart.seen else ""
    if chart.ended == "out of memory":
        return chart.error.reason.partition("\n")[0]
    odd = [rank for rank in chart.error.autopsy.ranks if rank.state == "waiting"]
    lines = dict.fromkeys(f"{rank.place}: {rank.source}" for rank in odd)
    return " ".join([chart.error.autopsy.headline, *lines])


def _ledger(chart: Chart) -> str:
    if not chart.ledgers:
        if chart.error is None:
            return ""
        where = [f"rank {rank.rank} {rank.call}" for rank in chart.error.autopsy.ranks if rank.call]
        return f"the last calls: {'; '.join(where)}" if where else ""
    calls = [ledger.calls() for ledger in chart.ledgers]
    by_axis = {axis: chart.ledgers[0].sent_bytes(axis=axis) for axis in ("dp", "tp", "pp", "world")}
    sent = ", ".join(f"{axis} {bytes_text(n)}" for axis, n in by_axis.items() if n)
    alike = "as many on every rank" if len({*calls}) == 1 else f"by rank {calls}"
    far = f"; {chart.across:.0%} of all bytes leave the node" if chart.links else ""
    return f"{calls[0]} calls of rank 0, {alike}; it sends {sent or 'nothing'}{far}"


def _clock(chart: Chart) -> str:
    if not chart.seen:
        return ""
    recording = chart.recording
    parts = []
    for rank in chart.seen:
        shares = recording.shares(rank.rank)
        busy = min(1.0, rank.busy)
        waits = f"waits for the wire {shares.exposed:.0%}, a rank {shares.bubble:.0%}"
        parts.append(f"rank {rank.rank} outside communication {shares.compute:.0%} (processor {busy:.0%}), {waits}")
    return "; ".join(parts)


def _memory(chart: Chart) -> str:
    if not chart.stored:
        return ""
    worst = max(chart.stored, key=lambda rank: rank.peak.total)
    kind = max(worst.peak, key=lambda name: worst.peak[name])
    usual = sorted(worst.tops)[len(worst.tops) // 2]
    floor = f"floor {bytes_text(worst.floors[2])} early, {bytes_text(worst.floors[-2])} late"
    return f"{floor}; top {bytes_text(max(worst.tops))}, usually {bytes_text(usual)}; at the top mostly {kind}"


def _allocator(chart: Chart) -> str:
    if not chart.stored:
        return ""
    worst = max(chart.stored, key=lambda rank: rank.reserved)
    used = f"{bytes_text(worst.allocated)} of {bytes_text(worst.reserved)}"
    return f"when it last grew {used} were allocated; largest free piece {bytes_text(worst.largest_free)}"


def _gradients(chart: Chart) -> str:
    table = next((rank.gradients for rank in chart.seen if rank.gradients), None)
    experts = [f"rows by expert {', '.join(map(str, layer))}" for layer in chart.rows_by_expert]
    return "; ".join([*experts, *_rows(table)]) if table else ""


def _rows(table: GradientTable) -> Iterator[str]:
    for row in table:
        odd = [
            f"{share:.0%} {quality}"
            for share, quality in ((row.zeros, "zero"), (row.not_finite, "not finite"))
            if share
        ]
        yield (
            f"{row.name} "
            + (f"{row.norm:.2g} long" if row.n else "no gradient")
            + "".join(f", {remark}" for remark in odd)
        )


def _fingerprints(chart: Chart) -> str:
    if not any(rank.weights is not None for rank in chart.seen):
        return ""
    sentences = []
    for part in ("weights", "buffers"):
        if any(getattr(rank, part) is not None for rank in chart.seen):
            far = chart.apart(part)
            sentences.append(
                f"{part} of all ranks alike" if far < 1e-9 else f"{part} of two ranks up to {far:.2g} apart"
            )
    unequal = chart.unequal()
    if 0 < sum(unequal.values()) < len(unequal):
        sentences.append(f"only {', '.join(name for name, differs in unequal.items() if differs)} differ")
    return "; ".join(sentences)


def _reference(chart: Chart) -> str:
    if chart.alone is None or not chart.losses:
        return ""
    losses, _, table = chart.alone
    ours = next((rank.gradients for rank in chart.seen if rank.gradients), None)
    if chart.steps == 1 and ours and table and table.norm > 0:
        return f"first gradient {ours.norm / table.norm:.3g} times as long"
    first, last = (f"{chart.losses[at]:.3g} (in one process {losses[at]:.3g})" for at in (0, -1))
    return f"first loss {first}, last {last}{_apart(chart.losses, losses)}"


def _apart(ours: tuple[float, ...], theirs: tuple[float, ...]) -> str:
    """The step in which losses that were those of one process leave them; "" if they never were, or never do."""
    off = [abs(a - b) for a, b in zip(ours, theirs, strict=False)]
    step = next((number for number, far in enumerate(off) if far > 1e-6), 0)
    if step < 2:
        return ""
    return f"; alike before step {step}, which has {ours[step]:.3g} (in one process {theirs[step]:.3g})"


READERS: MappingProxyType[str, Callable[[Chart], str]] = MappingProxyType(
    {
        "autopsy": _autopsy,
        "ledger": _ledger,
        "clock": _clock,
        "memory": _memory,
        "allocator": _allocator,
        "gradients": _gradients,
        "fingerprints": _fingerprints,
        "reference": _reference,
    }
)
"""For each test, the function that reads it from a chart."""
