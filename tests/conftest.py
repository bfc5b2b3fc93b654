"""Shared by all tests. Marks, time-outs and what counts as an error are in pyproject.toml."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes is the machine's affair: a busy one would fail tests that find nothing wrong.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# The same examples each time: a red is of what was changed. New ones: pytest --hypothesis-profile=untimed
settings.register_profile("same", settings.get_profile("untimed"), derandomize=True)
settings.load_profile("same")

gc.disable()  # until all tests are imported: nothing of that is garbage, and looking for some takes half a second

PROBLEMS, BUILD = (f"tests/course/exercises/test_{name}.py" for name in ("problems", "build"))
CLASSROOM, ATTACKS = "tests/course/classroom/test_classroom.py", "tests/course/judge/test_attacks.py"
GRIDS = ("tests/test_compose.py", "tests/test_rehearsal.py")
"""Files of which each test is a table of minutes, and has nothing dear in common with the next."""
FIRST = ("tests/test_lint.py", "tests/browser", "tests/test_notebooks.py", CLASSROOM, ATTACKS, *GRIDS, "tests/faults")
"""What takes longest is begun first, so that at the end no worker is left alone with it."""
LAST = PROBLEMS
"""A hundred units of a few seconds: whichever worker is free takes the next, and all end together."""
PROCESSOR, BEFORE = "processor_s", pytest.StashKey[float]()


@pytest.fixture(scope="session", autouse=True)
def devices() -> None:
    """Some tests use torch's own fake mode, and others fork: see `count_devices`."""
    from labkit.probe.fake_reads import count_devices

    count_devices()


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--long` runs the labs as a person would, with quick=False; `--minutes FILE` adds up the runs that name it;
    `--until SECONDS` (since 1970) begins no test after that time, so that a slow machine ends with what it could do."""
    parser.addoption("--long", action="store_true", help="run the labs with quick=False")
    parser.addoption("--minutes", type=Path, help="add this run's minutes by folder to those in a file")
    parser.addoption("--until", type=float, help="begin no test after this time, in seconds since 1970")


def unit_of(test: str) -> str:
    """The tests that one worker runs in one go, because they share something that is dear: a file as a rule.

    All browser tests share a browser and a server, the tests of a lab its run, the mistakes in an exercise those runs
    that explain several of them."""
    file, _, name = test.partition("::")
    if file in GRIDS:
        return test.partition("[")[0]
    if file.startswith("tests/browser/"):
        return "tests/browser"
    shared = re.search(r"\[(\d\d[_.]\w+)", name)
    if shared and file in ("tests/test_notebooks.py", PROBLEMS, BUILD):
        return f"{file} {shared[1]}"
    return file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n 3` a worker takes one unit of tests after the other."""
    from xdist.scheduler import LoadScopeScheduling

    class ByUnit(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    return ByUnit(config, log)


@pytest.hookimpl(trylast=True)  # when -m and -k have had their say
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Units stay together, the longest come first; what needs a GPU is skipped with the reason where there is none."""
    units = {unit: place for place, unit in enumerate(dict.fromkeys(unit_of(item.nodeid) for item in items))}

    def order(item: pytest.Item) -> tuple[int, int]:
        file = item.nodeid
        place = next((k for k, first in enumerate(FIRST) if file.startswith(first)), len(FIRST))
        return place + file.startswith(LAST), units[unit_of(file)]

    items.sort(key=order)
    for_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not for_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in for_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a GPU, and torch finds none here"))


def pytest_collection_finish() -> None:
    """What a test process need not do: compute small sums with two threads, and look through torch for garbage.

    A second thread waits by turning round and round, and several workers on two cores leave it nothing but waiting:
    with it the tests of `train` took three times as long. A collection looks at half a million objects of imports."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
    gc.freeze()
    gc.enable()


def pytest_configure() -> None:
    """A run in the background of a shell inherits an ignored SIGINT, and the tests of the stop button send it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Where the minutes go


def processor_s() -> float:
    """Seconds of processor time of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """No test begins when the time of the run is over. Remember how much processor time was spent before this one."""
    until = item.config.getoption("--until")
    if until is not None and time.time() > until:
        pytest.skip("not run: this machine was too slow for all tests in the time that they had")
    item.stash[BEFORE] = processor_s()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """The report on a test's end carries what it took."""
    report = (yield).get_result()
    if report.when == "teardown" and BEFORE in item.stash:
        report.user_properties.append((PROCESSOR, processor_s() - item.stash[BEFORE]))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """How many known mistakes in exercises were rejected for what they are, and minutes by folder."""
    if hasattr(config, "workerinput"):  # a worker's share is in what its chief tells
        return
    reports = [report for some in terminalreporter.stats.values() for report in some if hasattr(report, "duration")]
    mistakes = [report for report in reports if "::test_a_mistake_is_rejected" in report.nodeid]
    if judged := [report for report in mistakes if report.when == "call" or report.failed]:
        passed = sum(report.passed for report in judged)
        terminalreporter.write_line(
            f"mutation score of the exercises' checks: {passed} of {len(judged)} ({passed / len(judged):.0%})"
        )
    minutes: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for report in reports:
        row = minutes[folder_of(report.nodeid)]
        row[0] += report.when == "call" or report.skipped
        row[1] += report.duration / 60
        row[2] += dict(report.user_properties).get(PROCESSOR, 0.0) / 60
    kept = config.getoption("--minutes")
    if kept is not None:
        for folder, row in json.loads(kept.read_text() if kept.exists() else "{}").items():
            minutes[folder] = [mine + other for mine, other in zip(minutes[folder], row, strict=True)]
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(minutes))
    if len(minutes) > 1:
        terminalreporter.write_line(f"{'folder':24}{'tests':>8}{'minutes':>10}{'processor':>12}")
        for folder, (n_tests, wall, processor) in sorted(minutes.items(), key=lambda pair: -pair[1][1]):
            terminalreporter.write_line(f"{folder:24}{n_tests:8}{wall:10.1f}{processor:12.1f}")


def folder_of(test: str) -> str:
    """`tests/comm/test_ring.py::test_it` -> `tests/comm`; the labs' runs, which take longest, stand for themselves."""
    file = test.partition("::")[0]
    return file if file == "tests/test_notebooks.py" else file.rpartition("/")[0]
