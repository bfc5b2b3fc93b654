"""Selective precision: some modules stay in fp32 while the rest of the model computes in bf16.

Sums over many numbers (norms, softmax) and the logits lose most when they keep 8 bits, and cost little; matrix products
lose least and cost nearly everything. So what is kept is named, and casts stand at its borders:

    x bf16 -> Linear bf16 -> [ widen | LayerNorm fp32 | round ] -> Linear bf16 -> [ widen | Head fp32 ] -> logits fp32

Bytes: 4 instead of 2 for each kept parameter and for the activations inside kept modules. Sends nothing.
Source: Micikevicius et al., 1710.03740, section 3.3 (which sums want fp32).
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from labkit.comm.private import private

tree_map: Any = private("torch.utils._pytree.tree_map")


def selective(
    model: nn.Module,
    dtype: torch.dtype = torch.bfloat16,
    keep: Sequence[str | type[nn.Module]] = ("*Norm*",),
    keep_output: Sequence[str | type[nn.Module]] = (),
) -> tuple[str, ...]:
    """Cast the model to `dtype` in place, except modules that match `keep`: they compute in fp32 and hand back `dtype`.

    A match is a class, or a pattern (`*`, `?`) for the name of a class ("Softmax") or the path of a module ("head",
    "blocks.3.norm1"; "(model)" for the model itself). What is inside a kept module is kept. Those of `keep_output` are
    kept too, and hand on fp32: the head, whose logits meet the loss. A module that shares a parameter with a kept one
    (a tied embedding) is kept with it. Floating inputs of the whole model are cast to `dtype`.

    Do it before the first backward pass and before the optimizer is made. Softmax that is called as a function has no
    module to keep (`autocast_ops` shows what it computes in).

    Returns the paths of the kept modules. Raises ValueError for what matches nothing, and names what there is."""
    named = dict(model.named_modules())
    wide = _matching(named, keep_output)
    kept: set[str] = set()
    matched = _matching(named, keep) | wide
    while matched - kept:
        kept |= matched
        inside = {name for name in named if any(not top or name.startswith(f"{top}.") for top in kept)}
        matched = inside | _sharing(named, kept | inside)
    for name, module in named.items():
        target = torch.float32 if name in kept else dtype
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(target)
        within = name.rpartition(".")[0] in kept and name  # only the outermost of nested kept modules has a border
        if name in kept and not within:
            module.register_forward_pre_hook(partial(_cast_inputs, torch.float32), with_kwargs=True)
            if name not in wide:
                module.register_forward_hook(partial(_cast_output, dtype))
    if "" not in kept:
        model.register_forward_pre_hook(partial(_cast_inputs, dtype), with_kwargs=True)
    return tuple(name for name in named if name in kept)


def _matching(named: dict[str, nn.Module], patterns: Sequence[str | type[nn.Module]]) -> set[str]:
    matches: set[str] = set()
    for pattern in patterns:
        if isinstance(pattern, str):
            kinds = {name: type(module).__name__ for name, module in named.items()}
            hits = {
                name for name in named if fnmatchcase(kinds[name], pattern) or fnmatchcase(name or "(model)", pattern)
            }
        else:
            hits = {name for name, module in named.items() if isinstance(module, pattern)}
        if not hits:
            classes = sorted({type(module).__name__ for module in named.values()})
            raise ValueError(
                f"no module matches {pattern!r}; there are {', '.join(classes)}, at {', '.join(filter(None, named))}"
            )
        matches |= hits
    return matches


def _sharing(named: dict[str, nn.Module], kept: set[str]) -> set[str]:
    """Modules outside `kept` that own a parameter which a module inside owns too."""
    inside = {id(p) for name in kept for p in named[name]._parameters.values() if p is not None}
    return {
        name
        for name, module in named.items()
        if name not in kept and any(id(p) in inside for p in module._parameters.values() if p is not None)
    }


def _cast(dtype: torch.dtype, x: Any) -> Any:
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return tree_map(partial(_cast, dtype), (args, kwargs))


def _cast_output(dtype: torch.dtype, module: nn.Module, args: Any, output: Any) -> Any:
    return tree_map(partial(_cast, dtype), output)
