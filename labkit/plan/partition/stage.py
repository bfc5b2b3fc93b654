"""A pipeline's stage as tables: its layers in a row, and their parameters as a strategy shares them out.

    embedding  block 0  block 1  . . .  block 95  head  loss          each a LayerTable; all blocks are the same one

Parameters fall into groups: with ep the experts are shared out over other ranks than the rest. Gradients arrive from
the last parameter to the first, so that one number, the elements that have arrived, says which buckets are full.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

from labkit.plan.model.layer_table import LayerTable, Tensors
from labkit.plan.model.layers import layer
from labkit.plan.model.setting import Setting
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.buckets import Params, fill
from labkit.plan.partition.groups import Grouping, ParamGroup

EXPERTS = "experts."
"""The first part of the names of parameters that are dealt out along ep."""
EDGE = 3
"""Blocks at each end of a stage that are looked at one by one."""


def edges(count: int) -> list[int]:
    """Of so many layers those at both ends that are looked at, first to last."""
    side = EDGE + 2
    return [*range(min(side, count)), *range(max(side, count - side), count)]


@dataclass(frozen=True, eq=False)
class StageTable:
    """Layers in a row; `tied`: the head's weight is the embedding's, in this stage. (`stage_of` gives the same object
    for the same stage, so that a stage is quick to look up.)"""

    layers: tuple[LayerTable, ...]
    tied: bool

    @cached_property
    def held(self) -> int:
        """Bytes of activations of one micro-batch between its forward and its backward."""
        return self.held_before[-1]

    @cached_property
    def held_before(self) -> tuple[int, ...]:
        """Those of the layers before each layer, and of all."""
        return (0, *accumulate(one.held for one in self.layers))

    @cached_property
    def cached_before(self) -> tuple[int, ...]:
        """Bytes that autocast keeps of the layers before each layer until the forward of all is over."""
        return (0, *accumulate(one.cached for one in self.layers))

    @cached_property
    def held_by_loss(self) -> int:
        """Bytes that the loss saves for its backward; 0 in a stage without the loss."""
        return sum(one.held for one in self.layers if one.kind == "loss")

    @cached_property
    def tied_bytes(self) -> int:
        """Bytes of the tied head's gradient, which waits for the table's other use."""
        return self.tied * sum(row.fresh for one in self.layers for row in one.rows if row.name == "logits")

    @cached_property
    def params(self) -> tuple[Params, ...]:
        """The parameters of each layer."""
        return tuple(
            Params(k, tuple(pair for pair in one.weights if not (self.tied and pair[0] == "logits")))
            for k, one in enumerate(self.layers)
        )

    @cached_property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(one.numel for one in self.params)

    @cached_property
    def weights(self) -> Tensors:
        """(name, elements) of all of them."""
        return tuple(pair for one in self.params for pair in one.sizes)

    @cached_property
    def highest(self) -> tuple[int, int]:
        """Bytes of the highest moment of any layer alone, forward and backward."""
        return max(one.forward for one in self.layers), max(one.backward for one in self.layers)

    @cached_property
    def most_forward(self) -> tuple[int, ...]:
        """Bytes of activations that no moment of the forward of each layer at the ends (`edges`) exceeds."""
        held, cached = self.held_before, self.cached_before
        return tuple(held[k] + cached[k] + self.layers[k].forward for k in edges(len(self.layers)))

    @cached_property
    def most_backward(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The same of their backward: with gradients that arrive as wide as they are made, and with those that are
        widened to twice that."""
        ends = edges(len(self.layers))
        return tuple(self._most_backward(k, 1) for k in ends), tuple(self._most_backward(k, 2) for k in ends)

    def _most_backward(self, k: int, wide: int) -> int:
        layer = self.layers[k]
        works = max(layer.backward, layer.again + layer.result) + (wide - 1 + self.tied) * 2 * layer.fresh
        return self.held_before[k] + works + self.tied_bytes * wide

    def part(self, experts: bool) -> tuple[Params, ...]:
        """The parameters of routed experts alone, or all others."""
        return tuple(
            Params(one.layer, tuple(pair for pair in one.sizes if pair[0].startswith(EXPERTS) == experts))
            for one in self.params
        )

    def count(self, kind: str) -> int:
        """The number of layers of this kind."""
        return sum(one.kind == kind for one in self.layers)


@lru_cache(maxsize=1024)
def stage_of(
    shape: ModelShape, setting: Setting, n_blocks: int, first: bool, last: bool, n_dense: int, tied: bool
) -> StageTable:
    """A stage of `n_blocks` blocks, with the embedding if it is the first, with the head if it is the last. The first
    `n_dense` of its blocks have an MLP where the others have experts."""
    kinds = ["embedding"] * first + ["dense"] * n_dense + ["block"] * (n_blocks - n_dense) + ["head", "loss"] * last
    tables = {kind: layer(shape, kind, setting) for kind in dict.fromkeys(kinds)}  # blocks are alike
    return StageTable(tuple([tables[kind] for kind in kinds]), tied)


class PlannedBucket(NamedTuple):
    """Gradients that travel together, all of one parameter group: elements that have arrived once its last one has;
    (name, elements) of its parameters, last to first; their elements, and these padded so that n divides them."""

    full_at: int
    group: ParamGroup
    sizes: Tensors
    numel: int
    padded: int


@dataclass(frozen=True, eq=False)
class ShardedParameters:
    """Parameters that are shared out over the same `n` ranks.

    sums      bytes of a gradient that is added up;   bucket_bytes    of a bucket
    stays     the name of a parameter that several layers use, if there is one"""

    params: tuple[Params, ...]
    n: int
    sums: int
    bucket_bytes: int
    grouping: Grouping
    stays: str = ""

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """Elements of each layer."""
        return tuple([one.numel for one in self.params])

    @cached_property
    def numel(self) -> int:
        """Elements of all."""
        return sum(self.numels)

    @cached_property
    def tensors(self) -> tuple[tuple[ParamGroup, int], ...]:
        """Parameter group and elements of each parameter."""
        return tuple((self.grouping.of_weight(name), size) for one in self.params for name, size in one.sizes)

    @cached_property
    def after(self) -> tuple[int, ...]:
        """Elements of the layers after each layer, which have arrived before its own."""
        return tuple(accumulate(reversed(self.numels), initial=0))[-2::-1]

    def done(self, k: int) -> int:
        """Elements of the units after layer k, which backward has left."""
        return self._units_after[k]

    @cached_property
    def _units_after(self) -> tuple[int, ...]:
        return tuple(accumulate(reversed(self.units), initial=0))[-2::-1]

    @cached_property
    def buckets(self) -> tuple[PlannedBucket, ...]:
        """Its buckets, in the order in which they are full (labkit.plan.partition.buckets)."""
        named = [pair for one in self.params for pair in one.sizes]
        before = (0, *accumulate(size for _, size in named))
        buckets = []
        for members in fill([(kind, size * self.sums) for kind, size in self.tensors], self.bucket_bytes):
            sizes = tuple(named[k] for k in members)
            numel = sum(size for _, size in sizes)
            full_at = self.numel - before[min(members)]
            buckets.append(PlannedBucket(full_at, self.tensors[members[0]][0], sizes, numel, numel + -numel % self.n))
        return tuple(buckets)

    @cached_property
    def padded(self) -> int:
        """Elements of all buckets."""
        return sum(bucket.padded for bucket in self.buckets)

    @cached_property
    def largest_bucket(self) -> int:
        """Elements of the largest bucket, padded."""
        return max(bucket.padded for bucket in self.buckets)

    @cached_property
    def units(self) -> tuple[int, ...]:
        """Elements of each layer that come and go together, padded for each parameter group."""
        return tuple(sum(size for _, size in unit) for unit in self.flat)

    @cached_property
    def flat(self) -> tuple[tuple[tuple[ParamGroup, int], ...], ...]:
        """(parameter group, elements) of the flat buffers of each layer, without the weight that several layers use."""
        return tuple(self._flat([pair for pair in one.sizes if pair[0] != self.stays]) for one in self.params)

    @cached_property
    def stay(self) -> tuple[tuple[ParamGroup, int], ...]:
        """The same of that weight."""
        return self._flat([pair for one in self.params for pair in one.sizes if pair[0] == self.stays])

    @cached_property
    def staying(self) -> int:
        """Its elements."""
        return sum(size for _, size in self.stay)

    @cached_property
    def last_unit(self) -> int:
        """Elements of the unit whose gradients leave last: that weight, or else the first layer with parameters."""
        return self.staying or next((unit for unit in self.units if unit), 0)

    def _flat(self, sizes: Iterable[tuple[str, int]]) -> tuple[tuple[ParamGroup, int], ...]:
        whole: dict[ParamGroup, int] = {}
        for name, size in sizes:
            kind = self.grouping.of_weight(name)
            whole[kind] = whole.get(kind, 0) + size
        return tuple((kind, size + -size % self.n) for kind, size in whole.items())

    @cached_property
    def _full_at(self) -> tuple[int, ...]:
        return tuple(bucket.full_at for bucket in self.buckets)

    @cached_property
    def _sent(self) -> tuple[int, ...]:
        return (0, *accumulate(bucket.numel for bucket in self.buckets))

    def full(self, arrived: int) -> int:
        """The number of buckets that are full once so many elements have arrived."""
        return bisect_right(self._full_at, arrived)

    def sent(self, count: int) -> int:
        """Elements of the first `count` buckets."""
        return self._sent[count]


@lru_cache(maxsize=1024)
def groups_of(
    stage: StageTable, n: int, n_experts: int, apart: bool, sums: int, bucket_bytes: int, grouping: Grouping, stays: str
) -> tuple[ShardedParameters, ...]:
    """The groups of a stage: all parameters, or with `apart` the rest and the experts."""
    how = sums, bucket_bytes, grouping, stays
    if not apart:
        return (ShardedParameters(stage.params, n, *how),)
    groups = ShardedParameters(stage.part(False), n, *how), ShardedParameters(stage.part(True), n_experts, *how)
    return groups if groups[1].numel else groups[:1]


@dataclass(frozen=True, eq=False)
class RankParameters:
    """All parameters of a rank: of each of its stages the groups that are shared out over the same ranks."""

    stages: tuple[tuple[ShardedParameters, ...], ...]

    @cached_property
    def groups(self) -> tuple[ShardedParameters, ...]:
        """The groups of all stages."""
        return tuple(group for groups in self.stages for group in groups)

    @cached_property
    def numel(self) -> int:
        """Elements of all."""
        return sum(group.numel for group in self.groups)

    @cached_property
    def padded(self) -> int:
        """Elements of all buckets."""
        return sum(group.padded for group in self.groups)

    @cached_property
    def shared(self) -> int:
        """Elements of one rank's part of each group, where all are shared out."""
        return sum(group.numel // group.n for group in self.groups)

    @cached_property
    def largest(self) -> tuple[int, int]:
        """Elements of the largest layer, and of the largest parameter."""
        rows = [zip(*[group.numels for group in groups], strict=True) for groups in self.stages]
        layers = [sum(numels) for row in rows for numels in row]
        return max(layers), max(size for group in self.groups for one in group.params for _, size in one.sizes)
