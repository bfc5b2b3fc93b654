"""`doctor`: real measurements on this machine, and a clear word where there is nothing to measure."""

from __future__ import annotations

import io
import json
import sys
import time
from contextlib import redirect_stdout
from importlib import metadata

import psutil
import pytest

from labkit.comm.group import Group
from labkit.course.judge.wall_trials import Wall
from labkit.course.machine import doctor as module
from labkit.course.machine.doctor import Finding, MachineReport, doctor
from labkit.launch.cluster import BareCluster
from labkit.launch.gpu_facts import Gpu, GpuFacts
from labkit.launch.verdict import CheckResult, Verdict, kept_verdict

VERSION = metadata.version("labkit")


@pytest.fixture(scope="module")
def look() -> tuple[MachineReport, float, str]:
    """One look at this machine, how many milliseconds it took, and what was printed meanwhile."""
    started, printed = time.perf_counter(), io.StringIO()
    with redirect_stdout(printed):
        report = doctor(quick=True)
    return report, 1e3 * (time.perf_counter() - started), printed.getvalue()


@pytest.fixture
def report(look) -> MachineReport:
    """What was seen."""
    return look[0]


@pytest.mark.slow
def test_everything_that_a_learner_asks_has_an_answer(report):
    """Would catch a finding that was renamed or lost."""
    names = {finding.name for finding in report.findings}
    assert names >= {"Python", "system", "cores", "memory", "loopback", "torch", "GPUs", "start of a rank"}
    assert names >= {"fresh cluster", "warm call", "memory of a rank", "latency alpha", "bandwidth 1/beta"}
    assert names >= {"2 ranks use", "4 ranks use", "8 ranks use", "walls of the judge"}
    assert report.well
    assert all(finding.why for finding in report.findings)


def test_walls_that_are_missing_are_named_by_the_doctor(monkeypatch):
    """Would catch a machine without walls on which nobody says so."""

    class Server:
        def walls(self) -> tuple[Wall, ...]:
            return (Wall("the network", False, "Linux on x86_64"), Wall("writing files", True))

    monkeypatch.setattr(module, "prefork_server", Server)
    finding = module._walls()
    assert finding.value == "1 of 2"
    assert "does not keep an attempt from the network" in finding.why
    assert "Linux on x86_64" in finding.why


@pytest.mark.slow
def test_numbers_are_of_this_machine_and_in_their_units(look):
    """Would catch bytes for GiB, seconds or microseconds for milliseconds, and a constant in place of a measurement."""
    report, whole_ms, _ = look
    assert report["memory"] == pytest.approx(psutil.virtual_memory().total / 2**30, abs=0.06)
    assert report["loopback"] in psutil.net_if_addrs()
    assert 0.05 < report["warm call"] < report["fresh cluster"], "a call cannot be faster than a message or two"
    assert report["fresh cluster"] > 3, "nobody forks four processes in less"
    assert 2 * report["fresh cluster"] + 60 * report["warm call"] / 2 < whole_ms, (
        "two of three clusters, half of 60 calls"
    )
    assert 1 < report["memory of a rank"] < 500  # MiB
    assert report.link.seconds(1 << 22) > report.link.seconds(64) > 0
    assert report["latency alpha"] == pytest.approx(report.link.alpha_s * 1e6, abs=0.06)
    assert report["bandwidth 1/beta"] == pytest.approx(report.link.bandwidth / 1e9, abs=0.006)


@pytest.mark.slow
def test_the_choice_is_the_one_that_a_cluster_makes(report):
    """Would catch a doctor that says one thing and a cluster that does another."""
    with BareCluster(2, device="cpu", quiet=True) as cluster:
        devices = [reply.value for reply in cluster.run(_device)]
        assert report["2 ranks use"] == f"{cluster.choice.devices[0]}, {cluster.choice.carrier}"
        carriers = {reply.value for reply in cluster.run(lambda group: type(group.wire).__name__)}
        assert carriers == {"Shared" if cluster.choice.carrier == "shared memory" else "Native"}
        assert devices[0] == cluster.choice.devices[0]


@pytest.mark.slow
def test_a_look_prints_nothing(look):
    """Would catch a line of a cluster's own between the doctor's data, which no JSON reader forgives."""
    assert look[2] == ""


def _device(group: Group) -> str:
    return str(group.device)


@pytest.mark.slow
def test_the_report_shows_itself_everywhere(report):
    """Would catch a value that is missing from one of the four forms, and markup that is not escaped."""
    from rich.console import Console

    console = Console(width=200, record=True, file=io.StringIO())
    console.print(report)
    rich_text, html = console.export_text(), report._repr_html_()
    plain = json.loads(json.dumps(report.as_dict()))
    for finding in report.findings:
        assert finding.said in repr(report)
        assert finding.said in rich_text
        assert finding.said in html
        assert plain[finding.name] == {"value": finding.value, "unit": finding.unit, "why": finding.why}
    assert "<script>" not in MachineReport((Finding("<script>", "<script>"),), None)._repr_html_()


@pytest.mark.slow
def test_an_unknown_name_is_answered_with_the_known_ones(report):
    """Would catch a bare KeyError."""
    with pytest.raises(KeyError, match="latency alpha"):
        report["latency"]


@pytest.mark.slow
def test_this_process_never_touches_cuda(report):
    """Would catch a doctor that asks for GPUs here: a CUDA context in the kernel costs memory and forbids forks."""
    import torch

    assert not torch.cuda.is_initialized()


def test_a_machine_without_ranks_gets_a_report_and_not_an_exception(monkeypatch):
    """Would catch a doctor who faints: it is on a broken machine that it is asked for."""

    class Broken:
        def ready(self) -> None:
            raise RuntimeError("the process that imports torch for all ranks ended (1): is torch installed?\nmore")

    monkeypatch.setattr(module, "zygote", Broken)
    report = doctor()
    assert not report.well
    assert report["cores"] > 0
    assert "ranks" in repr(report).splitlines()[-1]
    assert "is torch installed?" in report.findings[-1].why
    assert "more" not in report.findings[-1].why
    assert "failed" in report._repr_html_()


def test_the_doctor_tries_gpus_and_what_it_finds_counts_from_now_on(monkeypatch, tmp_path):
    """Would catch a doctor that reads an old verdict after a driver was mended, or keeps the new one to itself."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    gpus = GpuFacts((Gpu("Tesla T4", (7, 5), 15 << 30),) * 2, torch="2.13.0", cuda="13.0", driver="580.1")
    outcome = ["failed"]

    def prove(facts: GpuFacts) -> Verdict:
        return Verdict(
            (CheckResult("hang", outcome[0], "why", 1.0),), facts.as_dict(), "cuda", 2, "box", "d", VERSION, "3.11"
        )

    monkeypatch.setattr(module, "facts_here", lambda: gpus)
    monkeypatch.setattr("labkit.launch.device_choice.facts_here", lambda: gpus)
    monkeypatch.setattr(module, "prove", prove)
    monkeypatch.setattr(module, "_measure", lambda *_: ([], None))
    monkeypatch.setattr(module, "_rest", lambda pid: None)
    report = doctor()
    between = "shared memory" if sys.platform == "linux" else "gloo"
    assert report["self-test of the GPUs"] == "failed"
    assert report["2 ranks use"] == f"cpu, {between}"
    assert report.everything()["self-test"]["parts"][0]["words"] == "why"
    outcome[0] = "passed"
    report = doctor()
    assert report["self-test of the GPUs"] == "passed"
    assert (report["2 ranks use"], report["4 ranks use"]) == ("cuda:0, nccl", f"cpu, {between}")
    assert report["GPU 1"] == 15.0
    assert kept_verdict(gpus) == report.verdict


@pytest.mark.gpu
def test_gpus_are_named_with_their_memory_and_nccl(report):
    """Would catch a GPU that is counted and not described."""
    assert report["GPUs"] >= 1
    assert report["GPU 0"] > 1
    assert report["NCCL"].count(".") == 2
