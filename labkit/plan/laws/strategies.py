"""The strategies of data parallelism that a recipe can name, each with its law: a new one is a row here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from labkit.plan.laws.ddp import DDPLaw
from labkit.plan.laws.hsdp import HSDPLaw
from labkit.plan.laws.strategy import Strategy
from labkit.plan.laws.zero1 import ZeRO1Law
from labkit.plan.laws.zero2 import ZeRO2Law
from labkit.plan.laws.zero3 import ZeRO3Law

LAWS: Mapping[str, Strategy] = MappingProxyType(
    {law.name: law for law in (DDPLaw(), ZeRO1Law(), ZeRO2Law(), ZeRO3Law())}
)
"""The laws by their names in a recipe."""

HYBRID = HSDPLaw.name
"""The strategy whose state may be shared out in groups of ranks, with a copy in each group."""


def law_of(strategy: str, shard_ranks: int | None) -> Strategy:
    """The law of this strategy; with `shard_ranks` that of HSDP, which shares state out in groups of so many ranks."""
    return LAWS[strategy] if shard_ranks is None else HSDPLaw(shard_ranks)
