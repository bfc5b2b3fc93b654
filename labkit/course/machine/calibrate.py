"""`labkit doctor --calibrate FILE`: what a rank of this machine does in a second, measured by all ranks at a time.

    GPUs that passed the self-test     a rank on each, over NCCL
    none                               a rank on each core, over what carries ranks' messages on this machine

The numbers are those of labkit.probe.machine, each with how it was measured, in the file of a machine of one's own:

    labkit doctor --calibrate box.toml
    labkit plan --gpu box.toml --gpus 2 --model gpt2
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from importlib import metadata
from pathlib import Path

import psutil

from labkit.launch.ask_gpus import facts_here
from labkit.launch.cluster import BareCluster
from labkit.launch.gpu_facts import usable
from labkit.plan.machine.device_file import device_file
from labkit.plan.machine.hardware import ENDING, Hardware
from labkit.plan.machine.link import Link
from labkit.probe.machine import measure_hardware, sizes_of

REPEATS = 8
"""Measurements of each rate: the median counts."""


@dataclass(frozen=True)
class Calibration:
    """The measured rates of a rank of this machine, what carried its messages, and the text of the file."""

    hardware: Hardware
    carrier: str
    text: str

    def lines(self) -> Iterator[str]:
        """The rates in words, a line for each."""
        hw = self.hardware
        for item in hw.flops:
            yield f"{item.name} products     {item.value / 1e9:,.1f} Gflop/s"
        yield f"memory            {hw.bytes_per_s.value / 1e9:,.1f} GB/s"
        yield f"start of an op    {hw.launch_s * 1e6:,.1f} us"
        if hw.node_size > 1:
            yield (
                f"link of two ranks {hw.intra.alpha_s * 1e6:,.1f} us and {hw.intra.bytes_per_s / 1e9:,.2f} GB/s "
                f"({self.carrier})"
            )


def check_place(file: Path, force: bool) -> None:
    """ValueError, with the mend, for a file that `labkit plan` would not read, and for one that is there already."""
    if file.suffix != ENDING:
        raise ValueError(f"{file} is to be read as a machine, whose file ends in {ENDING}: {file.with_suffix(ENDING)}")
    if file.exists() and not force:
        raise ValueError(f"{file} is there already: name another file, or write it anew with --force")
    if not file.parent.is_dir():
        raise ValueError(f"{file.parent} is no folder: make it first")


def calibrate(n_ranks: int | None = None, repeats: int = REPEATS) -> Calibration:
    """Start ranks, one for each GPU or each core, and measure what they do at a time. Takes some seconds.

    RuntimeError if ranks cannot be started here, ValueError for a number of ranks that this machine cannot have."""
    gpus = usable(facts_here())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    n_ranks = n_ranks or len(gpus) or max(2, cores)  # between two ranks there is a link, also on one core
    load = psutil.getloadavg()[0]  # before the ranks add to it
    with BareCluster(n_ranks, device="cuda" if n_ranks <= len(gpus) else "cpu", quiet=True) as cluster:
        hardware = cluster.run(measure_hardware, None, repeats)[0].value.changed(node_size=n_ranks)
        carrier = cluster.choice.carrier
    link = hardware.intra if n_ranks > 1 else None
    return Calibration(hardware, carrier, device_file(hardware, _words(hardware, link, carrier, repeats, load), link))


def _words(hardware: Hardware, link: Link | None, carrier: str, repeats: int, load: float) -> dict[str, str]:
    """A sentence for each key of the file that says how its number was measured or why it was assumed."""
    sizes = sizes_of(hardware.device, int(hardware.memory_bytes.value))
    n, kind = hardware.node_size, "GPU" if hardware.device == "cuda" else "CPU rank of one thread"
    versions = f"labkit {metadata.version('labkit')}, torch {metadata.version('torch')}"
    words = {
        "file": f"measured by labkit doctor on {date.today().isoformat()}: {n} x {kind} at a time, the slowest counts "
        f"({versions}; load average of the minute before: {load:.1f} on {os.cpu_count()} cores)",
        "tflops": f"products of {sizes.product} x {sizes.product} (fp64: {sizes.doubles}), median of {repeats}",
        "efficiency": "the rates above are reached ones, no peak of a data sheet",
        "memory_bytes": f"of the GPU: {hardware.memory_bytes.value / 1e9:.1f} GB"
        if hardware.device == "cuda"
        else f"of the machine, divided by its {n} ranks",
        "bytes_per_s": f"8 bytes an element of y = x + 1 in fp32, far larger than a cache; median of {repeats}",
        "memory_share": "the rate above is a reached one",
        "launch_s": f"seconds of an op on ten elements; median of {20 * repeats}",
        "node_size": "ranks that were measured together",
        "inter": "not measured, since this is one machine: assumed; write the link between yours",
    }
    if link is None:
        words["intra"] = "not measured, since there is one rank: assumed, and of no use with one device in a node"
    else:
        words["alpha_s"] = f"{link.source}, over {carrier}: seconds of an empty message"
        words["link"] = "bytes a second in one direction, the slope of the same line"
    return words
