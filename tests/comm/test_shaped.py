"""Shaped links on real processes: what was asked is what is measured, and the values are those of any other wire."""

from __future__ import annotations

import glob
import itertools
import os
import signal
import threading
import time

import pytest
import torch

from labkit import Cluster, Layout, Mesh, WorkerError, ring, run_threads, star, tree
from labkit.comm import hierarchy
from labkit.plan import collectives
from labkit.plan.link import Link
from labkit.plan.topology import Links
from labkit.probe.links import ping_pong, sweep

ALPHA, SPEED = 15e-3, 20e6
UNIFORM = Links.uniform(4, alpha_s=ALPHA, bytes_per_s=SPEED)
FAST, SLOW = Link("fast", 2e-3, 200e6), Link("slow", 15e-3, 20e6)
NODES = Links.two_nodes(2, FAST, SLOW)


@pytest.fixture(scope="module")
def uniform():
    with Cluster(4, device="cpu", links=UNIFORM, quiet=True) as made:
        yield made


@pytest.fixture(scope="module")
def nodes():
    with Cluster(4, device="cpu", links=NODES, quiet=True) as made:
        yield made


@pytest.fixture(scope="module")
def plain():
    with Cluster(4, device="cpu", quiet=True) as made:
        yield made


def values(cluster, fn, *args):
    return [reply.value for reply in cluster.run(fn, *args)]


def seconds_of(cluster, fn, *args, repeats=3):
    """Seconds of `fn(group, *args)` on the slowest rank, between two barriers; the median of a few."""

    def timed(group, repeats):
        import statistics
        import time

        times = []
        for _ in range(repeats + 1):
            group.barrier()
            started = time.perf_counter()
            fn(group, *args)
            times.append(time.perf_counter() - started)
        return statistics.median(times[1:])

    return max(values(cluster, timed, repeats))


def within(share, expected, measure, attempts=25):
    """Whether `measure()` comes within a share of what was expected; a disturbed machine may try again."""
    found = []
    for _ in range(attempts):
        found.append(measure())
        if abs(found[-1] / expected - 1) <= share:
            return True
    print(f"expected {expected}, found {found}")
    return False


def sometimes(true, attempts=25):
    """Whether `true()` is so at least once; the machine may be busy with something else."""
    return any(true() for _ in range(attempts))


# -- the links that were asked for are the links that are measured


@pytest.mark.parametrize(("alpha_s", "bytes_per_s"), [(20e-3, 40e6), (40e-3, 5e6), (10e-3, 100e6)])
def test_measured_alpha_and_beta_are_within_ten_percent_of_what_was_asked(alpha_s, bytes_per_s):
    """Would catch latency that is counted at both ends, headers that are counted, and sleeps that round up."""
    sizes = [4, round(alpha_s * bytes_per_s), round(4 * alpha_s * bytes_per_s)]
    with Cluster(2, device="cpu", links=Links.uniform(2, alpha_s=alpha_s, bytes_per_s=bytes_per_s), quiet=True) as two:
        off = []
        for _ in range(10):
            line = collectives.fit(values(two, ping_pong, sizes, 5)[0])
            off.append((line.alpha_s / alpha_s - 1, line.beta_s_per_byte * bytes_per_s - 1))
            if max(map(abs, off[-1])) < 0.1:
                return
    pytest.fail(f"alpha and beta are off by {off}")


def test_an_exchange_takes_the_time_of_one_message(uniform):
    """Full duplex: would catch an edge whose two directions share their bytes."""

    def both_ways(group):
        n, me = group.size, group.rank
        group.exchange(torch.zeros(250_000), (me + 1) % n, (me - 1) % n)

    assert within(0.1, ALPHA + 1e6 / SPEED, lambda: seconds_of(uniform, both_ways))


def test_two_senders_share_the_card_of_their_node(nodes):
    """Would catch an uplink for each rank: tensor and data parallel groups would not be in each other's way."""

    def across(group, senders):
        if group.rank in senders:
            group.send(torch.zeros(250_000), group.rank + 2).wait()
        elif group.rank - 2 in senders:
            group.recv(group.rank - 2)

    one, two = SLOW.alpha_s + 1e6 / SLOW.bytes_per_s, SLOW.alpha_s + 2e6 / SLOW.bytes_per_s
    assert within(0.1, one, lambda: seconds_of(nodes, across, (0,)))
    assert within(0.1, two, lambda: seconds_of(nodes, across, (0, 1)))


@pytest.mark.parametrize("n_bytes", [4_000, 2_000_000])
def test_a_ring_all_reduce_takes_the_time_of_its_law(uniform, n_bytes):
    """2(n-1)(alpha + N/n beta): would catch steps that do not overlap, and wake-ups that add up over 6 steps."""
    law = collectives.seconds("ring", "all_reduce", 4, n_bytes, UNIFORM.line(0, 1))
    measured = lambda: seconds_of(uniform, lambda group, size: group.all_reduce(torch.zeros(size // 4)), n_bytes)  # noqa: E731
    assert within(0.15, law, measured)


def test_who_wins_is_decided_by_the_links(uniform):
    """Few steps win for small tensors, few bytes for large ones, and a server that all talk to has one port: would
    catch a shape that has latency but no bandwidth, or the other way round, and ports that are endless."""

    def reduce(group, name, n_bytes):
        import importlib

        importlib.import_module(f"labkit.comm.{name}").all_reduce(torch.zeros(n_bytes // 4), group)

    def in_order(n_bytes, *names):
        found = [seconds_of(uniform, reduce, name, n_bytes) for name in names]
        return all(faster < 0.8 * slower for faster, slower in itertools.pairwise(found))

    assert sometimes(lambda: in_order(4_000, "tree", "ring"))
    assert sometimes(lambda: in_order(2_000_000, "ring", "tree", "star"))
    law = 2 * ALPHA + 2 * 3 * 2e6 / SPEED  # (n-1) N through one port, in and out
    assert within(0.15, law, lambda: seconds_of(uniform, reduce, "star", 2_000_000))


def test_a_reduction_in_levels_beats_the_flat_ring_across_nodes(nodes):
    """Would catch a hierarchy that sends whole tensors between nodes, or waits for the slow wire inside them."""

    def flat(group, n_bytes):
        ring.all_reduce(torch.zeros(n_bytes // 4), group)

    def levels(group, n_bytes):
        hierarchy.all_reduce(torch.zeros(n_bytes // 4), group)

    for n_bytes, gain in ((4_000, 1.8), (2_000_000, 1.15)):
        inside = 2 * NODES.line(0, 1).seconds(n_bytes / 2)
        across = 2 * (SLOW.alpha_s + n_bytes / 4 * 2 / SLOW.bytes_per_s)  # two rings, one card
        assert within(0.2, inside + across, lambda n=n_bytes: seconds_of(nodes, levels, n))
        assert sometimes(lambda n=n_bytes, g=gain: seconds_of(nodes, flat, n) > g * seconds_of(nodes, levels, n))


def test_tensor_parallelism_across_nodes_collapses(nodes):
    """The same layer on the same two ranks' worth of wire, inside a node and between two: would catch a mesh whose
    groups forget the shape, or take edges by their index in the group."""

    def layer_seconds(group, axis):
        import time

        from torch import nn

        from labkit.parallel.tensor import ColumnParallelLinear, RowParallelLinear

        mesh = Mesh.connect(Layout(dp=2, tp=2), group)
        tp = getattr(mesh, axis)
        torch.manual_seed(0)
        up = ColumnParallelLinear.of(nn.Linear(64, 256), tp)
        down = RowParallelLinear.of(nn.Linear(256, 64), tp)
        x = torch.randn(1000, 64, requires_grad=True)  # 256 KB go through an all_reduce in forward and in backward
        times = []
        for _ in range(4):
            group.barrier()
            started = time.perf_counter()
            down(torch.relu(up(x))).sum().backward()
            times.append(time.perf_counter() - started)
        return sorted(times[1:])[1]

    law = 4 * (SLOW.alpha_s + 2 * 128_000 / SLOW.bytes_per_s)  # two all_reduces of two steps, shared card
    assert sometimes(lambda: max(values(nodes, layer_seconds, "tp")) < 0.7 * law)
    assert min(values(nodes, layer_seconds, "dp")) > 0.9 * law


# -- the values, bytes and errors are those of any other wire


def test_every_verb_gives_what_it_gives_on_an_unshaped_group(uniform, plain):
    """Would catch a collective of messages that differs from gloo's: shapes, ragged cuts, dtypes, what is in place."""

    def verbs(group):
        n, me = group.size, group.rank
        x = torch.arange(6.0 * n).reshape(2 * n, 3) + 10**me
        found = [
            group.all_reduce(x),
            group.all_reduce(x, op="mean"),
            group.all_reduce(x.long(), op="max"),
            group.all_reduce(x.half() / 100, op="min"),
            group.all_reduce(torch.tensor(1.0 + me)),
            group.reduce_scatter(x),
            group.reduce_scatter(x[: n + 1], op="mean"),
            group.all_gather(x),
            group.all_gather(x[:0]),
            group.broadcast(x, source=n - 1),
            group.all_to_all(x),
            group.all_to_all(x[:0]),
            group.all_to_all(x[:, :0]),
            group.exchange(x[me:], (me + 1) % n, (me - 1) % n),
        ]
        mine, whole = x.clone(), x.new_empty(2 * n * n, 3)
        works = [
            group.all_reduce_start(mine, op="mean"),
            group.reduce_scatter_start(x),
            group.all_gather_start(x, whole),
        ]
        found += [group.all_reduce(x[0])]  # queues up behind them
        behind = all(work.done for work in works)
        found += [work.wait() for work in works]
        assert found[-3] is not None
        assert torch.equal(found[-3], mine)
        assert torch.equal(found[-1], whole)
        group.barrier()
        return found, x, behind

    for (shaped, x, behind), (bare, y, _) in zip(values(uniform, verbs), values(plain, verbs), strict=True):
        assert behind
        assert torch.equal(x, y)
        assert [each.shape for each in shaped] == [each.shape for each in bare]
        assert [each.dtype for each in shaped] == [each.dtype for each in bare]
        assert all(torch.allclose(a, b) for a, b in zip(shaped, bare, strict=True))


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (7, 5), (0,)])
def test_a_reduction_in_levels_gives_the_sum_in_any_shape_of_nodes(op, shape):
    """Would catch a mean that is divided twice, ragged parts that meet others, and nodes that are not runs of ranks."""

    def reduced(group, nodes):
        x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(group.rank))
        return x, hierarchy.all_reduce(x, group, op, nodes)

    for placed in ([[0, 1], [2, 3]], [[0, 2, 4], [5, 3, 1]], [[0], [1], [2]], [[0, 1, 2]], [[0]], None):
        found = run_threads(reduced, 3 if placed is None else sum(map(len, placed)), placed)
        xs = torch.stack([x for x, _ in found])
        expected = {"sum": xs.sum(0), "mean": xs.mean(0), "max": xs.amax(0), "min": xs.amin(0)}[op]
        assert all(torch.allclose(total, expected, atol=1e-14) for _, total in found)
        assert all(torch.equal(total, found[0][1]) for _, total in found)


def test_a_reduction_in_levels_sends_the_bytes_of_its_law():
    """Would catch a part that is sent whole between the nodes."""

    def sent(group, nodes):
        hierarchy.all_reduce(torch.ones(960), group, nodes=nodes)
        home = {member: number for number, node in enumerate(nodes) for member in node}
        across = sum(t.n_bytes for t in group.ledger if home[t.to] != home[group.rank])
        return across, group.ledger.sent_bytes()

    for m, k in ((2, 2), (2, 4), (3, 2), (1, 4), (4, 1)):
        found = run_threads(sent, m * k, [list(range(node * k, node * k + k)) for node in range(m)])
        across, inside = 2 * (m - 1) * 3840 // (m * k), 2 * (k - 1) * 3840 // k
        assert found == [(across, across + inside)] * (m * k)


def test_nodes_that_do_not_fit_are_refused():
    """Would catch a rank that belongs nowhere and waits for ever."""
    with pytest.raises(ValueError, match=r"as many ranks on every node, got \[2, 1\]"):
        run_threads(lambda g: hierarchy.all_reduce(torch.ones(3), g, nodes=[[0, 1], [2]]), 3)
    with pytest.raises(ValueError, match="hold its members 0 to 2"):
        run_threads(lambda g: hierarchy.all_reduce(torch.ones(3), g, nodes=[[0, 1]]), 3)


def test_a_swapped_in_hierarchy_is_found_by_the_links(nodes):
    """Would catch a subgroup whose nodes are looked up by index, and a `using` that loses the shape."""

    def swapped(group):
        mesh = Mesh.connect(Layout(dp=2, tp=2), group)
        return (
            hierarchy.nodes_of(group),
            hierarchy.nodes_of(mesh.dp),
            hierarchy.nodes_of(mesh.tp),
            group.using(all_reduce=hierarchy.all_reduce).all_reduce(torch.tensor([10.0**group.rank])).item(),
            mesh.dp.using(all_reduce=hierarchy.all_reduce).all_reduce(torch.tensor([10.0**group.rank])).item(),
        )

    for rank, (world, dp, tp, total, pair) in enumerate(values(nodes, swapped)):
        assert (world, dp, tp) == ([[0, 1], [2, 3]], [[0], [1]], [[0, 1]])
        assert total == 1111
        assert pair == sum(10**r for r in Layout(dp=2, tp=2).ranks("dp", rank))


def test_the_ledger_counts_the_same_bytes_as_without_a_shape(uniform, plain):
    """Would catch verbs in the stream that are not charged, and headers that are."""

    def sent(group):
        x = torch.ones(12 * group.size)
        group.all_reduce(x)
        group.reduce_scatter(x)
        group.all_gather(x)
        group.all_to_all(x)
        group.barrier()
        group.all_reduce_start(x).wait()
        group.all_gather_start(x).wait()
        verbs = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "barrier")
        return [group.ledger.sent_bytes(verb) for verb in verbs], group.ledger.sent_bytes()

    assert values(uniform, sent) == values(plain, sent)


def test_a_verb_that_was_started_overlaps_with_work(uniform):
    """Would catch a `start` that waits: no strategy could hide its communication."""

    def overlapped(group):
        import time

        group.barrier()
        started = time.perf_counter()
        works = [group.all_reduce_start(torch.ones(100_000)) for _ in range(2)]
        begun, looked = time.perf_counter() - started, works[-1].done
        time.sleep(0.25)  # stands for a backward pass
        totals = [work.wait() for work in works]
        return begun, looked, time.perf_counter() - started, [total[0].item() for total in totals]

    law = 2 * collectives.seconds("ring", "all_reduce", 4, 400_000, UNIFORM.line(0, 1))
    assert law > 0.2

    def hidden():
        seen = values(uniform, overlapped)
        assert [totals for *_, totals in seen] == [[4.0, 4.0]] * 4
        # 0.25 s more, were it not overlapped
        return all(begun < 0.1 and not looked and took < law + 0.2 for begun, looked, took, _ in seen)

    assert sometimes(hidden)


def test_messages_of_a_started_verb_meet_nobody_elses(uniform):
    """Would catch tags that a stream shares with the main thread: chunks of two tensors would be mixed up."""

    def both(group):
        n, me = group.size, group.rank
        under_way = group.all_reduce_start(torch.arange(40_000.0))
        swapped = group.using(all_reduce=ring.all_reduce).all_reduce(torch.arange(40_000.0) + 1)
        came = [group.exchange(torch.full((10_000,), 1.0 * me), (me + 1) % n, (me - 1) % n, tag=t) for t in range(n)]
        return under_way.wait(), swapped, came

    for rank, (started, swapped, came) in enumerate(values(uniform, both)):
        assert torch.equal(started, 4 * torch.arange(40_000.0))
        assert torch.equal(swapped, 4 * torch.arange(40_000.0) + 4)
        assert all(torch.equal(each, torch.full((10_000,), 1.0 * ((rank - 1) % 4))) for each in came)


def test_a_verb_that_fails_in_the_stream_says_so_where_it_is_waited_for(uniform):
    """Would catch a started verb whose rank is told of no mismatch, or that waits for ever."""

    def odd(group):
        x = torch.zeros(3 + (group.rank == 2))
        return group.all_reduce_start(x).wait()

    with pytest.raises(WorkerError, match="does not match"):
        uniform.run(odd)
    assert values(uniform, lambda g: g.all_reduce(torch.ones(1)).item()) == [4.0] * 4


# -- a cluster with shaped links behaves like any other


def test_a_long_message_is_honest_work_and_a_deadlock_is_still_found():
    """Would catch a watch that takes a slow wire for a hang, and a shaped wait that hides one."""
    links = Links.uniform(2, alpha_s=1e-3, bytes_per_s=1e6)
    with Cluster(2, device="cpu", links=links, timeout_s=1.5, quiet=True) as two:
        started = time.perf_counter()
        found = values(two, lambda g: g.exchange(torch.ones(1_000_000), 1 - g.rank, 1 - g.rank).sum().item())
        assert time.perf_counter() - started >= 4.0
        assert found == [1e6, 1e6]
        with pytest.raises(WorkerError):
            two.run(lambda g: g.recv(1 - g.rank))


@pytest.mark.parametrize("started", [False, True])
def test_the_stop_button_frees_ranks_that_sleep_and_the_wire_is_clear_afterwards(started):
    """Would catch a sleep that no signal breaks, 40 s of bytes that the next message waits for, and what is left."""

    def slow(group, started):
        x = torch.ones(10_000_000)
        group.all_reduce_start(x).wait() if started else group.all_reduce(x)

    with Cluster(2, device="cpu", links=Links.uniform(2, alpha_s=1e-3, bytes_per_s=1e6), quiet=True) as two:
        pids = two.pids
        button = threading.Timer(0.8, os.kill, (os.getpid(), signal.SIGINT))
        button.start()
        begun = time.perf_counter()
        with pytest.raises(KeyboardInterrupt):
            two.run(slow, started)
        assert time.perf_counter() - begun < 15, "40 s of bytes were left"
        begun = time.perf_counter()
        assert values(two, lambda g: g.all_reduce(torch.ones(1)).item()) == [2.0, 2.0]
        assert time.perf_counter() - begun < 15, "40 s of bytes were left"
        assert two.pids == pids
        folder = two._crew.folder
        assert len(glob.glob(os.path.join(folder, "traffic*"))) == 1  # pages of old generations are gone
    assert not os.path.exists(folder)


def test_the_first_line_says_which_links_and_wrong_ones_are_refused(capsys):
    """Would catch a notebook that does not say that its wire is shaped, and ranks without a link."""
    with Cluster(2, links=Links.two_nodes(1, scale=1e-3)) as two:
        assert values(two, lambda g: g.all_reduce(torch.ones(1)).item()) == [2.0, 2.0]
    assert (
        "2 nodes of 1, nvlink (1.9 ms, 450 MB/s) inside, infiniband (4 ms, 50 MB/s) between" in capsys.readouterr().out
    )
    with pytest.raises(ValueError, match=r"join 4 ranks .* the cluster has 3"):
        Cluster(3, device="cpu", links=Links.two_nodes(2))
    with pytest.raises(ValueError, match="links= takes Links"):
        Cluster(2, links="infiniband")


@pytest.mark.slow
def test_ranks_that_are_executed_afresh_get_their_links_too():
    """Would catch links that only travel by fork."""
    with Cluster(2, device="cpu", links=Links.uniform(2, alpha_s=0.1, bytes_per_s=1e9), fresh=True, quiet=True) as two:
        assert seconds_of(two, lambda g: g.all_reduce(torch.ones(1))) > 0.19


def test_a_sweep_of_a_shaped_verb_is_the_same_on_every_rank(uniform):
    """Would catch a barrier that lets ranks go at different times: the slowest would carry the skew."""
    found = values(uniform, lambda g: sweep(g.all_gather, [4_000], g, 3))
    assert all(each == found[0] for each in found)
    law = 3 * UNIFORM.line(0, 1).seconds(4_000)
    assert within(0.15, law, lambda: values(uniform, lambda g: sweep(g.all_gather, [4_000], g, 3))[0][0][1])


def test_tree_and_star_are_shaped_too(nodes):
    """Would catch an algorithm that goes round the shape by way of the native wire."""

    def broadcast(group, name):
        {"tree": tree, "star": star}[name].broadcast(torch.zeros(250_000), group)

    one = SLOW.alpha_s + 1e6 / SLOW.bytes_per_s
    assert seconds_of(nodes, broadcast, "tree") > 0.95 * one
    assert seconds_of(nodes, broadcast, "star") > 0.95 * (SLOW.alpha_s + 2e6 / SLOW.bytes_per_s)
