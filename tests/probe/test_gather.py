"""The gather probe: what it says of units is what ZeRO-3 did, in the order in which it did it."""

from __future__ import annotations

import pickle
import time

import pytest
import torch
from torch import nn

from labkit import Cluster, run_threads
from labkit.parallel.zero3 import ZeRO3
from labkit.probe import gather
from labkit.probe.gather import AGAIN, BACKWARD, COMING, FORWARD, SHARDED, WHOLE, GatherFilm, GatherProbe, unit_name
from labkit.probe.memory import MemoryProbe
from labkit.train.checkpoint import checkpoint_sequential


def four(width=8):
    """Four layers of `width` x `width`, 4 width^2 bytes each."""
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4)))


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def filmed(group, segments=0, **options):
    """(film, bytes sent) of the second step."""
    model = four()
    sync = ZeRO3(model, group, sgd, **options)

    def step():
        sync.zero_grad()
        x = torch.ones(2, 8)
        (checkpoint_sequential(list(model), x, segments) if segments else model(x)).square().mean().backward()
        sync.finish()
        sync.step()

    step()
    group.ledger.clear()
    with GatherProbe(sync) as probe:
        step()
    return probe.film, group.ledger.sent_bytes()


@pytest.mark.parametrize("n", [1, 2, 4])
def test_each_unit_is_gathered_twice_used_forward_and_backward_and_freed(n):
    """Would catch a verb that is not heard, and a phase that is taken for another."""
    film, _ = run_threads(filmed, n)[0]
    assert film.names == ("0.weight", "1.weight", "2.weight", "3.weight")
    assert film.sizes == (256,) * 4
    assert film.n_ranks == n
    for unit, lane in enumerate(film.lanes):
        assert [(each.state, each.phase) for each in lane] == [
            *([(SHARDED, "")] if lane[0].state == SHARDED else []),
            (COMING, ""), (WHOLE, FORWARD), (SHARDED, ""), (COMING, ""), (WHOLE, BACKWARD), (SHARDED, ""),
        ]  # fmt: skip
        assert film.gathers(unit) == 2
        assert lane[0].t0 == 0
        assert lane[-1].t1 == film.seconds
        assert all(a.t1 == b.t0 for a, b in zip(lane, lane[1:], strict=False))


def test_gathers_and_the_ledger_agree():
    """Would catch a gather that the film does not show."""
    for segments, options in ((0, {}), (2, {}), (2, {"keep": True})):
        for film, sent in run_threads(lambda group: filmed(group, segments, **options), 2):  # noqa: B023
            gathered = sum(film.gathers(unit) * size for unit, size in enumerate(film.sizes))
            assert sent == (gathered + film.model_bytes) // 2


def test_a_segment_that_runs_again_is_whole_again():
    """Would catch recomputing that is taken for a forward or a backward."""
    film, _ = run_threads(lambda group: filmed(group, 2), 2)[0]
    assert [film.gathers(unit) for unit in range(4)] == [3, 2, 2, 2]
    assert [each.phase for each in film.lanes[0] if each.state == WHOLE] == [FORWARD, AGAIN, BACKWARD]
    assert [each.phase for each in film.lanes[3] if each.state == WHOLE] == [FORWARD, BACKWARD]


@pytest.mark.parametrize(("prefetch", "units"), [(0, 1), (1, 2), (9, 4)])
def test_the_peak_of_weights_is_the_shards_and_the_units_that_are_there(prefetch, units):
    """Would catch a freed unit that still counts, and a prefetched one that does not."""
    film, _ = run_threads(lambda group: filmed(group, prefetch=prefetch), 2)[0]
    shards = film.held[0][1][0]
    assert shards == film.model_bytes // 2 + 4 * 4  # a freed unit leaves one NaN
    assert max(kinds[0] for _, kinds in film.held) == shards + units * 256
    assert film.bytes_at(film.peak)[0] == shards + units * 256
    assert film.bytes_at(0)[0] == shards
    assert [each.state for each in film.states(len(film.changes))] == [SHARDED] * 4


def test_a_prefetched_unit_comes_before_the_one_at_work_is_freed():
    """Would catch a film in the wrong order."""
    film, _ = run_threads(lambda group: filmed(group, prefetch=1), 2)[0]
    order = [(change.unit, change.state) for change in film.changes]
    assert order.index((1, COMING)) < order.index((0, SHARDED)) < order.index((1, WHOLE))
    late, _ = run_threads(lambda group: filmed(group, prefetch=0), 2)[0]
    order = [(change.unit, change.state) for change in late.changes]
    assert order.index((0, SHARDED)) < order.index((1, COMING))
    assert list(late.moments) == sorted(late.moments)


def test_a_film_begins_with_shards_also_where_the_probe_was_kept_waiting(monkeypatch):
    """Would catch gathered weights in the first picture, of a machine so busy that making the probe took a while."""

    class Late(MemoryProbe):
        def __init__(self, *watched):
            time.sleep(0.3)
            super().__init__(*watched)

    monkeypatch.setattr(gather, "MemoryProbe", Late)
    film, _ = run_threads(filmed, 2)[0]
    assert film.held[0][1][0] < film.model_bytes < max(kinds[0] for _, kinds in film.held)


@pytest.mark.slow
def test_films_come_home_from_processes_and_nothing_is_left_on_the_units():
    """Would catch a film that holds a tensor or a lambda, and a probe that goes on listening."""

    def twice(group):
        model = four()
        sync = ZeRO3(model, group, sgd)
        with GatherProbe(sync) as probe:
            model(torch.ones(2, 8)).square().mean().backward()
            sync.finish()
        left = [name for unit in sync.units for name in ("start", "wait", "free") if name in vars(unit)]
        return probe.film, left

    with Cluster(2, device="cpu", quiet=True) as cluster:
        for reply in cluster.run(twice):
            film, left = reply.value
            assert isinstance(film, GatherFilm)
            assert left == []
            assert pickle.loads(pickle.dumps(film)) == film


def test_what_cannot_be_filmed_is_told():
    """Would catch a film that begins in the middle of a step, and an empty one."""

    def rank(group):
        sync = ZeRO3(four(), group, sgd)
        probe = GatherProbe(sync)
        with pytest.raises(ValueError, match="nothing is recorded yet"):
            _ = probe.film
        sync.units[1].unshard()
        with pytest.raises(ValueError, match="unit 1 is whole"):
            probe.__enter__()
        with pytest.raises(ValueError, match="moments 0 to 0, not 1"):
            GatherFilm(("a",), (4,), 1, (), (), 1.0).states(1)

    run_threads(rank, 1)


def test_units_are_named_by_what_their_parameters_share():
    """Would catch a name that is cut in the middle of a word."""
    assert unit_name(["blocks.1.mlp.up.weight", "blocks.1.mlp.up.bias"]) == "blocks.1.mlp.up"
    assert unit_name(["blocks.1.a", "blocks.11.a"]) == "blocks"
    assert unit_name(["token.weight"]) == "token.weight"
    assert unit_name(["a.x", "b.x"]) == "rest (2 tensors)"
