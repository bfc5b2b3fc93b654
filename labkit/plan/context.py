"""What one layer's attention sends, holds and waits for when rows are cut over n ranks, by each of three ways.

    b = 2 B K T/n W bytes of a rank's keys and values; b' the same numbers as gradients, in fp32 at least

               sent forward       sent backward        while it runs, of keys, values and their gradients
    ring       (n-1) b            (n-1)(b + b')        2 b;  in backward 2 b and 4 b' (with 2 or 3 ranks b and 4 b')
    gather     (n-1) b            (n-1)(b + b')        (n+1) b;  in backward (n+1) b and (2n+1) b'
    ulysses    (n-1)/n of 2 B (H + K) T/n W numbers each way

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
arXiv:2309.14509, section 3. Backward is counted as 2.5 forwards: five products in place of two, one of which makes the
scores again (Dao, arXiv:2307.08691, section 4.1). Held by labkit.parallel.context.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from labkit.plan.breakdown import Breakdown, Item
from labkit.plan.link import Link
from labkit.plan.recipe import CONTEXTS

BACKWARD = 2.5
"""Flops of attention's backward, in those of its forward."""


@dataclass(frozen=True)
class CutAttention:
    """One layer's attention: `rows` of `seq` tokens over `n` ranks, with the heads that one rank of tp has.

    `word` bytes a number; `more`: numbers that a head of queries and keys has besides the `width` of one of values
    (latent attention). ValueError for sizes below 1, and for a row that n does not divide."""

    seq: int
    n: int
    heads: int
    key_heads: int
    width: int
    rows: int = 1
    word: int = 2
    more: int = 0

    def __post_init__(self) -> None:
        if min(self.seq, self.n, self.heads, self.key_heads, self.width, self.rows, self.word) < 1:
            raise ValueError(f"sizes of an attention are at least 1, got {self}")
        if self.seq % self.n:
            raise ValueError(f"rows of {self.seq} tokens do not cut over {self.n} ranks: make seq a multiple")

    @property
    def tokens(self) -> int:
        """Tokens that a rank has, of all rows."""
        return self.rows * self.seq // self.n

    @property
    def pair(self) -> int:
        """Numbers of a key and a value of one head, and of a query and what comes of it: 2 W, with `more` 2 W + r."""
        return 2 * self.width + self.more

    @property
    def block(self) -> int:
        """b: bytes of a rank's keys and values."""
        return self.key_heads * self.tokens * self.pair * self.word

    @property
    def gradients(self) -> int:
        """b': bytes of their gradients, as they travel."""
        return self.block // self.word * max(4, self.word)

    @property
    def flops(self) -> float:
        """Of a rank's forward under a causal mask: two products over half of the pairs."""
        return 1.0 * self.heads * self.pair * self.tokens * self.seq

    def possible(self, kind: str) -> bool:
        """False for "ulysses" with heads that n does not divide. ValueError for another word than the three."""
        if kind not in CONTEXTS:
            raise ValueError(f"attention over ranks is one of {', '.join(CONTEXTS)}, got {kind!r}")
        return kind != "ulysses" or not (self.heads % self.n or self.key_heads % self.n)


def sent(kind: str, layer: CutAttention) -> tuple[int, int]:
    """Bytes that each rank sends, forward and backward. ValueError for heads that cannot be dealt out."""
    n = layer.n
    if not layer.possible(kind):
        raise ValueError(
            f"ulysses deals {layer.heads} query heads and {layer.key_heads} key heads out over {n} ranks, and they do "
            "not come out even: take ring or gather, or another n"
        )
    if kind == "ulysses":
        each_way = (layer.heads + layer.key_heads) * layer.tokens * layer.pair * layer.word * (n - 1) // n
        return each_way, each_way
    return (n - 1) * layer.block, (n - 1) * (layer.block + layer.gradients)


def held_bytes(layer: CutAttention) -> int:
    """Bytes that autograd keeps of the layer until backward, the same for all three."""
    numbers = (layer.heads + layer.key_heads) * layer.tokens * layer.pair
    return numbers * layer.word + layer.heads * layer.tokens * max(4, layer.word)


def at_work(kind: str, layer: CutAttention) -> int:
    """Bytes of keys, values and their gradients on top of `held_bytes`, at the highest moment of backward.

    With ulysses: what came and what goes, of one all_to_all."""
    n, b, grads = layer.n, layer.block, layer.gradients
    if kind == "ulysses":
        return 2 * (layer.heads + layer.key_heads) * layer.tokens * layer.pair * layer.word
    if kind == "gather":
        return (n + 1) * b + (2 * n + 1) * grads
    return (2 if n > 3 else 1) * b + 4 * grads


def exchange_s(kind: str, layer: CutAttention, link: Link) -> tuple[float, float]:
    """Seconds of the exchange forward and backward, as if nothing were computed."""
    forward, backward = sent(kind, layer)
    peers = layer.n - 1
    ahead = 2 if kind == "ulysses" else 1  # all_to_alls there and back; backward of the others: blocks, and gradients
    return _way(link, forward, ahead * peers), _way(link, backward, 2 * peers)


def unhidden_s(kind: str, layer: CutAttention, flops_per_s: float, link: Link) -> tuple[float, float]:
    """Seconds of it that nothing hides, forward and backward: of the ring, what a hop takes longer than its scores."""
    n = layer.n
    if n == 1:
        return 0.0, 0.0
    if kind != "ring":
        return exchange_s(kind, layer, link)
    block, grads, hop = _way(link, layer.block), _way(link, layer.gradients), layer.flops / flops_per_s / n
    backward = max(0.0, block - BACKWARD * hop) + (n - 2) * max(0.0, block + grads - BACKWARD * hop) + grads
    return (n - 1) * max(0.0, block - hop), backward


def _way(link: Link, n_bytes: float, messages: int = 1) -> float:
    return messages * link.alpha_s + n_bytes / link.bytes_per_s


def seconds(kind: str, layer: CutAttention, flops_per_s: float, link: Link) -> Breakdown:
    """Forward and backward of the layer's attention on one rank: "compute", and "waiting" for what nothing hides."""
    n, scores = layer.n, layer.flops / flops_per_s
    formula = {
        "ring": "what a hop takes longer than its scores, and the last gradients",
        "gather": f"(n-1)(2 b + b') / S + 3 (n-1) alpha, n={n}",
        "ulysses": f"2 (n-1)/n 2 B (H + K) T/n W w / S + 4 (n-1) alpha, n={n}",
    }[kind]
    flops = f"3.5 x 2 B H W T T/n flops / {flops_per_s:g}"
    return Breakdown([
        Item("compute", (1 + BACKWARD) * scores, "s", flops, "arXiv:2307.08691, 4.1"),
        Item("waiting", sum(unhidden_s(kind, layer, flops_per_s, link)), "s", formula, "labkit.plan.context"),
    ])  # fmt: skip


def hides_from(layer: CutAttention, flops_per_s: float, link: Link) -> float:
    """Tokens of a row on each rank from which on the ring's forward hops hide behind the scores (latency left out)."""
    return layer.word * layer.key_heads * flops_per_s / (layer.heads * link.bytes_per_s)


def fastest(layer: CutAttention, flops_per_s: float, link: Link) -> str:
    """Of the three that are possible, the one that waits least; of equals the first in CONTEXTS."""
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
