"""Shaped links: what was asked is what is measured, and the values are those of any other wire.

Seconds are looked at where there are none of the machine: on simulated ranks, whose clock stands still while anybody
computes. On real processes it is values, bytes and who shares what with whom, and the one thing about seconds that a
busy machine cannot spoil: nothing comes sooner than the links allow.
"""

from __future__ import annotations

import glob
import os
import time
from collections import Counter

import pytest
import torch
from torch import nn

from labkit import Cluster, Layout, Mesh, WorkerError, ring, run_threads, star, tree
from labkit.comm import hierarchy, message
from labkit.comm.traffic import FORGIVEN_S
from labkit.launch import call
from labkit.parallel.tensor import ColumnParallelLinear, RowParallelLinear
from labkit.plan.machine import collectives
from labkit.plan.machine.link import Link
from labkit.plan.machine.topology import Links
from labkit.probe.links import ping_pong, sweep
from tests.simulated import simulate
from tests.waiting import once, stop_button, waiting

ALPHA, SPEED = 15e-3, 20e6
UNIFORM = Links.uniform(4, alpha_s=ALPHA, bytes_per_s=SPEED)
FAST, SLOW = Link("fast", 2e-3, 200e6), Link("slow", 15e-3, 20e6)
NODES = Links.two_nodes(2, FAST, SLOW)


@pytest.fixture(scope="module")
def shaped():
    """Two nodes of two ranks, whose links cost next to nothing: for all but seconds."""
    links = Links.two_nodes(2, Link("fast", 1e-4, 2e9), Link("slow", 2e-4, 1e9))
    with Cluster(4, device="cpu", links=links, quiet=True) as made:
        yield made


@pytest.fixture(scope="module")
def plain():
    with Cluster(4, device="cpu", quiet=True) as made:
        yield made


def values(cluster, fn, *args):
    return [reply.value for reply in cluster.run(fn, *args)]


def seconds_of(links, fn, *args, late_s=0.0):
    """Simulated seconds of `fn(group, *args)`, begun at once on all ranks, on the slowest of them."""

    def timed(group):
        started = time.perf_counter()
        fn(group, *args)
        return time.perf_counter() - started

    return max(simulate(timed, links, late_s=late_s))


def exactly(seconds):
    """What is simulated is rounded and not disturbed."""
    return pytest.approx(seconds, rel=1e-6)


# -- the links that were asked for are the links that are measured


@pytest.mark.parametrize(("alpha_s", "bytes_per_s"), [(20e-3, 40e6), (40e-3, 5e6), (10e-3, 100e6)])
def test_measured_alpha_and_beta_are_what_was_asked(alpha_s, bytes_per_s):
    """Would catch latency that is counted at both ends, headers that are counted, and sleeps that round up."""
    sizes = [4, round(alpha_s * bytes_per_s), round(4 * alpha_s * bytes_per_s)]
    two = Links.uniform(2, alpha_s=alpha_s, bytes_per_s=bytes_per_s)
    line = collectives.fit(simulate(ping_pong, two, sizes, 3)[0])
    assert line.alpha_s == exactly(alpha_s)
    assert line.beta_s_per_byte == exactly(1 / bytes_per_s)


def test_an_exchange_takes_the_time_of_one_message():
    """Full duplex: would catch an edge whose two directions share their bytes."""

    def both_ways(group):
        n, me = group.size, group.rank
        group.exchange(torch.zeros(250_000), (me + 1) % n, (me - 1) % n)

    assert seconds_of(UNIFORM, both_ways) == exactly(ALPHA + 1e6 / SPEED)


def test_two_senders_share_the_card_of_their_node():
    """Would catch an uplink for each rank: tensor and data parallel groups would not be in each other's way."""

    def across(group, senders):
        if group.rank in senders:
            group.send(torch.zeros(250_000), group.rank + 2).wait()
        elif group.rank - 2 in senders:
            group.recv(group.rank - 2)

    assert seconds_of(NODES, across, (0,)) == exactly(SLOW.alpha_s + 1e6 / SLOW.bytes_per_s)
    assert seconds_of(NODES, across, (0, 1)) == exactly(SLOW.alpha_s + 2e6 / SLOW.bytes_per_s)


@pytest.mark.parametrize("n_bytes", [4_000, 2_000_000])
def test_a_ring_all_reduce_takes_the_time_of_its_law(n_bytes):
    """2(n-1)(alpha + N/n beta): would catch steps that do not overlap, and wake-ups that add up over 6 steps."""
    law = collectives.seconds("ring", "all_reduce", 4, n_bytes, UNIFORM.line(0, 1))
    assert seconds_of(UNIFORM, lambda group: group.all_reduce(torch.zeros(n_bytes // 4))) == exactly(law)
    late_s = 1e-3
    took_s = seconds_of(UNIFORM, lambda group: group.all_reduce(torch.zeros(n_bytes // 4)), late_s=late_s)
    assert law <= took_s <= 1.01 * late_s + law, "each of six steps wakes late, and only the last may be seen"


@pytest.mark.parametrize("n_bytes", [4_000, 2_000_000])
def test_who_wins_is_decided_by_the_links(n_bytes):
    """Few steps win for small tensors, few bytes for large ones, and a server that all talk to has one port: would
    catch a shape that has latency but no bandwidth, or the other way round, and ports that are endless."""
    line, took_s = UNIFORM.line(0, 1), {}
    for module in (ring, tree, star):
        took_s[module] = seconds_of(UNIFORM, lambda group, m=module: m.all_reduce(torch.zeros(n_bytes // 4), group))
    for module, name in ((ring, "ring"), (tree, "tree")):
        assert took_s[module] == exactly(collectives.seconds(name, "all_reduce", 4, n_bytes, line))
    assert took_s[star] == exactly(2 * ALPHA + 2 * 3 * n_bytes / SPEED)  # (n-1) N through one port, in and out
    order = sorted(took_s, key=lambda module: took_s[module])
    assert order == ([star, tree, ring] if n_bytes == 4_000 else [ring, tree, star])


@pytest.mark.parametrize(("n_bytes", "gain"), [(4_000, 1.8), (2_000_000, 1.15)])
def test_a_reduction_in_levels_beats_the_flat_ring_across_nodes(n_bytes, gain):
    """Would catch a hierarchy that sends whole tensors between nodes, or waits for the slow wire inside them."""
    inside = 2 * NODES.line(0, 1).seconds(n_bytes / 2)
    across = 2 * (SLOW.alpha_s + n_bytes / 4 * 2 / SLOW.bytes_per_s)  # two rings, one card
    levels = seconds_of(NODES, lambda group: hierarchy.all_reduce(torch.zeros(n_bytes // 4), group))
    assert levels == exactly(inside + across)
    assert seconds_of(NODES, lambda group: ring.all_reduce(torch.zeros(n_bytes // 4), group)) > gain * levels


def test_tree_and_star_are_shaped_too():
    """Would catch an algorithm that goes round the shape by way of the native wire."""
    broadcast = {
        module: seconds_of(NODES, lambda group, m=module: m.broadcast(torch.zeros(250_000), group))
        for module in (tree, star)
    }
    across, inside = SLOW.alpha_s + 1e6 / SLOW.bytes_per_s, FAST.alpha_s + 1e6 / FAST.bytes_per_s
    assert broadcast[tree] == exactly(across + inside)
    assert broadcast[star] == exactly(SLOW.alpha_s + 2e6 / SLOW.bytes_per_s)  # two of the three behind one card


def layer(group, axis):
    """Forward and backward of a layer that is split along an axis of 2 x 2 ranks: 256 KB are summed in both."""
    mesh = Mesh.connect(Layout(dp=2, tp=2), group)
    tp = getattr(mesh, axis)
    torch.manual_seed(0)
    up = ColumnParallelLinear.of(nn.Linear(64, 256), tp)
    down = RowParallelLinear.of(nn.Linear(256, 64), tp)
    x = torch.randn(1000, 64, requires_grad=True)
    down(torch.relu(up(x))).sum().backward()


def test_tensor_parallelism_across_nodes_collapses():
    """Would catch a wire whose edges are taken by their index in a group: the layer would be as fast between nodes."""
    inside = 4 * (FAST.alpha_s + 128_000 / FAST.bytes_per_s)  # two all_reduces of two steps
    across = 4 * (SLOW.alpha_s + 2 * 128_000 / SLOW.bytes_per_s)  # two pairs, one card
    assert seconds_of(NODES, layer, "tp") == exactly(inside)
    assert seconds_of(NODES, layer, "dp") == exactly(across)


@pytest.mark.parametrize("work_s", [0.1, 0.5])
def test_a_verb_that_was_started_overlaps_with_work(work_s):
    """Would catch a `start` that waits: no strategy could hide its communication."""

    def overlapped(group):
        started = time.perf_counter()
        works = [group.all_reduce_start(torch.ones(100_000)) for _ in range(2)]
        begun, looked = time.perf_counter() - started, works[-1].done
        time.sleep(work_s)  # stands for a backward pass
        totals = [work.wait()[0].item() for work in works]
        return begun, looked, time.perf_counter() - started, totals

    law = 2 * collectives.seconds("ring", "all_reduce", 4, 400_000, UNIFORM.line(0, 1))
    assert 0.1 < law < 0.5
    at_once, over = pytest.approx(0, abs=1e-6), pytest.approx(max(law, work_s), abs=1e-6)
    assert simulate(overlapped, UNIFORM) == [(at_once, False, over, [4.0, 4.0])] * 4


def test_a_sweep_of_a_shaped_verb_is_the_same_on_every_rank():
    """Would catch a barrier that lets ranks go at different times: the slowest would carry the skew."""
    law = 3 * UNIFORM.line(0, 1).seconds(4_000)
    assert simulate(lambda group: sweep(group.all_gather, [4_000], group, 3), UNIFORM) == [[(4_000, exactly(law))]] * 4


# -- on real processes: one page of traffic for all, and nothing comes too soon


def test_on_processes_nothing_comes_sooner_than_the_links_allow():
    """Would catch links that do not reach the ranks. On a busy machine everything comes later, and nothing sooner."""
    links, sizes = Links.uniform(2, alpha_s=60e-3, bytes_per_s=4e6), [4, 400_000]
    with Cluster(2, device="cpu", links=links, quiet=True) as two:
        samples = values(two, ping_pong, sizes, 1)
    assert samples[0] == samples[1]
    for n_bytes, took_s in samples[0]:
        assert took_s >= links.line(0, 1).seconds(n_bytes) - FORGIVEN_S


def test_ranks_share_one_page_and_groups_book_on_the_edges_of_their_own_ranks(shaped):
    """Would catch a page for each rank, whose senders share no card, and a mesh whose groups forget the shape, or take
    edges by their index in the group."""

    def booked(group):
        traffic, edges = group.wire.traffic, {}
        for axis in ("tp", "dp"):
            counts = Counter()
            book = traffic.book

            def count(edge, n_bytes, counts=counts, book=book):
                counts[divmod(edge, group.size)] += n_bytes
                return book(edge, n_bytes)

            traffic.book = count
            try:
                layer(group, axis)
            finally:
                del traffic.book
            edges[axis] = dict(counts)
        group.barrier()
        n = group.size
        page = traffic._look(lambda core, _: {divmod(edge, n): core[1 + 2 * edge] for edge in traffic.edges})
        return edges, page

    seen = values(shaped, booked)
    for rank, (edges, page) in enumerate(seen):
        beside, opposite = rank ^ 1, rank ^ 2
        assert edges == {"tp": {(rank, beside): 4 * 128_000}, "dp": {(rank, opposite): 4 * 128_000}}
        for edge in ((0, 1), (1, 0), (2, 3), (3, 2), (0, 2), (2, 0), (1, 3), (3, 1)):
            assert page[edge] >= 4 * 128_000, f"rank {rank} does not see what went along {edge}"


# -- the values, bytes and errors are those of any other wire


def test_every_verb_gives_what_it_gives_on_an_unshaped_group(shaped, plain):
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
            group.all_to_all_start(x),
            group.all_gather_start(x, whole),
        ]
        found += [group.all_reduce(x[0])]  # queues up behind them
        behind = all(work.done for work in works)
        found += [work.wait() for work in works]
        assert found[-4] is not None
        assert torch.equal(found[-4], mine)
        assert torch.equal(found[-1], whole)
        group.barrier()
        return found, x, behind

    for (mine, x, behind), (bare, y, _) in zip(values(shaped, verbs), values(plain, verbs), strict=True):
        assert behind
        assert torch.equal(x, y)
        assert [each.shape for each in mine] == [each.shape for each in bare]
        assert [each.dtype for each in mine] == [each.dtype for each in bare]
        assert all(torch.allclose(a, b) for a, b in zip(mine, bare, strict=True))


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


def test_a_swapped_in_hierarchy_is_found_by_the_links(shaped):
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

    for rank, (world, dp, tp, total, pair) in enumerate(values(shaped, swapped)):
        assert (world, dp, tp) == ([[0, 1], [2, 3]], [[0], [1]], [[0, 1]])
        assert total == 1111
        assert pair == sum(10**r for r in Layout(dp=2, tp=2).ranks("dp", rank))


def test_the_ledger_counts_the_same_bytes_as_without_a_shape(shaped, plain):
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

    assert values(shaped, sent) == values(plain, sent)


def test_messages_of_a_started_verb_meet_nobody_elses(shaped):
    """Would catch tags that a stream shares with the main thread: chunks of two tensors would be mixed up."""

    def both(group):
        n, me = group.size, group.rank
        under_way = group.all_reduce_start(torch.arange(40_000.0))
        swapped = group.using(all_reduce=ring.all_reduce).all_reduce(torch.arange(40_000.0) + 1)
        came = [group.exchange(torch.full((10_000,), 1.0 * me), (me + 1) % n, (me - 1) % n, tag=t) for t in range(n)]
        return under_way.wait(), swapped, came

    for rank, (started, swapped, came) in enumerate(values(shaped, both)):
        assert torch.equal(started, 4 * torch.arange(40_000.0))
        assert torch.equal(swapped, 4 * torch.arange(40_000.0) + 4)
        assert all(torch.equal(each, torch.full((10_000,), 1.0 * ((rank - 1) % 4))) for each in came)


def test_a_verb_that_fails_in_the_stream_says_so_where_it_is_waited_for(shaped):
    """Would catch a started verb whose rank is told of no mismatch, or that waits for ever."""

    def odd(group):
        x = torch.zeros(3 + (group.rank == 2))
        return group.all_reduce_start(x).wait()

    with pytest.raises(WorkerError, match="does not match"):
        shaped.run(odd)
    assert values(shaped, lambda g: g.all_reduce(torch.ones(1)).item()) == [4.0] * 4


# -- a cluster with shaped links behaves like any other


def test_a_rank_that_sleeps_on_the_wire_gives_the_signs_of_life_that_the_watch_counts(shaped):
    """Would catch a watch that takes a slow wire for a hang. (That sleepers beat is proved in test_traffic.py.)"""

    def beats(group):
        page = group.ledger.witness
        before = page.box.read(group.rank).done
        group.wire.traffic.beat()
        return page.box.read(group.rank).done - before

    assert values(shaped, beats) == [1] * 4


def test_a_deadlock_on_shaped_links_is_still_found(monkeypatch):
    """Would catch a shaped wait that hides one."""
    monkeypatch.setattr(call, "SURE_S", 0.2)
    monkeypatch.setattr(call, "LOOK_S", 0.1)
    with Cluster(2, device="cpu", links=Links.uniform(2, alpha_s=1e-3, bytes_per_s=1e6), quiet=True) as two:
        with pytest.raises(WorkerError) as caught:
            two.run(lambda g: g.recv(1 - g.rank))
        assert caught.value.reason.startswith("Deadlock")


def test_the_stop_button_frees_ranks_that_sleep_and_the_wire_is_clear_afterwards(monkeypatch):
    """Would catch a sleep that no signal breaks, an hour of bytes that the next message waits for, and what is left."""
    monkeypatch.setattr(call, "RELEASE_S", 60.0)  # a busy machine frees them late; who is never freed is replaced

    def slow(group, started):
        x = torch.ones(1_000_000)
        group.all_reduce_start(x).wait() if started else group.all_reduce(x)

    with Cluster(2, device="cpu", links=Links.uniform(2, alpha_s=1e-3, bytes_per_s=1e3), quiet=True) as two:
        pids = two.pids
        for started in (False, True):
            with pytest.raises(KeyboardInterrupt), once(waiting(two), stop_button):
                two.run(slow, started)
            assert values(two, lambda g: g.all_reduce(torch.ones(1)).item()) == [2.0, 2.0]
            assert two.pids == pids
        folder = two._processes.folder
        assert len(glob.glob(os.path.join(folder, "traffic*"))) == 1  # pages of old generations are gone
    assert not os.path.exists(folder)


def test_the_first_line_says_which_links_and_wrong_ones_are_refused(capsys):
    """Would catch a notebook that does not say that its wire is shaped, and ranks without a link."""
    with Cluster(2, device="cpu", links=Links.two_nodes(1, scale=1e-3)) as two:
        assert values(two, lambda g: g.all_reduce(torch.ones(1)).item()) == [2.0, 2.0]
    assert (
        "2 nodes of 1, nvlink (1.9 ms, 450 MB/s) inside, infiniband (4 ms, 50 MB/s) between" in capsys.readouterr().out
    )
    with pytest.raises(ValueError, match=r"join 4 ranks .* the cluster has 3"):
        Cluster(3, device="cpu", links=Links.two_nodes(2))
    with pytest.raises(ValueError, match="links= takes Links"):
        Cluster(2, device="cpu", links="infiniband")


def changed_on_its_way(group):
    """What rank 0 is told when it writes to a buffer whose sum cannot be complete, since rank 1 has not begun."""
    x = torch.ones(3000)
    if group.rank == 1:
        group.recv(0)
    work = group.all_reduce_start(x)
    if group.rank == 0:
        time.sleep(0.3)  # by then a part of x is on its way, as a rule; the answer must be the same in any case
        x.add_(1)
        group.send(torch.zeros(1), 1)
    try:
        work.wait()
    except ValueError as error:
        return str(error)
    return ""


def test_a_buffer_that_is_changed_while_its_sum_is_on_its_way_is_named(shaped):
    """Would catch links that read at once, so that a program is right here and wrong on a GPU, and a rank that leaves
    the sum in its middle: the others would wait for ever."""
    told, *others = values(shaped, changed_on_its_way)
    assert "the buffer of an all_reduce was changed while it was on its way" in told
    assert others == [""] * 3


def test_a_message_leaves_a_gpu_when_its_tensor_is_finished(monkeypatch):
    """Would catch a delay that begins when work is handed to the device: its computing and the link would overlap. The
    copy to the host waits for the device."""
    order = []

    def copied(x):
        order.append("copied")
        return x

    class Booking:
        def book(self, n_bytes):
            order.append("booked")
            return message.UNSTAMPED

    class Wire:
        def lane(self, peer, outgoing):
            return Booking()

        def isend(self, x, to, tag):
            order.append("sent")

    monkeypatch.setattr(torch.Tensor, "cpu", copied)
    message.Sending(Wire(), torch.ones(4), 1, 0)
    assert order == ["copied", "booked", "sent"]
