"""Devices that `Hardware.preset` knows: figures of their data sheets, and what is reached of them, with the sources.

The share of the peak that a large bf16 product reaches is measured (S. Bekman, "Machine Learning Engineering", MAMF
table): 86.9% on an A100, 80.3% on an H100. Elsewhere it is assumed, and says so. What training runs lose beyond that is
fitted to published ones on H100 and A100 (labkit.plan.machine.efficiency; `make bench` prints how well the others are
foretold); that other devices lose as much as the nearer of the two is assumed.

Rates of 8-bit products (fp8) are dense, with sums in fp32: half of what data sheets print for sparse matrices, and on
GeForce cards half of what they print for sums in fp16. V100, A100, T4, A10G and TPU v4 have no such units. That large
8-bit products reach the share of their peak that those of bf16 reach is assumed.

GB here are 10^9 bytes where the data sheet says GB; the memory that a job can use is a little less (the driver and the
libraries take about 1 GB).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from labkit.plan.machine.efficiency import IDEAL, Practice
from labkit.plan.machine.link import Link, link_of

MAMF = "github.com/stas00/ml-engineering, compute/accelerator, MAMF table, bf16"
STREAM = "assumed: a streaming kernel reaches 80 to 90% of the data sheet's bandwidth"
ASSUMED = "assumed"
LOW_POWER = "assumed: some 70 W hold the clock down under large products"


GPU = Practice(
    products=0.885, attention=0.202, half_side=195, traffic=1.44, wire=0.8, crossing_s=8.2e-4, contention=0.71,
    host_s=6.2e-5, host_call_s=2.7e-4, step_s=0.052,
)  # fmt: skip
"""What runs on GPUs lose: fitted to published runs on H100 and A100 together, but for `wire` (NCCL's own tests reach
some 80% of NVLink). `products` and `attention` are those of an H100; other new devices are assumed to be like it."""
A100_GPU = replace(GPU, products=0.956, attention=0.314)
"""The same with the products and the attention of an A100, which keeps more of its smaller peak busy."""


class Row(NamedTuple):
    """A device in one line: flop/s by precision, efficiency and its source, memory, bandwidth, links, data sheet."""

    flops: tuple[tuple[str, float], ...]
    efficiency: float
    efficiency_source: str
    memory_bytes: float
    bytes_per_s: float
    node_size: int
    intra: str
    inter: str
    sheet: str
    practice: Practice = IDEAL
    device: str = "cuda"
    launch_s: float = 4e-6
    memory_share: float = 0.85


def _rates(fp64: float, fp32: float, bf16: float, fp16: float, fp8: float = 0) -> tuple[tuple[str, float], ...]:
    rates = (("fp64", fp64), ("fp32", fp32), ("bf16", bf16), ("fp16", fp16), ("fp8", fp8))
    return tuple((name, rate * 1e12) for name, rate in rates if rate)


def link_named(name: str) -> Link:
    """A link that a row names: one of OLDER, or of labkit.plan.machine.link."""
    return next((link for link in OLDER if link.name == name), None) or link_of(name)


HOP = "latency as of the newer one"
OLDER = (
    Link("nvlink-v100", 1.9e-6, 150e9, f"NVLink 2: 300 GB/s both ways, NVIDIA V100 data sheet; {HOP}"),
    Link("infiniband-edr", 4.0e-6, 12.5e9, f"EDR, 100 Gb/s a port, InfiniBand roadmap; {HOP}"),
    Link(
        "tpu-ici", 2e-6, 100e9, "TPU v4: 6 links of 50 GB/s each way, arXiv:2304.01433, table 4; a ring takes 2 of them"
    ),
    Link(
        "tpu-dcn",
        20e-6,
        6.25e9,
        "assumed: a host of 4 chips has 200 Gb/s to the other pod, arXiv:2204.02311, section 4",
    ),
    Link(
        "loopback", 50e-6, 1.5e9, "assumed for gloo between processes of one machine: measure with labkit.probe.links"
    ),
)
"""Links that devices have and labkit.plan.machine.link does not."""

A100 = _rates(19.5, 19.5, 312, 312)
H100 = _rates(67, 67, 989.4, 989.4, 1978.9)
GB = 1e9

DEVICES: Mapping[str, Row] = MappingProxyType(
    {
        "v100": Row(_rates(7.8, 15.7, 0, 125), 0.75, ASSUMED, 32 * GB, 900e9, 8, "nvlink-v100", "infiniband-edr",
                    "NVIDIA V100 SXM2 data sheet, 2018", A100_GPU),
        "a100-40gb": Row(A100, 0.869, MAMF, 40 * GB, 1555e9, 8, "nvlink-a100", "infiniband-hdr",
                         "NVIDIA A100 data sheet, 2020", A100_GPU),
        "a100-80gb": Row(A100, 0.869, MAMF, 80 * GB, 2039e9, 8, "nvlink-a100", "infiniband-hdr",
                         "NVIDIA A100 80GB data sheet, 2021", A100_GPU),
        "h100": Row(H100, 0.803, MAMF, 80 * GB, 3350e9, 8, "nvlink", "infiniband",
                    "NVIDIA H100 SXM data sheet, 2023", GPU),
        "h200": Row(H100, 0.803, f"{MAMF} (as H100)", 141 * GB, 4800e9, 8, "nvlink", "infiniband",
                    "NVIDIA H200 SXM data sheet, 2024", GPU),
        "b200": Row(_rates(37, 75, 2250, 2250, 4500), 0.776, MAMF, 180 * GB, 7700e9, 8, "nvlink-b200", "infiniband",
                    "NVIDIA HGX B200 data sheet, 2025", GPU),
        "mi300x": Row(_rates(81.7, 163.4, 1307.4, 1307.4, 2614.9), 0.58, MAMF, 192 * GB, 5300e9, 8, "infinity-fabric",
                      "infiniband", "AMD Instinct MI300X data sheet, 2023; fp64 and fp32 of vectors", GPU),
        "t4": Row(_rates(0.25, 8.1, 0, 65), 0.6, LOW_POWER, 16 * GB, 320e9, 4, "pcie3", "ethernet",
                  "NVIDIA T4 data sheet, 2019", A100_GPU),
        "l4": Row(_rates(0.47, 30.3, 121, 121, 242.5), 0.6, LOW_POWER, 24 * GB, 300e9, 8, "pcie4", "ethernet",
                  "NVIDIA L4 data sheet, 2023, half of its sparse rates", A100_GPU),
        "a10g": Row(_rates(0.55, 35, 70, 70), 0.8, ASSUMED, 24 * GB, 600e9, 8, "pcie4", "ethernet",
                    "NVIDIA A10G data sheet, 2022", A100_GPU),
        "l40s": Row(_rates(1.4, 91.6, 362, 362, 733), 0.75, ASSUMED, 48 * GB, 864e9, 8, "pcie4", "ethernet-100g",
                    "NVIDIA L40S data sheet, 2023, half of its sparse rates", A100_GPU),
        "rtx-4090": Row(_rates(1.3, 82.6, 165.2, 165.2, 330.3), 0.9, ASSUMED, 24 * GB, 1008e9, 2, "pcie4", "ethernet",
                        "NVIDIA Ada architecture white paper, appendix A", A100_GPU),
        "rtx-5090": Row(_rates(1.6, 104.8, 209.5, 209.5, 419), 0.9, ASSUMED, 32 * GB, 1792e9, 2, "pcie5", "ethernet",
                        "NVIDIA RTX Blackwell architecture white paper, appendix A", A100_GPU),
        "tpu-v4": Row((("bf16", 275e12), ("fp32", 275e12 / 6)), 0.85, ASSUMED, 32 * 2**30, 1228e9, 4096, "tpu-ici",
                      "tpu-dcn", "Jouppi et al., arXiv:2304.01433, table 4; fp32 in six bf16 passes"),
        "laptop": Row(_rates(0.05, 0.1, 0.05, 0.01), 0.8, ASSUMED, 8 * 2**30, 20e9, 8, "loopback", "ethernet",
                      "assumed: two cores, 16 multiply-adds a clock, 3 GHz; measure yours: Hardware.measured",
                      device="cpu", launch_s=2e-6),
    }
)  # fmt: skip


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
