"""The seconds of an optimizer whose state is on the CPU (labkit.train.offload): its step there, and the way to it.

    N owned elements    gradients to the CPU, new weights back        (g + w) N / PCIe, one after the other
                        step on fp32 masters                          80 N / what the CPU's memory gives to one device

Assumed, not measured: PCIe 4 with 16 lanes for each device, 60 GB/s of the CPU's memory for each (a node of 8 devices
has some 400 to 600), nothing hidden behind the backward. A fused step on the CPU, as DeepSpeed has it, touches 16 bytes
and not 80: Ren et al. (ZeRO-Offload), arXiv:2101.06840, sections 5 and 6.
"""

from __future__ import annotations

from labkit.plan.laws.choices import Choices
from labkit.plan.machine.link import link_of

WAY = "pcie4"
"""The link between a device and the CPU."""
CPU_BYTES_PER_S = 60e9
"""Bytes a second of the CPU's memory for the step of one device."""


def step_s(choices: Choices, owned: float, touched: float) -> float:
    """Seconds of a step on `owned` elements, for each of which `touched` bytes are read and written on the CPU."""
    link = link_of(WAY)
    moved = (choices.gradient_bytes + choices.weight_bytes) * owned
    return 2 * link.alpha_s + moved / link.bytes_per_s + touched * owned / CPU_BYTES_PER_S
