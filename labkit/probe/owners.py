"""What a storage is held for, found by identity: who owns it.

    module.parameters()                     parameters      certainty 3   a storage is of the kind that is most
    optimizer.state, wider copies           optimizer       certainty 2   certain, from its birth on; what the
    what reaches a parameter, its .grad     gradients       certainty 1   caller says has certainty 4
    made in forward, held by autograd       activations     certainty 0
    the rest, buffers                       other           certainty 0

Owners are looked at when something can have changed: at the end of a module's forward (ZeRO-3 and FSDP put whole
weights in place for no longer than that), before and after an optimizer's step, when a gradient reaches a parameter,
and when somebody reads the probe. Owners are held weakly: a probe keeps no model alive.

What autograd holds for backward is found by walking its graph: nothing is unpacked, nothing is run.

    loss --> NllLoss --> LogSoftmax --> Addmm --> Gelu --> Addmm --> AccumulateGrad
              target      result        mat1,2    self     mat1,2       the raw saved tensors of each node

A hook on saving would see the same tensors, but it would switch off autograd's check that they were not changed, and
it would miss tensors packed by another hook (checkpointing, offloading). Here a packed tensor counts as what it is: a
checkpoint's place-holder holds no bytes, an offloaded tensor holds those of its copy.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from labkit.plan.breakdown import KINDS
from labkit.plan.contracts import HasMasters
from labkit.probe.storages import LiveStorage, Storages
from labkit.probe.tracker import FakeTensor, ModuleTracker, Operators, current_node, tensors_in

PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, OTHER = range(len(KINDS))
CERTAINTY = MappingProxyType({PARAMETERS: 3, OPTIMIZER: 2, GRADIENTS: 1, ACTIVATIONS: 0, OTHER: 0})
CALLER = 4
JUST_MADE = 2
"""Below 3: a module that is being made says what is a parameter, and its name in the model is known only later."""


class Listeners:
    """A hook of torch's that stays in place, and calls those that listen at the moment.

    torch calls its hooks while it walks through them. A probe in another thread (`run_threads` has a rank in each) that
    added or removed one meanwhile would break that walk: "OrderedDict mutated during iteration"."""

    def __init__(self, register: Callable[[Callable[..., None]], Any]) -> None:
        """`register` is torch's function that adds a hook."""
        self._lock, self._heard = threading.Lock(), tuple[Callable[..., None], ...]()
        register(self)

    def __call__(self, *args: Any) -> None:
        """torch calls its hook."""
        for listener in self._heard:
            listener(*args)

    @contextmanager
    def heard_by(self, listener: Callable[..., None]) -> Iterator[None]:
        """Inside this context `listener` is called, too."""
        with self._lock:
            self._heard = (*self._heard, listener)
        try:
            yield
        finally:
            with self._lock:
                self._heard = tuple(other for other in self._heard if other is not listener)


BEFORE_STEP = Listeners(register_optimizer_step_pre_hook)
AFTER_STEP = Listeners(register_optimizer_step_post_hook)
NEW_PARAMETER = Listeners(register_module_parameter_registration_hook)


class TensorOwners:
    """The modules and optimizers that own tensors, and the hooks through which new ones become known."""

    def __init__(self, storages: Storages, modules: ModuleTracker, mode: Operators) -> None:
        """Modules are those that the tracker knows; optimizers are added here."""
        self._storages, self._modules, self._mode = storages, modules, mode
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._masters = WeakIdKeyDictionary()  # {master: None}; of tensors `==` compares elements, so by identity
        self._hooks: dict[int, tuple[weakref.ref[Tensor], tuple[Any, ...]]] = {}
        self._labelled: list[tuple[weakref.ref[Tensor], str]] = []
        self._listening = False
        self._widest = 0

    def add(self, optimizer: Any) -> None:
        """Watch an optimizer: its parameters now, and its state, which most optimizers make in their first step."""
        self._optimizers.add(optimizer)

    def label(self, tensor: Tensor, kind: int, name: str) -> None:
        """Record what the caller says a tensor is held for, which overrules all else; a parameter has gradients."""
        self._storages.keep(tensor, kind, CALLER, name)
        if kind == PARAMETERS and tensor.is_leaf and tensor.requires_grad:
            self._labelled.append((weakref.ref(tensor), name))
            self._parameter(tensor, kind, name)

    def look(self) -> None:
        """Give every storage that an owner holds its kind, and count storages that were not known before."""
        self._widest = 0
        for module, name in self._modules.modules():
            before = f"{name}." if name else ""
            for path, parameter in module.named_parameters():
                self._parameter(parameter, PARAMETERS, before + path)
                self._widest = max(self._widest, parameter.dtype.itemsize)
            for path, buffer in module.named_buffers():
                self._storages.keep(buffer, OTHER, CERTAINTY[OTHER], before + path)
        for optimizer in self._optimizers:
            self._parameters_of(optimizer)
            self._state_of(optimizer)
        for ref, name in self._labelled:
            if (tensor := ref()) is not None:
                self._parameter(tensor, PARAMETERS, name)

    def called(self, module: nn.Module, name: str) -> None:
        """Note a module's weights right after its forward: ZeRO-3 and FSDP free them a moment later."""
        for path, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            self._parameter(parameter, PARAMETERS, f"{name}.{path}")

    def fake_mode(self) -> Any:
        """The fake world that the owned parameters live in, None if they are real."""
        parameters = (parameter for module, _ in self._modules.modules() for parameter in module.parameters())
        return next((tensor.fake_mode for tensor in parameters if isinstance(tensor, FakeTensor)), None)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hook into every optimizer's step, and into every owned parameter's gradient."""
        with ExitStack() as stack:
            stack.enter_context(BEFORE_STEP.heard_by(partial(self._stepping, 1)))
            stack.enter_context(AFTER_STEP.heard_by(partial(self._stepping, -1)))
            stack.enter_context(NEW_PARAMETER.heard_by(self._registered))
            self._listening = True
            try:
                yield
            finally:
                self._listening = False
                for hook in (hook for _, pair in self._hooks.values() for hook in pair):
                    hook.remove()
                self._hooks.clear()

    def _registered(self, module: nn.Module, name: str, parameter: Any) -> None:
        if parameter is not None and not is_lazy(parameter) and self._mode.heard_here():
            self._storages.keep(parameter, PARAMETERS, JUST_MADE, f"{type(module).__name__}.{name}")

    def _stepping(self, change: int, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._mode.heard_here():
            self._modules.stepping = max(0, self._modules.stepping + change)
            if optimizer not in self._optimizers:
                self.add(optimizer)
                self._parameters_of(optimizer)
            elif change > 0:
                self._gradients_of(optimizer)
            if change < 0:
                self._state_of(optimizer)

    def _parameters_of(self, optimizer: Optimizer) -> None:
        for number, (parameter, master) in enumerate(_masters_of(optimizer).items()):
            self._parameter(parameter, PARAMETERS, f"optimizer's parameter {number}")
            if master is not parameter:
                self._masters[master] = None
                self._parameter(master, OPTIMIZER, f"master {number}")
        for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            if parameter not in self._masters:
                # fp32 copies of a bf16 model's weights are the optimizer's; a shard in the model's dtype is the model's
                kind = OPTIMIZER if 0 < self._widest < parameter.dtype.itemsize else PARAMETERS
                self._parameter(parameter, kind, f"optimizer's parameter {number}")

    def _gradients_of(self, optimizer: Optimizer) -> None:
        stepped_on = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for parameter in [*_masters_of(optimizer), *stepped_on]:
            grad = parameter.grad
            if grad is not None and not self._storages.sure(grad, GRADIENTS, CERTAINTY[GRADIENTS]):
                self._storages.keep(grad, GRADIENTS, CERTAINTY[GRADIENTS], self._name_of(parameter))

    def _state_of(self, optimizer: Optimizer) -> None:
        for parameter, state in optimizer.state.items():
            for name, value in state.items():
                for tensor in tensors_in(value):
                    if not self._storages.sure(tensor, OPTIMIZER, CERTAINTY[OPTIMIZER]):
                        owner = self._name_of(parameter)
                        self._storages.keep(tensor, OPTIMIZER, CERTAINTY[OPTIMIZER], f"{name} of {owner}")

    def _name_of(self, parameter: Any) -> str:
        held = self._storages.known(parameter) if isinstance(parameter, Tensor) else None
        return held.name if held else "optimizer"

    def _parameter(self, parameter: Tensor, kind: int, name: str) -> None:
        if not self._storages.sure(parameter, kind, CERTAINTY[kind]):
            if is_lazy(parameter):
                return
            self._storages.keep(parameter, kind, CERTAINTY[kind], name)
        grad = parameter.grad
        if grad is not None and not self._storages.sure(grad, GRADIENTS, CERTAINTY[GRADIENTS]):
            self._storages.keep(grad, GRADIENTS, CERTAINTY[GRADIENTS], name)
        if self._listening and parameter.requires_grad and parameter.is_leaf:
            ref, _ = self._hooks.get(id(parameter), (None, ()))
            if ref is None or ref() is not parameter:
                hooks = (
                    parameter.register_hook(partial(self._arrives, name)),
                    parameter.register_post_accumulate_grad_hook(partial(self._arrived, name)),
                )
                self._hooks[id(parameter)] = (weakref.ref(parameter), hooks)

    def _arrives(self, name: str, grad: Tensor) -> None:
        if self._mode.heard_here() and not self._storages.sure(grad, GRADIENTS, CERTAINTY[GRADIENTS]):
            self._storages.keep(grad, GRADIENTS, CERTAINTY[GRADIENTS], name)

    def _arrived(self, name: str, parameter: Tensor) -> None:
        if parameter.grad is not None:  # a strategy may have put a window into its bucket there
            self._arrives(name, parameter.grad)


def would_have_been(wanted: LiveStorage) -> int:
    """The kind that a refused storage would have got later: optimizer, gradients, or the kind that it was born with."""
    phase = wanted.where[0]
    if phase == "step" and wanted.op.startswith(("zeros", "empty", "full")):
        return OPTIMIZER
    if phase == "backward" and leads_to_parameter(current_node(), wanted.shape.numel()):
        return GRADIENTS
    return wanted.kind


def leads_to_parameter(node: Any, numel: int) -> bool:
    """True if, within three steps of the graph, this node's result becomes the gradient of a parameter of `numel`."""
    front = [node]
    for _ in range(3):
        front = [child for step in front if step is not None for child, _ in step.next_functions]
        if any(getattr(child, "variable", torch.empty(0, device="meta")).numel() == numel for child in front):
            return True
    return False


# What autograd holds

RAW = "_raw_saved_"


class Saved(NamedTuple):
    """A tensor that autograd holds: for which operator, recorded in which module, under which name of that operator.

    `n_bytes` is its storage's size; `is_repeat` says that the storage stands in the list already, so that the sum over
    those that are not `is_repeat` is what autograd holds. `kind` is what the storage is counted as, "" if it is not
    counted: it was made before the probe began, as a batch may have been."""

    op: str
    module: str
    what: str
    shape: tuple[int, ...]
    dtype: str
    n_bytes: int
    kind: str
    is_repeat: bool


def held_bytes(saved: Iterable[Saved]) -> int:
    """Bytes of a list of saved tensors, each storage counted once."""
    return sum(tensor.n_bytes for tensor in saved if not tensor.is_repeat)


def walk(
    roots: Iterable[Any],
    module_of: Callable[[Any], str],
    storages_of: Callable[[Tensor], list[tuple[int, int, str]]],
    fields_of: dict[type, tuple[str, ...]],
) -> tuple[Saved, ...]:
    """List every tensor that the graph below these nodes holds, nearest to the loss first.

    `storages_of` gives (address, bytes, kind) of a tensor's storages; `fields_of` remembers from walk to walk where
    each type of node keeps what it saves. Parameters are listed too, as they are saved."""
    saved: list[Saved] = []
    listed: set[int] = set()
    for node in below(roots):
        fields = fields_of.get(type(node))
        if fields is None:
            fields = fields_of[type(node)] = tuple(name for name in dir(node) if name.startswith(RAW))
        op = module = ""
        for slot, tensor in _tensors(node, fields):
            if not op:
                op, module = node.name().removesuffix("Backward0").removesuffix("Backward"), module_of(node)
            looks = (_shape(tensor), str(tensor.dtype).removeprefix("torch."))
            for address, n_bytes, kind in storages_of(tensor):
                saved.append(Saved(op, module, slot, *looks, n_bytes, kind, address in listed))
                listed.add(address)
    return tuple(saved)


def below(roots: Iterable[Any]) -> Iterator[Any]:
    """Every node of the graph once, breadth first from the roots."""
    front = [node for node in roots if node is not None]
    seen = set(front)  # autograd gives the same Python object for a node as long as one is held, as it is here
    while front:
        yield from front
        below_front = [child for node in front for child, _ in node.next_functions if child is not None]
        front = [node for node in dict.fromkeys(below_front) if node not in seen]
        seen.update(front)


def _shape(tensor: Tensor) -> tuple[int, ...]:
    """A tensor's shape. A nested one has none: (number of rows, number of all their elements)."""
    rows = tensor.is_nested and tensor.layout is torch.strided
    return (tensor.size(0), tensor.numel()) if rows else tuple(tensor.shape)


def _tensors(node: Any, fields: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    for name in fields:
        try:
            raw = getattr(node, name)
        except RuntimeError:  # this node has run and freed its tensors
            continue
        for holder in raw if isinstance(raw, tuple | list) else (raw,):
            for tensor in tensors_in(getattr(holder, "data", None)):
                yield name.removeprefix(RAW), tensor
    for name, kept in getattr(node, "__dict__", {}).items():  # `ctx.x = x` in an autograd.Function
        for tensor in tensors_in(kept):
            yield name, tensor


def _masters_of(optimizer: Optimizer) -> Mapping[Any, Any]:
    """What the model has -> the copy that is stepped on; empty for an optimizer that steps on the model's own."""
    return optimizer.masters if isinstance(optimizer, HasMasters) else {}
