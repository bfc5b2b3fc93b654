"""Rates of this machine: measured, the same on every rank, and those that the links were given."""

from __future__ import annotations

import psutil
import pytest

from labkit import Cluster, Layout, Links, Recipe, run_threads
from labkit.plan.machine.collectives import Line, seconds
from labkit.plan.step.time import predict_step
from labkit.probe.machine import hops_of, measure_hardware, measured_link, sizes_of, through
from labkit.train.config import GPTConfig
from tests.cases import cases


@pytest.mark.slow
def test_rates_are_the_same_on_every_rank_and_the_link_is_the_one_that_was_asked_for():
    """Would catch ranks that plan with different machines, flops for bytes, a beta that is taken for a speed."""
    links = Links.uniform(2, alpha_s=20e-3, bytes_per_s=50e6)
    with Cluster(2, device="cpu", links=links, quiet=True) as two:
        here, there = (reply.value for reply in two.run(measure_hardware, 64, 2))
    assert here == there
    assert [item.name for item in here.flops] == ["fp32", "fp64", "bf16", "fp16"]
    assert all(item.value > 1e6 and item.source == "measured by 2 ranks at a time" for item in here.flops)
    assert here.bytes_per_s.value > 1e7
    assert 0 < here.launch_s < 1e-2
    assert here.memory_bytes.value == psutil.virtual_memory().total // 2
    assert here.intra.alpha_s == pytest.approx(20e-3, rel=0.5)
    assert here.intra.bytes_per_s == pytest.approx(50e6, rel=0.5)


def test_a_link_that_is_no_slower_for_large_messages_still_has_a_speed():
    """A bug: on a busy machine the line was flat now and then, and a division by its slope failed."""
    assert through([(100, 1e-3), (1_100, 2e-3)]).bytes_per_s == pytest.approx(1e6)
    flat = through([(64, 2e-3), (4_000_000, 2e-3)])
    assert (flat.alpha_s, flat.bytes_per_s) == (pytest.approx(2e-3), 2e9)


def test_one_rank_needs_no_link_and_can_be_predicted_with():
    """Would catch a ping-pong with nobody."""
    (here,) = run_threads(measure_hardware, 1, 64, 1)
    assert here.intra.source.startswith("assumed")
    assert predict_step(GPTConfig(), Layout(), Recipe(), here).total > 0


@pytest.mark.parametrize("options", [(0, 1), (64, 0)])
def test_nothing_to_measure_is_refused(options):
    """Would catch a median of nothing."""
    with pytest.raises(ValueError, match="at least 1"):
        run_threads(measure_hardware, 1, *options)


@cases("free_bytes", [2**24, 2**31, 15 * 2**30, 80 * 2**30])
def test_a_gpu_is_measured_beyond_its_caches_and_its_launches(free_bytes):
    """A bug: 16 MB of memory lay in the cache of an A100, and products of 512 took less than a launch."""
    sizes, on_cpu = sizes_of("cuda:1", free_bytes), sizes_of("cpu", free_bytes)
    assert 2 * sizes.memory_bytes <= max(2**21, free_bytes / 4)
    assert sizes.memory_bytes >= min(free_bytes / 16, 8 * 130e6)
    assert max(sizes.link_bytes) <= sizes.memory_bytes
    assert 4096 <= sizes.product <= 8192
    assert min(sizes.in_a_row, sizes.starts) > 1  # else what is measured is the wait for the device
    assert (on_cpu.product, on_cpu.in_a_row, on_cpu.starts) == (512, 1, 1)


@pytest.mark.parametrize("n", [2, 3, 8])
def test_the_link_of_nccl_is_the_one_with_which_a_ring_takes_as_long(n):
    """Would catch 2(n-1) hops counted as n, and the bytes of a hop taken for those of the tensor."""
    line = Line(7e-6, 1 / 200e9)
    sums = [(size, seconds("ring", "all_reduce", n, size, line)) for size in sizes_of("cuda", 80 * 2**30).link_bytes]
    link = through(hops_of(sums, n))
    assert (link.alpha_s, link.bytes_per_s) == (pytest.approx(7e-6), pytest.approx(200e9))


def on_the_device(group):
    """The same measurement on a wire that says nothing, and on one that says it is NCCL's."""
    plain = measured_link(group, (64, 2**16), 2)
    sent = len(group.ledger)
    group.wire.on_device = True
    return plain, measured_link(group, (64, 2**16), 2), {transfer.verb for transfer in group.ledger.transfers[sent:]}


def test_where_nccl_carries_collectives_no_message_is_timed():
    """A bug: the link of NCCL was told from labkit's messages, which travel by way of the host."""
    with Cluster(2, device="cpu", quiet=True) as two:
        here, there = (reply.value for reply in two.run(on_the_device))
    assert here == there
    messages, sums, verbs = here
    assert verbs == {"all_reduce", "barrier"}
    assert messages.source.startswith("ping-pong")
    assert sums.source == "all_reduces of NCCL"
    assert min(messages.bytes_per_s, sums.bytes_per_s) > 1e3
