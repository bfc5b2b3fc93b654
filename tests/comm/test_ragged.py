"""all_to_all with parts of different lengths, on every wire, against one process that sees all ranks' rows."""

from __future__ import annotations

import random

import pytest
import torch
from torch._subclasses import FakeTensorMode

from labkit import Cluster, run_threads
from labkit.comm import by_messages, fake
from labkit.plan.machine.link import Link
from labkit.plan.machine.topology import Links
from tests.cases import cases

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


def counts_of(n, seed, most=5):
    """counts[i][j]: rows from rank i to rank j. Seed 0: none at all; 1: all to rank 0; 2: rank 0 sends to itself."""
    if seed < 3:
        return [[4 * (seed == 1 and j == 0) + 3 * (seed == 2 and i == j == 0) for j in range(n)] for i in range(n)]
    dice = random.Random(1000 * n + seed)
    return [[dice.choice([0, 0, 1, dice.randint(0, most)]) for _ in range(n)] for _ in range(n)]


def rows_of(rank, counts, shape, dtype):
    n_rows = sum(counts[rank])
    x = torch.randint(-60, 60, (n_rows, *shape), generator=torch.Generator().manual_seed(7 * rank + n_rows))
    return x.to(dtype)


def reference(rank, counts, shape, dtype):
    """What one process that sees everybody's rows gives to `rank`."""
    parts = [rows_of(i, counts, shape, dtype).split(row)[rank] for i, row in enumerate(counts)]
    return torch.cat(parts)


def dispatch(group, counts, shape, dtype):
    x = rows_of(group.rank, counts, shape, dtype)
    before = group.ledger.sent_bytes()
    come = [row[group.rank] for row in counts]
    y = group.all_to_all(x, send_rows=counts[group.rank], receive_rows=come)
    return y, group.ledger.sent_bytes() - before, x


def right(group, every, shapes, dtypes):
    """The cases in which this rank got other rows than one process gives it, or booked other bytes than left it."""
    wrong = []
    for counts in every:
        for shape in shapes:
            for dtype in dtypes:
                y, sent, x = dispatch(group, counts, shape, dtype)
                away = (sum(counts[group.rank]) - counts[group.rank][group.rank]) * x.element_size()
                for size in shape:
                    away *= size
                same = torch.equal(y, reference(group.rank, counts, shape, dtype)) and y.dtype == dtype
                if not same or sent != away:
                    wrong.append((counts, shape, dtype, sent, away))
    return type(group.wire).__name__, wrong


@cases("n", [1, 2, 3, 4])
def test_ragged_rows_arrive_in_rank_order_and_exactly_the_bytes_that_leave_are_booked(n):
    """Would catch parts cut at the wrong row, parts that change places, a lost empty part and bytes of what stays."""
    every = [counts_of(n, seed) for seed in range(8)]
    assert run_threads(right, n, every, [(), (3,), (2, 2), (0,)], DTYPES) == [("LocalWire", [])] * n


@pytest.fixture(scope="module", params=["gloo", "shared", "shaped"])
def cluster(request):
    link = Link("wire", 1e-5, 1e9)
    options = {"links": Links.uniform(4, link)} if request.param == "shaped" else {"wire": request.param}
    with Cluster(4, device="cpu", quiet=True, **options) as made:
        yield made


def of_every_size(group, large):
    """Groups of 2 and 3 of the four ranks too, rows of every kind, and parts larger than a page of the wire."""
    from labkit import Layout, Mesh

    found = []
    for mesh in (Mesh.connect(Layout(dp=2, tp=2), group), Mesh.connect(Layout(dp=4), group)):
        inside = mesh.dp
        every = [counts_of(inside.size, seed) for seed in range(7)]
        found.append(right(inside, every, [(), (3,)], DTYPES))
        found.append(right(inside, [counts_of(inside.size, 5, 40)], [(large,)], [torch.float32]))
        swapped = inside.using(all_to_all=by_messages.all_to_all)
        found.append(right(swapped, every[:5], [(3,)], [torch.float64]))
    return {wrong for _, cases in found for wrong in map(str, cases)}, group.wire.__class__.__name__


def test_processes_get_what_one_process_gives_them_on_gloo_shared_memory_and_shaped_links(cluster):
    """Would catch torch's two lists in the wrong order, a part read at another rank's offset or freed too early."""
    replies = [reply.value for reply in cluster.run(of_every_size, 20_000)]
    assert [wrong for wrong, _ in replies] == [set()] * 4
    assert len({wire for _, wire in replies}) == 1


@cases("n", [1, 2, 3, 4])
def test_in_a_fake_world_shape_and_bytes_are_those_of_the_real_one(n):
    """Would catch a rehearsal that counts on equal parts; the reference are threads with real rows."""
    for seed in range(8):
        counts = counts_of(n, seed)
        real = run_threads(dispatch, n, counts, (3,), torch.float32)
        for rank, (y, sent, _) in enumerate(real):
            for algorithm in (None, by_messages.all_to_all):
                with FakeTensorMode():
                    group = fake.world(n, rank)
                    group = group.using(all_to_all=algorithm) if algorithm else group
                    x = torch.empty(sum(counts[rank]), 3)
                    come = [row[rank] for row in counts]
                    shape = tuple(group.all_to_all(x, send_rows=counts[rank], receive_rows=come).shape)
                assert (shape, group.ledger.sent_bytes()) == (tuple(y.shape), sent)


@cases(
    ("send", "receive", "words"),
    [
        ([1, 2], None, "both send_rows= and receive_rows="),
        ([1, 2, 0], [1, 1], "send_rows are 2 whole numbers"),
        ([3, 0], [3], "receive_rows are 2 whole numbers"),
        ([4, -1], [4, 0], r"got \[4, -1\]"),
        ([1, 1], [1, 1], "add up to 2, x has 3 rows"),
        ([1, 2], [2, 1], r"keeps send_rows\[0\] = 1 rows and expects receive_rows\[0\] = 2"),
    ],
)
def test_rows_that_cannot_be_are_refused_before_anything_is_sent(send, receive, words):
    """Would catch a rank that sends the first parts and then fails, so that its peers wait for the rest."""

    def refused(group):
        if group.rank:
            return None
        with pytest.raises(ValueError, match=words):
            group.all_to_all(torch.ones(3, 2), send_rows=send, receive_rows=receive)
        return len(group.ledger)

    assert run_threads(refused, 2)[0] == 0


def test_ranks_that_disagree_about_a_part_are_told_both_shapes():
    """Would catch rows that are cut off or left unset without a word where send_rows and receive_rows differ."""

    def disagree(group):
        mine = [2, 1] if group.rank == 0 else [0, 2]
        group.all_to_all(torch.ones(sum(mine), 2), send_rows=mine, receive_rows=[2, 1] if group.rank == 0 else [1, 2])

    with pytest.raises(ValueError, match=r"\(1, 2\).*\(0, 2\)|\(0, 2\).*\(1, 2\)"):
        run_threads(disagree, 2)
