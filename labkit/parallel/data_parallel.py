"""The interface of every data-parallel strategy, and the checks of their arguments.

    sync.zero_grad()
    with sync.accumulate():        every micro-batch but the last
        forward, backward
    forward, backward              the last one: gradients may be sent while backward goes on
    sync.finish()                  now the gradients that this rank owns are the mean over the group
    sync.step()                    the optimizer, on what this rank owns

Under DDP a rank owns every gradient whole; under ZeRO it owns 1/n of each. `owned()` lists which elements of which
parameters are a rank's own, so that clipping (norm.py) and saving (checkpoints.py) work with any strategy.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from labkit.comm.group import Group
from labkit.comm.mesh import Mesh
from labkit.comm.private import private
from labkit.plan.contracts import HasMasters
from labkit.plan.words import dtype_name

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Makes an optimizer for a list of parameters: `lambda params: torch.optim.AdamW(params, lr=1e-3)`."""


@dataclass(frozen=True)
class Owned:
    """The elements of one parameter that this rank owns: `count` of them, from element `offset` of the flat parameter.

    name          of the parameter in the strategy's module
    local_shape   of the parameter on this rank: under tensor parallelism that of its slice, otherwise the global shape
    offset        the first element that this rank owns, in the flattened `local_shape`
    param         what the strategy gave to the optimizer: the parameter itself (DDP) or a flat shard with others (ZeRO)
    window        which elements of the flattened `param` these are
    grad          [count] their gradient, None before `finish` or for a parameter that has none
    shard_dim     the dim along which tensor parallelism has cut the parameter, None if it has not
    """

    name: str
    local_shape: tuple[int, ...]
    offset: int
    param: nn.Parameter
    window: slice
    grad: Tensor | None
    shard_dim: int | None


class DataParallel(Protocol):
    """A data-parallel strategy. `replica`: of the ranks that own the same elements this is number so and so; always 0
    where each element has one owner (ZeRO), the rank in the group where each rank owns all (DDP)."""

    module: nn.Module
    group: Group
    optimizer: torch.optim.Optimizer

    @property
    def replica(self) -> int:
        """The number of this rank among those that own the same elements."""

    def zero_grad(self) -> None:
        """Drop the gradients; p.grad is None until the next backward. (`optimizer.zero_grad()` drops only some.)"""

    def accumulate(self) -> AbstractContextManager[None]:
        """Backward passes inside this context add to the gradients; what can wait is not sent."""

    def finish(self) -> None:
        """Send what has not been sent and wait: the gradients that this rank owns are the mean over the group."""

    def grads(self) -> Iterable[Tensor]:
        """The gradients that this rank owns, as a few tensors that may be changed in place (to unscale, to clip)."""

    def step(self) -> None:
        """Run the optimizer on what this rank owns; afterwards every rank has the new weights that it needs."""

    def owned(self) -> Iterable[Owned]:
        """The elements that this rank trains, parameter by parameter."""

    def refresh(self) -> None:
        """New weights were loaded into what the optimizer steps on: let the module use them, drop the gradients."""


def answers_for(sync: DataParallel, shard_dim: int | None, mesh: Mesh) -> bool:
    """True if this rank counts (or saves) elements that several ranks may hold: `shard_dim` as in `Owned`."""
    # of copies exactly one rank answers: the first that has the gradients, rank 0 of tp if the parameter is whole
    return sync.replica == 0 and (shard_dim is not None or mesh.tp.rank == 0)


def stepped_on(optimizer: torch.optim.Optimizer, param: nn.Parameter) -> nn.Parameter:
    """The tensor that the optimizer changes for `param`: itself, or its copy elsewhere (see offload.py)."""
    return optimizer.masters.get(param, param) if isinstance(optimizer, HasMasters) else param


class GradientWatch:
    """Calls `method(p, *args)` of a strategy whenever a gradient of p is complete, while the strategy is alive."""

    def __init__(self, p: nn.Parameter, method: Callable[..., None], *args: Any) -> None:
        """Start to watch p; `remove()` ends it."""
        # weak, because torch keeps hooks where Python's garbage collector cannot see them: a hook that held the
        # strategy, which holds the parameter, would keep both in memory for ever
        self.method, self.args = weakref.WeakMethod(method), args
        # post-accumulate hooks run after p.grad has its new value; a plain tensor hook would run before
        self.remove: Callable[[], None] = p.register_post_accumulate_grad_hook(self).remove

    def __call__(self, p: Tensor) -> None:
        """Autograd has just added to p.grad."""
        method = self.method()
        if method is not None:
            method(p, *self.args)


# -- checks of arguments ---------------------------------------------------------------------------------------------


def check_arguments(module: nn.Module, group: Group, **options: object) -> None:
    """Check what every strategy is given, on all ranks together.

    Raises ValueError on every rank if ranks hold different modules or options, and for a module that belongs to another
    strategy. Sends a few bytes."""
    check_module(module, group)
    check_options(group, **options)
    for name, p in module.named_parameters():
        for hook in (private("torch.Tensor._post_accumulate_grad_hooks")(p) or {}).values():
            if isinstance(hook, GradientWatch) and hook.method() is not None:
                raise ValueError(f"{name} belongs to another strategy already: close() that one first")


def check_module(module: nn.Module, group: Group) -> None:
    """Check that the module is the same on every rank; ValueError on every rank that names the first difference."""
    own = [f"{name} {tuple(p.shape)} {dtype_name(p.dtype)} {p.requires_grad}" for name, p in module.named_parameters()]
    if not any(p.requires_grad for p in module.parameters()):
        raise ValueError(f"{type(module).__name__} has no parameter that wants a gradient: nothing to train")
    text = "\n".join(own).encode()
    if _alike(text, group):
        return  # the texts, tens of kilobytes, travel only if they differ
    length = group.all_reduce(torch.tensor([len(text), -len(text)], device=group.device), op="max").tolist()
    padded = torch.zeros(max(1, length[0]), dtype=torch.uint8, device=group.device)
    padded[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    first = bytes(group.broadcast(padded).tolist()).rstrip(b"\0").decode()
    differs = torch.tensor([int(first != "\n".join(own))], device=group.device)
    # agreed on by all: a rank that raised alone would leave the others waiting in the next collective
    if group.all_reduce(differs, op="max").item():
        theirs = first.split("\n")
        for own_line, on_0 in zip(own, theirs, strict=False):
            if own_line != on_0:
                raise ValueError(
                    f"ranks hold different modules: rank {group.rank} has {own_line!r}, rank 0 has {on_0!r}"
                )
        raise ValueError(
            f"ranks hold different modules: rank {group.rank} has {len(own)} parameters, rank 0 has {len(theirs)}"
        )


def check_options(group: Group, **options: object) -> None:
    """Check that options are written alike on every rank; ValueError on every rank that gives this rank's."""
    text = ", ".join(f"{key}={value!r}" for key, value in options.items())
    if not _alike(text.encode(), group):
        raise ValueError(f"ranks were given different options, rank {group.rank} {text}: give all of them the same")


def _alike(text: bytes, group: Group) -> bool:
    """True on every rank if all ranks brought the same text. Sends 16 bytes, whatever its length."""
    # 6 bytes of the digest: a float64 holds them exactly, and min == max over the ranks means that all are equal
    digest = float(int.from_bytes(hashlib.sha256(text).digest()[:6]))
    number = torch.tensor([digest], dtype=torch.float64, device=group.device)
    return torch.equal(group.all_reduce(number, op="max"), group.all_reduce(number, op="min"))


def check_state(state: dict[str, Any], param: Tensor, name: str) -> None:
    """ValueError if the optimizer keeps a tensor for `param` that is neither a scalar nor of its shape."""
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim() and value.shape != param.shape:
            raise ValueError(
                f"the optimizer keeps {key!r} of shape {tuple(value.shape)} for {name} {tuple(param.shape)}: state "
                "must have the parameter's shape (under ZeRO that of the flat part) or be a scalar, otherwise use DDP"
            )
