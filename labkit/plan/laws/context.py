"""What one layer's attention sends, holds and waits for when rows are cut over n ranks, by each way: a table of laws.

    b = 2 B K T/n W bytes of a rank's keys and values; b' the same numbers as gradients, in fp32 at least

               sent forward       sent backward        while it runs, of keys, values and their gradients
    ring       (n-1) b            (n-1)(b + b')        2 b;  in backward 2 b and 4 b' (with 2 or 3 ranks b and 4 b')
    gather     (n-1) b            (n-1)(b + b')        (n+1) b;  in backward (n+1) b and (2n+1) b'
    ulysses    (n-1)/n of 2 B (H + K) T/n W numbers each way
    halo       in a sliding window of w: at most w-1 tokens of b each way (labkit.plan.laws.halo)

What autograd keeps between forward and backward is the same for all: q, k, v and y of T/n tokens, a number for each
query and head. Ring and gather send the same bytes. A gather stands in front of the computation; the ring's hops hide
behind it, all but the last one of backward, where a rank has so many tokens that a block's scores take longer than its
way. With F flop/s and a link of S bytes/s, under a causal mask (2 B H W (T/n)^2 flops a hop):

    T/n  >=  w K F / (H S)      w bytes a number                  Liu et al., arXiv:2310.01889, section 3, where K = H

    64 query heads of 128 over 8 ranks, bf16, 400 Tflop/s: milliseconds a layer waits, ring / gather / ulysses
    tokens     8 key heads, 400 GB/s    8, 50 GB/s             64, 400 GB/s          64, 50 GB/s
    32k        0.08 / 1.20 / 0.69       0.68 / 9.50 / 5.42     0.67 / 9.42 / 1.20    58.4 / 75.3 / 9.54
    128k       0.34 / 4.72 / 2.67       2.69 / 37.7 / 21.3     2.69 / 37.6 / 4.73    49.9 / 301 / 37.7
    1M         2.69 / 37.6 / 21.2       21.5 / 301 / 169       21.5 / 301 / 37.6     172 / 2405 / 301

    GiB a layer: kept, and at work by ring / gather / ulysses
    128k       8 key heads   0.57, 0.62 / 2.69 / 1.12        64 key heads   1.00, 5.00 / 21.5 / 2.00
    1M         8 key heads   4.53, 5.00 / 21.5 / 9.00        64 key heads   8.03, 40.0 / 172.0 / 16.0

In latent attention a head of queries and keys has r numbers more than one of values, and 2 W becomes 2 W + r. Keys and
values are counted as they are when attention runs, made of their latents on each rank; a latent itself would be less to
send. labkit's GPT has no latent attention: this part is a law that no run has reached.

Ulysses sends least where n is large or H/K small, hides nothing, and needs n to divide H and K. Its law: Jacobs et al.,
arXiv:2309.14509, section 3. Held by labkit.parallel.context and labkit.parallel.halo.

LAWS has a law for each way. Everything else here asks that table and knows no way by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import MappingProxyType

from labkit.plan.breakdown import Breakdown, Item
from labkit.plan.laws.choices import Choices
from labkit.plan.laws.context_law import BACKWARD, ContextLaw
from labkit.plan.laws.halo import HaloLaw
from labkit.plan.laws.traffic import StepTraffic
from labkit.plan.laws.whole_keys import GatherLaw, RingLaw, UlyssesLaw
from labkit.plan.machine.link import Link
from labkit.plan.model.cut_attention import CONTEXTS, CutAttention
from labkit.plan.model.sizes import Sizes
from labkit.plan.partition.layout import Layout
from labkit.plan.words import multiples

LAWS = MappingProxyType({law.name: law for law in (RingLaw(), GatherLaw(), UlyssesLaw(), HaloLaw())})
"""The law of each of CONTEXTS."""


def law_of(kind: str) -> ContextLaw:
    """The law of a way. ValueError for a word that is none."""
    if kind not in LAWS:
        raise ValueError(f"attention over ranks is one of {', '.join(LAWS)}, got {kind!r}")
    return LAWS[kind]


def sent(kind: str, layer: CutAttention, rank: int | None = None) -> tuple[int, int]:
    """Bytes that `rank` sends, forward and backward; of the busiest rank each way if left out.

    ValueError for heads that cannot be dealt out, and for a halo without a window."""
    law = law_of(kind)
    for reason in law.lacks(layer):
        raise ValueError(reason)
    return law.sent(layer, rank)


def refuses(shape: Sizes, choices: Choices, layout: Layout) -> Iterator[str]:
    """Rows that cp does not divide, and what the way of attention refuses, such as heads that it cannot deal out."""
    if shape.seq % layout.cp:
        yield (
            f"rows of seq={shape.seq} tokens do not cut into cp={layout.cp} equal parts: "
            + multiples("seq", shape.seq, layout.cp)
        )
    if layout.cp > 1:
        yield from law_of(choices.context).refuses(shape, layout)


def sent_in_step(traffic: StepTraffic) -> Iterator[Item]:
    """Along cp: the attention of all blocks of a rank; the forward's part again where a block runs again."""
    layout, choices, n_layer = traffic.layout, traffic.choices, traffic.n_layer
    if layout.cp == 1:
        return
    # how wide a head is does not matter: heads x width of this rank of tp is d_model / tp
    heads = layout.cp * traffic.shared
    layer = CutAttention(traffic.row, layout.cp, heads, layout.cp, 1, traffic.rows, traffic.word, window=traffic.window)
    place = layout.coords(traffic.rank)["cp"]
    forward, backward = (part * traffic.d_model / layout.tp / heads for part in sent(choices.context, layer, place))
    runs = 2 if choices.recompute == "full" else 1
    formula = f"{n_layer} blocks x ({runs} x {forward:,.0f} + {backward:,.0f}) by {choices.context}, n={layout.cp}"
    yield Item("cp", n_layer * (runs * forward + backward), "B", formula, "labkit.plan.laws.context")


def exchange_s(kind: str, layer: CutAttention, link: Link) -> tuple[float, float]:
    """Seconds of the exchange forward and backward, as if nothing were computed."""
    sent(kind, layer)  # refuses what cannot be
    return law_of(kind).exchange_s(layer, link)


def unhidden_s(kind: str, layer: CutAttention, flops_per_s: float, link: Link) -> tuple[float, float]:
    """Seconds of it that nothing hides, forward and backward: of the ring, what a hop takes longer than its scores."""
    sent(kind, layer)
    return (0.0, 0.0) if layer.n == 1 else law_of(kind).unhidden_s(layer, flops_per_s, link)


def seconds(kind: str, layer: CutAttention, flops_per_s: float, link: Link) -> Breakdown:
    """Forward and backward of the layer's attention on one rank: "compute", and "waiting" for what nothing hides."""
    waiting = sum(unhidden_s(kind, layer, flops_per_s, link))
    flops = f"3.5 x 2 B H W T T/n flops / {flops_per_s:g}"
    if layer.window:
        flops = f"3.5 x 4 B H W x pairs in a window of {layer.window} / n / {flops_per_s:g}"
    return Breakdown([
        Item("compute", (1 + BACKWARD) * layer.flops / flops_per_s, "s", flops, "arXiv:2307.08691, 4.1"),
        Item("waiting", waiting, "s", law_of(kind).formula(layer), "labkit.plan.laws.context"),
    ])  # fmt: skip


def hides_from(layer: CutAttention, flops_per_s: float, link: Link) -> float:
    """Tokens of a row on each rank from which on the ring's forward hops hide behind the scores (latency left out)."""
    return layer.word * layer.key_heads * flops_per_s / (layer.heads * link.bytes_per_s)


def fastest(layer: CutAttention, flops_per_s: float, link: Link) -> str:
    """Of those that are possible, the one that waits least; of equals the first in CONTEXTS."""
    return min(
        (kind for kind in CONTEXTS if layer.possible(kind)),
        key=lambda kind: seconds(kind, layer, flops_per_s, link)["waiting"],
    )


def crossover(
    layer: CutAttention, seqs: Iterable[int], links: Iterable[Link], flops_per_s: float
) -> list[tuple[int, tuple[str, ...]]]:
    """The table of `fastest`: for each length of a row, the best way on each link."""
    links = list(links)
    layers = [replace(layer, seq=seq) for seq in seqs]
    return [(cut.seq, tuple(fastest(cut, flops_per_s, link) for link in links)) for cut in layers]
