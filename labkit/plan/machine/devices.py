"""Devices that `Hardware.preset` knows: figures of their data sheets, and what is reached of them. The figures, their
units and their sources stand in devices.toml.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from labkit.plan.machine.efficiency import IDEAL, Practice
from labkit.plan.machine.link import Link, link_of
from labkit.plan.tables import Key, Table, built, checked, toml

FILE = Path(__file__).with_suffix(".toml")
STREAM = "assumed: a streaming kernel reaches 80 to 90% of the data sheet's bandwidth"
PRACTICE = MappingProxyType({field.name: Key(float, 0, 10_000) for field in fields(Practice)})
LINK = MappingProxyType({
    "alpha_s": Key(float, 0, 10, needed=True), "bytes_per_s": Key(float, 1e3, 1e15, needed=True),
    "source": Key(str, needed=True),
})  # fmt: skip
TFLOPS = MappingProxyType({name: Key(float, 1e-6, 1e6) for name in ("fp64", "fp32", "bf16", "fp16", "fp8")})
DEVICE = MappingProxyType({
    "tflops": Key(dict, needed=True), "efficiency": Key(float, 0.01, 1, needed=True),
    "efficiency_source": Key(str, needed=True), "memory_bytes": Key(float, 2**20, 1e15, needed=True),
    "bytes_per_s": Key(float, 1e6, 1e15, needed=True), "node_size": Key(int, 1, 1_000_000, needed=True),
    "intra": Key(str, needed=True), "inter": Key(str, needed=True), "sheet": Key(str, needed=True),
    "practice": Key(str), "device": Key(str, among=("cuda", "cpu")), "launch_s": Key(float, 0, 1),
    "memory_share": Key(float, 0.01, 1),
})  # fmt: skip
KINDS = MappingProxyType({"practice": Key(dict), "link": Key(dict), "device": Key(dict, needed=True)})
"""What each kind of row may hold; devices.toml says what each key means."""


class Device(NamedTuple):
    """A device: its figures as devices.toml has them, but flop/s by precision, and links and losses for their names."""

    flops: tuple[tuple[str, float], ...]
    efficiency: float
    efficiency_source: str
    memory_bytes: float
    bytes_per_s: float
    node_size: int
    intra: Link
    inter: Link
    sheet: str
    practice: Practice = IDEAL
    device: str = "cuda"
    launch_s: float = 4e-6
    memory_share: float = 0.85


def read(file: Path = FILE) -> dict[str, Device]:
    """The devices of a file such as devices.toml, by name, in the order of the file. Another file may name the links
    and practices of that one besides its own.

    ValueError that names the file, the row and the mend, for a row that cannot be."""
    tables = checked(file.name, toml(file), KINDS)
    practices, links = ({}, {}) if file == FILE else _parts(FILE, checked(FILE.name, toml(FILE), KINDS))
    own = _parts(file, tables)
    practices, links = {**practices, **own[0]}, {**links, **own[1]}
    return {name: _row(f"{file.name}, [device.{name}]", name, row, practices, links)
            for name, row in tables["device"].items()}  # fmt: skip


def _parts(file: Path, tables: Mapping[str, Any]) -> tuple[dict[str, Practice], dict[str, Link]]:
    """The tables [practice.NAME] and [link.NAME] of this file: losses of real runs, and links, by their names."""
    practices, links = {}, {}
    for name, row in tables.get("practice", {}).items():
        place = f"{file.name}, [practice.{name}]"
        practices[name] = built(place, Practice, **checked(place, row, PRACTICE))
    for name, row in tables.get("link", {}).items():
        place = f"{file.name}, [link.{name}]"
        links[name] = built(place, Link, name, **checked(place, row, LINK))
    return practices, links


def _row(place: str, name: str, row: object, practices: Mapping[str, Practice], links: Mapping[str, Link]) -> Device:
    """One device, with the losses and the links that it names."""
    if name != name.lower():
        raise ValueError(f"{place}: a name is written in lower case: {name.lower()}")
    figures = dict(checked(place, row, DEVICE))
    rates = checked(f"{place}: tflops", figures.pop("tflops"), TFLOPS)
    if not rates:
        raise ValueError(f"{place}: tflops needs a rate: {{ bf16 = 312 }}, say")
    practice = figures.pop("practice", None)
    if practice not in (None, *practices):
        raise ValueError(f"{place}: practice = {practice!r} must be one of {', '.join(practices)}, or be left out")
    for end in ("intra", "inter"):
        figures[end] = links.get(figures[end]) or built(f"{place}: {end}", link_of, figures[end])
    flops = tuple((precision, rate * 1e12) for precision, rate in rates.items())
    return Device(flops, practice=practices.get(practice, IDEAL), **figures)


DEVICES: Mapping[str, Device] = Table(cache(read))
"""Each device by its name."""


def row_of(gpu: str, memory_bytes: float) -> str | None:
    """The name of the row for a GPU that calls itself "NVIDIA A100-SXM4-40GB", say, and has so much memory; None if
    there is none. Of two that differ in memory, the nearer. A slice of a GPU (MIG) is as fast as no data sheet says."""
    words = re.split(r"[^a-z0-9]+", gpu.lower())
    named = [name for name, row in DEVICES.items() if row.device != "cpu" and _called(name, words)]
    if "mig" in words or not named:
        return None
    return min(named, key=lambda name: abs(DEVICES[name].memory_bytes - memory_bytes))


def _called(name: str, words: Sequence[str]) -> bool:
    """rtx-4090 wants both of its words; a100-40gb only the first, since not every A100 says its memory."""
    return all(word in words for word in name.split("-") if not word.endswith("gb"))
