"""How code and data are serialized on their way between the notebook and the ranks.

Functions travel by value (cloudpickle), so a function defined in a cell arrives with its helpers and classes.
Tensors and arrays travel outside the pickle: small ones as frames of the same message, large ones through
memory that both processes map, so that a 256 MB result is copied once and not five times.
"""

from __future__ import annotations

import io
import linecache
import marshal
import mmap
import os
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle

from labkit.launch import system
from labkit.plan.words import dtype_name

DEEPEST = 8
"""Steps that are told on the way to a part that cannot be pickled. At each of them the rest is pickled once more."""
LARGE_BYTES = 1 << 20
"""From here on a buffer goes through shared memory: below, mapping pages costs more than copying them."""


class _Pickler(cloudpickle.Pickler):
    """cloudpickle that takes dense tensors out of band, whatever device they live on, and keeps the files of code.

    From 3.1.3 on cloudpickle calls every file "<dynamic-code>": no traceback would show a line of a cell, and no
    autopsy would find one. So code travels as Python itself writes it; both ends have the same Python (versions.py)."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.CodeType):
            return marshal.loads, (marshal.dumps(obj),)
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor):
            reduced = _reduce_tensor(obj, torch)
            if reduced is not None:
                return reduced
        return super().reducer_override(obj)


def written(obj: Any) -> bytes:
    """An object as bytes, whole: functions and classes of a notebook by value, with the names of their files."""
    stream = io.BytesIO()
    _Pickler(stream, protocol=5).dump(obj)
    return stream.getvalue()


def _reduce_tensor(x: Any, torch: types.ModuleType) -> Any:
    kind = type(x)
    if kind not in (torch.Tensor, torch.nn.Parameter):
        if kind.__name__ in ("FakeTensor", "DTensor", "LocalTensor", "FunctionalTensor"):
            raise pickle.PicklingError(
                f"a {kind.__name__} of shape {tuple(x.shape)} holds no bytes of its own to send; "
                "send its full value or its local part as a plain tensor (x.full_tensor(), x.to_local())"
            )
        return None
    if x.layout is not torch.strided or x.is_quantized or x.device.type == "meta":
        return None
    if x.requires_grad and not x.is_leaf:
        x = x.detach()  # the graph stays where it was made; only the numbers travel
    with torch.no_grad():
        dense = x.detach().cpu().contiguous()
        if dense.is_conj() or dense.is_neg():
            dense = dense.resolve_conj().resolve_neg()
        raw = dense.reshape(-1).view(torch.uint8).numpy() if dense.numel() else b""
    return _tensor, (
        pickle.PickleBuffer(raw),
        dtype_name(x.dtype),
        tuple(x.shape),
        x.requires_grad,
        kind is not torch.Tensor,
    )


def _tensor(raw: Any, dtype: str, shape: tuple[int, ...], requires_grad: bool, parameter: bool) -> Any:
    import torch

    kind = getattr(torch, dtype)
    writable = raw if not memoryview(raw).readonly else bytearray(raw)
    x = torch.frombuffer(writable, dtype=kind).reshape(shape) if len(raw) else torch.empty(shape, dtype=kind)
    x = torch.ops.aten.lift_fresh.default(x)  # as torch.tensor does, so that a probe sees the new tensor
    if parameter:
        return torch.nn.Parameter(x, requires_grad=requires_grad)
    return x.requires_grad_(requires_grad)


class Parcel:
    """An object on its way: the pickle, its small buffers, and files in shared memory for its large ones.

    The sender keeps the parcel until the receiver has opened it; then the memory belongs to the receiver alone. Between
    machines nothing is `shared`: large buffers are frames, too. Where the system has no memory without a name, the
    files are in `folder`.
    """

    def __init__(self, obj: Any, shared: bool = True, folder: str | None = None):
        buffers: list[pickle.PickleBuffer] = []
        stream = io.BytesIO()
        _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(obj)
        self.folder, self.files = folder, list[tuple[int, str]]()
        self.frames: list[Any] = [stream.getvalue()]
        notes: list[tuple[str, int] | None] = []
        for buffer in buffers:
            raw = buffer.raw()
            if raw.nbytes < LARGE_BYTES or not shared:
                notes.append(None)
                self.frames.append(bytes(raw))
            else:
                notes.append((self._shared(raw), raw.nbytes))
        self.frames.insert(0, pickle.dumps(notes))

    def _shared(self, raw: memoryview) -> str:
        fd, path = system.memory_file("labkit", self.folder)
        self.files.append((fd, path))
        sent = 0
        while sent < raw.nbytes:
            sent += os.write(fd, raw[sent : sent + (1 << 30)])
        return path

    def close(self) -> None:
        """Drop our hold on the shared memory; what a receiver has mapped stays."""
        for fd, path in self.files:
            system.close_memory_file(fd, path)
        self.files.clear()


def pack(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    shared: bool = True,
    folder: str | None = None,
) -> Parcel:
    """A call as a parcel. ValueError that names the part which cannot be pickled."""
    try:
        return Parcel((fn, args, kwargs), shared, folder)
    except Exception as error:
        named = [("the function", fn), *((f"argument {i}", a) for i, a in enumerate(args)), *kwargs.items()]
        reasons = (why_unpicklable(value, name) for name, value in named)
        where = next((reason for reason in reasons if reason), getattr(fn, "__name__", repr(fn)))
        raise ValueError(
            f"cannot send this to the ranks: {where}: {error}. "
            "Make it inside the function, or pass what it is made from"
        ) from None


def open_parcel(frames: list[Any]) -> Any:
    """The object in `frames` (as bytes-like objects). Large buffers are mapped copy-on-write, not copied."""
    notes = pickle.loads(frames[0])
    small = iter(frames[2:])
    buffers: list[Any] = []
    for note in notes:
        if note is None:
            buffers.append(bytearray(next(small)))
            continue
        path, n_bytes = note
        fd = os.open(path, os.O_RDONLY)
        try:
            buffers.append(mmap.mmap(fd, n_bytes, access=mmap.ACCESS_COPY))
        finally:
            os.close(fd)
    return pickle.loads(frames[1], buffers=buffers)


def new_sources(sent: set[str]) -> dict[str, list[str]]:
    """Source lines of notebook cells that `sent` does not name yet (and adds their names).

    With them in a rank's `linecache`, tracebacks show the cell's lines and `inspect.getsource` works.
    """
    fresh = {
        name: entry[2]
        for name, entry in list(linecache.cache.items())
        if name not in sent and len(entry) == 4 and entry[1] is None and entry[2] and not Path(name).exists()
    }
    sent.update(fresh)
    return fresh


def add_sources(sources: dict[str, list[str]]) -> None:
    """Make the lines of notebook cells known to this process."""
    for name, lines in sources.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)


def why_unpicklable(obj: Any, name: str) -> str | None:
    """The path to the part of `obj` that cannot be pickled, such as `fn -> global 'lock' (_thread.lock)`; or None."""
    path: list[str] = [name]
    seen: set[int] = set()
    if _sendable(obj):
        return None
    while id(obj) not in seen and len(path) <= DEEPEST:  # each part is pickled anew
        seen.add(id(obj))
        bad = next(((label, part) for label, part in _parts(obj) if not _sendable(part)), None)
        if bad is None:
            break
        path.append(bad[0])
        obj = bad[1]
    kind = f"{type(obj).__module__}.{type(obj).__qualname__}".removeprefix("builtins.")
    deeper = " -> ..." if len(path) > DEEPEST else ""
    return " -> ".join(path) + f"{deeper} ({kind})"


def _sendable(obj: Any) -> bool:
    try:
        _Pickler(io.BytesIO(), protocol=5, buffer_callback=lambda _: None).dump(obj)
    except Exception:
        return False
    return True


def _parts(obj: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(obj, types.MethodType):
        yield "its object", obj.__self__
    if isinstance(obj, types.FunctionType):
        closed: tuple[Callable, ...] | tuple = obj.__closure__ or ()
        for name, cell in zip(obj.__code__.co_freevars, closed, strict=True):
            try:
                yield f"closed-over {name!r}", cell.cell_contents
            except ValueError:  # an empty cell holds nothing
                continue
        for name in obj.__code__.co_names:
            if name in obj.__globals__:
                yield f"global {name!r}", obj.__globals__[name]
        for i, value in enumerate(obj.__defaults__ or ()):
            yield f"default {i}", value
    elif isinstance(obj, dict):
        yield from ((f"[{key!r}]", value) for key, value in obj.items())
    elif isinstance(obj, (list, tuple, set, frozenset)):
        yield from ((f"[{i}]", value) for i, value in enumerate(obj))
    elif isinstance(obj, type):
        yield from ((f"attribute {key!r}", value) for key, value in vars(obj).items() if callable(value))
    elif hasattr(obj, "func") and hasattr(obj, "args"):  # functools.partial
        yield "its function", obj.func
        yield "its arguments", (obj.args, getattr(obj, "keywords", None))
    elif hasattr(obj, "__dict__"):
        yield from ((f".{key}", value) for key, value in vars(obj).items())
