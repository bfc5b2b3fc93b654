"""What a way of reaching the keys of other ranks says of itself: the protocol that the laws of context share.

A new way is its attention in labkit/parallel with a row in labkit.parallel.contexts, its law with a row in
labkit.plan.laws.context, and what it holds while it runs with a row in labkit.plan.model.context_memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from labkit.plan.machine.hardware import Hardware
from labkit.plan.machine.link import Link
from labkit.plan.model.cut_attention import CutAttention
from labkit.plan.model.sizes import Sizes
from labkit.plan.partition.layout import Layout

BACKWARD = 2.5
"""Flops of attention's backward in those of its forward: five products in place of two, one of which makes the scores
again (Dao, arXiv:2307.08691, section 4.1)."""


class ContextLaw(Protocol):
    """The law of one way, of one layer's attention on one of n ranks."""

    @property
    def name(self) -> str:
        """The value of `context` in a recipe that chooses this way."""

    def lacks(self, layer: CutAttention) -> Iterator[str]:
        """Reasons why this attention cannot be cut in this way, each with the mend."""

    def refuses(self, shape: Sizes, layout: Layout) -> Iterator[str]:
        """Reasons why a model on a layout with cp > 1 cannot be cut in this way, each with the mend."""

    def sent(self, layer: CutAttention, rank: int | None = None) -> tuple[int, int]:
        """Bytes that `rank` sends, forward and backward; of the busiest rank each way if left out."""

    def exchange_s(self, layer: CutAttention, link: Link) -> tuple[float, float]:
        """Seconds of the exchange forward and backward, as if nothing were computed."""

    def unhidden_s(self, layer: CutAttention, flops_per_s: float, link: Link) -> tuple[float, float]:
        """Seconds of it that nothing hides, forward and backward, for n > 1."""

    def formula(self, layer: CutAttention) -> str:
        """The formula of `unhidden_s` as one line of text."""

    def link(self, cp: int, tp: int, hardware: Hardware) -> Link | None:
        """The link that sets its pace over `cp` ranks that are `tp` apart; None for all_to_alls, which use several."""


def travel_s(link: Link, n_bytes: float, messages: int = 1) -> float:
    """Seconds of so many bytes in so many messages, one after the other."""
    return messages * link.alpha_s + n_bytes / link.bytes_per_s
