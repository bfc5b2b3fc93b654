"""What every data-parallel strategy offers a training step, and nothing more.

    sync.zero_grad()
    with sync.accumulate():        every micro-batch but the last
        forward, backward
    forward, backward              the last one: gradients may leave while backward goes on
    sync.finish()                  now the gradients that this rank owns are the mean over the group
    sync.step()                    the optimizer, on what this rank owns

DDP owns every gradient whole; ZeRO owns 1/n of each. A `Piece` says which part of which parameter, so that clipping,
loss scaling, saving and statistics need to know nothing about the strategy.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from labkit.comm.group import Group
from labkit.comm.mesh import Mesh

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that this rank owns: elements `start` to `start + value.numel()` of it, flattened.

    name    of the parameter in the strategy's module
    whole   shape of the whole parameter (of this rank's tensor-parallel part of it)
    value   [k] window of what the optimizer steps on (fp32 masters, if there are any); writing to it changes them
    grad    [k] window of its gradient, None before `finish` or for a parameter that has none
    state   the optimizer's state for it: [k] windows, and scalars such as Adam's step as they are
    cut     the dim along which tensor parallelism has cut the parameter, None if it has not
    """

    name: str
    whole: tuple[int, ...]
    start: int
    value: Tensor
    grad: Tensor | None
    state: dict[str, Any] = field(default_factory=dict)
    cut: int | None = None


class DataParallel(Protocol):
    """A strategy. `sharded` says whether each rank owns 1/n of every gradient (ZeRO) or all of it (DDP)."""

    module: nn.Module
    group: Group
    optimizer: torch.optim.Optimizer
    sharded: bool

    def zero_grad(self) -> None:
        """Forget the gradients; p.grad is None until the next backward. (`optimizer.zero_grad()` forgets only some.)"""

    def accumulate(self) -> AbstractContextManager[None]:
        """Backward passes inside add to the gradients; what can wait is not sent."""

    def finish(self) -> None:
        """Send what has not been sent and wait: the gradients that this rank owns are the mean over the group."""

    def grads(self) -> Iterable[Tensor]:
        """The gradients that this rank owns, as few tensors that may be changed in place (to unscale, to clip)."""

    def step(self) -> None:
        """The optimizer's step on what this rank owns; afterwards every rank has the new weights that it needs."""

    def pieces(self) -> Iterable[Piece]:
        """What this rank owns, parameter by parameter."""

    def load(self, name: str, start: int, value: Tensor, state: dict[str, Any]) -> None:
        """Put [k] elements of parameter `name`, from `start` on, and their optimizer state in place."""

    def loaded(self) -> None:
        """All pieces are in place: bring the weights that the module computes with up to date."""


def answers_for(sync: DataParallel, piece: Piece, mesh: Mesh) -> bool:
    """Whether this rank is the one of several with the same elements that counts or saves them: no communication."""
    return (sync.sharded or mesh.dp.rank == 0) and (piece.cut is not None or mesh.tp.rank == 0)


def check_module(module: nn.Module, group: Group) -> None:
    """The same module on every rank, or a ValueError on every rank that names the first difference."""
    mine = [f"{name} {tuple(p.shape)} {str(p.dtype)[6:]} {p.requires_grad}" for name, p in module.named_parameters()]
    if not any(p.requires_grad for p in module.parameters()):
        raise ValueError(f"{type(module).__name__} has no parameter that wants a gradient: nothing to train")
    text = "\n".join(mine).encode()
    digest = float(int.from_bytes(hashlib.sha256(text).digest()[:6]))
    number = torch.tensor([digest], dtype=torch.float64, device=group.device)
    if torch.equal(group.all_reduce(number, op="max"), group.all_reduce(number, op="min")):
        return  # the texts, tens of kilobytes, travel only where they differ
    length = group.all_reduce(torch.tensor([len(text), -len(text)], device=group.device), op="max").tolist()
    padded = torch.zeros(max(1, length[0]), dtype=torch.uint8, device=group.device)
    padded[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    first = bytes(group.broadcast(padded).tolist()).rstrip(b"\0").decode()
    differs = torch.tensor([int(first != "\n".join(mine))], device=group.device)
    if group.all_reduce(differs, op="max").item():
        theirs = first.split("\n")
        for ours, other in zip(mine, theirs, strict=False):
            if ours != other:
                raise ValueError(f"ranks hold different modules: rank {group.rank} has {ours!r}, rank 0 has {other!r}")
        raise ValueError(
            f"ranks hold different modules: rank {group.rank} has {len(mine)} parameters, rank 0 has {len(theirs)}"
        )


def check_options(group: Group, **options: float) -> None:
    """The same numbers on every rank, or a ValueError on every rank that gives this rank's."""
    mine = torch.tensor([float(each) for each in options.values()], dtype=torch.float64, device=group.device)
    if not torch.equal(group.all_reduce(mine, op="max"), group.all_reduce(mine, op="min")):
        given = ", ".join(f"{key}={each}" for key, each in options.items())
        raise ValueError(f"ranks were given different options, rank {group.rank} {given}: give all of them the same")


class Watch:
    """Calls `method(p, *args)` of a strategy whenever a gradient of p has come, for as long as the strategy is alive.

    torch keeps what it calls where Python's collector of garbage does not see it: a hook that held the strategy, which
    holds the parameter, would keep both for ever."""

    def __init__(self, p: nn.Parameter, method: Callable[..., None], *args: Any) -> None:
        """Begin; `remove()` ends it."""
        self.method, self.args = weakref.WeakMethod(method), args
        self.remove: Callable[[], None] = p.register_post_accumulate_grad_hook(self).remove

    def __call__(self, p: Tensor) -> None:
        """Autograd has just added to p.grad."""
        method = self.method()
        if method is not None:
            method(p, *self.args)


def check_free(name: str, p: nn.Parameter) -> None:
    """ValueError for a parameter that another strategy of labkit watches."""
    for hook in (getattr(p, "_post_accumulate_grad_hooks", None) or {}).values():
        if isinstance(hook, Watch) and hook.method() is not None:
            raise ValueError(f"{name} belongs to another strategy already: close() that one first")
