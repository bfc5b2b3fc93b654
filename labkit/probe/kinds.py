"""What a storage is held for, found by identity: who owns it.

    module.parameters()                     parameters      rank 3      a storage is of the highest kind that
    optimizer.state, wider copies           optimizer       rank 2      it is found to be, from its birth on;
    what reaches a parameter, its .grad     gradients       rank 1      what the caller says has rank 4
    made in forward, held by autograd       activations     rank 0
    the rest, buffers                       other           rank 0

Owners are looked at when something can have changed: at the end of a module's forward (ZeRO-3 and FSDP put whole
weights in place for no longer than that), before and after an optimizer's step, when a gradient reaches a parameter,
and when somebody reads the probe. Owners are held weakly: a probe keeps no model alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from labkit.plan.breakdown import KINDS
from labkit.probe.history import Held
from labkit.probe.listen import Operators
from labkit.probe.parts import tensors_in
from labkit.probe.places import Places
from labkit.probe.storages import Storages

PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, OTHER = range(len(KINDS))
RANKS = MappingProxyType({PARAMETERS: 3, OPTIMIZER: 2, GRADIENTS: 1, ACTIVATIONS: 0, OTHER: 0})
CALLER = 4
JUST_MADE = 2
"""A module that is being made says what is a parameter, and only later whoever has the model says its name."""


class Owners:
    """The modules and optimizers whose tensors have a kind, and the hooks that hear of new ones."""

    def __init__(self, storages: Storages, places: Places, mode: Operators) -> None:
        """Modules are those that `places` knows; optimizers are added here."""
        self._storages, self._places, self._mode = storages, places, mode
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._hooks: dict[int, tuple[weakref.ref[Tensor], tuple[Any, ...]]] = {}
        self._labelled: list[tuple[weakref.ref[Tensor], str]] = []
        self._listening = False
        self._widest = 0

    def add(self, optimizer: Any) -> None:
        """Know an optimizer's parameters and, whenever it comes, its state."""
        self._optimizers.add(optimizer)

    def label(self, tensor: Tensor, kind: int, name: str) -> None:
        """A tensor is held for this, whoever else has a claim on it; a parameter has gradients."""
        self._storages.keep(tensor, kind, CALLER, name)
        if kind == PARAMETERS and tensor.is_leaf and tensor.requires_grad:
            self._labelled.append((weakref.ref(tensor), name))
            self._parameter(tensor, kind, name)

    def look(self) -> None:
        """Give every storage that an owner holds its kind, and count those that were not known."""
        self._widest = 0
        for module, name in self._places.modules():
            before = f"{name}." if name else ""
            for path, parameter in module.named_parameters():
                self._parameter(parameter, PARAMETERS, before + path)
                self._widest = max(self._widest, parameter.dtype.itemsize)
            for path, buffer in module.named_buffers():
                self._storages.keep(buffer, OTHER, RANKS[OTHER], before + path)
        for optimizer in self._optimizers:
            self._parameters_of(optimizer)
            self._state_of(optimizer)
        for ref, name in self._labelled:
            if (tensor := ref()) is not None:
                self._parameter(tensor, PARAMETERS, name)

    def called(self, module: nn.Module, name: str) -> None:
        """The forward of a module of this name is over; the weights that it used are still in place."""
        for each, parameter in module._parameters.items():
            if parameter is not None:
                self._parameter(parameter, PARAMETERS, f"{name}.{each}")

    def fake_mode(self) -> Any:
        """The fake world that the owned parameters live in, None if they are real."""
        parameters = (parameter for module, _ in self._places.modules() for parameter in module.parameters())
        return next((each.fake_mode for each in parameters if isinstance(each, FakeTensor)), None)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hook into every optimizer's step, and into every owned parameter's gradient."""
        hooks = (
            register_optimizer_step_pre_hook(partial(self._stepping, 1)),
            register_optimizer_step_post_hook(partial(self._stepping, -1)),
            register_module_parameter_registration_hook(self._registered),
        )
        self._listening = True
        try:
            yield
        finally:
            self._listening = False
            for hook in (*hooks, *(hook for _, pair in self._hooks.values() for hook in pair)):
                hook.remove()
            self._hooks.clear()

    def _registered(self, module: nn.Module, name: str, parameter: Any) -> None:
        if parameter is not None and not is_lazy(parameter) and self._mode.heard_here():
            self._storages.keep(parameter, PARAMETERS, JUST_MADE, f"{type(module).__name__}.{name}")

    def _stepping(self, change: int, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._mode.heard_here():
            self._places.stepping = max(0, self._places.stepping + change)
            if optimizer not in self._optimizers:
                self.add(optimizer)
                self._parameters_of(optimizer)
            elif change > 0:
                self._gradients_of(optimizer)
            if change < 0:
                self._state_of(optimizer)

    def _parameters_of(self, optimizer: Optimizer) -> None:
        for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            # fp32 copies of a bf16 model's weights are the optimizer's own; a shard in the model's dtype is the model's
            kind = OPTIMIZER if 0 < self._widest < parameter.dtype.itemsize else PARAMETERS
            self._parameter(parameter, kind, f"optimizer's parameter {number}")

    def _gradients_of(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is not None and not self._storages.sure(grad, GRADIENTS, RANKS[GRADIENTS]):
                    self._storages.keep(grad, GRADIENTS, RANKS[GRADIENTS], self._name_of(parameter))

    def _state_of(self, optimizer: Optimizer) -> None:
        for parameter, state in optimizer.state.items():
            for name, value in state.items():
                for each in tensors_in(value):
                    if not self._storages.sure(each, OPTIMIZER, RANKS[OPTIMIZER]):
                        owner = self._name_of(parameter)
                        self._storages.keep(each, OPTIMIZER, RANKS[OPTIMIZER], f"{name} of {owner}")

    def _name_of(self, parameter: Any) -> str:
        held = self._storages.known(parameter) if isinstance(parameter, Tensor) else None
        return held.name if held else "optimizer"

    def _parameter(self, parameter: Tensor, kind: int, name: str) -> None:
        if not self._storages.sure(parameter, kind, RANKS[kind]):
            if is_lazy(parameter):
                return
            self._storages.keep(parameter, kind, RANKS[kind], name)
        grad = parameter.grad
        if grad is not None and not self._storages.sure(grad, GRADIENTS, RANKS[GRADIENTS]):
            self._storages.keep(grad, GRADIENTS, RANKS[GRADIENTS], name)
        if self._listening and parameter.requires_grad and parameter.is_leaf:
            ref, _ = self._hooks.get(id(parameter), (None, ()))
            if ref is None or ref() is not parameter:
                hooks = (
                    parameter.register_hook(partial(self._arrives, name)),
                    parameter.register_post_accumulate_grad_hook(partial(self._arrived, name)),
                )
                self._hooks[id(parameter)] = (weakref.ref(parameter), hooks)

    def _arrives(self, name: str, grad: Tensor) -> None:
        if self._mode.heard_here() and not self._storages.sure(grad, GRADIENTS, RANKS[GRADIENTS]):
            self._storages.keep(grad, GRADIENTS, RANKS[GRADIENTS], name)

    def _arrived(self, name: str, parameter: Tensor) -> None:
        if parameter.grad is not None:  # a strategy may have put a window into its bucket there
            self._arrives(name, parameter.grad)


def would_have_been(wanted: Held) -> int:
    """The kind of a storage that was refused: what it would have turned out to be had it lived."""
    phase = wanted.where[0]
    if phase == "step" and wanted.op.startswith(("zeros", "empty", "full")):
        return OPTIMIZER
    if phase == "backward" and leads_to_parameter(torch._C._current_autograd_node(), wanted.shape.numel()):
        return GRADIENTS
    return wanted.kind


def leads_to_parameter(node: Any, numel: int) -> bool:
    """Does what this autograd node computes end, within three steps, in the gradient of a parameter of `numel`?"""
    front = [node]
    for _ in range(3):
        front = [each for step in front if step is not None for each, _ in step.next_functions]
        if any(getattr(each, "variable", torch.empty(0, device="meta")).numel() == numel for each in front):
            return True
    return False
