"""The tensors inside a thing: those in a list or a dict, and those with a storage of their own inside a tensor.

DTensor             -> its local part
sparse (COO)        -> indices, values
of torch.func       -> none: it stands for tensors that the dispatcher has shown already
everything else     -> itself
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

PLAIN = frozenset({Tensor, torch.nn.Parameter})
"""Types of tensors that have one storage of their own, if they are not sparse."""


def plain(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors with a storage of their own inside a tensor."""
    if tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif type(tensor) not in PLAIN and is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            inner = getattr(tensor, name)
            if isinstance(inner, Tensor):
                yield from plain(inner)
    elif tensor.layout is torch.strided and torch._C._has_storage(tensor):
        yield tensor


def tensors_in(thing: Any) -> Sequence[Tensor]:
    """The tensors in a tensor, a list, a dict or anything made of these."""
    if isinstance(thing, Tensor):
        return (thing,)  # nearly always; a walk through nothing is slow
    return [leaf for leaf in tree_leaves(thing) if isinstance(leaf, Tensor)] if thing is not None else ()


def given_back(output: Any) -> Iterator[Tensor]:
    """The tensors that an operator gives back, or takes: one, or lists of them. It is asked at every operator."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, tuple | list):
        for each in output:
            yield from given_back(each)
