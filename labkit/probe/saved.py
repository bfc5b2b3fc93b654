"""What autograd holds for backward, found by walking its graph: nothing is unpacked, nothing is run.

    loss --> NllLoss --> LogSoftmax --> Addmm --> Gelu --> Addmm --> AccumulateGrad
              target      result        mat1,2    self     mat1,2       the raw saved tensors of each node

A hook on saving would see the same tensors, but it would switch off autograd's check that they were not changed, and
tensors packed by somebody else's hook (checkpointing, offloading) would pass it by. Here a packed tensor shows as what
it is: a checkpoint's place-holder holds no bytes, one that was offloaded holds those of its copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from labkit.probe.parts import tensors_in

RAW = "_raw_saved_"


class Saved(NamedTuple):
    """A tensor that autograd holds: for which operator, recorded in which module, under which name of that operator.

    `n_bytes` is its storage's size; `again` says that the storage stands in the list already, so that the sum over
    those that are not `again` is what autograd holds. `kind` is what the storage is counted as, "" if it is not
    counted: it was made before the probe began, as a batch may have been."""

    op: str
    module: str
    what: str
    shape: tuple[int, ...]
    dtype: str
    n_bytes: int
    kind: str
    again: bool


def held_bytes(saved: Iterable[Saved]) -> int:
    """What a list of saved tensors holds, each storage once."""
    return sum(each.n_bytes for each in saved if not each.again)


def walk(
    roots: Iterable[Any],
    module_of: Callable[[Any], str],
    storages_of: Callable[[Tensor], list[tuple[int, int, str]]],
    fields_of: dict[type, tuple[str, ...]],
) -> tuple[Saved, ...]:
    """Everything that the graph below these nodes holds, nearest to the loss first.

    `storages_of` gives (address, bytes, kind) of a tensor's storages; `fields_of` remembers from walk to walk where
    each type of node keeps what it saves. Parameters are listed too, as they are saved."""
    found: list[Saved] = []
    listed: set[int] = set()
    for node in below(roots):
        fields = fields_of.get(type(node))
        if fields is None:
            fields = fields_of[type(node)] = tuple(name for name in dir(node) if name.startswith(RAW))
        op = module = ""
        for what, tensor in _tensors(node, fields):
            if not op:
                op, module = node.name().removesuffix("Backward0").removesuffix("Backward"), module_of(node)
            looks = (_shape(tensor), str(tensor.dtype).removeprefix("torch."))
            for address, n_bytes, kind in storages_of(tensor):
                found.append(Saved(op, module, what, *looks, n_bytes, kind, address in listed))
                listed.add(address)
    return tuple(found)


def below(roots: Iterable[Any]) -> Iterator[Any]:
    """Every node of the graph once, breadth first from the roots."""
    rank = [node for node in roots if node is not None]
    seen = set(rank)  # nodes are one Python object each while it is held, as it is here
    while rank:
        yield from rank
        rank = [node for each in rank for node, _ in each.next_functions if node is not None]
        rank = [node for node in dict.fromkeys(rank) if node not in seen]
        seen.update(rank)


def _shape(tensor: Tensor) -> tuple[int, ...]:
    """Of a nested tensor, which has none: the number of its rows, and of all the numbers in them."""
    rows = tensor.is_nested and tensor.layout is torch.strided
    return (tensor.size(0), tensor.numel()) if rows else tuple(tensor.shape)


def _tensors(node: Any, fields: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    for name in fields:
        try:
            raw = getattr(node, name)
        except RuntimeError:  # this node has run and let go
            continue
        for each in raw if isinstance(raw, tuple | list) else (raw,):
            for tensor in tensors_in(getattr(each, "data", None)):
                yield name.removeprefix(RAW), tensor
    for name, kept in getattr(node, "__dict__", {}).items():  # `ctx.x = x` in an autograd.Function
        for tensor in tensors_in(kept):
            yield name, tensor
