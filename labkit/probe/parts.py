"""The tensors inside a thing: those in a list or a dict, and those with a storage of their own inside a tensor.

DTensor             -> its local part
sparse              -> indices, values; compressed (CSR, CSC, BSR, BSC): both its indices, values
nested              -> one flat buffer; and where its rows lie in it, which are tensors, too
of torch.func       -> none: it stands for tensors that the dispatcher has shown already
of mkldnn           -> none, though it holds bytes (`x.to_mkldnn()`): see below
everything else     -> itself

Not seen: what mkldnn holds is no storage, and of a tensor that `detach` or autograd makes of another it is the same.
So the death of a tensor, which could be heard, does not say that its bytes are gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._C import _has_storage
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

PLAIN = frozenset({Tensor, torch.nn.Parameter})
"""Types of tensors that have one storage of their own, if they are neither sparse nor nested."""
STRIDED = torch.strided
"""Under a name of our own: it is asked for at every operator."""
ROWS = ("crow_indices", "col_indices", "values")
COLUMNS = ("ccol_indices", "row_indices", "values")
SPARSE = MappingProxyType({
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ROWS, torch.sparse_bsr: ROWS, torch.sparse_csc: COLUMNS, torch.sparse_bsc: COLUMNS,
})  # fmt: skip
"""Layout -> what gives the tensors of a sparse tensor."""
NESTED = ("values", "_nested_tensor_size", "_nested_tensor_strides", "_nested_tensor_storage_offsets")
"""What gives the tensors of a nested tensor that is none of Python's: strided, as it is if no layout is asked for."""


def plain(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors with a storage of their own inside a tensor."""
    if (layout := tensor.layout) in SPARSE:
        for name in SPARSE[layout]:
            yield getattr(tensor, name)()
    elif type(tensor) not in PLAIN and is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            inner = getattr(tensor, name)
            if isinstance(inner, Tensor):
                yield from plain(inner)
    elif layout is STRIDED and _has_storage(tensor):
        if tensor.is_nested:
            yield from _of_nested(tensor)
        else:
            yield tensor


def _of_nested(tensor: Tensor) -> list[Tensor]:
    with torch._C._DisableTorchDispatch():  # who listens to operators would hear of new tensors, and ask again
        return [getattr(tensor, each)() for each in NESTED]


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
