"""What strategies, optimizers and modules ask of one another, written down.

`parallel` and `train` import nothing of each other: a strategy knows an optimizer, and an optimizer a parameter, by
what is promised here. Beside each promise stands who keeps it.

    on a parameter
      shard_dim_of(p)     the dim along which tensor parallelism has cut it            set by parallel.tensor
      group_of(p)         what its optimizer does with it                              set by train.groups
    of an optimizer
      Wraps               another optimizer, `inner`, makes the step                   train.precision, train.offload
      HasMasters          the step is made on copies of the parameters                 the same two
      LooksAtLayers       the step of an element depends on its whole layer            train.large_batch
      StepsOnMatrices     it brings whole matrices together from pieces on ranks       train.by_matrix
      OwnsGradients       its gradients are not those of the parameters                train.precision, strategies
    of a module
      Attends, AsksPositions    the tokens of a row may lie on several ranks           train.gpt
      Routes              tokens travel to experts, which may lie on other ranks       train.moe
      RoutesInSteps       the same, and others may compute while they travel           train.moe
      Multiplies          its product can be made by others, in 8 bits, say            parallel.tensor
      InEightBits         it is made so                                                train.fp8
      StaysWide           it must not be                                               train.moe
      Gathers             it gathers a sequence from all ranks before it computes      parallel.sequence

A pure file: nothing of torch is imported, and tensors, modules and groups are `Any`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

# -- marks on parameters -----------------------------------------------------------------------------------------------


def shard_dim_of(p: Any) -> int | None:
    """The dim along which tensor parallelism has cut the parameter; None if it is whole on each rank."""
    shard_dim: int | None = getattr(p, "shard_dim", None)
    return shard_dim


def group_of(p: Any) -> Any:
    """The mark that says what an optimizer does with the parameter (labkit.plan.partition.groups); None for none.

    Parameters of different groups share no flat buffer, so that an optimizer's group is a list of whole shards."""
    return getattr(p, "param_group", None)


def mark_as(p: Any, original: Any) -> None:
    """Give a copy of a parameter the marks of the original."""
    for name in ("shard_dim", "param_group"):
        if hasattr(original, name):
            setattr(p, name, getattr(original, name))


# -- optimizers --------------------------------------------------------------------------------------------------------


@runtime_checkable
class Wraps(Protocol):
    """An optimizer that lets another one, `inner`, make the step."""

    inner: Any


@runtime_checkable
class HasMasters(Protocol):
    """An optimizer that steps on copies: `masters` maps a parameter to its copy, or to itself."""

    masters: Mapping[Any, Any]


@runtime_checkable
class TakesMasters(Protocol):
    """An optimizer whose masters may be loaded: the parameters then have to follow."""

    def masters_to_params(self) -> None:
        """Copy the masters into the parameters."""


@runtime_checkable
class LooksAtLayers(Protocol):
    """An optimizer that says whether it needs whole layers: True for LARS and LAMB, and for what wraps them."""

    needs_whole_layers: bool


@runtime_checkable
class StepsOnMatrices(Protocol):
    """An optimizer that steps on whole matrices, which it brings together from pieces (Muon, Shampoo)."""

    @property
    def matrices(self) -> Sequence[Any]:
        """What it steps on so: matrices, or flat shards with pieces of them."""

    def share(self, pieces: Any, group: Any) -> None:
        """Which pieces of matrices lie on this rank of `group`, and who holds the others."""

    def kept_of(self, param: Any, window: slice) -> Mapping[str, Any]:
        """The state that this rank keeps as the owner of a matrix, by name."""

    def keep_of(self, param: Any, window: slice, kept: Mapping[str, Any]) -> None:
        """Put back what `kept_of` gave."""


@runtime_checkable
class OwnsGradients(Protocol):
    """Something with gradients of its own: a strategy, or an optimizer with masters."""

    def grads(self) -> Iterable[Any]:
        """The gradients that the step will use."""


def innermost(optimizer: Any) -> Any:
    """The optimizer that makes the step: `inner` of one that wraps, and otherwise itself."""
    return optimizer.inner if isinstance(optimizer, Wraps) else optimizer


def needs_whole_layers(optimizer: Any) -> bool:
    """True if the optimizer's step of an element depends on others of its layer."""
    return isinstance(optimizer, LooksAtLayers) and optimizer.needs_whole_layers


# -- modules -----------------------------------------------------------------------------------------------------------


@runtime_checkable
class Attends(Protocol):
    """Attention whose `attend(q, k, v, documents)` may be another's: one that reaches keys on other ranks."""

    attend: Callable[..., Any]
    dropout: float


@runtime_checkable
class AsksPositions(Protocol):
    """A module that asks `positions` which tokens of the row it has."""

    positions: Callable[..., Any]


@runtime_checkable
class Routes(Protocol):
    """A mixture of experts: `journey` takes its tokens to the experts and back, `reader` reads the counts."""

    journey: Any
    reader: Any


@runtime_checkable
class RoutesInSteps(Routes, Protocol):
    """A mixture whose forward can be made in steps: what comes before the journey, what comes behind it, and shared
    experts."""

    experts: Any

    def begin(self, x: Any, rows: int | None = None) -> Any:
        """The experts of each token, and the rows that travel; `rows`: sequences of the whole batch."""

    def end(self, routed: Any, out: Any) -> Any:
        """The outputs `out` of the experts, scaled by the router's weights and added up by token."""

    def with_shared(self, y: Any, x: Any) -> Any:
        """`y` plus the outputs of the shared experts for `x`."""


@runtime_checkable
class Multiplies(Protocol):
    """A linear cut over ranks, whose `product(x, W, bias)` may be another's."""

    product: Callable[..., Any]


@runtime_checkable
class InEightBits(Protocol):
    """A linear whose products are made by `multiply`, in 8 bits."""

    multiply: Any


@runtime_checkable
class StaysWide(Protocol):
    """A linear that must not be made narrow, such as the router of a mixture."""

    stays_wide: bool


@runtime_checkable
class Gathers(Protocol):
    """A layer, or a hook before one, that may gather a whole sequence from the ranks: `enter` does it."""

    gathers: bool

    def enter(self, x: Any) -> Any:
        """The whole sequence."""
