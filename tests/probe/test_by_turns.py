"""The quickest turn of each of several programs: all take turns, and a slow turn does not count."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from labkit import run_threads
from labkit.probe import by_turns
from labkit.probe.by_turns import best_seconds


def test_programs_take_turns_and_the_quickest_turn_counts(monkeypatch):
    """Would catch the last turn, the sum or the mean of all turns, one program that runs all its turns first, and a
    program that one rank begins while another is still busy with the one before."""
    calls, now = [], [0.0]
    seconds = {"whole": iter((5.0, 3.0, 4.0)), "pieces": iter((2.0, 9.0, 7.0))}
    group = SimpleNamespace(device="cpu", barrier=lambda: calls.append("barrier"))

    def program(name):
        calls.append(name)
        now[0] += next(seconds[name])

    monkeypatch.setattr(by_turns, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    found = best_seconds(group, {name: lambda name=name: program(name) for name in seconds})
    assert found == {"whole": 3.0, "pieces": 2.0}
    assert calls == ["barrier", "whole", "barrier", "pieces"] * 3


def test_every_rank_has_the_seconds_of_its_own():
    """Would catch programs that one rank calls and another does not: a sum over the ranks would wait for ever."""
    ones = torch.ones(3)
    replies = run_threads(lambda group: best_seconds(group, {"sum": lambda: group.all_reduce(ones)}, 1), 2)
    assert all(list(reply) == ["sum"] and 0 <= reply["sum"] < float("inf") for reply in replies)


def test_no_turn_at_all_is_refused():
    """Would catch an answer of infinitely many seconds."""
    group = SimpleNamespace(device="cpu", barrier=lambda: None)
    with pytest.raises(ValueError, match="at least 1"):
        best_seconds(group, {"a": object}, 0)
