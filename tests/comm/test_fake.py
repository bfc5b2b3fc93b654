"""A world of nobody: the same tensors, shapes and ledger entries as a real world, and no values."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from labkit import run_threads
from labkit.comm import fake, ring, tree
from labkit.comm.mesh import Mesh
from labkit.plan.partition.layout import AXES, Layout
from tests.cases import cases

VERBS = {
    "all_reduce": lambda group, x: group.all_reduce(x, "mean"),
    "reduce_scatter": lambda group, x: group.reduce_scatter(x),
    "all_gather": lambda group, x: group.all_gather(x),
    "broadcast": lambda group, x: group.broadcast(x, source=1),
    "all_to_all": lambda group, x: group.all_to_all(x),
    "all_reduce_start": lambda group, x: group.all_reduce_start(x).wait(),
    "reduce_scatter_start": lambda group, x: group.reduce_scatter_start(x, "mean").wait(),
    "all_gather_start": lambda group, x: group.all_gather_start(x).wait(),
    "all_to_all_start": lambda group, x: group.all_to_all_start(x).wait(),
}
RINGS = {verb: getattr(ring, verb) for verb in ("all_reduce", "reduce_scatter", "all_gather", "broadcast")}


def looks(x):
    return tuple(x.shape), x.dtype


def account(group):
    """What the ledger says, in order: verb, axis, to whom, bytes, within which verb."""
    return [(t.verb, t.axis, t.to, t.n_bytes, t.within) for t in group.ledger]


@cases("n_ranks", [1, 2, 3, 1000])
@cases("verb", VERBS)
def test_a_verb_gives_the_shape_and_sends_the_bytes_of_the_textbook(verb, n_ranks):
    """Would catch a result of the wrong shape, and bytes that are not those of a ring."""
    rank = n_ranks - 1
    if n_ranks == 1 and verb == "broadcast":
        return
    with FakeTensorMode():
        group = fake.world(n_ranks, rank)
        x = torch.empty(6 * n_ranks, 5)
        y = VERBS[verb](group, x)
    rows = {"reduce_scatter": 6, "all_gather": 6 * n_ranks**2}.get(verb.removesuffix("_start"), 6 * n_ranks)
    assert looks(y) == ((rows, 5), torch.float32)
    n_bytes, n = 6 * n_ranks * 5 * 4, n_ranks
    law = {
        "all_reduce": 2 * (n - 1) * n_bytes // n,
        "reduce_scatter": (n - 1) * n_bytes // n,
        "all_gather": (n - 1) * n_bytes,
        "all_to_all": (n - 1) * n_bytes // n,
        "broadcast": n_bytes if rank == 1 else 0,
    }
    assert group.ledger.sent_bytes() == law[verb.removesuffix("_start")]


@pytest.mark.parametrize("rows", [7, 8, 9])
def test_a_reduce_scatter_is_cut_as_tensor_split_cuts(rows):
    """Would catch equal parts where n does not divide: rank 0 of 4 has one row more than rank 3."""
    with FakeTensorMode():
        shapes = [tuple(fake.world(4, rank).reduce_scatter(torch.empty(rows, 2)).shape) for rank in range(4)]
    assert shapes == [tuple(part.shape) for part in torch.empty(rows, 2).tensor_split(4)]


@pytest.mark.parametrize("verb", RINGS)
def test_swapped_in_algorithms_send_what_they_send_on_threads(verb):
    """Would catch messages that are not counted, counted twice or of the wrong size: the reference is a real ring."""

    def run(group):
        result = getattr(group.using(**{verb: RINGS[verb]}), verb)(torch.ones(10, 3, dtype=torch.float64))
        return looks(result), account(group)

    for rank, real in enumerate(run_threads(run, 4)):
        with FakeTensorMode():
            assert run(fake.world(4, rank)) == real


@pytest.mark.parametrize("rank", range(5))
def test_a_tree_works_too_where_a_rank_only_listens(rank):
    """Would catch a receive before any send: the root of a tree hears first."""
    run = partial(lambda group: looks(group.using(all_reduce=tree.all_reduce).all_reduce(torch.ones(7))))
    with FakeTensorMode():
        assert run(fake.world(5, rank)) == ((7,), torch.float32)


def test_a_guess_that_leads_to_a_wrong_shape_is_an_error():
    """Would catch a silent wrong answer: in a tree's all_gather messages grow, which nobody here can know."""
    with FakeTensorMode(), pytest.raises(ValueError, match="hear=lambda"):
        fake.world(4, 0).using(all_gather=tree.all_gather).all_gather(torch.ones(7))


def test_messages_are_what_one_is_told_then_an_echo_then_an_error():
    """Would catch an echo that overrules what was said, and a shape that is made up from nothing."""
    told = {("world", 2, 7): (4, 4)}

    def hear(axis, source, tag):
        shape = told.get((axis, source, tag))
        return None if shape is None else torch.empty(shape, dtype=torch.float16)

    with FakeTensorMode():
        group = fake.world(3, 0, hear)
        with pytest.raises(ValueError, match="what would rank 1 send on axis world under tag 0"):
            group.recv(1)
        group.send(torch.empty(5), 1).wait()
        assert looks(group.recv(2, tag=7)) == ((4, 4), torch.float16)
        assert looks(group.recv(1)) == ((5,), torch.float32)
        into = torch.empty(9)
        assert group.recv(1, into=into) is into
        assert looks(group.exchange(torch.empty(2, 3), 1, 2)) == ((2, 3), torch.float32)


def test_a_large_message_is_kept_until_it_is_waited_for_and_a_small_one_is_not():
    """Would catch memory that a real wire holds and a fake one forgets, and the other way round."""
    import weakref

    with FakeTensorMode():
        group = fake.world(2)
        for n_bytes, kept in ((3968, False), (3969, True)):
            x = torch.empty(n_bytes, dtype=torch.uint8)
            storage = weakref.ref(x.untyped_storage())
            work = group.send(x, 1)
            del x
            assert (storage() is not None) == kept
            work.wait()
            assert storage() is None


def test_the_groups_of_a_mesh_of_16384_ranks_are_there_at_once():
    """Would catch work that grows with the square of the world."""
    layout = Layout(dp=128, pp=16, tp=8)
    rank = 12345
    with FakeTensorMode():
        mesh = Mesh.connect(layout, fake.world(layout.size, rank))
        for axis in AXES:
            group = getattr(mesh, axis)
            assert (group.axis, group.size, group.ranks) == (axis, getattr(layout, axis), layout.ranks(axis, rank))
            assert group.ranks[group.rank] == rank
            group.all_reduce(torch.empty(8))
    assert {t.axis for t in mesh.world.ledger} == set(AXES)


@pytest.mark.parametrize("verb", ["all_reduce", "all_reduce_start", "send"])
def test_a_real_tensor_is_refused(verb):
    """Would catch a sum that is silently the rank's own number."""
    group = fake.world(4)
    give = {"send": lambda x: group.send(x, 1)}.get(verb, getattr(group, verb))
    with pytest.raises(ValueError, match=r"real tensor \(3,\) float32"):
        give(torch.ones(3))


@pytest.mark.parametrize(("n_ranks", "rank"), [(0, 0), (4, 4), (4, -1)])
def test_a_rank_that_is_not_there_is_refused(n_ranks, rank):
    """Would catch a world that nobody is in."""
    with pytest.raises(ValueError, match=f"n_ranks={n_ranks}"):
        fake.world(n_ranks, rank)


def test_bad_arguments_are_refused_as_in_a_real_world():
    """Would catch a rehearsal that passes and a real run that fails."""
    with FakeTensorMode():
        group = fake.world(2)
        for bad in (
            lambda: group.send(torch.empty(2), 0),
            lambda: group.recv(2),
            lambda: group.send(torch.empty(2), 1, -1),
        ):
            with pytest.raises(ValueError):
                bad()
        with pytest.raises(ValueError, match="mean of int64"):
            group.all_reduce(torch.empty(2, dtype=torch.int64), "mean")
