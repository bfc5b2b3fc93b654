"""Shared by all tests. Marks, time-outs and what counts as an error are in pyproject.toml."""

from __future__ import annotations

import signal

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--long` runs the labs as a person would, with quick=False."""
    parser.addoption("--long", action="store_true", help="run the labs with quick=False")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker runs a file, and all that shares the browser. Without a GPU, `gpu` is skipped with the reason."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group("browser" if item.get_closest_marker("browser") else item.location[0]))
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
