"""Where a step with cp waits: attention's exchange on the links of a device, and the ranks that share gradients.

    rank = ((dp_index * pp + pp_index) * cp + cp_index) * tp + tp_index       neighbours along cp are tp ranks apart

    ring       a hop is as slow as its slowest link: between nodes each rank has one port, and shares nobody's
    halo       the same, between ranks that are next to each other as long as w - 1 <= T/n
    gather     a collective, which crosses nodes with all ports of a node
    ulysses    all_to_alls: what stays inside a node and what leaves it go at the same time
    data       gradients are reduced over dp x cp, and with dualpipe over both ranks of a stage. Between two nodes such
               a ring has a port for each member in a node. Those of experts are reduced over cp and every ep-th rank
               of dp

What ring and halo hide is not free: exchange and scores want the same memory (`contention` of plan.machine.efficiency).
The law of one link: labkit.plan.laws.context.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from labkit.plan.breakdown import Item
from labkit.plan.laws.context import exchange_s, law_of, unhidden_s
from labkit.plan.laws.timing import PassSeconds, Timing
from labkit.plan.machine.hardware import Hardware
from labkit.plan.model.cut_attention import CutAttention, window_of
from labkit.plan.model.setting import Setting
from labkit.plan.model.sizes import Sizes
from labkit.plan.partition.layout import Layout


class ExchangeSeconds(NamedTuple):
    """Seconds of one direction of a layer and one micro-batch: waited for, and behind attention's scores."""

    waits: float
    hidden: float


def layer_of(shape: Sizes, setting: Setting, word: int) -> CutAttention:
    """A layer's attention as this setting cuts it, with numbers of `word` bytes."""
    heads, keys = shape.n_head // setting.tp, max(1, shape.kv_heads // setting.tp)
    whole = setting.seq * setting.cp
    window = window_of(shape)
    return CutAttention(whole, setting.cp, heads, keys, shape.width, setting.rows, word, shape.rope_width, window)


def layer_s(timing: Timing, layer: str) -> tuple[PassSeconds, PassSeconds]:
    """Seconds of attention's exchange in one block, forward and backward, where rows are cut."""
    if timing.layout.cp == 1 or layer not in ("block", "dense"):
        return PassSeconds(), PassSeconds()
    machine = timing.along("cp")
    ahead, behind = exchanges(timing.shape, timing.setting, timing.products, timing.narrow, machine)
    return PassSeconds(cp=ahead.waits, hidden=ahead.hidden), PassSeconds(cp=behind.waits, hidden=behind.hidden)


def rows(timing: Timing, spent: PassSeconds) -> Iterator[Item]:
    """The seconds of all exchanges of a step, where rows are cut."""
    if timing.layout.cp > 1:
        formula = f"{timing.layout.cp} ranks by {timing.choices.context}, of which {spent.cp:.3g} s are waited for"
        yield Item("cp", spent.cp + spent.hidden, "s", formula, "labkit.plan.laws.context")


def exchanges(
    shape: Sizes, setting: Setting, precision: str, word: int, hardware: Hardware
) -> tuple[ExchangeSeconds, ExchangeSeconds]:
    """Forward and backward of one layer. ValueError for heads that cannot be dealt out."""
    layer, kind, practice = layer_of(shape, setting, word), setting.context, hardware.practice
    link = law_of(kind).link(setting.cp, setting.tp, hardware)
    if link is None:
        # q, k and v go there, y comes back; gradients go the other way
        mixed = layer.heads * layer.width
        together = mixed + layer.heads * layer.rope_width + layer.key_heads * layer.pair
        parts = (layer.tokens * together * word, layer.tokens * mixed * word)
        both = sum(hardware.all_to_all_s(setting.cp, setting.tp, n_bytes) for n_bytes in parts)
        return ExchangeSeconds(both, 0.0), ExchangeSeconds(both, 0.0)
    link = replace(link, bytes_per_s=link.bytes_per_s * practice.wire)
    rate = hardware.rate(precision) * (practice.attention if shape.fused_attention else 0.5)
    made = []
    for talk, open_ in zip(exchange_s(kind, layer, link), unhidden_s(kind, layer, rate, link), strict=True):
        waited = open_ + practice.contention * (talk - open_)
        made.append(ExchangeSeconds(waited, talk - waited))
    return made[0], made[1]


def data_stride(layout: Layout, node_size: int, copies: int = 1, ep: int = 1) -> int:
    """How far apart the ranks of dp x cp are: as if they stood evenly, with as many of them in a node as there are.

    `copies` 2: a rank's mirror image along pp is one of them, and in its node if a whole pipeline is. Of dp every
    `ep`-th rank alone: with ep those that have the same experts."""
    apart = layout.pp * ep
    if copies == 1 and layout.cp == 1:
        return layout.tp * apart
    if copies == 1 and (apart == 1 or layout.dp == ep):
        return layout.tp
    along_cp = max(1, min(layout.cp, node_size // layout.tp))
    pipelines = node_size // (apart * layout.cp * layout.tp)
    members = along_cp * (copies * pipelines or 1)
    return max(1, -(-node_size // members))
