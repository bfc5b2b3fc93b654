"""`doctor`: what this machine can do, what labkit will use, and why. Links are measured, not looked up."""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from html import escape
from importlib import metadata
from typing import Any, NamedTuple

import psutil

from labkit.comm.group import Group
from labkit.comm.private import tried_versions, untried, was_tried, without
from labkit.course.judge.prefork import prefork_server
from labkit.course.judge.wall_trials import missing
from labkit.launch.ask_gpus import facts_here
from labkit.launch.cluster import BareCluster
from labkit.launch.device_choice import choose
from labkit.launch.gpu_facts import GpuFacts, remarks, trouble, usable
from labkit.launch.progress import Bar
from labkit.launch.verdict import LONGEST_S, Verdict, keep, prove
from labkit.launch.zygote import Hello, zygote
from labkit.plan.machine.collectives import Line
from labkit.plan.machine.hardware import line_of
from labkit.plan.text_columns import in_columns
from labkit.probe.links import ping_pong
from labkit.probe.machine import through

GIB = 1 << 30
SIZES = (64, 1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22)


@dataclass(frozen=True)
class Finding:
    """One thing that the doctor examined. `value` is a plain number or text in `unit`, None if it could not be
    determined; `why` says what follows from it."""

    name: str
    value: Any
    unit: str = ""
    why: str = ""

    @property
    def said(self) -> str:
        """The value with its unit."""
        return "failed" if self.value is None else f"{self.value} {self.unit}".strip()


@dataclass(frozen=True)
class MachineReport:
    """All findings, by name: `report["cores"]`. Shown as a table. `link` is the fitted alpha-beta line of a link.

    `gpus` is all that is known of the GPUs here, `verdict` what labkit's self-test has found on them."""

    findings: tuple[Finding, ...]
    link: Line | None
    gpus: GpuFacts | None = None
    verdict: Verdict | None = None

    def __getitem__(self, name: str) -> Any:
        for finding in self.findings:
            if finding.name == name:
                return finding.value
        raise KeyError(f"no finding {name!r}; there are {', '.join(finding.name for finding in self.findings)}")

    @property
    def well(self) -> bool:
        """True if every finding has a value: ranks start, meet and talk."""
        return all(finding.value is not None for finding in self.findings)

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Plain data, for JSON: name -> value, unit, why."""
        return {
            finding.name: {"value": finding.value, "unit": finding.unit, "why": finding.why}
            for finding in self.findings
        }

    def everything(self) -> dict[str, Any]:
        """Plain data for whoever is asked about this machine: as_dict(), its name, the day, labkit's version, the facts
        of its GPUs and the verdict of the self-test, with each of its parts."""
        gpus = None if self.gpus is None else self.gpus.as_dict()
        verdict = None if self.verdict is None else self.verdict.as_dict()
        about = {"machine": platform.node(), "date": date.today().isoformat(), "labkit": metadata.version("labkit")}
        return {**self.as_dict(), **about, "GPU facts": gpus, "self-test": verdict}

    def __repr__(self) -> str:
        return "\n".join(in_columns(self._rows(), left=(0, 2)))

    def __rich__(self) -> Any:
        from labkit.view.terminal_table import TerminalTable

        table = TerminalTable(title="labkit doctor", title_justify="left")
        for heading, justify in (("what", "left"), ("found", "right"), ("so", "left")):
            table.add_column(heading, justify=justify)  # type: ignore[arg-type]
        for row in self._rows():
            table.add_row(*row)
        return table

    def _repr_html_(self) -> str:
        left, right = 'style="text-align:left"', 'style="text-align:right;white-space:nowrap"'
        rows = "".join(
            f"<tr><th {left}>{escape(a)}</th><td {right}>{escape(b)}</td><td {left}>{escape(c)}</td></tr>"
            for a, b, c in self._rows()
        )
        return f"<table><tr><th {left}>what</th><th {right}>found</th><th {left}>so</th></tr>{rows}</table>"

    def _rows(self) -> list[tuple[str, str, str]]:
        return [(finding.name, finding.said, finding.why) for finding in self.findings]


def doctor(quick: bool = False) -> MachineReport:
    """Examine the machine, start real clusters on it and measure them. Takes a few seconds; `quick` repeats less often.

    Never raises for a fault of the machine: what fails becomes a finding without a value, with the reason."""
    findings = list(_machine())
    link, bar = None, Bar()
    facts: GpuFacts | None = None
    verdict: Verdict | None = None
    try:
        bar.draw(0.0, "importing torch, once for all ranks")
        hello = zygote().ready()
        _rest(hello.pid)
        findings += torch_findings(hello)
        facts = facts_here()
        findings += gpu_findings(facts)
        if usable(facts):
            bar.draw(0.1, f"trying the GPUs, for at most {LONGEST_S:g} s")
            verdict = prove(facts)
            findings.append(_self_test(verdict))
        measured, link = _measure(3 if quick else 15, bar)
        findings += measured
        bar.draw(0.9, "trying what an attempt at an exercise must not be able to do")
        findings.append(_walls())
        for n_ranks in (2, 4, 8):
            choice = choose(n_ranks, proof=lambda _: verdict)
            findings.append(
                Finding(f"{n_ranks} ranks use", f"{choice.devices[0]}, {choice.carrier}", "", choice.sentence)
            )
    except (RuntimeError, ValueError, OSError) as error:
        findings.append(Finding("ranks", None, "", f"cannot be used: {str(error).splitlines()[0]}"))
    finally:
        bar.end("examined")
    return MachineReport(tuple(findings), link, facts, verdict)


def _self_test(verdict: Verdict) -> Finding:
    """What the self-test says, which is kept: from now on "auto" goes by it."""
    try:
        keep(verdict)
        unkept = ""
    except OSError as error:
        unkept = f" (it cannot be kept: {error})"
    return Finding("self-test of the GPUs", "passed" if verdict.passed else "failed", "", verdict.sentence + unkept)


def _machine() -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    loopback = [
        name
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.address == "127.0.0.1"
    ]
    versions = ", ".join(f"{name} {version}" for name in ("labkit", "JupyterLab") if (version := version_of(name)))
    yield Finding("Python", platform.python_version(), "", versions)
    yield Finding("system", f"{platform.system()} {platform.machine()}", "", platform.release())
    yield Finding("cores", usable, "", "more ranks than cores take turns: right numbers, longer times")
    yield Finding("memory", round(memory.total / GIB, 1), "GiB", f"{memory.available / GIB:.1f} GiB are free")
    if os.path.isdir("/dev/shm"):
        shm = shutil.disk_usage("/dev/shm")
        why = f"{shm.free / GIB:.1f} GiB are free; labkit needs none of it, NCCL and data loaders do"
        yield Finding("/dev/shm", round(shm.total / GIB, 2), "GiB", why)
    yield Finding("loopback", loopback[0] if loopback else None, "", "the only network that ranks of this machine use")


def version_of(package: str) -> str:
    """The version of an installed package; "" if it is not installed, as JupyterLab need not be."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def torch_findings(hello: Hello) -> Iterator[Finding]:
    """What the doctor says of torch, from the greeting of the process that has imported it."""
    words = f"labkit was tried with {tried_versions()}" if was_tried(hello.torch) else untried(hello.torch)
    once = "imported once, by the process that starts all ranks" if hello.can_fork else "imported anew by each rank"
    yield Finding("torch", hello.torch, "", f"{once}; {words}")
    for path in hello.absent:
        yield Finding(path, "absent", "", without(path))
    forked = (
        "from a process that has imported torch once"
        if hello.can_fork
        else "each rank, warden and judge is executed afresh: on this system a process that has torch bears no fork"
    )
    yield Finding("start of a rank", "fork" if hello.can_fork else "exec", "", forked)


def gpu_findings(facts: GpuFacts) -> Iterator[Finding]:
    """What the doctor says of GPUs: how many can be used, why the others cannot, and what of them one should know."""
    numbers = usable(facts)
    cause = trouble(facts) or ("" if facts.gpus else "torch finds none here: ranks run on the CPU")
    yield Finding("GPUs", len(numbers), "", cause or "torch has kernels for them, and has run one")
    for number, gpu in enumerate(facts.gpus):
        words = f"{gpu.name}, sm_{gpu.capability[0]}{gpu.capability[1]}"
        yield Finding(f"GPU {number}", round(gpu.memory_bytes / GIB, 1), "GiB", words)
    if facts.driver or facts.driver_cuda:
        runs = f"runs CUDA up to {facts.driver_cuda}; " if facts.driver_cuda else ""
        yield Finding("GPU driver", facts.driver or "unknown", "", f"{runs}torch was built for {facts.cuda or 'none'}")
    if facts.nccl:
        yield Finding("NCCL", facts.nccl, "", "the version that this torch was built with")
    for number, words in enumerate(remarks(facts, numbers, len(numbers)), 1):
        yield Finding(f"GPUs, remark {number}", "", "", words)
    for number, words in enumerate(facts.messages, 1):
        yield Finding(f"GPUs, torch says {number}", "", "", words)


def _walls() -> Finding:
    """What the kernel keeps the judge's ranks from: each wall was tried by a confined process."""
    walls = prefork_server().walls()
    standing = sum(wall.stands for wall in walls)
    words = missing(walls) or "a checked attempt cannot read your files, write, connect, start or signal anything"
    return Finding("walls of the judge", f"{standing} of {len(walls)}", "", words)


def _rest(pid: int, at_most_s: float = 15.0) -> None:
    """Wait until the process that starts ranks is done with its imports, which would disturb the measurements."""
    deadline, before = time.monotonic() + at_most_s, -1.0
    with suppress(psutil.NoSuchProcess):  # where it forks nothing it has ended
        process = psutil.Process(pid)
        while (now := sum(process.cpu_times()[:2])) > before and time.monotonic() < deadline:
            before = now
            time.sleep(0.1)


class _Timing(NamedTuple):
    fresh_s: float
    warm_s: float
    private_bytes: int


def _measure(repeats: int, bar: Bar) -> tuple[list[Finding], Line]:
    timings = list[_Timing]()
    for number in (1, 2, 3):
        bar.draw(0.2 * number, f"starting a cluster of 4 ranks and calling it, {number} of 3 times")
        timings.append(_time_cluster(20 * repeats))
    bar.draw(0.8, "sending messages between two ranks")
    with BareCluster(2, device="auto", quiet=True) as cluster:
        link = line_of(through(cluster.run(ping_pong, SIZES, repeats)[0].value))
        where = f"{cluster.choice.devices[0]}, {cluster.choice.carrier}"
    fresh, warm, private = (statistics.median(column) for column in zip(*timings, strict=True))
    return [
        Finding("fresh cluster", round(fresh * 1e3, 1), "ms", "from Cluster(4) to the first sum, median of 3"),
        Finding("warm call", round(warm * 1e3, 2), "ms", f"an empty function on 4 ranks, median of {60 * repeats}"),
        Finding(
            "memory of a rank",
            round(private / 2**20, 1),
            "MiB",
            "its own; what it shares with the others is not counted",
        ),
        Finding("latency alpha", round(link.alpha_s * 1e6, 1), "us", f"of a message between two ranks ({where})"),
        Finding("bandwidth 1/beta", round(link.bandwidth / 1e9, 2), "GB/s", f"the same fit, over {len(SIZES)} sizes"),
    ], link


def _time_cluster(calls: int) -> _Timing:
    started = time.perf_counter()
    with BareCluster(4, device="cpu", quiet=True) as cluster:
        cluster.run(_first_sum)
        fresh = time.perf_counter() - started
        warm = statistics.median(_time_call(cluster) for _ in range(calls))
        private = statistics.median_high(status.private_bytes for status in cluster.status())
    return _Timing(fresh, warm, private)


def _time_call(cluster: BareCluster) -> float:
    started = time.perf_counter()
    cluster.run(_nothing)
    return time.perf_counter() - started


def _first_sum(group: Group) -> float:
    import torch

    return group.all_reduce(torch.ones(1)).item()


def _nothing(group: Group) -> None:
    return None
