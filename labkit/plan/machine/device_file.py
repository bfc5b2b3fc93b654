"""A machine that was measured, as a file with the keys of devices.toml: what `labkit plan --gpu FILE` reads.

    Hardware ── device_file ──> [link.measured] and [device.NAME], a comment beside each number ── Hardware.read ──> it

A rate that was measured is what a large op reaches, so that `efficiency` and `memory_share` are 1: there is no peak of
a data sheet to take a share of, and the MFU of a plan is a share of the measured rate.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from labkit.plan.machine.hardware import Hardware
from labkit.plan.machine.link import Link

BETWEEN = "ethernet"
"""The link that is written for what one machine cannot measure: that to another machine."""


def device_name(words: str) -> str:
    """`nvidia-h200` of "NVIDIA H200": a name that a file of devices can have."""
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def device_file(hardware: Hardware, measured: Mapping[str, str], intra: Link | None) -> str:
    """The text of the file. `measured` says of each key how its number came about, and of "file" how all of them did;
    `intra` is the link between ranks of this machine, None where there is one rank and nothing was measured."""
    name = device_name(hardware.name)
    rates = ", ".join(f"{item.name} = {item.value / 1e12:.4g}" for item in hardware.flops)
    rows = [
        ("tflops", f"{{ {rates} }}"),
        ("efficiency", "1.0"),
        ("efficiency_source", f'"{measured["tflops"]}"'),
        ("memory_bytes", f"{hardware.memory_bytes.value:.6g}"),
        ("bytes_per_s", f"{hardware.bytes_per_s.value:.4g}"),
        ("memory_share", "1.0"),
        ("launch_s", f"{hardware.launch_s:.3g}"),
        ("node_size", f"{hardware.node_size}"),
        ("intra", '"measured"' if intra else f'"{BETWEEN}"'),
        ("inter", f'"{BETWEEN}"'),
        ("device", f'"{hardware.device}"'),
        ("sheet", f'"{measured["file"]}"'),
    ]
    lines = [f"# {line}" for line in (measured["file"], f"labkit plan --gpu THIS_FILE --gpus {hardware.node_size}")]
    if intra:
        lines += ["", "[link.measured]", *_row("alpha_s", f"{intra.alpha_s:.3g}", measured)]
        lines += [*_row("bytes_per_s", f"{intra.bytes_per_s:.4g}", {"bytes_per_s": measured["link"]})]
        lines += [f'source = "{intra.source}"']
    lines += ["", f"[device.{name}]", *(line for key, value in rows for line in _row(key, value, measured))]
    return "\n".join(lines) + "\n"


def _row(key: str, value: str, measured: Mapping[str, str]) -> list[str]:
    """The line of a key, below a comment if there is one for it."""
    return [*([f"# {measured[key]}"] if key in measured else []), f"{key} = {value}"]
