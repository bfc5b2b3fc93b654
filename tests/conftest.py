"""Shared by all tests. Marks, time-outs and what counts as an error are in pyproject.toml."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes is the machine's affair: a busy one would fail tests that find nothing wrong.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# The same examples each time: a red is of what was changed. New ones: pytest --hypothesis-profile=untimed
settings.register_profile("same", settings.get_profile("untimed"), derandomize=True)
settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--long` runs the labs as a person would, with quick=False."""
    parser.addoption("--long", action="store_true", help="run the labs with quick=False")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n 2 --dist loadfile` one worker runs a file, and one all that share the browser."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "the browser" if nodeid.startswith("tests/browser/") else super()._split_scope(nodeid)

    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need a GPU are skipped, with the reason, where torch finds none."""
    for_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not for_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in for_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a GPU, and torch finds none here"))


def pytest_configure() -> None:
    """A run in the background of a shell inherits an ignored SIGINT, and the tests of the stop button send it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How many known mistakes in exercises were rejected for what they are, before pytest's closing line."""
    mistakes = "tests/lab/test_problems.py::test_a_mistake_is_rejected"
    count = {
        outcome: sum(
            getattr(each, "nodeid", "").startswith(mistakes) for each in terminalreporter.stats.get(outcome, ())
        )
        for outcome in ("passed", "failed", "error")
    }
    if total := sum(count.values()):
        score = f"{count['passed']} of {total} ({count['passed'] / total:.0%})"
        terminalreporter.write_line(f"mutation score of the exercises' checks: {score}")
