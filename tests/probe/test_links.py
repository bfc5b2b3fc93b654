"""Measured links: what is measured, and that everybody gets the same."""

from __future__ import annotations

import time

import pytest
import torch

from labkit import run, run_threads
from labkit.probe import links
from labkit.probe.links import ping_pong, sweep
from tests.simulated import simulate


def test_a_ping_pong_measures_half_a_round_trip_of_the_size_that_was_asked():
    """Would catch a size in numbers taken for bytes, and ranks that go home with different samples."""
    replies = run(ping_pong, [64, 1 << 20], 3, n_ranks=3, device="cpu")
    assert all(reply.value == replies[0].value for reply in replies)
    assert [size for size, _ in replies[0].value] == [64, 1 << 20]
    assert all(seconds > 0 for _, seconds in replies[0].value)
    sent = [transfer.n_bytes for transfer in replies[0].ledger if transfer.verb == "send"]
    assert sent.count(64) == sent.count(1 << 20) == 3 + 2  # three that count, two that warm up


def test_there_and_back_takes_twice_as_long_as_there(monkeypatch):
    """Would catch a latency that is the whole round trip."""
    monkeypatch.setattr(links, "sweep", lambda verb, sizes, group, repeats, share: [(size, 8.0) for size in sizes])
    assert run_threads(lambda group: ping_pong(group, [64, 128]), 2) == [[(64, 4.0), (128, 4.0)]] * 2


def test_a_sweep_reports_the_slowest_rank_in_the_median():
    """Would catch the fastest rank's time, a sum in place of a median, and warm-up that is counted."""

    def slow(group):
        naps, sizes = iter((8.0, 9.0, 0.5, 0.03, 0.02) if group.rank == 1 else (0.01,) * 5), []

        def verb(x: torch.Tensor) -> None:
            sizes.append(x.numel())
            time.sleep(next(naps))

        return sweep(verb, [40], group, 3), sizes

    assert simulate(slow, 3) == [([(40, pytest.approx(0.03))], [10] * 5)] * 3


def test_a_moment_in_which_the_machine_is_busy_falls_on_all_sizes_and_on_no_link():
    """Would catch one size that is three times off its neighbours, since all of its messages met the same delay."""

    def busy_for_a_while(group, share=0.5):
        naps = iter([0.01] * 11 + [5.0] * 6 + [0.01])

        def verb(x: torch.Tensor) -> None:
            time.sleep(next(naps))

        return sweep(verb, [4, 40], group, 7, share)

    assert simulate(busy_for_a_while, 2) == [[(4, pytest.approx(0.01)), (40, pytest.approx(0.01))]] * 2
    all_of_them = simulate(lambda group: busy_for_a_while(group, 1.0), 2)
    assert all_of_them == [[(4, pytest.approx(5.0)), (40, pytest.approx(5.0))]] * 2


def test_impossible_measurements_are_refused():
    """Would catch a median of nothing."""
    for sizes, repeats in (([64], 0), ([-1], 3)):
        with pytest.raises(ValueError, match="repeats at least 1"):
            run_threads(lambda group, s=sizes, r=repeats: sweep(lambda x: None, s, group, r), 1)
    with pytest.raises(ValueError, match="joins two ranks"):
        run_threads(lambda group: ping_pong(group, [64]), 1)
