"""The table of what ran where, on GPUs, is made of what the doctor wrote there."""

from __future__ import annotations

import json
import platform
import runpy
from datetime import date
from importlib import metadata
from pathlib import Path

from labkit.course.machine.doctor import Finding, MachineReport, gpu_findings
from labkit.launch.gpu_facts import Gpu, GpuFacts
from labkit.launch.verdict import CheckResult, Verdict

TABLES = runpy.run_path(str(Path(__file__).resolve().parents[1] / "benchmarks/tables.py"))
H100, V100 = Gpu("NVIDIA H100", (9, 0)), Gpu("Tesla V100", (7, 0))
PARTS = (
    CheckResult("verbs", "passed", "fine", 1.0),
    CheckResult("hang", "failed", "rank 0 | rank 1", 1.0),
    CheckResult("mesh", "skipped", "one GPU", 0.0),
)


def store(folder, name, facts, verdict):
    """What `labkit doctor --json` writes on such a machine."""
    findings = (*gpu_findings(facts), Finding("ranks", 1))
    folder.mkdir(exist_ok=True)
    about = {} if verdict is None else {"machine": verdict.machine, "date": verdict.date}
    plain = {**MachineReport(findings, None, facts, verdict).everything(), **about}
    (folder / f"{name}.json").write_text(json.dumps(plain))


def verdict(facts, machine, day, parts=PARTS):
    """The verdict of a self-test on a machine and a day."""
    return Verdict(parts, facts.as_dict(), "cuda", 2, machine, day, "0.1.0", "3.11.7")


def test_each_machine_and_day_has_a_row_with_what_passed_and_what_failed(tmp_path):
    """Would catch a failure that is left out, and a row that is taken for one of another machine."""
    good = GpuFacts((H100,) * 2, torch="2.13.0+cu130", cuda="13.0", driver="580.65.06", archs=("sm_90",))
    store(tmp_path / "boxes", "b", good, verdict(good, "second", "2026-02-01", PARTS[:1]))
    store(tmp_path / "boxes", "a", good, verdict(good, "first", "2026-01-01"))
    old = GpuFacts((V100,), torch="2.13.0+cu130", cuda="13.0", driver="580.65.06", archs=("sm_90",))
    store(tmp_path / "boxes", "z", old, None)
    rows = [line for line in TABLES["boxes"](tmp_path) if line.startswith("| ")]
    said = f"2 x NVIDIA H100 | 2.13.0+cu130 | 580.65.06 | {metadata.version('labkit')}"
    assert rows[1] == f"| first | 2026-01-01 | {said} | verbs | mesh | hang: rank 0 \\| rank 1 |"
    assert rows[2].startswith(f"| second | 2026-02-01 | {said} | verbs |")
    assert rows[3].startswith(f"| {platform.node()} | {date.today().isoformat()[:4]}")
    assert "GPU 0 (Tesla V100, sm_70) cannot be used" in rows[3]
    assert "What ran where" in TABLES["page"](tmp_path)


def test_without_a_file_one_sentence_says_that_no_gpu_has_run_it(tmp_path):
    """Would catch a table that claims, or keeps quiet about, what nobody has run."""
    assert TABLES["boxes"](tmp_path) == [TABLES["NO_GPU"]]
    assert TABLES["NO_GPU"].startswith("No GPU has run labkit yet:")
    assert TABLES["NO_GPU"] in TABLES["page"](tmp_path)
