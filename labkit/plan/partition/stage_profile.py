"""Layers in a row: the profile and the parameters of each layer of a pipeline's stage.

    embedding  block 0  block 1  block 2   (. . .)   block 93  block 94  block 95  head  loss
                                   skipped: like the others

Blocks are alike, so of a long stage only six are walked one by one when its memory is predicted; the others hold what
their neighbours hold. Parameters stand in the order in which the module names them, because buckets are filled in that
order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from labkit.plan.model.layers import Profile, profile
from labkit.plan.model.ops import Setting
from labkit.plan.model.shape import ModelShape
from labkit.plan.model.tape import ACTIVATIONS
from labkit.plan.partition.buckets import Params

WALKED = 6
"""Blocks of a stage that are walked one by one."""
NAMES = (
    "token", "position", "norm1", "query_in", "query_norm", "query", "key", "value", "latent", "latent_norm",
    "key_value", "out", "norm2", "router", "experts", "shared", "gate", "up", "down", "norm", "logits", "bias",
)  # fmt: skip
EXPERTS = "experts."
"""The first part of the names of parameters that are dealt out along ep."""


@dataclass(frozen=True)
class Stage:
    """Layers in a row: the profile and the parameters of each; `skipped` blocks are like that at `at`."""

    kinds: tuple[str, ...]
    profiles: tuple[Profile, ...]
    params: tuple[Params, ...]
    skipped: int
    at: int

    def part(self, experts: bool) -> Stage:
        """The same layers with the parameters of routed experts alone, or with all others alone."""
        params = tuple(
            Params(layer.layer, tuple(pair for pair in layer.sizes if pair[0].startswith(EXPERTS) == experts))
            for layer in self.params
        )
        return replace(self, params=params)

    @cached_property
    def all_params(self) -> tuple[Params, ...]:
        """The parameters of all layers, those of blocks that are not walked included."""
        return (*self.params[: self.at], *[self.params[self.at]] * self.skipped, *self.params[self.at :])

    @cached_property
    def held(self) -> int:
        """Bytes of activations of one micro-batch between its forward and its backward."""
        middle = self.profiles[self.at].held[ACTIVATIONS] * self.skipped
        return sum(layer.held[ACTIVATIONS] for layer in self.profiles) + middle

    @cached_property
    def middle(self) -> int:
        """Elements of the parameters of the blocks that are not walked."""
        return self.skipped * self.params[self.at].numel

    @cached_property
    def numel(self) -> int:
        """Elements of all parameters."""
        return self.middle + sum(layer.numel for layer in self.params)

    @cached_property
    def largest(self) -> tuple[int, int]:
        """Elements of the largest layer, and of the largest parameter."""
        return max(layer.numel for layer in self.params), max(n for layer in self.params for _, n in layer.sizes)

    @cached_property
    def highest(self) -> int:
        """Bytes of the highest moment of any layer alone."""
        return max(max(sum(layer.forward), sum(layer.top)) for layer in self.profiles)


@lru_cache(maxsize=1024)
def stage_of(shape: ModelShape, setting: Setting, n_blocks: int, first: bool, last: bool, n_dense: int = 0) -> Stage:
    """A stage of `n_blocks` blocks, with the embedding if it is the first, with the head if it is the last. The first
    `n_dense` of its blocks have an MLP where the others have experts."""
    walked = min(n_blocks - n_dense, WALKED)
    kinds = ["embedding"] * first + ["dense"] * n_dense + ["block"] * walked + ["head", "loss"] * last
    profiles = tuple(profile(shape, kind, setting) for kind in kinds)
    params = []
    for index, layer in enumerate(profiles):
        sizes = {seg.weight.name: seg.weight.numel for seg in layer.segments if seg.weight is not None}
        if kinds[index] == "head" and first and shape.tied:
            del sizes["logits"]  # it is the token table
        params.append(Params(index, tuple((name, sizes[name]) for name in _in_order(sizes))))
    at = first + n_dense + walked // 2 - (n_dense > 0 and not walked)
    return Stage(tuple(kinds), profiles, tuple(params), n_blocks - n_dense - walked, at)


def _in_order(names: Iterable[str]) -> list[str]:
    def place(part: str) -> int:
        return int(part) if part.isdigit() else NAMES.index(part)

    return sorted(names, key=lambda name: [place(part) for part in name.split(".")])
