"""The moments of an optimizer's step that may be the highest of a rank, and the sum of bytes that a moment is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from labkit.plan.job.recipe import Recipe
from labkit.plan.partition.groups import ParamGroup
from labkit.plan.partition.matrices import MatrixStep
from labkit.plan.partition.stage import ShardedParameters


class Sum(NamedTuple):
    """Bytes on top of what is held between steps, by kind, at one moment."""

    when: str
    weights: int = 0
    gradients: int = 0
    activations: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.activations + self.other


def of_optimizer(
    r: Recipe,
    stages: Sequence[Sequence[ShardedParameters]],
    device: str,
    cut_rows: int,
    matrix_step: Callable[[int, ShardedParameters], MatrixStep | None],
) -> Iterator[Sum]:
    """The optimizer's step on a rank: gradients, 1/n of them where they are cut, and temporaries. Of each of its
    `stages` the groups of parameters; `cut_rows` and `matrix_step` as in Rank.

    For Adam the square root of the variance, and that over its correction, one tensor after another on a CPU. Each
    stage has an optimizer of its own, and so have experts that are dealt out; they step one after another."""
    law, wide = r.strategy_law, r.state_bytes
    groups = [pair for one in stages for pair in enumerate(one)]
    gradients = sum(group.padded // group.n for _, group in groups) * r.gradient_bytes * r.cuts.state
    for _, group in groups:
        if decoded := law.decoding(group, r):
            yield Sum("the gradients' way", other=cut_rows + decoded)
    if r.offload and device != "cpu":
        return
    for number, group in groups:
        kinds: dict[ParamGroup, list[int]] = {}
        for kind, size in law.owned(group):
            kinds.setdefault(kind, []).append(size * wide)
        step = matrix_step(number, group)
        scratch = 0 if step is None else step.temporaries(not r.cuts.state)
        for kind, sizes in kinds.items():
            if r.steps_by.adam and not kind.by_matrix:
                one_by_one = max(2 * size + before for size, before in zip(sizes, [0, *sizes], strict=False))
                scratch = max(scratch, one_by_one if device == "cpu" else sum(sizes))
        widened, stepped = 0, [size for sizes in kinds.values() for size in sizes]
        if r.has_masters and not r.fp32_gradients:  # fp32 gradients for the masters
            widened = sum(stepped) // 2 if r.cuts.state else sum(stepped)  # ZeRO's bf16 ones are freed
            if r.clip_norm is not None and stepped:  # one after another is squared in fp32
                yield Sum("the gradients' norm", gradients=gradients, other=cut_rows + max(stepped))
        yield Sum("the optimizer's step", gradients=gradients + widened, other=cut_rows + scratch)
        if r.cuts.state:
            gradients -= widened  # as many bytes of narrow gradients are gone
