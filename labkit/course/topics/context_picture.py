"""Attention over sequences that are cut over ranks: what three ways send, wait for and hold, and who wins.

    way       sent forward   backward   waits     held at work   at 128k   at 1M
    ring        88 MiB        264 MiB   0.3 ms      0.6 GiB        ...      ...      <- waits least
    gather      ...
    ulysses     ...

    waits |     / gather            who waits least     8k  32k  128k  1M
          |   / / ulysses           nvlink             [u ][r  ][r   ][r ]
          | / /___ ring             infiniband         [u ][u  ][r   ][r ]
             tokens of a sequence

All of it is the law in labkit.plan.laws.context, for one layer, forward and backward, under a causal mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from labkit.plan.laws.context import fastest, seconds, sent
from labkit.plan.machine.link import Link, link_of
from labkit.plan.model.cut_attention import FOR_ALL, CutAttention, at_work, held_bytes
from labkit.view import chart
from labkit.view.svg import PALETTE
from labkit.view.units import binary_text, plural, seconds_text

COLOURS = MappingProxyType(dict(zip(FOR_ALL, (PALETTE[0], PALETTE[1], PALETTE[2]), strict=True)))
LENGTHS = tuple(2**k for k in range(13, 21))
"""Tokens of a sequence, 8k to 1M."""
LINKS = ("nvlink", "pcie5", "infiniband", "ethernet-100g", "ethernet")
"""The links of the table of winners, the fastest first."""
COLUMNS = (84.0, 196.0, 318.0, 440.0, 562.0, 684.0)


def tokens_text(tokens: int) -> str:
    """8k, 128k, 1M: powers of two as people say them; another number as it is."""
    for unit, word in ((2**20, "M"), (2**10, "k")):
        if tokens % unit == 0:
            return f"{tokens // unit}{word}"
    return f"{tokens:,}"


def waiting(kind: str, layer: CutAttention, flops_per_s: float, link: Link) -> float | None:
    """Seconds a layer waits by this way; None where heads cannot be dealt out."""
    return seconds(kind, layer, flops_per_s, link)["waiting"] if layer.possible(kind) else None


@chart.style()
def three_ways(layer: CutAttention, link: Link, flops_per_s: float, title: str = "") -> chart.Chart:
    """A table of the three, how long they wait on this link by length, and who waits least on others."""
    best = fastest(layer, flops_per_s, link)
    compute = seconds("ring", layer, flops_per_s, link)["compute"]
    heads = f"{layer.heads} heads, {layer.key_heads} for keys"
    head = title or f"{tokens_text(layer.seq)} tokens, {heads}, over {plural(layer.n, 'rank')}: {best} waits least"
    rows = [_row(kind, layer, link, flops_per_s) for kind in FOR_ALL]
    law = (
        f"one layer, forward and backward: computes {seconds_text(compute)} at {flops_per_s / 1e12:g} Tflop/s; link: "
        f"{link.name} of {link.bytes_per_s / 1e9:g} GB/s"
    )
    keeps = "kept until backward, whichever way: " + ", ".join(
        f"{binary_text(held_bytes(replace(layer, seq=seq)))} at {tokens_text(seq)}" for seq in _lengths(layer)
    )
    facts = "; ".join(f"{kind}: " + ", ".join(row[1:]) for kind, row in zip(FOR_ALL, rows, strict=True))
    figure = chart.Chart(452, head, f"{head}; {law}; {facts}; {keeps}")
    figure.words(4, 42, law, fontsize=12)
    names = ("way", "sent forward", "sent backward", "waits", "at work",
             *(f"at work, {tokens_text(seq)}" for seq in _lengths(layer)[1:]))  # fmt: skip
    for x, name in zip((24.0, *COLUMNS), names, strict=False):
        figure.words(x, 68, name, weight="bold", fontsize=12)
    figure.rule(74)
    for place, (kind, row) in enumerate(zip(FOR_ALL, rows, strict=True)):
        y = 92 + 20 * place
        figure.swatch(6, y - 11, COLOURS[kind])
        for x, words in zip((24.0, *COLUMNS), row, strict=False):
            figure.words(x, y, words, fontsize=12, weight="bold" if kind == best else "normal")
    figure.words(4, 156, keeps, fontsize=12)
    _over_lengths(figure, layer, link, flops_per_s)
    axes = figure.panel(540, 216, 796, 216 + 40 * len(LINKS), xlim=(0, len(LENGTHS)), ylim=(len(LINKS), 0))
    winners(axes, layer, LENGTHS, [link_of(name) for name in LINKS], flops_per_s, letters=True)
    figure.words(440, 190, "who waits least, on other links", weight="bold", fontsize=12)
    return figure


def _lengths(layer: CutAttention) -> tuple[int, ...]:
    """The chosen length, 128k and 1M, each once."""
    return tuple(dict.fromkeys((layer.seq, 2**17, 2**20)))


def _row(kind: str, layer: CutAttention, link: Link, flops_per_s: float) -> list[str]:
    if not layer.possible(kind):
        return [
            kind,
            f"not possible: {layer.n} ranks do not divide {layer.heads} heads and {layer.key_heads} key heads",
        ]
    forward, backward = sent(kind, layer)
    waits = seconds_text(waiting(kind, layer, flops_per_s, link) or 0.0)
    works = [binary_text(at_work(kind, replace(layer, seq=seq))) for seq in _lengths(layer)]
    return [kind, binary_text(forward), binary_text(backward), waits, *works]


def _over_lengths(figure: chart.Chart, layer: CutAttention, link: Link, flops_per_s: float) -> None:
    """Seconds that a layer waits over the length of a sequence, and those it computes."""
    axes = figure.panel(64, 216, 400, 416, xscale="log", yscale="log", xlim=(LENGTHS[0] / 1.2, LENGTHS[-1] * 1.2))
    at = [replace(layer, seq=seq) for seq in LENGTHS]
    lowest = []
    for place, kind in enumerate(FOR_ALL):
        waits = [waiting(kind, one, flops_per_s, link) for one in at]
        seen = [wait for wait in waits if wait is not None]
        if seen:
            axes.plot(LENGTHS, seen, color=COLOURS[kind], linestyle=chart.DASHES[place], label=kind)
            lowest += seen
    computes = [seconds("ring", one, flops_per_s, link)["compute"] for one in at]
    axes.plot(LENGTHS, computes, color="black", linestyle=(0, (1, 2)), label="computes")
    for kind in FOR_ALL:
        wait = waiting(kind, layer, flops_per_s, link)
        if wait is not None:
            words = f"{kind}, {tokens_text(layer.seq)} tokens: waits {seconds_text(wait)}"
            chart.dot(axes, layer.seq, wait, words, color=COLOURS[kind])
    low, high = min(*lowest, *computes) / 2, max(*lowest, *computes) * 2
    axes.set_ylim(low, high)
    powers = [10.0**k for k in range(-9, 7) if low <= 10.0**k <= high]
    chart.marks(axes, LENGTHS[::2], powers[:: 1 + len(powers) // 6], lambda seq: tokens_text(int(seq)), seconds_text)
    axes.set_xlabel("tokens of a sequence")
    figure.words(4, 190, f"a layer waits, on {link.name}", weight="bold", fontsize=12)
    figure.keys(64, 204, axes)


def winners(
    axes: chart.Axes,
    layer: CutAttention,
    lengths: Sequence[int],
    links: Sequence[Link],
    flops_per_s: float,
    letters: bool = False,
) -> None:
    """A box for each length and link, with who waits least there. Where `letters` stand for their names, the length of
    `layer` is the chosen one, and has thick edges."""
    for row, link in enumerate(links):
        for column, seq in enumerate(lengths):
            one = replace(layer, seq=seq)
            best = fastest(one, flops_per_s, link)
            waits = {kind: waiting(kind, one, flops_per_s, link) for kind in FOR_ALL}
            details = ", ".join(f"{kind} {seconds_text(wait)}" for kind, wait in waits.items() if wait is not None)
            hover = f"{tokens_text(seq)} tokens on {link.name}: {best} waits least ({details})"
            word, edge = (best[0] if letters else best), (2.5 if letters and seq == layer.seq else 0.5)
            chart.box(axes, column, row, 1, 1, COLOURS[best], word, hover, edge=edge)
    middles = [column + 0.5 for column in range(len(lengths))]
    chart.marks(
        axes, middles, [row + 0.5 for row in range(len(links))],
        lambda at: tokens_text(lengths[int(at)]), lambda at: links[int(at)].name,
    )  # fmt: skip
    axes.grid(False)
    axes.set_xlabel("tokens of a sequence")
    axes.tick_params(length=0)


@chart.style()
def crossovers(
    layers: Sequence[CutAttention],
    flops_per_s: float,
    lengths: Sequence[int] = LENGTHS,
    links: Sequence[str] = LINKS,
    title: str = "who waits least",
) -> chart.Chart:
    """The table of winners for several attentions, one below the other; a colour and a word for each way."""
    tall = 30.0 * len(links)
    figure = chart.Chart(56 + (tall + 66) * len(layers), title, _words(layers, flops_per_s, lengths, links, title))
    for place, layer in enumerate(layers):
        top = 62 + (tall + 66) * place
        heads = f"{layer.heads} query heads, {layer.key_heads} key heads, {plural(layer.n, 'rank')}"
        figure.words(4, top - 10, heads, weight="bold", fontsize=12)
        axes = figure.panel(110, top, 796, top + tall, xlim=(0, len(lengths)), ylim=(len(links), 0))
        winners(axes, layer, lengths, [link_of(name) for name in links], flops_per_s)
    return figure


def _words(
    layers: Sequence[CutAttention], flops_per_s: float, lengths: Sequence[int], links: Sequence[str], title: str
) -> str:
    rows = []
    for layer in layers:
        for name in links:
            best = [fastest(replace(layer, seq=seq), flops_per_s, link_of(name)) for seq in lengths]
            pairs = ", ".join(f"{tokens_text(seq)} {kind}" for seq, kind in zip(lengths, best, strict=True))
            rows.append(f"{layer.key_heads} key heads, {layer.n} ranks, {name}: {pairs}")
    return f"{title}: " + "; ".join(rows)
