"""A watch for tensors that do not say where they are, and so are on the host of a rank that has a GPU.

    device = watched("tensors.log")           in a kernel, before its first cluster: what every cluster is then given
    cluster = Cluster(2, device=device)       ranks on this machine's processors, as anywhere, but watched

A watched rank computes on the host and keeps, for each storage, whether it would be on the rank's GPU. It is there if
whoever made it said a device, or moved it to one, or computed it from what is there; it is not if nobody said where.
Four things are written into the log, each with its function and its line, which on a GPU would be an error, or would
leave the GPU idle without a word:

    a tensor that a cell makes without `device=`           (torch.ones(3))
    an operation on tensors of both places                 (weights of a model that was never moved, and its tokens)
    a collective or a message of a tensor that has no place
    a matrix product of tensors that have no place

A cluster that is given device="cpu" is where its cell wants it, and is not watched."""

from __future__ import annotations

import functools
import inspect
import sys
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from labkit.comm.libraries import within
from labkit.launch.call_context import Around, MakesAround

FROM_HOST = (torch.from_numpy, torch.frombuffer)
"""Makers of tensors which know no `device=`."""
COPIES = ("copy_", "_to_copy", "index", "index_put", "index_put_", "_index_put_impl_")
"""Operations that may see tensors of two places: copies, and an index, which may be on the host."""
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "embedding", "_scaled_dot_product_flash_attention_for_cpu")


class Watched(str):
    """A device that the top of a lab has chosen, as against one that a cell names: "cpu" to whoever asks."""


def watched(log: str) -> Watched:
    """From now on clusters of this process are watched, unless a cell says device="cpu"; lines are written to `log`."""
    from labkit.launch.cluster import BareCluster

    begin = inspect.unwrap(BareCluster.__init__)  # a kernel runs one lab after the other
    parameters = inspect.signature(begin)

    @functools.wraps(begin)
    def begin_watched(self: BareCluster, *args: Any, **kwargs: Any) -> None:
        bound = parameters.bind(self, *args, **kwargs)
        bound.apply_defaults()
        asked = bound.arguments["device"]
        if isinstance(asked, Watched) or asked == "auto":
            bound.arguments |= {"device": "cpu", "around": Watches(bound.arguments["around"], log)}
        self.asked = asked
        begin(*bound.args, **bound.kwargs)

    def device(self: BareCluster) -> str:
        """What the cluster was given: a lab passes it on to its other clusters, which are watched as this one is."""
        return Watched("cpu") if isinstance(self.asked, Watched) or self.asked == "auto" else self.choice.device

    BareCluster.__init__ = begin_watched  # type: ignore[method-assign]
    BareCluster.device = property(device)  # type: ignore[assignment,method-assign]
    return Watched("cpu")


@dataclass(frozen=True)
class Watches:
    """Makes the watch of a rank, around whatever else is around its calls."""

    others: MakesAround | None
    log: str

    @property
    def words(self) -> str:
        """For the first line of a cluster."""
        return f"{'' if self.others is None else self.others.words + ', '}watched for tensors without a place"

    def __call__(self, device: str) -> Watch:
        """Make the watch of a rank."""
        return Watch(None if self.others is None else self.others(device), self.log)


class Watch(AbstractContextManager["Watch"]):
    """What a watched rank is in while it runs a call (an `Around` of launch/call_context.py)."""

    def __init__(self, other: Around | None, log: str):
        self.other, self.log = other, log
        self.placed: dict[tuple[int, int], bool] = {}
        self.noted: set[tuple[CodeType, int, str]] = set()
        self.stack = ExitStack()
        _have_verbs_ask(self)

    held_bytes = property(lambda self: 0 if self.other is None else self.other.held_bytes)
    cap_bytes = property(lambda self: 1 << 60 if self.other is None else self.other.cap_bytes)

    def __enter__(self) -> Watch:
        self.placed.clear()  # by address, so it must not outlive what it tells of
        if self.other is not None:
            self.stack.enter_context(self.other)
        self.stack.enter_context(_Makers(self))
        self.stack.enter_context(_Operations(self))
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self.stack.__exit__(*error)

    def of(self, tensor: Tensor) -> bool | None:
        """True if it would be on the GPU, False if on the host, None if nobody has seen it made."""
        return self.placed.get(_key(tensor)) if tensor.numel() else None

    def place(self, things: Any, where: bool | None) -> None:
        """Note the place of all tensors in `things`."""
        for tensor in tree_leaves(things):
            if _has_a_place(tensor):
                if where is None:
                    self.placed.pop(_key(tensor), None)
                else:
                    self.placed[_key(tensor)] = where

    def note(self, operation: str, why: str) -> None:
        """Write a line if a cell is behind it: the first of this kind for each line of the cell."""
        frame = _cell(sys._getframe(2))
        if frame is not None and (frame.f_code, frame.f_lineno, why) not in self.noted:
            self.noted.add((frame.f_code, frame.f_lineno, why))
            with open(self.log, "a", encoding="utf-8") as log:
                log.write(f"{operation} in {frame.f_code.co_name}, line {frame.f_lineno}: {why}\n")


class _Makers(TorchFunctionMode):
    """Sees who makes a tensor and who moves one."""

    def __init__(self, watch: Watch):
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        by_cell = _is_cell(sys._getframe(1))
        makes = func in _device_constructors() and not isinstance((*args, None)[0], Tensor)
        if makes or func in FROM_HOST:
            named = kwargs.get("device") is not None
            self.watch.place(made, _place_of(kwargs.get("device"), sys._getframe(1)))
            # A generator on the host makes numbers on the host, the same on every machine; they are moved afterwards.
            if makes and by_cell and not named and kwargs.get("generator") is None:
                self.watch.note(f"torch.{func.__name__}", "does not say where")
        elif func is Tensor.cpu and by_cell:
            made = made.clone()  # as from a GPU, it is a copy
            self.watch.place(made, False)
        elif func is Tensor.to and _says_a_device(args[1:], kwargs):
            self.watch.place(made, True)
        return made


class _Operations(TorchDispatchMode):
    """Sees what is computed from what."""

    def __init__(self, watch: Watch):
        super().__init__()
        self.watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [x for x in tree_leaves((args, kwargs)) if _has_a_place(x)]
        places = {self.watch.of(x) for x in inputs if x.dim()}  # a number of the host may meet any tensor
        name = func.overloadpacket.__name__
        if {True, False} <= places and name not in COPIES:
            self.watch.note(f"torch.{name}", "meets a tensor that does not say where it is")
        elif False in places and name in PRODUCTS:
            self.watch.note(f"torch.{name}", "is computed where the GPU is not")
        before = {_key(x) for x in inputs}
        made = func(*args, **kwargs)
        fresh = [x for x in tree_leaves(made) if _has_a_place(x)]
        where = True if True in places else False if False in places else None
        self.watch.place([x for x in fresh if _key(x) not in before], where)
        return made


def _have_verbs_ask(watch: Watch) -> None:
    """Collectives and messages look at each tensor in `checked`; it now asks the watch, too."""
    from labkit.comm import group

    look = group.checked

    def looked_at(of: Any, x: Any) -> Any:
        if isinstance(x, Tensor) and watch.of(x) is False:
            watch.note("a collective or message", "takes a tensor that does not say where it is")
        return look(of, x)

    for module in [module for name, module in sys.modules.items() if name.startswith("labkit.")]:
        if getattr(module, "checked", None) is look:
            module.checked = looked_at  # type: ignore[attr-defined]


def _has_a_place(x: Any) -> bool:
    """A dense tensor on the host; what only wraps others, as a DTensor, is where those are."""
    return type(x) in (Tensor, Parameter) and x.layout is torch.strided and x.device.type == "cpu"


def _place_of(device: Any, caller: FrameType) -> bool | None:
    """Where a tensor is that this line makes: on the GPU if it names a device; on the host if it, a module or labkit
    names none. None if it writes "cpu" itself, and for what other parts of torch make for themselves: neither is held
    against anybody."""
    if device is not None:
        return None if device == "cpu" and "cpu" in caller.f_code.co_consts else True
    inside = within(caller.f_code.co_filename)
    return None if inside.startswith("torch/") and not inside.startswith("torch/nn/") else False


def _key(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage._cdata, storage.data_ptr()  # both: a view of shared memory may have the address of a freed storage


def _says_a_device(args: Any, kwargs: Any) -> bool:
    words = [*args, kwargs.get("device"), kwargs.get("other")]
    return any(isinstance(x, str | torch.device | Tensor) for x in words)


def _is_cell(frame: FrameType) -> bool:
    return _cell(frame) is frame


def _cell(frame: FrameType | None) -> FrameType | None:
    """The first frame of a cell: its code is in no file that was installed, and not in this one."""
    while frame is not None and (
        within(frame.f_code.co_filename)
        or frame.f_code.co_filename == __file__
        or "<frozen" in frame.f_code.co_filename
    ):
        frame = frame.f_back
    return frame
