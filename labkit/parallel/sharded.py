"""What the three stages of ZeRO share: each rank keeps 1/n of what only the optimizer needs.

    parameters in one flat buffer    |a a a a a a|b b b b b|c c|0|      n = 2
    its shards                       |--- rank 0 ---|--- rank 1 ---|

    of one shard, on its rank:       master   what the optimizer steps on
                                     state    the optimizer's: momentum, variance, ...
                                     grad     the mean over the group, of this part alone

An optimizer that treats every element by itself (SGD, Adam, Adagrad, RMSprop, ...) does to 1/n of the elements just
what it would do to them among all. One that looks at a whole layer (LARS, Adafactor, Muon) would not, and is refused.

    bytes held for Adam in fp32, N parameters:     whole 16 N
                                                   weights    gradients     optimizer
    ZeRO1  (zero1.py)                              4 N        4 N           8 N/n
    ZeRO2  (zero2.py)                              4 N        4 N/n         8 N/n      and buckets on their way
    ZeRO3  (zero3.py)                              4 N/n      4 N/n         8 N/n      and units on their way

Source: Rajbhandari et al., arXiv:1910.02054, sections 3.1 and 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from labkit.comm.group import Group
from labkit.parallel.bucket import as_on_rank_0
from labkit.parallel.offload import stepped_on
from labkit.parallel.shards import Shard
from labkit.parallel.sync import MakeOptimizer, Piece, Watch, check_free, check_module, check_options

WHOLE_LAYERS = ("Adafactor", "LBFGS", "Muon", "SparseAdam")
"""Optimizers of torch whose step for one element depends on others, or that want sparse gradients."""


class Sharded:
    """A strategy of which each rank owns 1/n of every gradient: what of the protocol in sync.py all three do alike."""

    sharded = True
    module: nn.Module
    group: Group
    optimizer: torch.optim.Optimizer
    shards: Sequence[Shard]

    def __init__(self, module: nn.Module, group: Group, broadcast_buffers: bool, **options: int) -> None:
        """Take rank 0's weights and buffers.

        ValueError on every rank for modules or options that differ between ranks, and for a module wrapped already."""
        check_module(module, group)
        check_options(group, broadcast_buffers=broadcast_buffers, **options)
        for name, p in module.named_parameters():
            check_free(name, p)
        as_on_rank_0([*module.parameters(), *module.buffers()], group)
        self.module, self.group, self.broadcast_buffers = module, group, broadcast_buffers
        self._hooks: list[Any] = []
        self._touched = False  # gradients have come since the last finish
        self._checked = False  # the optimizer's state

    def _own(self, shards: Sequence[Shard], make_optimizer: MakeOptimizer) -> None:
        """Make the optimizer of what trains, and watch for its gradients."""
        self.shards = shards
        training = [shard for shard in shards if shard.trains]
        self.optimizer = build(make_optimizer, [shard.master for shard in training])
        params = [p for shard in training for p in shard.flat.params]
        self._hooks += [Watch(p, self._arrive) for p in params]

    def _arrive(self, p: Tensor) -> None:
        """Autograd has just added to p.grad."""
        self._touched = True

    def _optimize(self) -> None:
        """The optimizer's step on this rank's parts."""
        if self._touched:
            raise ValueError("gradients have come since the last finish(): call finish() before step()")
        self.optimizer.step()
        if not self._checked:
            for shard in self.shards:
                param = stepped_on(self.optimizer, shard.master)
                check_state(self.optimizer.state.get(param, {}), param, shard.flat.names)
            self._checked = True

    def _forget(self) -> None:
        for shard in self.shards:
            shard.forget()
        self._touched = False

    def _buffers_as_on_rank_0(self) -> None:
        if self.broadcast_buffers:
            as_on_rank_0(list(self.module.buffers()), self.group)

    def grads(self) -> Iterable[Tensor]:
        """This rank's part of the gradients, flat (padding is zero): may be scaled and clipped in place."""
        return [shard.master.grad for shard in self.shards if shard.master.grad is not None]

    def pieces(self) -> Iterable[Piece]:
        """This rank's part of every parameter that trains. ValueError for optimizer state that cannot be cut."""
        for shard in self.shards:
            if not shard.trains:
                continue
            value, grad = stepped_on(self.optimizer, shard.master).detach(), shard.master.grad
            state = self.optimizer.state.get(stepped_on(self.optimizer, shard.master), {})
            check_state(state, value, shard.flat.names)
            for name, p, first, at, count in shard.flat.owned(self.group.rank):
                part = slice(at, at + count)
                mine = {key: each[part] if _is_long(each) else each for key, each in state.items()}
                cut = getattr(p, "shard_dim", None)
                yield Piece(name, tuple(p.shape), first, value[part], None if grad is None else grad[part], mine, cut)

    def load(self, name: str, start: int, value: Tensor, state: dict[str, Any]) -> None:
        """Put `value` [k], elements `start` to `start + k` of a parameter, and its optimizer state in place.

        What of it other ranks own is left to them. ValueError for an unknown name or elements it does not have."""
        owners = [shard for shard in self.shards if name in shard.flat.names]
        if not owners:
            raise ValueError(f"cannot load {name}: no such parameter is sharded here")
        shard, k = owners[0], value.numel()
        numel = shard.flat.params[shard.flat.names.index(name)].numel()
        if not 0 <= start <= start + k <= numel:
            raise ValueError(f"cannot load elements {start} to {start + k} of {name}: it has {numel}")
        param = stepped_on(self.optimizer, shard.master)
        for owned, _, first, at, count in shard.flat.owned(self.group.rank):
            low, high = max(first, start), min(first + count, start + k)
            if owned == name and low < high:
                there, here = slice(at + low - first, at + high - first), slice(low - start, high - start)
                param.detach()[there] = value[here].to(param.device)
                for key, each in (state if shard.trains else {}).items():
                    self._load_state(param, key, each[here] if _is_long(each) else each, there)

    def _load_state(self, param: Tensor, key: str, each: Any, there: slice) -> None:
        kept = self.optimizer.state[param]
        if _is_long(each):
            if not _is_long(kept.get(key)):  # an optimizer makes its state in its first step, which was not yet
                dtype = param.dtype if each.is_floating_point() else each.dtype
                kept[key] = torch.zeros(param.shape, dtype=dtype, device=param.device)
            kept[key][there] = each.to(param.device)
        elif isinstance(each, Tensor):  # a copy for each: steps are counted in place
            options = self.optimizer.param_groups[0]
            on_device = options.get("capturable") or options.get("fused")
            kept[key] = each.detach().clone().to(param.device if on_device else "cpu")
        else:
            kept[key] = each


def build(make_optimizer: MakeOptimizer, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer for flat shards [numel / n]. ValueError for one that would have to see whole layers."""
    try:
        optimizer = make_optimizer(params)
    except ValueError as error:
        error.add_note(
            "(ZeRO gives the optimizer flat parts of layers, [numel / n]: one that wants whole layers needs DDP)"
        )
        raise
    kinds = {each.__name__ for each in type(getattr(optimizer, "inner", optimizer)).__mro__}
    if getattr(optimizer, "needs_whole_layers", False) or kinds & set(WHOLE_LAYERS):
        raise ValueError(
            f"{type(getattr(optimizer, 'inner', optimizer)).__name__} looks at whole layers (or wants sparse "
            "gradients), but under ZeRO a rank holds 1/n of their elements: use DDP, or an elementwise optimizer"
        )
    return optimizer


def check_state(state: dict[str, Any], value: Tensor, names: Sequence[str]) -> None:
    """ValueError if the optimizer keeps something that is neither a scalar nor shaped like the flat part."""
    for key, each in state.items():
        if _is_long(each) and each.shape != value.shape:
            raise ValueError(
                f"the optimizer keeps {key!r} of shape {tuple(each.shape)} for a flat part {tuple(value.shape)} "
                f"({names[0]}, ...): state must have the part's shape or be a scalar, otherwise use DDP"
            )


def _is_long(each: Any) -> bool:
    return isinstance(each, Tensor) and each.dim() > 0
