"""What attention in a sliding window sends, holds and waits for when rows are cut over n ranks: a halo, not a ring.

A query at position i looks at the w keys i-w+1 ... i and at no others. Where rank r has the r-th part of a row, in
order, it lacks only the w-1 keys and values that stand before its first token, whatever the length T of the row is:

    T = 12, n = 3, w = 3        rank 0          rank 1          rank 2
    tokens                      0 1 2 3         4 5 6 7         8 9 10 11
    halo                        none            2 3             6 7              of the rank before
    halo with w = 7             none            0 1 2 3         2 3 | 4 5 6 7    of two ranks

    b = 2 B K T/n W bytes of a rank's keys and values, c = b / (T/n) those of one token, b' as b but in fp32 at least

               sent forward                   sent backward
    halo       min(w-1, (n-1-r) T/n) c        min(w-1, r T/n) c           to all other ranks at the same time
    ring       (n-1) b                        (n-1)(b + b')               one hop after another

The busiest rank sends (w-1) c each way. In backward keys and values need not come again, since they are kept, and only
their gradients go back. From w - 1 = T - T/n on, rank 0 sends as much forward as in a ring (`pays_below`): a halo never
sends more, but tokens in order are unevenly much work under a window that long, and a ring takes them in zigzag.

The halo travels while a rank attends to its own keys, and the gradients of the halo while it does so backward. For
w <= T/n both hide where (F flop/s, S bytes/s, w' bytes a number, latency left out)

    T/n  >=  w' K F / (2 H S)  +  w/2                     a ring under a full mask: T/n >= w' K F / (H S)

    Mistral 7B (32 query heads, 8 key heads of 128, w = 4096) over 8 ranks, bf16: sent forward by the busiest rank in a
    layer, in MiB, and milliseconds of it as if nothing were computed, on a link of 50 GB/s and 5 us
    tokens     halo, ring         halo, ring
    32k        16.0, 112          0.34, 2.38
    128k       16.0, 448          0.34, 9.43
    1M         16.0, 3584         0.34, 75.2

Flops are those of the pairs in the window; labkit's own attention computes scores in tiles of 1024 tokens and leaves
out only tiles that lie wholly outside. Held by labkit.parallel.halo. In a Recipe it is context="halo", for models whose
blocks all have a window. In a model with windows in some blocks only, tokens in order would be uneven work in the
others, so that it is refused.

Sources: windows in Beltagy et al., arXiv:2004.05150, section 3.1; Mistral's sizes and window in Jiang et al.,
arXiv:2310.06825, section 2. Cutting a domain and exchanging its borders is the halo exchange of stencil codes. The laws
are counted here, and measured against the ledger and against simulated links.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from labkit.plan.breakdown import Breakdown, Item
from labkit.plan.checks import is_whole
from labkit.plan.laws.context_law import BACKWARD
from labkit.plan.machine.hardware import Hardware
from labkit.plan.machine.link import Link
from labkit.plan.model import cut_attention
from labkit.plan.model.cut_attention import CutAttention, pairs_in_window
from labkit.plan.model.sizes import Sizes
from labkit.plan.partition.layout import Layout

Runs = tuple[tuple[int, range], ...]
"""(another rank, the positions in the row that it gives or takes), nearest rank first."""


def check_window(window: object) -> int:
    """The window. ValueError for what is no whole number of at least 1."""
    if not is_whole(window):
        raise ValueError(
            f"a window is a whole number of keys, at least 1 (each query sees its own), got {window!r}: "
            "for a full causal mask take the length of the row"
        )
    return window


def halo_of(lengths: Sequence[int], rank: int, window: int) -> Runs:
    """(owner, positions) of the tokens before this rank's own that its queries see; `lengths`: tokens of each rank."""
    begins = [0, *accumulate(lengths)]
    if not lengths[rank]:
        return ()  # no queries
    oldest = begins[rank] - (window - 1)
    runs = ((owner, range(max(oldest, begins[owner]), begins[owner + 1])) for owner in reversed(range(rank)))
    return tuple((owner, run) for owner, run in runs if run)


def readers_of(lengths: Sequence[int], rank: int, window: int) -> Runs:
    """(reader, positions) of this rank's tokens that the queries of later ranks see: the other side of `halo_of`."""
    readers = range(rank + 1, len(lengths))
    pairs = ((reader, halo_of(lengths, reader, window)) for reader in readers)
    return tuple((reader, run) for reader, runs in pairs for owner, run in runs if owner == rank)


def sent(layer: CutAttention, window: int, rank: int | None = None) -> tuple[int, int]:
    """Bytes that `rank` sends, forward and backward; of the busiest rank each way if left out (the first, the last).

    ValueError for a window below 1 and a rank that is none of the n."""
    n, tokens = layer.n, layer.seq // layer.n
    if rank is not None and rank not in range(n):
        raise ValueError(f"rank is one of 0 to {n - 1}, got {rank!r}")
    after, before = (n - 1, n - 1) if rank is None else (n - 1 - rank, rank)
    halo, a_token = check_window(window) - 1, layer.block // tokens
    return min(halo, after * tokens) * a_token, min(halo, before * tokens) * a_token


def pays_below(layer: CutAttention) -> int:
    """The window from which on rank 0 sends as much forward as it does in a ring: below, each rank sends less."""
    return layer.seq - layer.seq // layer.n + 1


def held_bytes(layer: CutAttention, window: int, rank: int | None = None) -> int:
    """Bytes that autograd keeps until backward: what a ring keeps, and the halo. Without `rank`: of the last rank."""
    return cut_attention.held_bytes(layer) + sent(layer, window, rank)[1]


def at_work(layer: CutAttention, window: int, rank: int) -> int:
    """Bytes of keys, values and their gradients on top of `held_bytes`, at the highest moment of backward in fp32.

    Own keys and values and their gradients, and the gradients that leave this rank and that come to it."""
    return layer.block + layer.gradients + sum(sent(layer, window, rank))


def exchange_s(layer: CutAttention, window: int, link: Link) -> float:
    """Seconds of the exchange one way, as if nothing were computed. All messages of a rank go at the same time."""
    n_bytes, _ = sent(layer, window)
    return link.alpha_s + n_bytes / link.bytes_per_s if n_bytes else 0.0


def window_flops(layer: CutAttention, window: int) -> tuple[float, float]:
    """Forward flops of the last rank, which has no fewer than another: with own keys, and with those of its halo."""
    tokens = layer.seq // layer.n
    own = pairs_in_window(tokens, check_window(window))
    together = pairs_in_window(layer.seq, window) - pairs_in_window(layer.seq - tokens, window)
    a_pair = 2.0 * layer.rows * layer.heads * layer.pair
    return own * a_pair, (together - own) * a_pair


def unhidden_s(layer: CutAttention, window: int, flops_per_s: float, link: Link) -> tuple[float, float]:
    """Seconds of the exchange that own keys do not hide, forward and backward."""
    way, own = exchange_s(layer, window, link), window_flops(layer, window)[0] / flops_per_s
    return max(0.0, way - own), max(0.0, way - BACKWARD * own)


def seconds(layer: CutAttention, window: int, flops_per_s: float, link: Link) -> Breakdown:
    """Forward and backward of the layer's attention on one rank: "compute", and "waiting" for what nothing hides."""
    formula = "what (w-1) c / S + alpha takes longer than the scores with own keys, each way"
    pairs = f"3.5 x 4 B H W x pairs in a window of {window} / {flops_per_s:g}"
    computed = (1 + BACKWARD) * sum(window_flops(layer, window)) / flops_per_s
    return Breakdown([
        Item("compute", computed, "s", pairs, "arXiv:2307.08691, 4.1"),
        Item("waiting", sum(unhidden_s(layer, window, flops_per_s, link)), "s", formula, "labkit.plan.laws.halo"),
    ])  # fmt: skip


def hides_from(layer: CutAttention, window: int, flops_per_s: float, link: Link) -> float:
    """Tokens of a row on each rank from which on the halo hides behind own scores (window <= T/n, no latency)."""
    bandwidth_share = layer.word * layer.key_heads * flops_per_s / (2 * layer.heads * link.bytes_per_s)
    return bandwidth_share + check_window(window) / 2


class HaloLaw:
    """The law of context="halo", of a layer that knows its own window."""

    name = "halo"

    def lacks(self, layer: CutAttention) -> Iterator[str]:
        """A window."""
        if not layer.window:
            yield "a halo is for attention in a sliding window, and this one has window=0: take ring, or give a window"

    def refuses(self, shape: Sizes, layout: Layout) -> Iterator[str]:
        """Blocks without a window."""
        if shape.n_windowed < shape.n_layer:
            yield (
                f"a halo is for attention in a sliding window, and {shape.n_layer - shape.n_windowed} of "
                f"n_layer={shape.n_layer} blocks have none (window={shape.window}): take context='ring', or a model "
                "whose blocks all have a window, GPTConfig(window=...)"
            )

    def sent(self, layer: CutAttention, rank: int | None = None) -> tuple[int, int]:
        """At most w-1 keys and values, and as many gradients."""
        return sent(layer, layer.window, rank)

    def exchange_s(self, layer: CutAttention, link: Link) -> tuple[float, float]:
        """All messages of a rank go at the same time."""
        way = exchange_s(layer, layer.window, link)
        return way, way

    def unhidden_s(self, layer: CutAttention, flops_per_s: float, link: Link) -> tuple[float, float]:
        """Seconds by which the messages outlast the scores with this rank's own keys, forward and backward."""
        return unhidden_s(layer, layer.window, flops_per_s, link)

    def formula(self, layer: CutAttention) -> str:
        """The formula of `unhidden_s` as one line of text."""
        return f"what (w-1) c / S + alpha takes longer than the scores with own keys, each way, w={layer.window}"

    def link(self, cp: int, tp: int, hardware: Hardware) -> Link | None:
        """Between neighbours, as in a ring: the slowest of these links."""
        return hardware.intra if cp * tp <= hardware.node_size else hardware.inter
