"""Which elements travel when weights that lie in one layout are wanted in another.

    a matrix on three ranks that hold it        wanted by two ranks          what rank 0 has for rank 3
    in runs of its rows (ZeRO)                  in columns (tp)

        |0 0 0 0 0 0|                               |3 3 3|4 4 4|                |x x x|     |
        |0 0 1 1 1 1|                               |3 3 3|4 4 4|                |x x  |     |
        |1 1 1 1 2 2|                               |3 3 3|4 4 4|                |     |     |
        |2 2 2 2 2 2|                               |3 3 3|4 4 4|

What a rank holds of a parameter is a run of elements of the flattened slice that tensor parallelism has cut out of it,
which is the whole where nothing is cut. In the parameter, seen as a matrix of shape[0] rows, that is three blocks at
most: the end of a row, whole rows, the beginning of a row. Two blocks meet in a block, so each pair of ranks is settled
by a few comparisons, however many elements there are.

Several ranks may hold the same elements (copies of dp, what tp leaves whole). One that wants them and has them takes
its own; else that holder sends which has the fewest bytes to send so far. Everybody works this out alone, and comes to
the same.

    bytes that all ranks send together     sum over those that want of (bytes wanted - bytes of these that they hold)
    bytes that one rank sends              `sent_bytes`; W/t where t ranks hold a t-th of the W bytes each, and every
                                           element is wanted once on another rank; with c copies of the generator c W/t
    bytes that one rank receives           `received_bytes`: its share of the generator, but for what it holds itself

Source: two layouts are intersected piece by piece in torch.distributed.checkpoint, too, when it loads what other ranks
have saved (`create_read_items_for_chunk_list`); there from files, here from rank to rank.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from types import MappingProxyType
from typing import NamedTuple

WORDS = MappingProxyType(
    {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int64": 8}
)
"""Bytes of a number, by torch's name of its dtype."""


class Rectangle(NamedTuple):
    """Rows `top` to `bottom` (not included), columns `left` to `right`, of a parameter that is seen as a matrix."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def numel(self) -> int:
        """Elements."""
        return max(0, self.bottom - self.top) * max(0, self.right - self.left)

    def common(self, other: Rectangle) -> Rectangle:
        """The elements that are in both; `numel` is 0 if there are none."""
        return Rectangle(
            max(self.top, other.top), min(self.bottom, other.bottom),
            max(self.left, other.left), min(self.right, other.right),
        )  # fmt: skip


class Placement(NamedTuple):
    """The elements of one parameter that one rank holds, or wants.

    rank          in the world
    name          of the parameter in the whole model
    global_shape  of the whole parameter
    shard_dim     the dim along which tp has cut it into `n_shards`, of which this rank has number `shard_index`; None
                  if it has not
    offset        the first element in the flattened shard, and `numel` of them
    dtype         torch's name of it, in which the rank holds or wants them
    """

    rank: int
    name: str
    global_shape: tuple[int, ...]
    shard_dim: int | None
    shard_index: int
    n_shards: int
    offset: int
    numel: int
    dtype: str

    @property
    def shard(self) -> Rectangle:
        """The shard that tp has cut out. ValueError for a cut along a dim behind the second."""
        shape, dim = self.global_shape, self.shard_dim
        rows, cols = matrix(shape)
        if dim is None:
            return Rectangle(0, rows, 0, cols)
        if dim not in (0, 1) or dim >= len(shape):
            raise ValueError(f"{self.name} {shape} is cut along dim {dim}: only dims 0 and 1 can be met")
        first, last = (_begin(shape[dim], index, self.n_shards) for index in (self.shard_index, self.shard_index + 1))
        inner = prod(shape[2:])
        return Rectangle(first, last, 0, cols) if dim == 0 else Rectangle(0, rows, first * inner, last * inner)

    @property
    def blocks(self) -> tuple[Rectangle, ...]:
        """Where the elements lie in the whole parameter: at most three blocks."""
        top, _, left, right = self.shard
        if not self.numel:
            return ()
        width, end = right - left, self.offset + self.numel
        (first, begin), (last, stop) = divmod(self.offset, width), divmod(end, width)
        if first == last:
            runs = [(first, first + 1, begin, stop)]
        else:
            whole_from = first + (begin > 0)
            runs = [(first, whole_from, begin, width), (whole_from, last, 0, width), (last, last + 1, 0, stop)]
        placed = (Rectangle(top + a, top + b, left + c, left + d) for a, b, c, d in runs)
        return tuple(block for block in placed if block.numel)

    @property
    def n_bytes(self) -> int:
        """Bytes of these elements."""
        return self.numel * WORDS[self.dtype]

    def begin_and_stride(self, block: Rectangle) -> tuple[int, int]:
        """The place in the run at which a block begins, and the elements from one row of the block to the next."""
        top, _, left, right = self.shard
        return (block.top - top) * (right - left) + block.left - left - self.offset, right - left


class Move(NamedTuple):
    """One block of elements on its way from a rank that holds it to a rank that wants it, perhaps the same."""

    source: Placement
    target: Placement
    block: Rectangle

    @property
    def stays(self) -> bool:
        """True if nothing has to be sent."""
        return self.source.rank == self.target.rank

    @property
    def n_bytes(self) -> int:
        """Bytes in the dtype in which they are wanted."""
        return self.block.numel * WORDS[self.target.dtype]


Holders = dict[str, dict[tuple[Rectangle, ...], list[Placement]]]
"""Name -> the blocks that some ranks hold of it, and which ranks hold just these."""


def matrix(shape: Sequence[int]) -> tuple[int, int]:
    """A parameter's rows and columns.   (4, 6) -> (4, 6), (5,) -> (5, 1), (4, 3, 2) -> (4, 6), () -> (1, 1)"""
    return (shape[0] if shape else 1), prod(shape[1:])


def moves(held: Iterable[Placement], wanted: Iterable[Placement]) -> tuple[Move, ...]:
    """All that travels, parameter by parameter in the order in which it is wanted; the same on every rank.

    ValueError if a parameter is wanted that nobody holds or is held and not wanted, if shapes differ, or if what is
    held does not give each element once."""
    holders: Holders = defaultdict(lambda: defaultdict(list))
    wishes: dict[str, list[Placement]] = defaultdict(list)
    for place in held:
        holders[place.name][place.blocks].append(place)
    for place in wanted:
        wishes[place.name].append(place)
    _check(holders, wishes)
    load = Counter[int]()
    travelling = []
    for name, targets in wishes.items():
        for target in targets:
            for blocks, places in holders[name].items():
                met = [both for a in blocks for b in target.blocks if (both := a.common(b)).numel]
                if not met:
                    continue
                source = min(places, key=lambda p: (p.rank != target.rank, load[p.rank], p.rank))
                travelling += [Move(source, target, block) for block in met]
                load[source.rank] += sum(move.n_bytes for move in travelling[-len(met) :] if not move.stays)
    return tuple(travelling)


def wholes(wanted: Iterable[Placement], rank: int) -> tuple[Placement, ...]:
    """Each parameter that is wanted, once and whole, on one rank."""
    firsts = {place.name: place for place in reversed(list(wanted))}
    return tuple(
        Placement(rank, name, place.global_shape, None, 0, 1, 0, prod(place.global_shape), place.dtype)
        for name, place in reversed(firsts.items())
    )


def rounds(travelling: Iterable[Move], bucket_bytes: int) -> Iterator[tuple[Move, ...]]:
    """The moves in groups: parameters one after the other, of one dtype and at most `bucket_bytes` together; a larger
    one is alone. ValueError for less than a byte."""
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes={bucket_bytes}: a bucket has at least a byte")
    by_name: dict[str, list[Move]] = defaultdict(list)
    for move in travelling:
        by_name[move.target.name].append(move)
    bucket: list[Move] = []
    filled = 0
    for some in by_name.values():
        dtype, n_bytes = some[0].target.dtype, prod(some[0].target.global_shape) * WORDS[some[0].target.dtype]
        if bucket and (filled + n_bytes > bucket_bytes or bucket[-1].target.dtype != dtype):
            yield tuple(bucket)
            bucket, filled = [], 0
        bucket += some
        filled += n_bytes
    if bucket:
        yield tuple(bucket)


def sent_bytes(travelling: Iterable[Move], rank: int) -> int:
    """Bytes that a rank sends to others."""
    return sum(move.n_bytes for move in travelling if move.source.rank == rank and not move.stays)


def received_bytes(travelling: Iterable[Move], rank: int) -> int:
    """Bytes that come to a rank from others."""
    return sum(move.n_bytes for move in travelling if move.target.rank == rank and not move.stays)


def buffer_bytes(travelling: Iterable[Move], rank: int, bucket_bytes: int) -> int:
    """The most bytes that a rank holds besides its shards: of one bucket, what it sends and what comes."""
    buckets = rounds(travelling, bucket_bytes)
    return max((sent_bytes(some, rank) + received_bytes(some, rank) for some in buckets), default=0)


def _begin(size: int, index: int, n_shards: int) -> int:
    """The first row of shard `index`, as `torch.tensor_split` cuts: the first shards are longer by one."""
    base, longer = divmod(size, n_shards)
    return index * base + min(index, longer)


def _check(holders: Holders, wishes: dict[str, list[Placement]]) -> None:
    for name in [*wishes, *holders]:
        places = [place for same in holders.get(name, {}).values() for place in same]
        if not places or name not in wishes:
            has, lacks = ("generator", "trainer") if not places else ("trainer", "generator")
            raise ValueError(
                f"the {has} has {name}, the {lacks} has not: build both from one GPTConfig (a tied head is no "
                "parameter of its own)"
            )
        kinds = sorted({str(place.global_shape) for place in [*places, *wishes[name]]})
        if len(kinds) > 1:
            raise ValueError(f"{name} has shapes {' and '.join(kinds)}: trainer and generator are different models")
        dtypes = sorted({place.dtype for place in wishes[name]})
        if len(dtypes) > 1 or dtypes[0] not in WORDS:
            raise ValueError(
                f"{name} is wanted as {' and '.join(dtypes)}: one of {', '.join(WORDS)}, the same on every rank"
            )
        numel = sum(block.numel for blocks in holders[name] for block in blocks)
        shape = places[0].global_shape
        if numel != prod(shape):
            raise ValueError(
                f"of {prod(shape):,} elements of {name} {shape} the trainer's ranks hold {numel:,} "
                "(copies counted once): let every rank of the trainer say what it holds"
            )
