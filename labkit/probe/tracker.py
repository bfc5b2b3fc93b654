"""What the program does while a probe is entered: each operator, each resize of a storage, and the module at work.

    y = x @ w
        autograd            records the node
        TorchDispatchMode   <-- Operators: sees what came back, asks whether it is a new storage
        kernel              allocates

    p.untyped_storage().resize_(0)      passes by all of that: <-- `resizes` wraps the method

Views and in-place operators, about half of all calls, are recognised once by their schema and then let through. What a
kernel allocates for itself and frees before it returns is seen by neither: no tensor of it ever reaches Python.

ModuleTracker knows in which module's forward, in whose backward, or in an optimizer's step this happens:

    forward    modules call each other: hooks push and pop a stack of names
    backward   the autograd engine runs nodes: each knows the number it got when forward made it,
               and from number n on forward was in module m        numbers  0   4      9  11
                                                                   modules  |norm1|up  |  |down ...
So a node, and with it everything that backward allocates for it, is traced to the module that recorded it.

`plain` gives the tensors with a storage of their own inside a tensor:

    DTensor             -> its local part
    sparse              -> indices, values; compressed (CSR, CSC, BSR, BSC): both its indices, values
    nested              -> one flat buffer; and where its rows lie in it, which are tensors, too
    of torch.func       -> none: it stands for tensors that the dispatcher has shown already
    of mkldnn           -> none, though it holds bytes (`x.to_mkldnn()`): what it holds is no storage, and a tensor that
                           `detach` or autograd makes of it holds the same. So a tensor's death, which could be noticed,
                           does not say that its bytes are gone.
    everything else     -> itself
"""

from __future__ import annotations

import sys
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from labkit.comm.private import private

FakeTensor: Any = private("torch._subclasses.fake_tensor.FakeTensor")
TorchDispatchMode: Any = private("torch.utils._python_dispatch.TorchDispatchMode")
is_wrapper: Any = private("torch.utils._python_dispatch.is_traceable_wrapper_subclass")
is_wrapper_type: Any = private("torch.utils._python_dispatch.is_traceable_wrapper_subclass_type")
stack_height: Any = private("torch._C._len_torch_dispatch_stack")
mode_at: Any = private("torch._C._get_dispatch_stack_at")
storage_key: Any = private("torch.UntypedStorage._cdata")
schema_of: Any = private("torch.ops.aten.add.Tensor._schema")
node_number: Any = private("torch.autograd.graph.Node._sequence_nr")
has_storage: Any = private("torch._C._has_storage")
tree_leaves: Any = private("torch.utils._pytree.tree_leaves")
current_node: Any = private("torch._C._current_autograd_node")
graph_task: Any = private("torch._C._current_graph_task_id")
next_node_number: Any = private("torch._C._autograd._get_sequence_nr")

Where = tuple[str, str]
"""(phase, module): ("forward", "blocks.0.mlp")."""


# The operators, and the tensors that they give back

NEW_OR_RESIZED = frozenset({"aten::lift_fresh", "aten::set_", "aten::resize_", "aten::resize_as_"})
"""Their schema says that they give back their input; it may be new to us, or have another size than before."""
ONE_AT_A_TIME = threading.Lock()
"""Held for the moment in which `resize_` is wrapped or unwrapped: ranks may be threads of one process."""

Made = Callable[[str, tuple[Any, ...], Any], Exception | None]


class Operators(TorchDispatchMode):
    """Calls `made(name, arguments, output)` after each operator that may make a storage; raises what that returns."""

    def __init__(self, made: Made) -> None:
        """Nothing is observed before the mode is entered."""
        super().__init__()
        self._made = made
        self._names: dict[int, str] = {}  # by id: operators live as long as torch, and hash slowly
        self._wrappers: dict[type, bool] = {FakeTensor: False}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the usual answer imports torch's compiler, one second at the first operator

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code runs as it does without the mode. Else torch would run it eagerly, or, with `fullgraph=True`,
        try to compile this class and stop the program."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, then report its output."""
        if types and any(self._is_wrapper(kind) for kind in types):
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
                    del refused  # in a reference cycle it would keep the frames of the code that catches it
        return output

    def heard_here(self) -> bool:
        """True if this thread runs under this mode: torch calls the hooks of modules and optimizers in every thread."""
        return any(mode_at(place) is self for place in range(stack_height()))

    def _is_wrapper(self, kind: type) -> bool:
        known = self._wrappers.get(kind)
        if known is None:
            known = self._wrappers[kind] = is_wrapper_type(kind)
        return known


def has_compiled_code() -> bool:
    """True if torch.compile has compiled something in this process. The operators of compiled code are not dispatched
    one by one, so that no mode observes what they allocate."""
    return "torch._dynamo" in sys.modules and private("torch._dynamo.utils.counters")["stats"]["unique_graphs"] > 0


def _maker(func: Any) -> str:
    """The operator's name if it may make a storage, "" if it never does."""
    schema = schema_of(func)
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


# The tensors inside an object

PLAIN = frozenset({Tensor, torch.nn.Parameter})
"""Types of tensors that have one storage of their own, if they are neither sparse nor nested."""
STRIDED = torch.strided
"""Under a name of our own: it is asked for at every operator."""
ROWS = tuple(map(attrgetter, ("crow_indices", "col_indices", "values")))
COLUMNS = tuple(map(attrgetter, ("ccol_indices", "row_indices", "values")))
SPARSE = MappingProxyType({
    torch.sparse_coo: (private("torch.Tensor._indices"), private("torch.Tensor._values")),
    torch.sparse_csr: ROWS, torch.sparse_bsr: ROWS, torch.sparse_csc: COLUMNS, torch.sparse_bsc: COLUMNS,
})  # fmt: skip
"""Layout -> what gives the tensors of a sparse tensor."""
NESTED = (
    attrgetter("values"),
    private("torch.Tensor._nested_tensor_size"),
    private("torch.Tensor._nested_tensor_strides"),
    private("torch.Tensor._nested_tensor_storage_offsets"),
)
"""Methods that give the tensors of a strided nested tensor, which is no Python subclass (torch's default layout)."""


def plain(tensor: Any) -> Iterator[Tensor]:
    """The tensors with a storage of their own inside a tensor."""
    if (layout := tensor.layout) in SPARSE:
        for part in SPARSE[layout]:
            yield part(tensor)()
    elif type(tensor) not in PLAIN and is_wrapper(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            inner = getattr(tensor, name)
            if isinstance(inner, Tensor):
                yield from plain(inner)
    elif layout is STRIDED and has_storage(tensor):
        if tensor.is_nested:
            yield from _of_nested(tensor)
        else:
            yield tensor


def _of_nested(tensor: Tensor) -> list[Tensor]:
    with private("torch._C._DisableTorchDispatch")():  # else these calls would be observed as operators, and never end
        return [part(tensor)() for part in NESTED]


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
        for item in output:
            yield from given_back(item)


# The module at work

MOST_TURNS = 1 << 16
OUTSIDE: Where = ("", "")


class ModuleTracker:
    """The stack of modules whose forward is running, and the map from autograd's numbers to modules."""

    def __init__(self, is_ours: Callable[[], bool], called: Callable[[nn.Module, str, Any], None]) -> None:
        """`is_ours` says whether a hook runs on behalf of this probe; `called(module, name, output)` is
        called right after a module's forward, while the weights that it computed with are still there."""
        self.stack: list[Where] = []
        self.stepping = 0
        self.roots: list[tuple[weakref.ref[nn.Module], str]] = []
        self._is_ours, self._called = is_ours, called
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._from: list[int] = []
        self._owner: list[str] = []
        self._thread = 0

    def add(self, module: nn.Module, name: str) -> None:
        """Name a module and its parts; those that have a name keep it. "" stands for the class's name."""
        self._names.setdefault(module, name or type(module).__name__)
        if module not in (ref() for ref, _ in self.roots):
            self.roots.append((weakref.ref(module), name))
        for path, part in module.named_modules():
            if path:
                self._names.setdefault(part, f"{name}.{path}" if name else path)

    def modules(self) -> Iterator[tuple[nn.Module, str]]:
        """The modules that were added and are alive, with their names."""
        yield from ((module, name) for ref, name in self.roots if (module := ref()) is not None)

    def here(self) -> Where:
        """(phase, module) of what is being computed; ("", "") outside of all."""
        if self.stack:
            return self.stack[-1]
        node = current_node()
        if node is not None:
            return "backward", self.owner(node)
        return ("step", "") if self.stepping else OUTSIDE

    def owner(self, node: Any) -> str:
        """The module whose forward recorded an autograd node; "" for one recorded outside of all."""
        number = node_number(node)()
        place = bisect_right(self._from, number) - 1
        return self._owner[place] if place >= 0 and number < 1 << 62 else ""  # AccumulateGrad has the highest number

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hook into every module call of the process; calls in other threads are recognised and left alone."""
        self._thread = threading.get_ident()
        hooks = (
            module_hooks.register_module_forward_pre_hook(self._enter),
            module_hooks.register_module_forward_hook(self._leave, always_call=True),
        )
        self._owns_from_here("")
        try:
            yield
        finally:
            self.stack.clear()
            self.stepping = 0
            self._owns_from_here("")
            for hook in hooks:
                hook.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return  # torch takes the hooks into its graph, and cannot compile what they do
        if self._is_ours():
            if not self.stack:
                self.stepping = 0  # an optimizer's step that was broken off has not reset this
            name = self._names.get(module) or self._name_of(module)
            phase = "forward" if graph_task() == -1 else "recompute"
            self.stack.append((phase, name))
            self._owns_from_here(name)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self._is_ours() and self.stack:
            _, name = self.stack.pop()
            self._owns_from_here(self.stack[-1][1] if self.stack else "")
            self._called(module, name, output)

    def _name_of(self, module: nn.Module) -> str:
        for root, name in list(self.modules()):
            self.add(root, name)  # a watched module may have got new parts
        if module not in self._names and self.stack:
            self._names[module] = f"{self.stack[-1][1]}.{type(module).__name__}"
        elif module not in self._names:
            self.add(module, "")
        return self._names[module]

    def _owns_from_here(self, owner: str) -> None:
        """The nodes that autograd numbers from now on belong to the module `owner`."""
        if threading.get_ident() != self._thread:
            return  # autograd's own threads count their nodes for themselves
        if len(self._from) >= MOST_TURNS:
            del self._from[: MOST_TURNS // 2], self._owner[: MOST_TURNS // 2]
        number = next_node_number()
        if self._from and self._from[-1] == number:
            self._owner[-1] = owner
        else:
            self._from.append(number)
            self._owner.append(owner)
