"""A unit of ZeRO-3: layers whose weights are whole only while somebody computes with them.

                      start                       wait
    SHARDED  -------------------->  COMING  ---------------->  WHOLE
       ^        all_gather begins             and is done        |
       |_________________________________________________________|
                          free: the memory is given back

A freed weight keeps its shape and reads as NaN: what computes with it by mistake shows it at once. Weights that
autograd has saved are views of one buffer, whose memory is given back and asked for again; the views stay, and so do
their version counters (a weight written with `copy_` would look like one that was changed after forward).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from labkit.comm.group import Work
from labkit.parallel.bucket import Named
from labkit.parallel.shards import Shard

SHARDED, COMING, WHOLE = "sharded", "coming", "whole"


class Unit:
    """Parameters that are gathered and freed together: one shard for each kind (dtype, device, frozen or not).

    index     its place among the strategy's units: what the record of gathers names it by
    state     SHARDED, COMING or WHOLE
    stays     True for weights used in several places: whole from the first use until the backward pass is over
    kept      whole though nobody computes with it now, because it is the next one needed
    calls     forward calls that have begun and not ended, innermost last
    armed     those of its calls through which backward is going at the moment
    """

    def __init__(self, index: int, shards: Sequence[Shard], stays: bool = False) -> None:
        """Take the shards' weights apart: SHARDED."""
        self.index, self.shards, self.stays = index, tuple(shards), stays
        self.state, self.kept = WHOLE, False
        self.works: list[Work] = []
        self.calls: list[object] = []
        self.armed: set[object] = set()
        self.windows = [list(shard.flat.windows(shard.weights)) for shard in self.shards]
        self.nothing = [_nothing(shard.weights) for shard in self.shards]
        self.free()

    @property
    def has_grads(self) -> bool:
        """Whether there are gradients that were not sent."""
        return any(shard.has_grads for shard in self.shards)

    def start(self) -> None:
        """SHARDED -> COMING. Sends (n-1)/n of the weights' bytes."""
        if self.state == SHARDED:
            for shard in self.shards:
                shard.weights.untyped_storage().resize_(shard.weights.numel() * shard.weights.element_size())
            self.works = [shard.gather_start() for shard in self.shards]
            self.state = COMING

    def wait(self) -> None:
        """SHARDED or COMING -> WHOLE."""
        self.start()
        if self.state == COMING:
            self._arrive()
            for windows in self.windows:
                for p, window in windows:
                    p.data = window
            self.state = WHOLE

    def free(self) -> None:
        """COMING or WHOLE -> SHARDED."""
        if self.state == COMING:
            self._arrive()  # the wire still writes to the memory
        if self.state != SHARDED:
            for windows, nothing, shard in zip(self.windows, self.nothing, self.shards, strict=True):
                for p, window in windows:
                    p.data = nothing.expand(window.shape)
                shard.weights.untyped_storage().resize_(0)
        self.state, self.kept = SHARDED, False

    def _arrive(self) -> None:
        for work in self.works:
            work.wait()
        self.works = []


class Record:
    """The order in which units were needed in the last step: what to prefetch, and what to keep.

    One step of three units, forward and backward:      0 1 2 2 1 0
    in the next step, when 1 is needed in forward, 2 is gathered while 1 computes; and when 2 has computed it is the
    next one needed, so it need not be freed. A step that goes another way is served without foresight, and recorded."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        self.known: tuple[int, ...] = ()
        self.begin()

    def begin(self) -> None:
        """A step begins; what was noted since the last one is no part of it."""
        self.seen: list[int] = []
        self.follows = True

    def end(self) -> None:
        """The step is over: the next one is expected to go the same way."""
        if self.seen:
            self.known = tuple(self.seen)
        self.begin()

    def note(self, index: int) -> None:
        """Unit `index` is needed now."""
        at = len(self.seen)
        self.follows = self.follows and at < len(self.known) and self.known[at] == index
        self.seen.append(index)

    def ahead(self, count: int) -> tuple[int, ...]:
        """The next `count` units that will be needed, as far as is known."""
        return self.known[len(self.seen) : len(self.seen) + count] if self.follows else ()


class Leave(torch.autograd.Function):
    """The identity around a unit's inputs, whose backward says that the gradient has left the unit.

    Autograd refuses to let a unit change such an input in place: begin it with ReLU(), not ReLU(inplace=True)."""

    @staticmethod
    def forward(ctx: object, left: object, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The inputs as they are; `left()` is called in backward, when all gradients inside the unit are known."""
        ctx.left = left  # type: ignore[attr-defined]
        return inputs

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients as they are."""
        ctx.left()  # type: ignore[attr-defined]
        return None, *grads


def default_units(module: nn.Module) -> list[nn.Module]:
    """The layers of a GPT-like module or the children of an nn.Sequential. ValueError for any other module."""
    layers = getattr(module, "layers", None)
    if isinstance(layers, list | tuple | nn.ModuleList | nn.Sequential):
        return list(layers)
    if isinstance(module, nn.Sequential):
        return list(module)
    raise ValueError(
        f"which parts of a {type(module).__name__} shall be whole at a time? Give them, units=[module.a, *module.b], "
        "in the order of the forward (an nn.Sequential, or a module with `.layers`, needs no list)"
    )


def assign(module: nn.Module, units: Sequence[nn.Module]) -> list[tuple[list[nn.Module], list[Named], bool]]:
    """Which parameters are gathered together: (modules that use them, parameters, whether they stay whole).

    One entry for each unit with parameters of its own, and a last one for those of several units or of none."""
    inside, units = set(module.modules()), list(dict.fromkeys(units))
    if not units or not inside.issuperset(units):
        strangers = ", ".join(type(each).__name__ for each in units if each not in inside) or "an empty list"
        raise ValueError(f"units are modules inside {type(module).__name__}, got {strangers}")
    members = {unit: set(unit.parameters()) for unit in units}
    own: dict[nn.Module, list[Named]] = {unit: [] for unit in units}
    rest: list[Named] = []
    users = [module]
    for name, p in module.named_parameters():
        homes = [unit for unit in units if p in members[unit]]
        if len(homes) == 1:
            own[homes[0]].append((name, p))
        else:
            rest.append((name, p))
            users += homes or [each for each in inside if any(p is mine for mine in each.parameters(recurse=False))]
    entries = [([unit], named, False) for unit, named in own.items() if named]
    in_order = [each for each in module.modules() if each in set(users)]  # the same order on every rank
    return [*entries, (in_order, rest, True)] if rest else entries


def by_kind(named: Sequence[Named]) -> list[list[Named]]:
    """Parameters parted by dtype, device, and whether they train: what can share a flat buffer."""
    kinds: dict[Any, list[Named]] = {}
    for name, p in named:
        kinds.setdefault((p.dtype, p.device, p.requires_grad), []).append((name, p))
    return list(kinds.values())


def _nothing(like: Tensor) -> Tensor:
    return torch.full((), float("nan") if like.is_floating_point() else 0, dtype=like.dtype, device=like.device)
