"""What torch's `fully_shard` holds and sends, unit by unit: the law of a configuration.

    fully_shard(block, mesh=mesh, mp_policy=policy)     one unit: the parameters that no earlier call has taken
    fully_shard(model, mesh=mesh, mp_policy=policy)     the root: a unit of all that are left

Each parameter is cut along its first dim into n chunks of ceil(size / n), padded at the end. C is the number of
elements of a rank's chunks of a unit. In each micro-batch a rank sends of this unit:

    all_gather in forward                 (n-1) C w       w: bytes of an element of `param_dtype`
    all_gather in backward                (n-1) C w       if it is resharded after forward, else nothing
    reduce_scatter of the gradients       (n-1) C g       g: bytes of an element of `reduce_dtype`
    all_reduce over k copies (HSDP)       2(k-1)/k C g    on a mesh of two dims (k copies, n shards)

`reshard_after_forward=None`, the default, is True for every unit but the root: the root's weights are needed at once
when backward begins, so they stay whole in between. Between two steps every rank holds only its chunks, whatever this
says: in the dtype of the model, with gradients of that dtype, and two more numbers for each in AdamW.

Source: torch 2.13, torch/distributed/fsdp/_fully_shard: _fully_shard.py (the arguments), _fsdp_param.py (the padding).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ShardedUnit:
    """One call of `fully_shard`: the shapes of its parameters, and whether they are freed after forward."""

    shapes: tuple[Shape, ...]
    reshard: bool = True

    def __post_init__(self) -> None:
        scalars = [shape for shape in self.shapes if not shape]
        if scalars:
            raise ValueError(f"{len(scalars)} parameters have no dim to be cut along: make them tensors of one element")

    def chunk_elements(self, n_ranks: int) -> int:
        """Elements of the padded chunks of one rank."""
        return sum(math.ceil(shape[0] / n_ranks) * math.prod(shape[1:]) for shape in self.shapes)

    def gather_bytes(self, n_ranks: int, word: int) -> int:
        """Bytes that a rank sends in one gather of this unit."""
        return (n_ranks - 1) * self.chunk_elements(n_ranks) * word

    def held_elements(self, n_ranks: int, rank: int) -> int:
        """Elements that a rank holds between two steps, without padding: the last ranks may have fewer, or none."""
        total = 0
        for first, *rest in self.shapes:
            longest = math.ceil(first / n_ranks)
            total += max(0, min(longest, first - rank * longest)) * math.prod(rest)
        return total


@dataclass(frozen=True)
class UnitTraffic:
    """Bytes that a rank sends of one unit, or of all: in forward, in backward, for gradients, between copies."""

    forward: int
    backward: int
    gradients: int
    copies: float = 0.0

    @property
    def total(self) -> float:
        """The sum of all four."""
        return self.forward + self.backward + self.gradients + self.copies


def unit_traffic(
    units: Sequence[ShardedUnit], n_ranks: int, word: int = 4, reduce_word: int = 4, n_micro: int = 1, copies: int = 1
) -> list[UnitTraffic]:
    """What a rank sends of each unit in one step. `word` and `reduce_word` are bytes of an element, see above.

    Gradients are scattered in every micro-batch, as without `set_requires_gradient_sync(False)`. ValueError for counts
    below 1."""
    for name, count in (("n_ranks", n_ranks), ("n_micro", n_micro), ("copies", copies)):
        if count < 1:
            raise ValueError(f"{name} is at least 1, got {count}")
    traffic = []
    for unit in units:
        gathered, scattered = unit.gather_bytes(n_ranks, word), unit.gather_bytes(n_ranks, reduce_word)
        summed = 2 * (copies - 1) / copies * unit.chunk_elements(n_ranks) * reduce_word
        backward = gathered if unit.reshard else 0
        traffic.append(UnitTraffic(n_micro * gathered, n_micro * backward, n_micro * scattered, n_micro * summed))
    return traffic
