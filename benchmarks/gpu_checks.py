"""What has to work on GPUs before numbers of them mean anything: the parts of gpu.py that pass or fail.

machine      the driver's own table, torch's architectures, and all that `labkit doctor --json` tells
one GPU      tests of ranks that share a GPU over gloo, and of arithmetic in 8 and 16 bits
self-test    on ranks over NCCL: one rank first, each verb, subgroup, mesh, a hang, a stop, the next generation, memory
nccl         tests of every dtype, meshes, a hang with its line, a cap beside the allocator, over NCCL
large        four ranks: attention in a ring with 64 MB of keys and values each, and all-to-all by messages
bridge       torch's DDP, fully_shard and tensor parallelism over labkit's groups, beside one process in float64
others       the other tests that are marked for a GPU, without labs
labs         every lab: with four ranks that share a GPU over gloo, or have one each, and with two or three over NCCL
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
Row = dict[str, Any]
SEVERAL = "tests/gpu/test_several_gpus.py"
OPTIONS = ["-p", "no:cacheprovider", "-p", "no:nbval", "-p", "no:anyio"]


def told(command: list[str]) -> str:
    """What a command prints, or why there is nothing."""
    try:
        run = subprocess.run(command, text=True, capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return run.stdout.strip() or run.stderr.strip()


def machine(device: str, quick: bool) -> list[Row]:
    """What the driver and torch say, and the report of the doctor, which is kept beside the other numbers."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "box.json"
        said = told([sys.executable, "-m", "labkit", "doctor", "--json", str(report)])
        text = report.read_text(encoding="utf-8") if report.exists() else ""
    return [
        {"asked": "nvidia-smi", "answer": told(["nvidia-smi"])},
        {"asked": "torch.cuda.get_arch_list()", "answer": " ".join(torch.cuda.get_arch_list())},
        {"asked": "labkit doctor", "answer": said},
        {"asked": "labkit doctor --json", "answer": text} | ({} if text else {"error": "the doctor tells nothing"}),
    ]


def self_test(device: str, quick: bool) -> list[Row]:
    """Each part of the self-test, on up to four ranks."""
    from labkit.self_test import examine
    from tests.gpu.ranks import maker

    n = 4 if torch.cuda.device_count() < 2 else min(4, torch.cuda.device_count())
    rows: list[Row] = []
    for part in examine(*maker(device, n), n):
        row = {"part": part.name, "outcome": part.outcome, "words": part.words, "s": part.seconds, "ranks": n}
        rows.append(row | ({"error": part.words} if part.outcome == "failed" else {}))
    return rows


def pytest(*asked: str) -> Callable[[str, bool], list[Row]]:
    """A part that runs those of the tests asked for that are marked for a GPU."""

    def run(device: str, quick: bool) -> list[Row]:
        mark = "gpu" if torch.device(device).type == "cuda" else "not gpu"
        command = [sys.executable, "-m", "pytest", *asked, "-m", mark, "-v", "-rfEs", "--durations=0", *OPTIONS]
        lines = []
        with subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as done:
            assert done.stdout is not None
            for line in done.stdout:  # a part that is ended for its time has told how far it came
                print(line, end="", flush=True)
                lines.append(line.rstrip())
        slow = [re.match(r"([\d.]+)s call +(\S+)", line) for line in lines]
        rows = [{"result": f"{match[2]} {match[1]} s"} for match in slow if match]
        rows += [{"result": line} for line in lines if re.match(r"(FAILED|ERROR|SKIPPED) \S*tests", line)]
        rows.append({"result": (lines or ["nothing was said"])[-1].strip("= ")})
        if done.returncode:
            rows.append({"result": f"exit {done.returncode}", "error": "\n".join(lines)[-20000:]})
        return rows

    return run


def labs(device: str, quick: bool) -> list[Row]:
    """Every lab that is to run on a GPU, several at a time."""
    at_a_time = max(1, min(8, (os.cpu_count() or 1) // 3))
    lab = "tests/test_notebooks.py::test_a_lab_runs_through_and_leaves_nothing_behind"
    return pytest(lab, "-n", str(at_a_time), *(["-k", "00_ or 03_"] if quick else []))(device, quick)


def others(device: str, quick: bool) -> list[Row]:
    """The files with a test for a GPU that no other part runs."""
    marked = (
        file for file in sorted(ROOT.glob("tests/**/test_*.py")) if "mark.gpu" in file.read_text(encoding="utf-8")
    )
    files = [str(file) for file in marked if file.parent.name != "gpu" and file.name != "test_notebooks.py"]
    return pytest(*files)(device, quick)


LARGE = "ring_of_four or everybody_may_send"
CHECKS: dict[str, Callable[[str, bool], list[Row]]] = {
    "machine": machine,
    "one GPU": pytest("tests/gpu/test_one_gpu.py"),
    "self-test": self_test,
    "nccl": pytest(SEVERAL, "-k", f"not ({LARGE} or self_test or fully_shard)"),
    "large": pytest(SEVERAL, "-k", LARGE),
    "bridge": pytest(
        "tests/gpu/test_bridge.py", f"{SEVERAL}::test_fully_shard_over_the_bridge_trains_as_one_process_does"
    ),
    "others": others,
    "labs": labs,
}
