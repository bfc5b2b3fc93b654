"""labkit on a GPU that is not there: forward, backward and step of everything, without a tensor on the wrong device."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.fake_runs import LAYOUTS, MECHANISMS

ROOT = Path(__file__).resolve().parents[2]
FEW = frozenset(
    {
        "ddp", "zero3", "zero1, offloaded", "sp", "recomputed, dropout", "fp16, zero2, clipped", "fp8, delayed",
        "muon, zero3", "cp, ring", "experts, capped", "zero bubble", "pp x tp",
    }
)  # fmt: skip
"""What `make test` runs; `make rest` runs the others."""
RUNS = [pytest.param(name, marks=[] if name in FEW else [pytest.mark.rest]) for name in LAYOUTS]


@pytest.fixture(scope="module")
def ask():
    """A process with the device, in which one run after the other is tried: {"value": ...} or {"error": ...}."""
    command = [sys.executable, "-m", "tests.gpu.fake_runs"]
    with contextlib.ExitStack() as started:

        def start():
            there = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            started.enter_context(there)
            started.callback(there.kill)
            return there

        newest = [start()]

        def asked(name):
            for _ in range(2):  # once in a thousand runs the process ended where nothing was wrong, without a trace
                there = newest[-1]
                there.stdin.write(f"{name}\n")
                there.stdin.flush()
                if answer := there.stdout.readline():
                    return json.loads(answer)
                newest.append(start())
            return {"error": "its process has ended, twice: stderr says where"}

        yield asked


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_step_of_a_layout_and_recipe_makes_each_tensor_where_its_group_is(name, ask):
    """Would catch a factory without device= anywhere between the batch and the optimizer, backward included."""
    told = ask(name)
    assert "error" not in told, told["error"]


@pytest.mark.slow
@pytest.mark.parametrize("name", MECHANISMS)
def test_a_mechanism_by_itself_makes_each_tensor_where_its_group_is(name, ask):
    """Would catch the same in what no recipe has: adapters, caches, codes, tables, films."""
    told = ask(name)
    assert "error" not in told, told["error"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixed_in_forward", "mixed_in_backward"])
def test_a_sum_of_two_devices_is_refused(name, ask):
    """Would catch a fake device on which nothing can be wrong: all others here would pass, too."""
    assert "on the same device, but found at least two devices, cudalike:0 and cpu" in ask(name)["error"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["spans_of_a_clock", "waits_of_a_clock", "waits_of_own_time", "memory_of_modules"])
def test_what_happens_in_backward_counts_as_on_a_cpu(name, ask):
    """A bug: backward of a GPU runs in a thread of its own, whose spans and waits were taken for a stranger's."""
    told = ask(name)
    assert "error" not in told, told["error"]
    here, there = told["value"]
    assert here == there
    assert here
