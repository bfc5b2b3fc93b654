"""LoRA: train a small correction beside a frozen weight.

            x [.., I]
            /        \\                      W [O, I] frozen,  A [r, I] random,  B [O, r] zero at the start
       W x + b     A x [.., r]
            \\        |
             \\     B A x * alpha / r        y = W x + b + (alpha / r) B A x          [.., I] -> [.., O]
              \\    /
                (+)

B = 0, so nothing changes at first; and the gradient of A is zero until B has moved. A change of weights learned for one
task has low rank, the paper finds: r = 8 of I = 4096 often does.

    trainable          r (I + O) a layer instead of I O
    optimizer, grads   Adam in fp32: 12 r (I + O) bytes instead of 12 I O; W itself stays, but needs only its own bytes
    activations        A x on top, [.., r]; x must still be kept, for A's gradient

`merge_` adds the correction to W: no cost at inference. `unmerge_` puts back the very bits that were there, since
merge_ keeps them aside (subtracting again would be off by the rounding of two sums). Sends nothing; data-parallel ranks
send only gradients of A and B. Source: Hu et al., 2106.09685, sections 4.1 and 4.2.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from labkit.plan.contracts import shard_dim_of


class LoRALinear(nn.Module):
    """A frozen `linear` and its correction of rank r.   [.., I] -> [.., O]

    `alpha` (None: rank) sets the size of the correction, alpha / rank, so that another rank needs no other learning
    rate. `dropout` acts on the input of the correction only. A and B get the weight's dtype and device.

    Raises ValueError for what is not a plain nn.Linear, for one that is cut over ranks, and for impossible numbers."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: float | None = None, dropout: float = 0.0):
        super().__init__()
        _check(linear, rank, alpha, dropout)
        self.linear, self.rank, self.alpha = linear, rank, float(rank if alpha is None else alpha)
        self.dropout = nn.Dropout(dropout)
        weight = linear.weight
        self.A = nn.Parameter(torch.empty(rank, linear.in_features, dtype=weight.dtype, device=weight.device))
        self.B = nn.Parameter(torch.zeros(linear.out_features, rank, dtype=weight.dtype, device=weight.device))
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))  # as nn.Linear draws its weight
        linear.requires_grad_(False)
        self.aside: Tensor | None = None  # the weight as it was before merge_; never part of a checkpoint
        self.register_state_dict_post_hook(_save_unmerged)
        self.register_load_state_dict_pre_hook(_not_merged)

    @property
    def scaling(self) -> float:
        """alpha / rank."""
        return self.alpha / self.rank

    @property
    def merged(self) -> bool:
        """True while the correction is added to the weight."""
        return self.aside is not None

    def forward(self, x: Tensor) -> Tensor:
        """W x + b + (alpha / r) B A x; merged, the linear alone.   [.., I] -> [.., O]

        Raises ValueError in training while merged: A and B would get no gradient."""
        if not self.merged:
            return self.linear(x) + F.linear(F.linear(self.dropout(x), self.A), self.B) * self.scaling
        if self.training and torch.is_grad_enabled() and self.A.requires_grad:
            raise ValueError("a merged LoRA does not train: unmerge_() first, or model.eval() to use it as it is")
        return self.linear(x)

    def delta(self) -> Tensor:
        """The correction of the weight, (alpha / r) B A, in fp32 at least.   [O, I]"""
        exact = torch.promote_types(self.A.dtype, torch.float32)
        return (self.B.detach().to(exact) @ self.A.detach().to(exact)) * self.scaling

    @torch.no_grad()
    def merge_(self) -> None:
        """W <- W + (alpha / r) B A, summed in fp32 at least and rounded once; the old bits are kept aside, I O numbers.

        Raises ValueError if merged already."""
        if self.merged:
            raise ValueError("this LoRA is merged already: a second merge_ would add the correction twice")
        weight = self.linear.weight
        self.aside = weight.detach().clone()
        weight.copy_(weight + self.delta())  # the sum is as wide as delta; copy_ rounds

    @torch.no_grad()
    def unmerge_(self) -> None:
        """Put the weight back as it was, bit for bit. Raises ValueError if not merged."""
        if self.aside is None:
            raise ValueError("this LoRA is not merged: there is nothing to take out")
        self.linear.weight.copy_(self.aside)
        self.aside = None

    def extra_repr(self) -> str:
        """rank, alpha and whether merged, for `print(model)`."""
        return f"rank={self.rank}, alpha={self.alpha:g}{', merged' if self.merged else ''}"


def inject_lora(
    model: nn.Module, targets: str | Sequence[str], rank: int, alpha: float | None = None, dropout: float = 0.0
) -> tuple[str, ...]:
    """Freeze the model and put a LoRALinear in the place of every linear that `targets` match. Returns their names.

    A target is a pattern for a whole name ("blocks.*.attention.query") or for its last part ("query"). Every rank of a
    data-parallel group must draw the same A: seed alike, or let the strategy broadcast.

    Raises ValueError for a target that matches no linear (and names those there are), a linear that has a LoRA already,
    or one whose weight another module uses too. Nothing is changed then."""
    patterns = (targets,) if isinstance(targets, str) else tuple(targets)
    places = [(name, module) for name, module in model.named_modules(remove_duplicate=False) if name]
    inside = {f"{name}.linear" for name, module in places if isinstance(module, LoRALinear)}
    linears = {n: m for n, m in places if isinstance(m, nn.Linear | LoRALinear) and n not in inside}
    chosen: dict[str, nn.Linear] = {}
    for pattern in patterns or ("",):
        hits = [n for n in linears if fnmatchcase(n, pattern) or fnmatchcase(n.rpartition(".")[2], pattern)]
        if not hits:
            names = sorted({re.sub(r"\d+", "*", name) for name in linears}) or ["none"]
            raise ValueError(f"no linear matches {pattern!r}; there are {', '.join(names)}")
        for name in hits:
            linear = linears[name]
            if isinstance(linear, LoRALinear):
                raise ValueError(f"{name} has a LoRA already, of rank {linear.rank}")
            shared = [
                n for n, m in places if m is not linear and any(linear.weight is p for p in m.parameters(recurse=False))
            ]
            if shared:
                raise ValueError(f"{name} shares its weight with {', '.join(shared)}: merge_ would change both")
            _check(linear, rank, alpha, dropout, name)
            chosen[name] = linear
    already = [layer for _, layer in lora_layers(model)]
    model.requires_grad_(False)
    for layer in already:  # injected before, for other linears
        layer.A.requires_grad_()
        layer.B.requires_grad_()
    corrected = {
        id(linear): LoRALinear(linear, rank, alpha, dropout).train(linear.training) for linear in chosen.values()
    }
    for name, linear in chosen.items():  # a linear that stands in two places gets one LoRA in both
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, corrected[id(linear)])
    return tuple(chosen)


def lora_layers(model: nn.Module) -> Iterator[tuple[str, LoRALinear]]:
    """Every LoRALinear of the model with its name."""
    yield from ((name, module) for name, module in model.named_modules() if isinstance(module, LoRALinear))


def adapter_state(model: nn.Module) -> dict[str, Tensor]:
    """The trained adapter: for each layer copies of A [r, I] and B [O, r], and alpha. r (I + O) numbers a layer.

    Raises ValueError for a model without LoRA."""
    state: dict[str, Tensor] = {}
    for name, layer in lora_layers(model):
        state |= {f"{name}.A": layer.A.detach().clone(), f"{name}.B": layer.B.detach().clone()}
        state[f"{name}.alpha"] = torch.tensor(layer.alpha, dtype=torch.float64)
    if not state:
        raise ValueError("this model has no LoRA: inject_lora first")
    return state


@torch.no_grad()
def load_adapter(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Put a saved adapter into a model with LoRA of the same places, rank and alpha.

    Raises ValueError, with the differences, for any other, and for layers that are merged; then nothing is changed."""
    own = adapter_state(model)
    merged = [name for name, layer in lora_layers(model) if layer.merged]
    wrong = [f"{name} is merged: unmerge_() first" for name in merged]
    wrong += [f"{name} is missing" for name in own if name not in state]
    wrong += [f"{name} is not in this model" for name in state if name not in own]
    for name in own.keys() & state.keys():
        if own[name].shape != state[name].shape:
            wrong.append(f"{name} is {tuple(own[name].shape)} here and {tuple(state[name].shape)} in the adapter")
        elif name.endswith(".alpha") and own[name] != state[name]:
            wrong.append(f"{name} is {float(own[name]):g} here and {float(state[name]):g} in the adapter")
    if wrong:
        rest = f" and {len(wrong) - 6} more" if len(wrong) > 6 else ""
        raise ValueError(f"this adapter does not fit: {'; '.join(sorted(wrong)[:6])}{rest}")
    for name, layer in lora_layers(model):
        layer.A.copy_(state[f"{name}.A"])
        layer.B.copy_(state[f"{name}.B"])


def _check(linear: nn.Module, rank: int, alpha: float | None, dropout: float, name: str = "it") -> None:
    kind = type(linear).__name__
    if shard_dim_of(getattr(linear, "weight", None)) is not None:
        raise ValueError(
            f"{name} ({kind}) is cut over tensor-parallel ranks: A's gradient would have to be summed over them; "
            "use LoRA with data or pipeline parallelism, or merge_ it before the model is cut"
        )
    if not isinstance(linear, nn.Linear):
        raise ValueError(f"LoRA corrects an nn.Linear, {name} is a {kind}")
    if isinstance(linear, NonDynamicallyQuantizableLinear):
        raise ValueError(f"{name} belongs to an nn.MultiheadAttention, which reads its weight and never calls it")
    if not 1 <= rank <= min(linear.weight.shape):
        raise ValueError(
            f"rank must be 1 to {min(linear.weight.shape)} for weight {list(linear.weight.shape)}, got {rank}"
        )
    if alpha is not None and not (math.isfinite(alpha) and alpha > 0):
        raise ValueError(f"alpha must be a positive number, got {alpha}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout is a probability from 0 up to, but not, 1, got {dropout}")


def _save_unmerged(layer: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    """A checkpoint of a merged layer gets the weight without the correction, since A and B are saved too."""
    assert isinstance(layer, LoRALinear)
    if layer.aside is not None:
        state_dict[f"{prefix}linear.weight"] = layer.aside


def _not_merged(layer: nn.Module, *_: Any) -> None:
    assert isinstance(layer, LoRALinear)
    if layer.merged:
        raise ValueError("cannot load weights into a merged LoRA: unmerge_() first")
