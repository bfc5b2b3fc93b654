"""A pipeline's stage as tables: its layers in a row, and their parameters as a strategy shares them out.

    embedding  block 0  block 1  . . .  block 95  head  loss     each a LayerTable (layer_table.py); blocks are all one

Parameters fall into groups: with ep the experts are shared out over other ranks than the rest. Gradients arrive from
the last parameter to the first, so that one number, the elements that have arrived, says which buckets are full.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

from labkit.plan.model.layer_table import LayerTable
from labkit.plan.model.layers import layer
from labkit.plan.model.setting import Setting
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.buckets import Params, fill
from labkit.plan.partition.groups import Grouping

EXPERTS = "experts."
"""The first part of the names of parameters that are dealt out along ep."""


@dataclass(frozen=True)
class Stage:
    """Layers in a row; `tied`: the head's weight is the embedding's, in this stage."""

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

    def part(self, experts: bool) -> tuple[Params, ...]:
        """The parameters of routed experts alone, or all others."""
        return tuple(
            Params(one.layer, tuple(pair for pair in one.sizes if pair[0].startswith(EXPERTS) == experts))
            for one in self.params
        )

    def count(self, kind: str) -> int:
        """How many layers are of this kind."""
        return sum(one.kind == kind for one in self.layers)


@lru_cache(maxsize=1024)
def stage_of(
    shape: ModelShape, setting: Setting, n_blocks: int, first: bool, last: bool, n_dense: int, tied: bool
) -> Stage:
    """A stage of `n_blocks` blocks, with the embedding if it is the first, with the head if it is the last. The first
    `n_dense` of its blocks have an MLP where the others have experts."""
    kinds = ["embedding"] * first + ["dense"] * n_dense + ["block"] * (n_blocks - n_dense) + ["head", "loss"] * last
    return Stage(tuple(layer(shape, kind, setting) for kind in kinds), tied)


@dataclass(frozen=True)
class Bucket:
    """Gradients that travel together: elements that have arrived once its last one has; its own, and padded ones."""

    full_at: int
    numel: int
    padded: int


@dataclass(frozen=True)
class Group:
    """Parameters that are shared out over the same `n` ranks. `stays`: the name of one that several layers use."""

    params: tuple[Params, ...]
    n: int
    sums: int
    bucket_bytes: int
    grouping: Grouping
    stays: str = ""

    @cached_property
    def numel(self) -> int:
        """Elements of all."""
        return sum(one.numel for one in self.params)

    @cached_property
    def after(self) -> tuple[int, ...]:
        """Elements of the layers after each layer, which have arrived before its own."""
        return tuple(accumulate((one.numel for one in reversed(self.params)), initial=0))[-2::-1]

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """Its buckets, in the order in which they are full (labkit.plan.partition.buckets)."""
        sizes = [(self.grouping.of_weight(name), size) for one in self.params for name, size in one.sizes]
        before = (0, *accumulate(size for _, size in sizes))
        buckets = []
        for members in fill([(kind, size * self.sums) for kind, size in sizes], self.bucket_bytes):
            numel = sum(sizes[k][1] for k in members)
            buckets.append(Bucket(self.numel - before[min(members)], numel, numel + -numel % self.n))
        return tuple(buckets)

    @cached_property
    def padded(self) -> int:
        """Elements of all buckets."""
        return sum(bucket.padded for bucket in self.buckets)

    @cached_property
    def units(self) -> tuple[int, ...]:
        """Elements of each layer that come and go together, padded for each parameter group."""
        return tuple(sum(size for _, size in self.unit(one)) for one in self.params)

    def unit(self, one: Params, stays: bool = False) -> list[tuple[object, int]]:
        """(parameter group, elements) of the flat buffers of a layer; `stays`: of the weight that several layers use"""
        whole: dict[object, int] = {}
        for name, size in one.sizes:
            if (name == self.stays) == stays:
                kind = self.grouping.of_weight(name)
                whole[kind] = whole.get(kind, 0) + size
        return [(kind, size + -size % self.n) for kind, size in whole.items()]

    @cached_property
    def staying(self) -> int:
        """Elements of the weight that several layers use."""
        return sum(size for one in self.params for _, size in self.unit(one, True))

    @cached_property
    def _full_at(self) -> tuple[int, ...]:
        return tuple(bucket.full_at for bucket in self.buckets)

    @cached_property
    def _sent(self) -> tuple[int, ...]:
        return (0, *accumulate(bucket.numel for bucket in self.buckets))

    def full(self, arrived: int) -> int:
        """How many buckets are full once so many elements have arrived."""
        return bisect_right(self._full_at, arrived)

    def sent(self, count: int) -> int:
        """Elements of the first `count` buckets."""
        return self._sent[count]


@lru_cache(maxsize=1024)
def groups_of(
    stage: Stage, n: int, n_experts: int, apart: bool, sums: int, bucket_bytes: int, grouping: Grouping, stays: str
) -> tuple[Group, ...]:
    """The groups of a stage: all parameters, or with `apart` the rest and the experts."""
    how = sums, bucket_bytes, grouping, stays
    if not apart:
        return (Group(stage.params, n, *how),)
    groups = Group(stage.part(False), n, *how), Group(stage.part(True), n_experts, *how)
    return groups if groups[1].numel else groups[:1]
