"""Two ears on torch: one hears every operator, the other every change of a storage's size.

    y = x @ w
        autograd            records the node
        TorchDispatchMode   <-- the first ear: sees what came back, asks whether it is a new storage
        kernel              allocates

    p.untyped_storage().resize_(0)      passes by all of that: <-- the second ear wraps the method

Views and in-place operators, about half of all calls, are recognised once by their schema and then let through. What a
kernel allocates for itself and frees before it returns is heard by neither: no tensor of it ever reaches Python.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

NEW_OR_RESIZED = frozenset({"aten::lift_fresh", "aten::set_", "aten::resize_", "aten::resize_as_"})
"""Their schema says that they give back their input; it may be new to us, or have another size than before."""
ONE_AT_A_TIME = threading.Lock()
"""Held for the moment in which `resize_` is wrapped or unwrapped: ranks may be threads of one process."""

Made = Callable[[str, tuple[Any, ...], Any], Exception | None]


class Operators(TorchDispatchMode):
    """Tells `made(name, arguments, output)` of every operator that may have made a storage; raises what it returns."""

    def __init__(self, made: Made) -> None:
        """Nothing is heard before the mode is entered."""
        super().__init__()
        self._made = made
        self._names: dict[int, str] = {}  # by id: operators live as long as torch, and hash slowly
        self._wrappers: dict[type, bool] = {FakeTensor: False}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the usual answer imports torch's compiler, one second at the first operator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator; say what came of it."""
        if types and any(self._is_wrapper(each) for each in types):
            return NotImplemented  # a DTensor: it takes itself apart, and its parts come by here again
        output = func(*args, **kwargs) if kwargs else func(*args)
        name = self._names.get(id(func))
        if name is None:
            name = self._names[id(func)] = _maker(func)
        if name:
            refused = self._made(name, args, output)
            if refused is not None:
                del output, func, args, kwargs  # the traceback keeps this frame
                try:
                    raise refused
                finally:
                    del refused  # and with it, in a circle, the frames of whoever catches this and goes on
        return output

    def heard_here(self) -> bool:
        """Does this thread's code run under this mode? (A hook of torch's is called in every thread.)"""
        for place in range(torch._C._len_torch_dispatch_stack()):
            if torch._C._get_dispatch_stack_at(place) is self:
                return True
        return False

    def _is_wrapper(self, kind: type) -> bool:
        known = self._wrappers.get(kind)
        if known is None:
            known = self._wrappers[kind] = is_traceable_wrapper_subclass_type(kind)
        return known


def _maker(func: Any) -> str:
    """The operator's name if it may make a storage, "" if it never does."""
    schema = func._schema
    name = schema.name
    if name.startswith("c10d::"):
        return ""  # they give back the tensors that they were given
    writes_out = any(argument.is_out for argument in schema.arguments)
    if name in NEW_OR_RESIZED or writes_out or any(result.alias_info is None for result in schema.returns):
        return name.removeprefix("aten::")
    return ""


@contextmanager
def resizes(before: Callable[[Any, int], None], after: Callable[[Any], None]) -> Iterator[None]:
    """While this is entered, every `storage.resize_(n)` calls `before(storage, n)` and `after(storage)`.

    Several can be entered and left in any order: one that is left but not the outermost lets calls through until those
    around it are left too."""
    with ONE_AT_A_TIME:
        inner = torch.UntypedStorage.resize_

        def resize_(storage: Any, n_bytes: int) -> Any:
            if not resize_.active:  # type: ignore[attr-defined]
                return inner(storage, n_bytes)
            before(storage, n_bytes)
            result = inner(storage, n_bytes)
            after(storage)
            return result

        resize_.active, resize_.inner = True, inner  # type: ignore[attr-defined]
        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        with ONE_AT_A_TIME:
            resize_.active = False  # type: ignore[attr-defined]
            outer: Any = torch.UntypedStorage.resize_
            while getattr(outer, "active", True) is False:
                outer = outer.inner
            torch.UntypedStorage.resize_ = outer  # type: ignore[method-assign]
