"""What a TensorProbe keeps of one rank, as values that can be sent and stored; filled in tensor_probe.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class RankPlace(NamedTuple):
    """Where a rank stands along an axis. A Group has the same two numbers, and will do in its place."""

    rank: int
    size: int


class ModuleCall(NamedTuple):
    """The return of a module: its `nth` in this call of the model, `micro`, and its tensors, None if too large."""

    module: str
    micro: int
    nth: int
    outputs: tuple[Tensor | None, ...]


class RootCall(NamedTuple):
    """A call of the outermost module: its name ("" for the whole model), what it was given, and if it was training."""

    module: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    training: bool


class KeptPiece(NamedTuple):
    """Elements of a parameter or buffer, flat, from `offset` on of `local_shape`, which is cut along `shard_dim`."""

    flat: Tensor
    offset: int
    local_shape: tuple[int, ...]
    shard_dim: int | None


class Stepping(NamedTuple):
    """What makes a step: the optimizer's class, and for each parameter its options and its state before the run."""

    kind: type[torch.optim.Optimizer]
    options: Mapping[str, Mapping[str, Any]]
    state: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class StepRecord:
    """All that was kept of one step.

    `inputs` and `gradients_out` are by (module, micro, nth, number of the input or output)."""

    roots: tuple[RootCall, ...]
    calls: tuple[ModuleCall, ...]
    inputs: Mapping[tuple[str, int, int, int], Tensor]
    gradients_out: Mapping[tuple[str, int, int, int], Tensor]
    gradients: Mapping[str, KeptPiece]
    parameters: Mapping[str, KeptPiece]
    buffers: Mapping[str, KeptPiece]
    options: Mapping[str, Mapping[str, Any]]
    too_large: int


@dataclass(frozen=True)
class TensorRecord:
    """The record of one rank. `model` is a copy of the whole model as it was at first; None if it was cut."""

    dp: RankPlace
    tp: RankPlace
    start: Mapping[str, KeptPiece]
    start_buffers: Mapping[str, KeptPiece]
    with_masters: frozenset[str]
    unit: float | None
    steps: tuple[StepRecord, ...]
    model: nn.Module | None
    stepping: Stepping | None
    reason: str = ""

    @property
    def n_bytes(self) -> int:
        """Bytes held by all tensors that were kept, the model's copy not counted."""
        tensors = [piece.flat for piece in (*self.start.values(), *self.start_buffers.values())]
        for step in self.steps:
            tensors += [x for call in step.calls for x in call.outputs if x is not None]
            tensors += [*step.inputs.values(), *step.gradients_out.values()]
            for pieces in (step.gradients, step.parameters, step.buffers):
                tensors += [piece.flat for piece in pieces.values()]
            tensors += [x for root in step.roots for x in tensors_in((root.args, dict(root.kwargs)))]
        return sum(x.nbytes for x in tensors)

    def __repr__(self) -> str:
        names = {call.module for step in self.steps for call in step.calls}
        return (
            f"TensorRecord of dp rank {self.dp.rank} of {self.dp.size}, tp rank {self.tp.rank} of {self.tp.size}: "
            f"{len(self.steps)} steps, {len(names)} modules, {len(self.start)} parameters, {self.n_bytes:,} bytes"
        )


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of nested tuples, lists and dicts, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in(tuple(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def with_tensors(value: Any, tensors: Iterator[Tensor]) -> Any:
    """The same nest with other tensors, in the order of `tensors_in`."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, dict):
        return {key: with_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(with_tensors(item, tensors) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(with_tensors(item, tensors) for item in value)
    return value
