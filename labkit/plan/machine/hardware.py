"""Hardware: what one device can do, how it is wired to others, and where every figure is written.

    flops        the peak of dense products by precision             x efficiency: what a large matmul reaches of it
    memory       bytes of a device, and bytes a second to them       x `memory_share`: what an op reaches of it
    links        inside a node of `node_size` devices, and between nodes, of one device each

A figure is an Item, so it carries its source; `Hardware.measured(...)` takes figures that were measured on the machine
at hand, with an efficiency of 1. Nothing is measured here: this file is arithmetic.

Time of an op: the longer one of its flops at that rate and its bytes at that one (the roofline: Williams, Waterman and
Patterson, 2009), plus `launch_s` for starting it.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from labkit.plan.breakdown import Item
from labkit.plan.machine.collectives import Line, seconds
from labkit.plan.machine.devices import DEVICES, STREAM, Device, read
from labkit.plan.machine.efficiency import IDEAL, Practice
from labkit.plan.machine.link import Link, link_of
from labkit.plan.words import nearest

ENDING = ".toml"
"""The end of the name of a file that describes devices."""
PRECISIONS = ("fp64", "fp32", "bf16", "fp16")
EIGHT_BITS = "fp8"
"""What a device may have a rate for besides; only products of 8-bit copies ask for it."""


@dataclass(frozen=True)
class Hardware:
    """One kind of device and its links. `flops` are Items named by precision; `efficiency`, `memory_share`: 0 to 1.

    Raises ValueError, with the numbers, for figures that are not above zero."""

    name: str
    flops: tuple[Item, ...]
    efficiency: Item
    memory_bytes: Item
    bytes_per_s: Item
    memory_share: Item
    node_size: int
    intra: Link
    inter: Link
    launch_s: float = 0.0
    device: str = "cuda"
    practice: Practice = IDEAL

    def __hash__(self) -> int:
        """That of a few figures: a look-up is quick, and other differences are for __eq__ to find."""
        return hash((self.name, self.node_size, self.efficiency.value, self.bytes_per_s.value))

    def __post_init__(self) -> None:
        for item in (*self.flops, self.efficiency, self.memory_bytes, self.bytes_per_s, self.memory_share):
            if not item.value > 0:
                raise ValueError(f"{self.name}: {item.name} is {item.value} {item.unit}: it must be above zero")
        for item in (self.efficiency, self.memory_share):
            if item.value > 1:
                raise ValueError(f"{self.name}: {item.name} is a share, 0 to 1, got {item.value}")
        if self.node_size < 1 or not 0 <= self.launch_s < math.inf:
            raise ValueError(
                f"{self.name}: a node has 1 device or more and an op starts in 0 s or more, got {self.node_size} and "
                f"{self.launch_s}"
            )

    @classmethod
    def preset(cls, name: str) -> Hardware:
        """A known device: "h100", "h200", "a100-80gb", "v100", "laptop", "tpu-v4", ...

        ValueError that names the nearest for one that is not there."""
        row = DEVICES.get(name.lower())
        if row is None:
            near = difflib.get_close_matches(name.lower(), DEVICES, 3, 0.4)
            raise ValueError(
                f"no hardware {name!r}; "
                + (f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are {', '.join(DEVICES)}")
                + f"; a file of yours ends in {ENDING}"
            )
        return cls.of(row, name.lower())

    @classmethod
    def read(cls, path: Path | str) -> Hardware:
        """A device of a file with the keys of devices.toml: the only one, or with `FILE:NAME` the one of this name.

        ValueError, with the row and the key, for a file that cannot be read, and for a name that is not in it."""
        text, _, name = f"{path}".partition(f"{ENDING}:")
        file = Path(text + ENDING) if name else Path(path)
        try:
            rows = read(file)
        except OSError as error:
            raise ValueError(f"{file} cannot be read: {error.strerror}") from error
        if not name and len(rows) > 1:
            raise ValueError(f"{file} has several devices, {', '.join(rows)}: write {file}:{next(iter(rows))}, say")
        name = name or next(iter(rows), "")
        if name not in rows:
            raise ValueError(f"{file} has no device {name!r}; {nearest(name, rows)}")
        return cls.of(rows[name], name)

    @classmethod
    def named(cls, text: str) -> Hardware:
        """A known device by its name, or one of a file, whose name has the ending .toml."""
        return cls.read(text) if ENDING in text else cls.preset(text)

    @classmethod
    def of(cls, row: Device, name: str) -> Hardware:
        """A row of the table of devices, each figure with its source."""
        return cls(
            name,
            tuple(Item(precision, rate, "flop/s", "dense", row.sheet) for precision, rate in row.flops),
            Item("efficiency", row.efficiency, "", "large product / peak", row.efficiency_source),
            Item("memory", row.memory_bytes, "B", "", row.sheet),
            Item("memory bandwidth", row.bytes_per_s, "B/s", "", row.sheet),
            Item("share of the bandwidth", row.memory_share, "", "", STREAM),
            row.node_size, row.intra, row.inter, row.launch_s, row.device, row.practice,
        )  # fmt: skip

    @classmethod
    def measured(
        cls,
        flops: float | Mapping[str, float],
        bytes_per_s: float,
        *,
        memory_bytes: float = 8 * 2**30,
        intra: Link | str | tuple[float, float] | None = None,
        inter: Link | str | tuple[float, float] | None = None,
        node_size: int = 8,
        launch_s: float = 0.0,
        name: str = "this machine",
        device: str = "cpu",
        source: str = "measured",
    ) -> Hardware:
        """A device by what was measured on it: flop/s of a large product (for all precisions, or by precision), and
        bytes/s of an elementwise op. A link: a Link, a preset's name, (alpha_s, bytes_per_s); None: loopback."""
        rates = dict(flops) if isinstance(flops, Mapping) else dict.fromkeys(PRECISIONS, float(flops))
        unknown = sorted(set(rates) - {*PRECISIONS, EIGHT_BITS})
        if unknown or not rates:
            known = ", ".join((*PRECISIONS, EIGHT_BITS))
            raise ValueError(f"flop/s are told for {known}; got {', '.join(unknown) or 'none'}")
        loop = intra or inter or Link("loopback", 50e-6, 1.5e9, "assumed: measure with labkit.probe.links")
        return cls(
            name,
            tuple(Item(precision, rate, "flop/s", "", source) for precision, rate in rates.items()),
            Item("efficiency", 1.0, "", "the rates are measured ones", source),
            Item("memory", memory_bytes, "B", "", source),
            Item("memory bandwidth", bytes_per_s, "B/s", "", source),
            Item("share of the bandwidth", 1.0, "", "the rate is a measured one", source),
            node_size, link_of(intra or loop), link_of(inter or loop), launch_s, device,
        )  # fmt: skip

    def changed(self, **changes: Any) -> Hardware:
        """The same with other fields; a bare number for `memory_bytes` or `bytes_per_s` becomes an Item."""
        for name in ("memory_bytes", "bytes_per_s", "efficiency", "memory_share"):
            if isinstance(changes.get(name), int | float):
                changes[name] = replace(getattr(self, name), value=changes[name], source="asked for")
        return replace(self, **changes)

    def fitted(self, samples: Sequence[tuple[float, float]]) -> Hardware:
        """The same device, as slow as measured: all rates times the geometric mean of predicted / measured seconds.

        `samples` are (predicted_s, measured_s) of a few steps; predictions for other shapes then need no more numbers.
        ValueError for no samples, and seconds that are not above zero."""
        if not samples or any(not 0 < seconds < math.inf for pair in samples for seconds in pair):
            raise ValueError(f"pairs of predicted and measured seconds above zero are needed, got {list(samples)[:4]}")
        factor = math.exp(sum(math.log(predicted / seen) for predicted, seen in samples) / len(samples))
        note = f"{factor:.3g} x, fitted to {len(samples)} measured steps; "
        flops = tuple(replace(i, value=i.value * factor, source=note + i.source) for i in self.flops)
        moved = replace(self.bytes_per_s, value=self.bytes_per_s.value * factor, source=note + self.bytes_per_s.source)
        return replace(self, flops=flops, bytes_per_s=moved, launch_s=self.launch_s / factor)

    # -- rates -------------------------------------------------------------------------------------------------------

    def peak(self, precision: str) -> float:
        """Flop/s of dense products in this precision, by the data sheet: what MFU divides by. Half precisions stand
        in for each other, and a precision that the device does not have runs in fp32. ValueError for an unknown one.

        "fp8" is asked for products of 8-bit copies. A CPU multiplies these in fp32; on another device without such
        units they would only be slower than in bf16, which is a ValueError."""
        rates = {item.name: item.value for item in self.flops}
        if precision == EIGHT_BITS and precision not in rates and self.device != "cpu":
            names = ", ".join(name for name, row in DEVICES.items() if EIGHT_BITS in dict(row.flops))
            raise ValueError(
                f"no 8-bit rate is known of {self.name}, and without 8-bit units products are no faster than in bf16: "
                f"precision='bf16', or a device with such units: {names}"
            )
        if precision not in (*PRECISIONS, EIGHT_BITS):
            raise ValueError(f"a precision is one of {', '.join((*PRECISIONS, EIGHT_BITS))}, got {precision!r}")
        twin = {"bf16": "fp16", "fp16": "bf16"}.get(precision, "fp32")
        return rates.get(precision) or rates.get(twin) or rates.get("fp32") or min(rates.values())

    def rate(self, precision: str) -> float:
        """Flop/s that a large product reaches."""
        return self.peak(precision) * self.efficiency.value

    @property
    def reachable_bytes_per_s(self) -> float:
        """Bytes/s that an elementwise op reaches."""
        return self.bytes_per_s.value * self.memory_share.value

    def op_s(self, flops: float, n_bytes: float, precision: str) -> float:
        """Seconds of one op."""
        return self.launch_s + max(flops / self.rate(precision), n_bytes / self.reachable_bytes_per_s)

    # -- links -------------------------------------------------------------------------------------------------------

    def link(self, size: int, stride: int) -> Link:
        """The link that a ring over `size` ranks, `stride` apart, has to itself: the slower of those that it crosses.

        Inside a node that is the node's link. Between nodes a ring has one port for each of its members in a node, for
        the devices of a node share the work of crossing (as NCCL's rings do), up to what the node's own link takes."""
        if size * stride <= self.node_size or size == 1:
            return self.intra
        members = min(max(1, self.node_size // stride), size)
        speed = min(self.inter.bytes_per_s * members, self.intra.bytes_per_s)
        # one hop of `members` crosses
        alpha = (self.inter.alpha_s + (members - 1) * self.intra.alpha_s) / members
        return replace(self.inter, alpha_s=alpha, bytes_per_s=speed)

    def collective_s(self, verb: str, size: int, stride: int, n_bytes: float) -> float:
        """Seconds of one collective of `n_bytes` over `size` ranks, `stride` apart; 0 for a single rank.

        By a ring; an all_reduce between nodes by two trees that each carry half: a ring's bytes, 2 log2 n latencies
        (Sanders, Speck and Traeff 2009, as NCCL does since 2.4)."""
        if size == 1:
            return 0.0
        link = self.link(size, stride)
        line = Line(link.alpha_s, 1 / (link.bytes_per_s * self.practice.wire))
        ring = seconds("ring", verb, size, n_bytes, line)
        if verb == "all_reduce" and size * stride > self.node_size:
            hops, moved = 2 * math.ceil(math.log2(size)), 2 * (size - 1) / size * n_bytes
            return min(hops * line.alpha_s + moved * line.beta_s_per_byte, ring)
        return ring

    def all_to_all_s(self, size: int, stride: int, n_bytes: float) -> float:
        """Seconds in which each of `size` ranks, `stride` apart, sends 1/size of `n_bytes` to each of them.

        What stays inside a node and what leaves it goes at the same time, each rank through a port of its own:

            max((members - 1)/n S / B of the node's link,  (n - members)/n S / B between nodes) + a latency a message
        """
        if size == 1:
            return 0.0
        members = min(max(1, self.node_size // stride), size)
        within, beyond = members - 1, size - members
        inside = within * self.intra.alpha_s + within / size * n_bytes / (self.intra.bytes_per_s * self.practice.wire)
        between = beyond * self.inter.alpha_s + beyond / size * n_bytes / (self.inter.bytes_per_s * self.practice.wire)
        return max(inside, between)


def line_of(link: Link) -> Line:
    """A link as alpha and beta, for the laws of labkit.plan.machine.collectives."""
    return Line(link.alpha_s, 1 / link.bytes_per_s)
