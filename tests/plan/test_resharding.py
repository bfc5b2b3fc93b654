"""Which elements travel: against every element counted one by one."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from labkit.plan.pocket.resharding import (
    Placement,
    Rectangle,
    buffer_bytes,
    matrix,
    moves,
    received_bytes,
    rounds,
    sent_bytes,
    wholes,
)
from tests.cases import cases

SHAPES = [(), (7,), (5, 6), (6, 5), (1, 9), (4, 3, 2)]


def elements(place):
    """The numbers of a place's elements in the flattened whole, by torch's own cuts."""
    numbers = torch.arange(torch.Size(place.global_shape).numel()).view(place.global_shape)
    shard = numbers
    if place.shard_dim is not None:
        shard = numbers.tensor_split(place.n_shards, place.shard_dim)[place.shard_index]
    return shard.reshape(-1)[place.offset : place.offset + place.numel].tolist()


def inside(block, shape):
    rows, cols = matrix(shape)
    return torch.arange(rows * cols).view(rows, cols)[block.top : block.bottom, block.left : block.right].tolist()


def layout(shape, rng, first=0, copies=1):
    """A random layout of one parameter: cut over some ranks, each slice in runs on some others, all of it copied."""
    cut = rng.choice([None, *range(min(2, len(shape)))])
    of = 1 if cut is None else rng.choice([1, 2, 3])
    runs = rng.choice([1, 2, 3])
    places, rank = [], first
    for part in range(of):
        size = len(elements(Placement(0, "w", shape, cut, part, of, 0, 10**6, "float32")))
        ends = [0, *sorted(rng.randint(0, size) for _ in range(runs - 1)), size]
        for begin, end in zip(ends, ends[1:], strict=False):
            for copy in range(copies):
                at = rank + copy * of * runs
                places.append(Placement(at, "w", shape, cut, part, of, begin, end - begin, "float32"))
            rank += 1
    return places


@cases("shape", SHAPES)
@cases("seed", range(20))
def test_every_element_that_is_wanted_comes_once_from_a_rank_that_holds_it(shape, seed):
    """Would catch a run that begins in the middle of a row, a slice of columns that is read as rows, an element of two
    holders that comes twice, and a rank that is sent what it has."""
    rng = random.Random(f"{shape} {seed}")
    held = layout(shape, rng, copies=rng.choice([1, 2]))
    wanted = layout(shape, rng, first=rng.choice([0, 40]))
    for place in (*held, *wanted):
        assert sorted(n for block in place.blocks for row in inside(block, shape) for n in row) == sorted(
            elements(place)
        )
        assert len(place.blocks) <= 3
    found: dict[int, Counter[int]] = {place.rank: Counter() for place in wanted}
    has = {place.rank: set(elements(place)) for place in held}
    away: Counter[int] = Counter()
    for move in moves(held, wanted):
        rows = inside(move.block, shape)
        numbers = [n for row in rows for n in row]
        found[move.target.rank].update(numbers)
        assert set(numbers) <= has[move.source.rank]
        if move.target.rank in has:
            assert move.stays == bool(set(numbers) <= has[move.target.rank])
        away[move.source.rank] += 0 if move.stays else 4 * len(numbers)
        for place in (move.source, move.target):  # where the window lies in the run that the rank keeps
            begin, width = place.begin_and_stride(move.block)
            flat = elements(place)
            assert [[flat[begin + r * width + c] for c in range(len(row))] for r, row in enumerate(rows)] == rows
    assert found == {place.rank: Counter(elements(place)) for place in wanted}
    assert all(sent_bytes(moves(held, wanted), rank) == away[rank] for rank in has)


def test_whole_parameters_and_buckets():
    """Would catch a bucket of two dtypes, one above its size with more than one parameter, a dropped last one, and rows
    that travel in two blocks where they are one."""
    for start, numel, n_blocks in ((0, 30, 1), (6, 18, 1), (6, 20, 2), (5, 19, 2), (5, 20, 3), (7, 4, 1)):
        assert len(Placement(0, "w", (5, 6), None, 0, 1, start, numel, "float32").blocks) == n_blocks
    sizes = {"a": (2, 5), "b": (3,), "c": (40,), "d": (1,), "e": (2,)}
    dtypes = {"d": "bfloat16"}
    held = [Placement(0, n, s, None, 0, 1, 0, torch.Size(s).numel(), "float32") for n, s in sizes.items()]
    wanted = [p._replace(rank=rank, dtype=dtypes.get(p.name, "float32")) for rank in (1, 2) for p in held]
    whole = wholes(wanted, 5)
    assert [(place.rank, place.name, place.dtype) for place in whole] == [
        (5, name, dtypes.get(name, "float32")) for name in sizes
    ]
    travelling = moves(held, wanted)
    buckets = [sorted({move.target.name for move in some}) for some in rounds(travelling, 60)]
    assert buckets == [["a", "b"], ["c"], ["d"], ["e"]]
    assert sent_bytes(travelling, 0) == 2 * (10 + 3 + 40 + 2) * 4 + 2 * 2
    assert received_bytes(travelling, 2) == (10 + 3 + 40 + 2) * 4 + 2
    assert buffer_bytes(travelling, 0, 60) == 2 * 160
    assert buffer_bytes(travelling, 2, 10**6) == 55 * 4 - 8, "d begins another bucket, e one more"
    with pytest.raises(ValueError, match="bucket_bytes=0"):
        list(rounds(travelling, 0))


def test_what_cannot_be_resharded_is_refused_with_its_numbers():
    """Would catch a trainer of which a rank is missing, and a generator whose ranks want different numbers."""
    whole = Placement(0, "w", (4, 3, 2), None, 0, 1, 0, 24, "float32")
    with pytest.raises(ValueError, match=r"of 24 elements of w \(4, 3, 2\) the trainer's ranks hold 20"):
        moves([whole._replace(numel=20)], [whole])
    with pytest.raises(ValueError, match="w is wanted as bfloat16 and float32"):
        moves([whole], [whole, whole._replace(rank=1, dtype="bfloat16")])
    with pytest.raises(ValueError, match="w is wanted as int8"):
        moves([whole], [whole._replace(dtype="int8")])
    with pytest.raises(ValueError, match="cut along dim 2"):
        whole._replace(shard_dim=2, n_shards=2, numel=12).shard  # noqa: B018
    assert Rectangle(0, 2, 3, 5).common(Rectangle(1, 9, 0, 4)) == Rectangle(1, 2, 3, 4)
