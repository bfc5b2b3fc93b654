"""The laws of a run that survives: against the published job, against calculus done numerically, against events."""

from __future__ import annotations

import math

import pytest

from labkit.plan.model.shape import ModelShape
from labkit.plan.pocket.survival import (
    HOUR_S,
    LLAMA3_DEVICE_MTBF_S,
    LLAMA3_DEVICES,
    Job,
    best_interval,
    checkpoint_bytes,
    daly,
    device_mtbf,
    first_order,
    gathered_s,
    goodput,
    job_mtbf,
    sharded_s,
    shares,
    shrinking,
    simulated,
    stretches,
    with_spares,
    young,
)

JOBS = [
    Job(mtbf_s=11_000, block_s=60, restart_s=600),
    Job(mtbf_s=11_000, block_s=5, restart_s=600, write_s=90),
    Job(mtbf_s=100, block_s=20, restart_s=50),  # a restart fails as a rule
    Job(mtbf_s=100, block_s=1, restart_s=0, write_s=20),
]


def test_the_published_job_stops_every_three_hours_and_keeps_nine_tenths():
    """Would catch failures that do not grow with the devices."""
    mean = job_mtbf(LLAMA3_DEVICE_MTBF_S, LLAMA3_DEVICES)
    assert mean / HOUR_S == pytest.approx(54 * 24 / 419)
    assert 5.7 < LLAMA3_DEVICE_MTBF_S / HOUR_S / 24 / 365 < 5.9
    assert job_mtbf(LLAMA3_DEVICE_MTBF_S, 8) / HOUR_S / 24 > 200
    assert goodput(Job(mean, 30, 600), young(Job(mean, 30, 600))) > 0.85
    assert device_mtbf(10, 5, 3.0) == 6


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_law_and_simulation_agree_within_the_error(job, factor):
    """Would catch a law that forgets failures during a restart or a block, or counts a write that was not done."""
    interval = max(factor * best_interval(job), job.write_s - job.block_s)
    events, law = simulated(job, interval, 20_000, seed=3), shares(job, interval)
    assert abs(events.goodput - law["useful"]) < 4 * events.error < 0.1
    assert law.total == pytest.approx(1)
    assert events.shares.total == pytest.approx(1)
    for item in law.items:
        assert events.shares[item.name] == pytest.approx(item.value, abs=0.02), item.name


@pytest.mark.parametrize(("mtbf_min", "published_min"), [(24 * 60, 117), (6 * 60, 57), (15, 9.1)])
def test_dalys_interval_is_that_of_his_figures(mtbf_min, published_min):
    """Would catch a coefficient of the series that is not his: figures 3 to 5 of the paper, for a dump of 5 minutes."""
    assert daly(Job(60 * mtbf_min, 60 * 5)) / 60 == pytest.approx(published_min, rel=0.006)


def test_the_intervals_are_where_the_costs_are_least():
    """Would catch a lost factor 2 under the root."""
    for job in JOBS:
        best = best_interval(job)
        if best > job.write_s - job.block_s:
            assert goodput(job, best) > max(goodput(job, best * 0.98), goodput(job, best * 1.02))
            assert daly(job) == pytest.approx(best, rel=0.01)
        optimum = young(job)
        if optimum > job.write_s:
            costs = [first_order(job, optimum * factor) for factor in (0.99, 1.0, 1.01)]
            assert costs[1].total < min(costs[0].total, costs[2].total)
            assert costs[1]["checkpoints"] == pytest.approx(costs[1]["done again"])
    rare = Job(mtbf_s=1e7, block_s=1)
    assert best_interval(rare) == pytest.approx(young(rare), rel=1e-3)
    assert 1 - goodput(rare, young(rare)) == pytest.approx(first_order(rare, young(rare)).total, rel=1e-2)
    assert daly(Job(mtbf_s=10, block_s=20)) == 10
    slow = Job(mtbf_s=1e4, block_s=1, write_s=500)
    assert best_interval(slow) == 499


def test_a_write_behind_the_steps_pays_and_costs_what_a_longer_restart_does():
    """Would catch an async checkpoint that counts from its copy on."""
    behind = Job(mtbf_s=11_000, block_s=5, restart_s=600, write_s=90)
    sync = behind.synchronous()
    assert (sync.block_s, sync.write_s) == (95, 0)
    assert goodput(behind, best_interval(behind)) > goodput(sync, best_interval(sync)) + 0.05
    assert goodput(behind, 300) == pytest.approx(goodput(Job(11_000, 5, 690), 300))
    assert goodput(behind, 300) < goodput(Job(11_000, 5, 600), 300)


def test_events_are_in_order_and_drawn_anew_for_each_seed():
    """Would catch a clock that runs backwards, and a seed that is ignored."""
    job = JOBS[1]
    before = 0.0
    for stretch, _ in zip(stretches(job, 200, seed=1), range(300), strict=False):
        assert stretch.began_s == before
        assert stretch.up_s >= stretch.began_s + job.restart_s
        assert 0 <= stretch.n_saved * 205 <= stretch.failed_s - stretch.up_s
        before = stretch.failed_s
    assert simulated(job, 200, 50, seed=1) == simulated(job, 200, 50, seed=1) != simulated(job, 200, 50, seed=2)


def test_a_checkpoint_takes_as_long_as_its_slowest_part():
    """Would catch n writers that are n times as fast however slow the disk is that they share."""
    n_bytes = checkpoint_bytes(ModelShape.preset("llama3-405b").n_params)
    assert n_bytes == 12 * ModelShape.preset("llama3-405b").n_params > 4.8e12
    assert sharded_s(n_bytes, 2048, 2e9, 1e15) == pytest.approx(n_bytes / 2048 / 2e9)
    assert sharded_s(n_bytes, 2048, 2e9, 2e12) == pytest.approx(n_bytes / 2e12)
    assert gathered_s(800, 4, 100, 10) == pytest.approx(6 + 80)
    assert gathered_s(n_bytes, 2048, 50e9, 2e9) > 1000 * sharded_s(n_bytes, 2048, 2e9, 1e15)


def test_spares_and_shrinking_are_probabilities():
    """Would catch spares that are free, and a replica that runs without one of its devices."""
    assert with_spares(4, 0, 9, 1) == pytest.approx(0.9**4)
    assert with_spares(3, 1, 9, 1) == pytest.approx((0.9**4 + 4 * 0.1 * 0.9**3) * 3 / 4)
    assert with_spares(8, 2, 1e9, 0) == pytest.approx(0.8)
    assert shrinking(8, 9, 1) == pytest.approx(0.9**8)
    tries = [with_spares(16_384, s, LLAMA3_DEVICE_MTBF_S, 24 * HOUR_S) for s in range(0, 64, 4)]
    assert max(tries) not in (tries[0], tries[-1])


def test_what_makes_no_sense_is_refused():
    """Would catch a writer that never catches up, and means below 0."""
    with pytest.raises(ValueError, match="save every 80 s or less often"):
        goodput(Job(1000, 10, 0, 90), 60)
    for odd in (0, -1, math.inf, math.nan):
        with pytest.raises(ValueError, match="an interval is above 0"):
            goodput(JOBS[0], odd)
    for odd in ({"mtbf_s": 0}, {"block_s": 0}, {"restart_s": -1}, {"write_s": -1}):
        with pytest.raises(ValueError, match="got"):
            Job(**{"mtbf_s": 10.0, "block_s": 1.0, **odd})
    with pytest.raises(ValueError, match="2 failures"):
        simulated(JOBS[0], 100, 1)
    with pytest.raises(ValueError, match="above 0"):
        job_mtbf(0, 4)
    with pytest.raises(ValueError, match="above 0"):
        device_mtbf(4, 0, 4)
