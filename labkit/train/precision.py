"""Mixed precision by hand: fp32 master weights for a model that computes in bf16 or fp16.

A step changes a weight by about lr * gradient. When that is less than half the gap to the next bf16 number (1/256 of
the weight), adding it changes nothing, step after step. So the sum is kept in fp32, and what the model computes with is
a rounded copy:

    w (bf16)  -> forward, backward -> g (bf16)
        ^                                |  widen
        |  round                         v
    master (fp32)  <--  optimizer  <-- g (fp32)

    bytes a parameter, Adam:   2 w + 4 master + 8 moments + 4 g in fp32 (the bf16 gradient is freed as it is widened)

That is 2 more than plain fp32 training (4 + 8 + 4): what is saved is activations, time and gathers, not state. Sends
nothing. Source: Micikevicius et al., 1710.03740, section 3.1.

The other parts of precision have a file each, and can be imported from here too: number formats (`formats`), tables of
them (`explore`), modules that stay in fp32 (`selective`), what torch.autocast changes (`autocast`). Products of 8-bit
numbers, which go with such masters, are in `fp8`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from labkit.comm.private import private
from labkit.plan.contracts import mark_as, needs_whole_layers
from labkit.train.autocast import AutocastReport, OpDtypes, autocast_ops
from labkit.train.explore import TextTable, explore, limits
from labkit.train.formats import BF16, E4M3, E5M2, FORMATS, FP16, FP32, INT8, TF32, Bits, Format, round_to
from labkit.train.selective import selective

is_view: Any = private("torch.Tensor._is_view")
version_of: Any = private("torch.Tensor._version")

__all__ = (
    "BF16",
    "E4M3",
    "E5M2",
    "FORMATS",
    "FP16",
    "FP32",
    "INT8",
    "TF32",
    "AutocastReport",
    "Bits",
    "Format",
    "MasterWeights",
    "OpDtypes",
    "TextTable",
    "autocast_ops",
    "explore",
    "limits",
    "round_to",
    "selective",
)
NARROW = (torch.bfloat16, torch.float16)


class OnMasters(Optimizer):
    """An optimizer that lets another one step on copies of its parameters; those that inherit say how a step does it.

    inner     the optimizer that `make_optimizer` made; `param_groups` (the learning rate) and `state` are its own
    masters   parameter -> the copy that `inner` steps on, or itself; it is there before `__init__` is called
    """

    masters: dict[Tensor, Tensor]

    def __init__(self, params: list[Any], make_optimizer: Callable[[Any], Optimizer]):
        """`params` are the masters, or parameter groups of them."""
        self.inner = make_optimizer(params)
        super().__init__(self.inner.param_groups, self.inner.defaults)
        self._share()

    def _share(self) -> None:
        # the same objects: a schedule that sets our learning rate sets the inner optimizer's
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    @property
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """(parameter, its master), in the order they were given, without those that are their own masters."""
        return [(p, master) for p, master in self.masters.items() if p is not master]

    @property
    def needs_whole_layers(self) -> bool:
        """True if `inner` looks at more than one element at a time."""
        return needs_whole_layers(self.inner)

    @torch.no_grad()
    def masters_to_params(self) -> None:
        """Round every master into its parameter, for masters that were changed or loaded."""
        for p, master in self.pairs:
            p.copy_(master)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the parameters (or fill them with zeros)."""
        for p in self.masters:
            if set_to_none or p.grad is None:
                p.grad = None
            else:
                p.grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        """The state of `inner`, and the masters, which are exact where the parameters are rounded."""
        return {**self.inner.state_dict(), "masters": [master.detach() for _, master in self.pairs]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave; the parameters follow.

        Raises ValueError if the masters are others in number or shape; then nothing has changed."""
        masters = [master for _, master in self.pairs]
        saved: Any = state_dict.get("masters")
        wanted = [tuple(master.shape) for master in masters]
        shapes = None if saved is None else [tuple(master.shape) for master in saved]
        if shapes != wanted:
            raise ValueError(f"this optimizer has masters of shapes {wanted}, the saved state has {shapes}")
        inner = state_dict.get("inner", state_dict)  # where older versions of MasterWeights put it
        self.inner.load_state_dict({key: value for key, value in inner.items() if key != "masters"})
        self._share()
        for master, exact in zip(masters, saved, strict=True):
            master.copy_(exact)
        self.masters_to_params()


class MasterWeights(OnMasters):
    """Any torch optimizer, stepping on fp32 masters of the bf16 and fp16 parameters it is given.

    `MasterWeights(model.parameters(), partial(torch.optim.AdamW, lr=1e-3))`; parameter groups work too. Parameters that
    are already wide (a norm kept in fp32) are their own masters and cost nothing. It is an optimizer itself: schedules
    of the learning rate, `Scaler` and the data-parallel strategies take it as one (`make_optimizer`)."""

    def __init__(self, params: Iterable[Any], make_optimizer: Callable[[Any], Optimizer]):
        self.masters = {}
        self.taken: dict[Tensor, tuple[weakref.ref[Tensor], int]] = {}
        super().__init__([self._group(e) if isinstance(e, dict) else self._master(e) for e in params], make_optimizer)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters later, as torch's optimizers do; the narrow ones get masters."""
        own = any(param_group is group for group in self.inner.param_groups)  # torch's __init__ hands us the inner's
        super().add_param_group(param_group if own else self._group(param_group))

    def _group(self, group: dict[str, Any]) -> dict[str, Any]:
        params = group["params"]
        return {**group, "params": [self._master(p) for p in ([params] if isinstance(params, Tensor) else params)]}

    def _master(self, p: Tensor) -> Tensor:
        if not isinstance(p, Tensor):
            raise ValueError(f"MasterWeights takes parameters or groups of parameters, got {type(p).__name__}")
        if p in self.masters or p.dtype not in NARROW:
            return self.masters.setdefault(p, p)
        master = p.detach().float().requires_grad_(p.requires_grad)
        mark_as(master, p)  # a tensor-parallel part of a layer stays known as one, as does its parameter group
        self.masters[p] = master
        return master

    def grads(self) -> list[Tensor]:
        """The fp32 gradients that `step` will use, after taking over those that backward has left in bf16 or fp16.

        Unscale and clip these: a scaled fp16 gradient that is divided in fp16 falls below what fp16 can hold."""
        for p, master in self.pairs:
            grad = p.grad
            if grad is None or self._has_taken(p, grad):
                continue
            master.grad = grad.detach().float()
            if is_view(grad)():  # a window into a strategy's bucket, which is not ours to free
                self.taken[p] = weakref.ref(grad), version_of(grad)
            else:
                p.grad = None
        return [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]

    def _has_taken(self, p: Tensor, grad: Tensor) -> bool:
        taken, version = self.taken.get(p, (None, 0))
        return taken is not None and taken() is grad and version_of(grad) == version

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One step of the inner optimizer on the masters, then each parameter becomes its rounded master.

        Raises ValueError for a closure: it would evaluate the model between the two."""
        if closure is not None:
            raise ValueError("MasterWeights takes no closure: the model would be evaluated on weights not yet rounded")
        self.grads()
        result = self.inner.step()
        self.masters_to_params()
        self.taken.clear()
        for _, master in self.pairs:
            master.grad = None  # 4 bytes a parameter, which would live on through the next forward
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the masters and of the parameters (or fill them with zeros)."""
        super().zero_grad(set_to_none)
        self.inner.zero_grad(set_to_none)
