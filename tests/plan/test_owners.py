"""Who owns which matrix: against elements counted one by one."""

from __future__ import annotations

import random

from labkit.plan.laws.muon import orthogonalising_flops
from labkit.plan.partition.owners import PlacedMatrix, assign, runs_of, sent


def test_runs_are_those_of_elements_laid_out_one_by_one():
    """Would catch a border that moves by one, an empty piece, and padding that belongs to a matrix."""
    draw = random.Random(0)
    for _ in range(200):
        sizes, n = [draw.randint(1, 40) for _ in range(draw.randint(1, 6))], draw.randint(1, 5)
        shard = -(-sum(sizes) // n)
        places = [(k, e) for k, size in enumerate(sizes) for e in range(size)]
        rank_of = {place: index // shard for index, place in enumerate(places)}
        for k, runs in enumerate(runs_of(sizes, n)):
            assert all(run.size for run in runs)
            by_run = {(k, run.start + e): run.rank for run in runs for e in range(run.size)}
            assert by_run == {place: rank for place, rank in rank_of.items() if place[0] == k}


def test_an_owner_holds_a_piece_and_work_is_shared_out():
    """Would catch an owner that has to be sent everything, and one rank with all the work.

    The last matrix that the busiest rank was given went to what was then the idlest."""
    draw = random.Random(1)
    for _ in range(100):
        n, k = draw.randint(1, 5), draw.randint(1, 12)
        # every rank holds a piece of each, as in tensor parallelism
        held = [PlacedMatrix(8 * n, draw.randint(1, 99), runs_of([8 * n], n)[0]) for _ in range(k)]
        owners = assign(held, n)
        load = [sum(h.work for h, owner in zip(held, owners, strict=True) if owner == rank) for rank in range(n)]
        assert max(load) - min(load) <= max(h.work for h in held)
        cut = [
            PlacedMatrix(size, size, runs)
            for size, runs in zip([7, 30, 11, 2], runs_of([7, 30, 11, 2], n), strict=True)
        ]
        assert all(owner in {run.rank for run in h.runs} for h, owner in zip(cut, assign(cut, n), strict=True))


def test_what_all_ranks_send_is_there_and_back():
    """Would catch an answer that is not sent, or a piece that its owner sends to itself."""
    sizes, n = [12, 40, 7, 33], 3
    held = [PlacedMatrix(size, size, runs) for size, runs in zip(sizes, runs_of(sizes, n), strict=True)]
    owners = assign(held, n)
    away = sum(run.size for h, owner in zip(held, owners, strict=True) for run in h.runs if run.rank != owner)
    assert away > 0
    assert sum(sent(held, owners, rank) for rank in range(n)) == 2 * away
    assert sent(held[:1], owners[:1], owners[0]) == 0  # it lies on one rank


def test_flops_are_those_of_the_three_products():
    """Would catch the larger side being squared."""
    assert orthogonalising_flops(3, 7) == orthogonalising_flops(7, 3) == 5 * (2 * 3 * 7 * 3 + 2 * 3**3 + 2 * 3 * 3 * 7)
