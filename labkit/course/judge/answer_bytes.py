"""An answer as bytes, from a rank to the judge: tensors, numbers, words, and lists and dicts of them.

    4 bytes   the length of the text
    text      JSON: the answer's form; a tensor is its dtype and shape
    bytes     of all tensors, one behind the other, in the order in which the text names them

The judge reads it with limits. No code of the attempt runs, nothing is unpickled, and tensors take as much memory as
came: a shape whose bytes did not come is refused, and so is a form that is nested too deeply.
"""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from torch import Tensor

MOST_BYTES = 64 << 20
"""The most bytes that an answer may have."""
MOST_TEXT_BYTES = 4 << 20
MOST_DEPTH = 40
LENGTH_BYTES = 4


def packed(output: Any) -> bytes:
    """An attempt's output as bytes. TypeError for what is of none of these kinds; ValueError above MOST_BYTES."""
    tensors: list[Tensor] = []
    text = json.dumps(_form(output, tensors)).encode()
    n_bytes = LENGTH_BYTES + len(text) + sum(tensor.nbytes for tensor in tensors)
    if n_bytes > MOST_BYTES or len(text) > MOST_TEXT_BYTES:
        raise ValueError(f"what it returned has {n_bytes:,} bytes, more than there can be")
    return b"".join((len(text).to_bytes(LENGTH_BYTES, "little"), text, *map(_raw, tensors)))


def unpacked(data: bytes) -> Any:
    """The answer that these bytes hold. ValueError if they hold none, or one beyond the limits."""
    start = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
    if len(data) > MOST_BYTES or start - LENGTH_BYTES > MOST_TEXT_BYTES or start > len(data):
        raise ValueError(f"an answer of {len(data):,} bytes with a text of {start - LENGTH_BYTES:,}")
    try:
        form = json.loads(data[LENGTH_BYTES:start])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the form of an answer cannot be read: {type(error).__name__}") from None
    rest = _Rest(memoryview(data)[start:])
    answer = _of(form, rest, MOST_DEPTH)
    if rest.left:
        raise ValueError(f"{rest.left:,} bytes behind an answer belong to no tensor of it")
    return answer


class _Rest:
    """The bytes that no tensor has taken yet."""

    def __init__(self, raw: memoryview):
        self.raw, self.at = raw, 0

    @property
    def left(self) -> int:
        return len(self.raw) - self.at

    def tensor(self, name: str, shape: list[int]) -> Tensor:
        dtype = getattr(torch, name, None) if isinstance(name, str) else None
        sizes = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
        if not isinstance(dtype, torch.dtype) or not sizes:
            raise ValueError(f"a tensor of {name!r} and shape {shape!r}"[:200])
        n_bytes = math.prod(shape) * dtype.itemsize
        if n_bytes > self.left:
            raise ValueError(f"a tensor of {n_bytes:,} bytes where {self.left:,} have come")
        part = bytearray(self.raw[self.at : self.at + n_bytes])
        self.at += n_bytes
        try:
            return torch.frombuffer(part, dtype=dtype).view(shape) if n_bytes else torch.empty(shape, dtype=dtype)
        except (RuntimeError, TypeError):  # an empty one with a size beyond those of any tensor
            raise ValueError(f"a tensor of shape {shape!r}"[:200]) from None


def _of(form: Any, rest: _Rest, depth: int) -> Any:
    if form is None or isinstance(form, bool | int | float | str):
        return form
    if not isinstance(form, dict):
        raise ValueError("the form of an answer has a bare list in it")
    ((kind, parts),) = form.items() if len(form) == 1 else (("", None),)
    if not depth or not isinstance(parts, list):
        raise ValueError("the form of an answer is nested too deeply, or is none")
    if kind == "tensor" and len(parts) == 2:
        return rest.tensor(*parts)
    if kind == "list":
        return [_of(part, rest, depth - 1) for part in parts]
    if kind == "dict" and all(isinstance(pair, list) and len(pair) == 2 for pair in parts):
        if not all(isinstance(key, str | int) for key, _ in parts):
            raise ValueError("a key of an answer that is no word and no number")
        return {key: _of(value, rest, depth - 1) for key, value in parts}
    raise ValueError(f"an answer has no {kind!r}"[:200])


def _form(thing: Any, tensors: list[Tensor]) -> Any:
    """The form of an answer; its tensors are added to `tensors`.

    Memory is no longer measured here, so no code of the attempt may run: an object of a subclass is read through the
    methods of list, dict or the number type, never through its own."""
    if isinstance(thing, Tensor):
        if thing.device.type != "cpu":
            return {"dict": [["device", str(thing.device)]]}
        tensors.append(thing.detach() if thing.layout is torch.strided else thing.detach().to_dense())
        return {"tensor": [str(tensors[-1].dtype).removeprefix("torch."), list(thing.shape)]}
    if thing is None or type(thing) in (bool, int, float, str):
        return thing
    for number, exact in ((int, int.__int__), (float, float.__float__), (str, str.__str__)):
        if isinstance(thing, number):
            return exact(thing)  # type: ignore[arg-type]
    if isinstance(thing, torch.dtype):
        return str(thing)
    for sort in (list, tuple, set, frozenset):
        if isinstance(thing, sort):
            parts = [_form(part, tensors) for part in sort.__iter__(thing)]  # type: ignore[arg-type]
            return {"list": sorted(parts) if sort in (set, frozenset) else parts}
    if isinstance(thing, dict):
        return {"dict": [[_key(key), _form(value, tensors)] for key, value in dict.items(thing)]}
    raise TypeError(
        f"what it returned holds {type(thing).__name__}: return tensors, numbers, words, or lists and dicts of them"
    )


def _key(key: Any) -> str | int:
    exact = _form(key, [])
    return exact if isinstance(exact, str | int) else str(exact)


def _raw(tensor: Tensor) -> bytes:
    if not tensor.numel():
        return b""
    return bytes(tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
