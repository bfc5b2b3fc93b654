"""A TensorProbe keeps what one rank has computed, step by step, so that two runs can be compared afterwards.

    probe = TensorProbe(model, optimizer, tp=group)
    with probe:
        for tokens, targets in batches:
            with probe.step():
                ...                              zero_grad, forward, backward, optimizer.step()
    return probe.record                          of one rank; `first_difference` takes a list with those of all

    start       each parameter and buffer before the first step
    forward     what the model is given; what each module returns, in the order in which modules return; and what a
                module is handed that no other has returned: a sum, an activation, an attention of the one around it
    backward    the gradient of each of these outputs
    gradient    each parameter's gradient as the optimizer's step finds it: summed over ranks, unscaled, clipped
    update      each parameter and buffer after the step

Tensors are detached and copied to the CPU in their own format; nothing is sent, and nothing of the run is changed.
Held are the bytes of all these copies (`record.n_bytes`), and one copy of the model, without its hooks, if it lies in
one piece: that copy is what `first_difference` computes with again. A tensor of more than `largest` elements is not
kept and not compared, and the comparison says so.

A module may be called several times in a step: for micro-batches, which are told by calls of the whole model, and
within one of these calls. Where a block is computed again in backward (checkpointing), the first forward is what
counts.

Under ZeRO a rank knows only the elements that it owns: a strategy's `owned()` says which (parallel/data_parallel.py).
Of a DTensor, as `fully_shard` and `parallelize_module` make them, the rank's own piece is kept (placed_piece.py).
"""

from __future__ import annotations

import copy
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from labkit.comm.replica_groups import is_placed
from labkit.plan.contracts import HasMasters, innermost, shard_dim_of
from labkit.probe.placed_piece import is_partial, piece_of_placed
from labkit.probe.tensor_record import (
    KeptPiece,
    ModuleCall,
    RankPlace,
    RootCall,
    Stepping,
    StepRecord,
    TensorRecord,
    tensors_in,
    with_tensors,
)
from labkit.probe.tracker import graph_task

LARGEST = 2**24


class HasPlace(Protocol):
    """Something with a rank and a size, as a Group."""

    @property
    def rank(self) -> int:
        """From 0."""

    @property
    def size(self) -> int:
        """The number of ranks."""


@runtime_checkable
class OwnsElements(Protocol):
    """A data-parallel strategy, which knows what elements of each parameter this rank trains."""

    group: Any
    optimizer: torch.optim.Optimizer

    def owned(self) -> Iterable[Any]:
        """`Owned` rows: name, local shape, offset, the tensor they lie in, and the gradient."""


class TensorProbe:
    """Records one rank's tensors while it is open; `step()` around each step. See the head of this file."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | OwnsElements | None = None,
        *,
        dp: HasPlace | None = None,
        tp: HasPlace | None = None,
        unit: float | None = None,
        largest: int = LARGEST,
    ) -> None:
        """Copy the model's start; hooks are set when the probe is opened.

        optimizer   torch's, or a strategy of labkit's, which also says which ranks share the batch; None: steps are
                    recorded, and cannot be judged
        dp, tp      where this rank stands among those that share the batch, and those that share the matrices: a Group,
                    or RankPlace(rank, size). torch's DistributedDataParallel: give the module inside, and dp
        unit        the unit roundoff of products if it is coarser than the tensors' format says (TF32: 2**-11)

        Raises ValueError if the model has no parameters."""
        if not any(True for _ in model.parameters()):
            raise ValueError(f"{type(model).__name__} has no parameters: give the probe the model that is trained")
        self._model, self._largest = model, largest
        self._strategy = optimizer if isinstance(optimizer, OwnsElements) else None
        self._optimizer: Any = self._strategy.optimizer if self._strategy is not None else optimizer
        dp = dp if dp is not None or self._strategy is None else self._strategy.group
        self._dp = RankPlace(0, 1) if dp is None else RankPlace(dp.rank, dp.size)
        self._tp = RankPlace(0, 1) if tp is None else RankPlace(tp.rank, tp.size)
        self._unit = unit
        self._copy, self._reason = self._whole_model()
        self._start, self._start_buffers = self._parameters(), self._buffers()
        self._stepping = self._stepping_of()
        self._steps: list[StepRecord] = []
        self._handles: list[Any] = []
        self._now: _Step | None = None

    def __enter__(self) -> TensorProbe:
        for name, module in self._model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._before(name), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._after(name)))
        if self._optimizer is not None:
            self._handles.append(self._optimizer.register_step_pre_hook(self._before_update))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextmanager
    def step(self) -> Iterator[None]:
        """One training step, from the forward to the end of the optimizer's step. A step that raises is not kept.

        Raises ValueError inside of another step, and outside of `with probe`."""
        if self._now is not None or not self._handles:
            raise ValueError("open the probe, `with probe:`, and then one `with probe.step():` at a time in it")
        self._now = now = _Step()
        try:
            yield
            if now.gradients is None:
                now.gradients = self._gradients()
            record = StepRecord(
                tuple(now.roots), tuple(now.calls), now.inputs, now.gradients_out, now.gradients, self._parameters(),
                self._buffers(), self._options(), now.too_large,
            )  # fmt: skip
            self._steps.append(record)
        finally:
            self._now = None

    @property
    def record(self) -> TensorRecord:
        """Copies of the tensors of all steps that have ended, with the places of this rank, for `first_difference`."""
        masters = frozenset(name for name, p in self._trained() if self._master_of(p) is not p)
        return TensorRecord(
            self._dp, self._tp, self._start, self._start_buffers, masters, self._unit, tuple(self._steps),
            self._copy, self._stepping, self._reason,
        )  # fmt: skip

    # -- hooks -------------------------------------------------------------------------------------------------------

    def _before(self, name: str) -> Callable[..., None]:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            now = self._now
            if now is not None and graph_task() == -1:  # in backward a block is computed again: its first time counts
                if not now.inside:
                    now.count.clear()
                    now.roots.append(RootCall(name, _kept(args), _kept(kwargs), module.training))
                    now.made |= {id(x): weakref.ref(x) for x in tensors_in((args, kwargs))}
                for number, x in enumerate(tensors_in(args)):
                    if not x.is_floating_point() or (is_placed(x) and is_partial(x)):
                        continue
                    if x.numel() <= self._largest and not now.has_seen(x):
                        now.inputs[name, now.micro(), now.count[name], number] = _copied(x)
                now.inside.append(name)

        return before

    def _after(self, name: str) -> Callable[..., None]:
        def after(_: nn.Module, args: Any, output: Any) -> None:
            now = self._now
            if now is None or graph_task() != -1 or not now.inside:
                return
            now.inside.pop()
            micro, nth = now.micro(), now.count[name]
            now.count[name] += 1
            kept = []
            for number, x in enumerate(tensors_in(output)):
                now.made[id(x)] = weakref.ref(x)
                small = x.numel() <= self._largest
                now.too_large += not small
                summed = not (is_placed(x) and is_partial(x))
                kept.append(_copied(x) if small and summed else None)
                if small and x.requires_grad:
                    x.register_hook(now.keep_gradient((name, micro, nth, number)))
            now.calls.append(ModuleCall(name, micro, nth, tuple(kept)))

        return after

    def _before_update(self, *_: Any) -> None:
        if self._now is not None and self._now.gradients is None:
            self._now.gradients = self._gradients()

    # -- parameters --------------------------------------------------------------------------------------------------

    def _trained(self) -> Iterator[tuple[str, Any]]:
        """(name, the tensor that holds it): the parameter, or under ZeRO a flat shard."""
        if self._strategy is not None:
            yield from ((row.name, row.param) for row in self._strategy.owned())
        else:
            yield from ((name, p) for name, p in self._model.named_parameters() if p.requires_grad)

    def _master_of(self, p: Tensor) -> Tensor:
        return self._optimizer.masters.get(p, p) if isinstance(self._optimizer, HasMasters) else p

    def _parameters(self) -> dict[str, KeptPiece]:
        pieces = {}
        if self._strategy is not None:
            for row in self._strategy.owned():
                flat = _copied(row.param.detach().reshape(-1)[row.window])
                pieces[row.name] = KeptPiece(flat, row.offset, row.local_shape, row.shard_dim)
        for name, p in self._model.named_parameters():
            if name not in pieces and (self._strategy is None or not p.requires_grad):
                pieces[name] = self._piece(p, name)
        return pieces

    def _gradients(self) -> dict[str, KeptPiece]:
        pieces = {}
        if self._strategy is not None:
            for row in self._strategy.owned():
                master = self._master_of(row.param)
                grad = row.grad
                if master is not row.param and master.grad is not None:
                    grad = master.grad.reshape(-1)[row.window]
                if grad is not None:
                    pieces[row.name] = KeptPiece(_copied(grad), row.offset, row.local_shape, row.shard_dim)
            return pieces
        for name, p in self._model.named_parameters():
            grad = p.grad if p.grad is not None else self._master_of(p).grad
            if grad is not None:
                pieces[name] = self._piece(grad, name, shard_dim_of(p))
        return pieces

    def _buffers(self) -> dict[str, KeptPiece]:
        return {name: self._piece(buffer, name) for name, buffer in self._model.named_buffers()}

    def _piece(self, x: Tensor, name: str, shard_dim: int | None = None) -> KeptPiece:
        if is_placed(x):
            return piece_of_placed(x, name, self._dp, self._tp)
        cut = shard_dim_of(x) if shard_dim is None else shard_dim
        return KeptPiece(_copied(x).reshape(-1), 0, tuple(x.shape), cut)

    def _options(self) -> dict[str, dict[str, Any]]:
        if self._optimizer is None:
            return {}
        groups = {
            id(p): {key: value for key, value in group.items() if key != "params"}
            for group in self._optimizer.param_groups
            for p in group["params"]
        }
        trained = [(name, id(self._master_of(p))) for name, p in self._trained()]
        return {name: _kept(groups[key]) for name, key in trained if key in groups}

    def _stepping_of(self) -> Stepping | None:
        if self._optimizer is None:
            return None
        inner = innermost(self._optimizer)
        state: dict[str, Any] = {}
        numel = {name: p.numel() for name, p in self._model.named_parameters()}
        for name, p in self._trained():
            own = inner.state.get(self._master_of(p))
            # in a flat shard lie elements of others, and of a DTensor there is a piece
            if own and p.numel() == numel[name] and not is_placed(p):
                state[name] = _kept(dict(own))
        return Stepping(type(inner), self._options(), state)

    def _whole_model(self) -> tuple[nn.Module | None, str]:
        if self._tp.size > 1 or any(shard_dim_of(p) is not None for p in self._model.parameters()):
            return None, "its matrices are cut over ranks"
        if any(is_placed(p) for p in self._model.parameters()):
            return None, "its parameters are DTensors, of which each rank holds a piece"
        try:
            with torch.no_grad(), _without_hooks(self._model):
                whole = copy.deepcopy(self._model).cpu()
            whole.zero_grad()
        except Exception as error:  # any class may refuse to be copied, in its own words
            return None, f"it cannot be copied: {type(error).__name__}: {error}"
        return whole, ""


class _Step:
    """Copies of the tensors of the step that is running, and the modules that it has called so far."""

    def __init__(self) -> None:
        self.roots: list[RootCall] = []
        self.calls: list[ModuleCall] = []
        self.inputs: dict[tuple[str, int, int, int], Tensor] = {}
        self.gradients_out: dict[tuple[str, int, int, int], Tensor] = {}
        self.made: dict[int, weakref.ref[Tensor]] = {}
        self.gradients: dict[str, KeptPiece] | None = None
        self.inside: list[str] = []
        self.count: Counter[str] = Counter()
        self.too_large = 0

    def has_seen(self, x: Tensor) -> bool:
        """True if a module has returned this very tensor, or the model was given it: its values are kept already."""
        made = self.made.get(id(x))
        return made is not None and made() is x

    def micro(self) -> int:
        """The number of this call of the outermost module, among those of the same name."""
        return sum(root.module == self.roots[-1].module for root in self.roots) - 1

    def keep_gradient(self, key: tuple[str, int, int, int]) -> Callable[[Tensor], None]:
        """A hook that copies the gradient of an output, and changes nothing."""

        def keep(gradient: Tensor) -> None:
            if not (is_placed(gradient) and is_partial(gradient)):
                self.gradients_out[key] = _copied(gradient)

        return keep


@contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    """The model without hooks while it is copied: a strategy's lead to the strategy, and to its group's connections."""
    hooks = [
        (vars(module), key, value)
        for module in model.modules()
        for key, value in vars(module).items()
        if key.endswith("_hooks") and isinstance(value, OrderedDict)
    ]
    try:
        for attributes, key, _ in hooks:
            attributes[key] = OrderedDict()
        yield
    finally:
        for attributes, key, value in hooks:
            attributes[key] = value


def _copied(x: Tensor) -> Tensor:
    own: Any = x.detach()
    copied: Tensor = (own.to_local() if is_placed(own) else own).to("cpu", copy=True)
    return copied


def _kept(value: Any) -> Any:
    return with_tensors(value, (_copied(x) for x in list(tensors_in(value))))
