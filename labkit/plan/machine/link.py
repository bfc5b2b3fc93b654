"""Link: one kind of wire, and the presets with their sources.

A message of b bytes takes alpha + b beta seconds: alpha the latency, 1/beta the bandwidth of one direction (Hockney
1994; Thakur, Rabenseifner and Gropp 2005, section 3).

`slower(1e-3)` is slow motion: bandwidth and latency are both a thousand times worse. A laptop's own wire is then faster
than the one it plays, and all ratios stay: a ring beats a tree from the same number of bytes on as on the real machine.
A second here is a millisecond there. `latency_scale=1` keeps the latency. That is right for tensors a thousand times
smaller than real ones, but a laptop's own wire needs longer than those few microseconds.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

_NCCL = "latency: NCCL, src/graph/tuning.cc, hwLat, ring with LL128"


class Edge(NamedTuple):
    """From one rank to another: seconds of latency a message, and seconds a byte."""

    alpha_s: float
    beta_s_per_byte: float


@dataclass(frozen=True)
class Link:
    """One kind of wire: latency in seconds, bytes a second in each direction, where the numbers come from.

    Raises ValueError for a latency below zero, and a bandwidth that is zero, below, or endless."""

    name: str
    alpha_s: float
    bytes_per_s: float
    source: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.alpha_s < math.inf:
            raise ValueError(f"link {self.name!r}: latency is 0 s or more, got alpha_s={self.alpha_s!r}")
        if not 0 < self.bytes_per_s < math.inf:
            raise ValueError(
                f"link {self.name!r}: bandwidth must be above 0 bytes a second and finite, got {self.bytes_per_s!r} "
                "(nothing would ever arrive; for latency alone say 1e12)"
            )

    @property
    def words(self) -> str:
        """`nvlink (1.9 ms, 450 MB/s)`."""
        return f"{self.name} ({self.alpha_s * 1e3:,.4g} ms, {self.bytes_per_s / 1e6:,.4g} MB/s)"

    def slower(self, scale: float, latency_scale: float | None = None) -> Link:
        """The same link in slow motion: bandwidth times `scale`, latency divided by it (or by `latency_scale`)."""
        latency_scale = scale if latency_scale is None else latency_scale
        if not (0 < scale < math.inf and 0 < latency_scale < math.inf):
            raise ValueError(f"scales must be above 0, got scale={scale!r}, latency_scale={latency_scale!r}")
        return replace(self, alpha_s=self.alpha_s / latency_scale, bytes_per_s=self.bytes_per_s * scale)


PRESETS = (
    Link("nvlink", 1.9e-6, 450e9, f"NVLink 4: 900 GB/s both ways, NVIDIA H100 datasheet; {_NCCL}"),
    Link("nvlink-a100", 1.9e-6, 300e9, f"NVLink 3: 600 GB/s both ways, NVIDIA A100 datasheet; {_NCCL}"),
    Link("nvlink-b200", 1.9e-6, 900e9, f"NVLink 5: 1.8 TB/s both ways, NVIDIA GB200 datasheet; {_NCCL}"),
    Link("pcie5", 2.5e-6, 63.0e9, f"16 lanes of 32 GT/s, 128b/130b, PCI Express 5.0; {_NCCL}"),
    Link("pcie4", 2.5e-6, 31.5e9, f"16 lanes of 16 GT/s, 128b/130b, PCI Express 4.0; {_NCCL}"),
    Link("pcie3", 2.5e-6, 15.75e9, f"16 lanes of 8 GT/s, 128b/130b, PCI Express 3.0; {_NCCL}"),
    Link("infinity-fabric", 1.9e-6, 448e9, "7 links of 128 GB/s both ways, AMD MI300X data sheet; latency: as NVLink"),
    Link("infiniband", 4.0e-6, 50e9, f"NDR, 400 Gb/s a port, InfiniBand roadmap; {_NCCL}"),
    Link("infiniband-hdr", 4.0e-6, 25e9, f"HDR, 200 Gb/s a port, InfiniBand roadmap; {_NCCL}"),
    Link("efa", 15e-6, 50e9, "EFA v2, 3,200 Gb/s for 8 devices, AWS EC2 P5; latency: a guess for SRD, measure yours"),
    Link("ethernet-100g", 30e-6, 12.5e9, "100 Gb/s, IEEE 802.3bm; latency: a guess for TCP in one hall, measure yours"),
    Link("ethernet", 50e-6, 1.25e9, "10 Gb/s, IEEE 802.3ae; latency: a guess for TCP in one hall, measure yours"),
    Link("internet", 20e-3, 12.5e6, "100 Mb/s and 20 ms: a household's line, an example and no measurement"),
)


def preset(name: str) -> Link:
    """A link by its name. ValueError for an unknown one, with the nearest name."""
    for link in PRESETS:
        if link.name == name:
            return link
    names = [link.name for link in PRESETS]
    near = difflib.get_close_matches(str(name).lower(), names, 1, 0.4)
    raise ValueError(
        f"no link is called {name!r}{f'; did you mean {near[0]!r}?' if near else ''} There are {', '.join(names)}"
    )


def link_of(link: Link | str | tuple[float, float] | None) -> Link:
    """A Link, a preset by its name, or (alpha_s, bytes_per_s). ValueError for anything else."""
    if isinstance(link, Link):
        return link
    if isinstance(link, str):
        return preset(link)
    if isinstance(link, tuple) and len(link) == 2:
        return Link("a link", *link)
    raise ValueError(f"a link is the name of a preset, a Link or (alpha_s, bytes_per_s), got {link!r}")
