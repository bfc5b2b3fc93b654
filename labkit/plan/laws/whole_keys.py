"""The laws of ring, gather and ulysses, ways in which a rank meets the keys of a whole sequence: the first three rows
of the tables in labkit.plan.laws.context."""

from __future__ import annotations

from collections.abc import Iterator

from labkit.plan.laws.context_law import BACKWARD, travel_s
from labkit.plan.machine.hardware import Hardware
from labkit.plan.machine.link import Link
from labkit.plan.model.cut_attention import CutAttention
from labkit.plan.model.sizes import Sizes
from labkit.plan.partition.layout import Layout


class RingLaw:
    """Keys and values go round. Hops hide behind the scores of the block before."""

    name = "ring"

    def lacks(self, layer: CutAttention) -> Iterator[str]:
        """Nothing: it cuts no heads, and any order of tokens will do."""
        yield from ()

    def refuses(self, shape: Sizes, layout: Layout) -> Iterator[str]:
        """Nothing."""
        yield from ()

    def sent(self, layer: CutAttention, rank: int | None = None) -> tuple[int, int]:
        """(n-1) b, and (n-1)(b + b'), on each rank."""
        peers = layer.n - 1
        return peers * layer.block, peers * (layer.block + layer.gradients)

    def exchange_s(self, layer: CutAttention, link: Link) -> tuple[float, float]:
        """n-1 messages forward, twice as many backward: blocks, and gradients."""
        forward, backward = self.sent(layer)
        return travel_s(link, forward, layer.n - 1), travel_s(link, backward, 2 * (layer.n - 1))

    def unhidden_s(self, layer: CutAttention, flops_per_s: float, link: Link) -> tuple[float, float]:
        """Seconds by which hops outlast the scores of a block, and those of the last gradients, which nothing hides."""
        n, block, grads = layer.n, travel_s(link, layer.block), travel_s(link, layer.gradients)
        hop = layer.flops / flops_per_s / n
        backward = max(0.0, block - BACKWARD * hop) + (n - 2) * max(0.0, block + grads - BACKWARD * hop) + grads
        return (n - 1) * max(0.0, block - hop), backward

    def formula(self, layer: CutAttention) -> str:
        """The formula of `unhidden_s` as one line of text."""
        return "what a hop takes longer than its scores, and the last gradients"

    def link(self, cp: int, tp: int, hardware: Hardware) -> Link | None:
        """A hop is as slow as its slowest link."""
        return hardware.intra if cp * tp <= hardware.node_size else hardware.inter


class GatherLaw(RingLaw):
    """The bytes of a ring in one collective, which nothing hides."""

    name = "gather"

    def unhidden_s(self, layer: CutAttention, flops_per_s: float, link: Link) -> tuple[float, float]:
        """All seconds of the exchange: nothing is computed meanwhile."""
        return self.exchange_s(layer, link)

    def formula(self, layer: CutAttention) -> str:
        """The formula of `unhidden_s` as one line of text."""
        return f"(n-1)(2 b + b') / S + 3 (n-1) alpha, n={layer.n}"

    def link(self, cp: int, tp: int, hardware: Hardware) -> Link | None:
        """That of a collective, which crosses nodes with all ports of a node."""
        return hardware.link(cp, tp)


class UlyssesLaw:
    """Tokens for heads, and back: two all_to_alls each way, which nothing hides."""

    name = "ulysses"

    def lacks(self, layer: CutAttention) -> Iterator[str]:
        """Heads that n does not divide."""
        if not layer.possible(self.name):
            yield (
                f"ulysses deals {layer.heads} query heads and {layer.key_heads} key heads out over {layer.n} ranks, "
                "and they do not come out even: take ring or gather, or another n"
            )

    def refuses(self, shape: Sizes, layout: Layout) -> Iterator[str]:
        """Heads of a rank of tp that cp does not divide."""
        mend = "take another cp, or context='ring' or 'gather', which cut no heads"
        if shape.n_head // layout.tp % layout.cp:
            yield (
                f"ulysses deals a rank's n_head={shape.n_head} / tp={layout.tp} heads out over cp={layout.cp} ranks, "
                f"and they do not come out even: {mend}"
            )
        keys = max(1, shape.kv_heads // layout.tp)  # with more ranks than key heads each has a copy
        if keys % layout.cp:
            yield (
                f"ulysses deals a rank's {keys} key heads out over cp={layout.cp} ranks, and they do not come out "
                f"even: {mend}"
            )

    def sent(self, layer: CutAttention, rank: int | None = None) -> tuple[int, int]:
        """(n-1)/n of q, k, v and y each way, on each rank."""
        n = layer.n
        each_way = (layer.heads + layer.key_heads) * layer.tokens * layer.pair * layer.word * (n - 1) // n
        return each_way, each_way

    def exchange_s(self, layer: CutAttention, link: Link) -> tuple[float, float]:
        """2 (n-1) messages each way."""
        forward, backward = self.sent(layer)
        return travel_s(link, forward, 2 * (layer.n - 1)), travel_s(link, backward, 2 * (layer.n - 1))

    def unhidden_s(self, layer: CutAttention, flops_per_s: float, link: Link) -> tuple[float, float]:
        """All seconds of the exchange: nothing is computed meanwhile."""
        return self.exchange_s(layer, link)

    def formula(self, layer: CutAttention) -> str:
        """The formula of `unhidden_s` as one line of text."""
        return f"2 (n-1)/n 2 B (H + K) T/n W w / S + 4 (n-1) alpha, n={layer.n}"

    def link(self, cp: int, tp: int, hardware: Hardware) -> Link | None:
        """None: all_to_alls use links inside a node and between nodes at the same time."""
        return None
