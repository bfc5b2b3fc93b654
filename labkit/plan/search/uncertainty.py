"""uncertainty.toml as values: constants of risks, and the intervals in which published runs lay, kind by kind."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from labkit.plan.tables import Key, checked, toml

FILE = Path(__file__).with_suffix(".toml")
PARTS = MappingProxyType({name: Key(dict, needed=True) for name in ("full", "late", "many", "seconds", "bytes")})
NUMBERS = MappingProxyType({
    "full": ("least", "share", "runs", "others", "slow"), "late": ("share", "sick", "late_s"),
    "many": ("least", "share", "late_s", "runs", "sources"),
})  # fmt: skip
INTERVAL = MappingProxyType({
    "low": Key(float, 0.001, 1000, needed=True), "high": Key(float, 0.001, 1000, needed=True),
    "runs": Key(int, 1, needed=True), "sources": Key(str, needed=True),
})  # fmt: skip


class Interval(NamedTuple):
    """Nine of ten `runs` took (or held) `low` to `high` times what is predicted of them; `sources` in words."""

    low: float
    high: float
    runs: int
    sources: str


class Constants(NamedTuple):
    """The tables of the file: numbers of the three risks, and an interval for each kind of run."""

    full: Mapping[str, float]
    late: Mapping[str, float]
    many: Mapping[str, float]
    seconds: Mapping[str, Interval]
    held: Interval


@cache
def constants(file: Path = FILE) -> Constants:
    """What a file such as uncertainty.toml holds. ValueError that names file, table and key for what cannot be."""
    tables = checked(file.name, toml(file), PARTS)
    full, late, many = (
        MappingProxyType(checked(f"{file.name}, [{name}]", tables[name], dict.fromkeys(keys, Key(float, needed=True))))
        for name, keys in NUMBERS.items()
    )
    seconds = {
        kind: Interval(**checked(f'{file.name}, [seconds."{kind}"]', row, INTERVAL))
        for kind, row in tables["seconds"].items()
    }
    held = Interval(**checked(f"{file.name}, [bytes]", tables["bytes"], INTERVAL))
    return Constants(full, late, many, MappingProxyType(seconds), held)
