"""`doctor`: what this machine can do, what labkit will use, and why. The links are measured, not looked up."""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import sys
import time
from dataclasses import dataclass
from html import escape
from importlib import metadata
from typing import Any

import psutil

from labkit.launch.choice import choose
from labkit.launch.cluster import Cluster
from labkit.launch.zygote import zygote
from labkit.plan.collectives import Line, fit
from labkit.probe.links import ping_pong


@dataclass(frozen=True)
class Finding:
    """One thing that the doctor found. `value` is a plain number or text in `unit`; `why` says what follows from it."""

    name: str
    value: Any
    unit: str
    why: str


@dataclass(frozen=True)
class Report:
    """All findings; shows itself as a table."""

    findings: tuple[Finding, ...]
    link: Line

    def __getitem__(self, name: str) -> Any:
        for finding in self.findings:
            if finding.name == name:
                return finding.value
        raise KeyError(f"the doctor knows {', '.join(finding.name for finding in self.findings)}; not {name!r}")

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {f.name: {"value": f.value, "unit": f.unit, "why": f.why} for f in self.findings}

    def __repr__(self) -> str:
        width = max(len(f.name) for f in self.findings)
        return "\n".join(f"{f.name:{width}s}  {_said(f):22s}  {f.why}" for f in self.findings)

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<tr><th style="text-align:left">{escape(f.name)}</th><td style="text-align:right">{escape(_said(f))}</td>'
            f'<td style="text-align:left">{escape(f.why)}</td></tr>'
            for f in self.findings
        )
        return f"<table>{rows}</table>"


def doctor(quick: bool = False) -> Report:
    """Look at the machine and measure it with a real cluster; about 3 s, most of it `import torch` the first time.

    `quick` measures with fewer repetitions."""
    hello = zygote().ready()
    fresh, warm, link, n_link = _measure(3 if quick else 7)
    memory = psutil.virtual_memory()
    findings = [
        Finding("python", platform.python_version(), "", sys.executable.rpartition(os.sep)[2]),
        Finding("torch", hello.torch, "", f"labkit {metadata.version('labkit')} wants 2.11 or newer"),
        Finding("system", f"{platform.system()} {platform.machine()}", "", "Windows: use WSL2"),
        Finding(
            "cores", os.cpu_count() or 1, "", "more ranks than cores take turns: numbers are right, times are long"
        ),
        Finding(
            "memory", round(memory.total / 1e9, 1), "GB", f"{memory.available / 1e9:.1f} GB free; a rank takes 12 MB"
        ),
        Finding("shared memory", _free_shm(), "GB", "free in /dev/shm; labkit itself does not need it"),
        Finding("GPUs", len(hello.gpus), "", ", ".join(hello.gpus) or "none that torch can use"),
        Finding("start of ranks", "fork" if hello.can_fork else "fresh", "", _start_reason(hello.can_fork)),
        Finding("fresh cluster", round(fresh * 1e3, 1), "ms", "4 ranks, from Cluster(4) to the first all_reduce"),
        Finding("warm call", round(warm * 1e3, 2), "ms", "an empty function on 4 ranks"),
        Finding("latency alpha", round(link.alpha_s * 1e6, 1), "us", f"one message between two ranks, {n_link} sizes"),
        Finding("bandwidth", round(link.bandwidth / 1e9, 2), "GB/s", "the same fit, 1/beta"),
    ]
    for n_ranks in (2, 4, 8):
        choice = choose(n_ranks, "auto", hello.gpus)
        findings.append(Finding(f"{n_ranks} ranks", choice.backend, "", choice.sentence))
    return Report(tuple(findings), link)


def _measure(repeats: int) -> tuple[float, float, Line, int]:
    fresh = []
    for _ in range(min(3, repeats)):
        started = time.perf_counter()
        with Cluster(4, quiet=True, device="cpu") as cluster:
            cluster.run(_first_all_reduce)
            fresh.append(time.perf_counter() - started)
            warm = statistics.median(_timed(cluster) for _ in range(20 * repeats))
    with Cluster(2, quiet=True) as cluster:
        sizes = [64, 4096, 1 << 16, 1 << 18, 1 << 20, 1 << 22]
        samples = cluster.run(ping_pong, sizes, repeats)[0].value
    return statistics.median(fresh), warm, fit(samples), len(sizes)


def _first_all_reduce(group: Any) -> float:
    import torch

    return float(group.all_reduce(torch.ones(1)))


def _nothing(group: Any) -> None:
    return None


def _timed(cluster: Cluster) -> float:
    started = time.perf_counter()
    cluster.run(_nothing)
    return time.perf_counter() - started


def _free_shm() -> float:
    return round(shutil.disk_usage("/dev/shm").free / 1e9, 1) if os.path.isdir("/dev/shm") else 0.0


def _start_reason(can_fork: bool) -> str:
    return "from a process that has imported torch once" if can_fork else "no safe fork here: each start imports torch"


def _said(finding: Finding) -> str:
    return f"{finding.value} {finding.unit}".strip()
