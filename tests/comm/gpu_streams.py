"""Streams of a GPU without a GPU: what may read what, and when, on tensors of the CPU that have real values.

    s.record_event(), s.wait_event(e), s.wait_stream(t), s.synchronize(), `with stream(s):`      as torch.cuda has them

Nothing runs later here than it is called. But each operator belongs to the current stream of its thread, and is noted
with what it reads and writes. On a GPU it would run after three things only: what its stream had before, what that was
told to wait for, and what the host has waited for. So two operators of which one writes what the other touches are a
race unless one of these puts them in order (vector clocks: Fidge, 1988; Mattern, 1989).

    with Watch() as watch: ...          watch.races: ["aten.mul on s1 reads what aten.copy_ on s2 has", ...]
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from labkit.comm import stream as labkits

Clock = dict[int, int]
"""Of each stream, how many of its operators are known to be over."""


def join(clock: Clock, other: Clock) -> None:
    for number, ticks in other.items():
        clock[number] = max(ticks, clock.get(number, 0))


class Event:
    """A point in a stream."""

    def __init__(self, watch: Watch):
        self.watch = watch
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        self.clock = dict((stream or self.watch.current_stream()).clock)

    def synchronize(self) -> None:
        join(self.watch.host, self.clock)


class Stream:
    """Operators in order."""

    def __init__(self, watch: Watch, number: int):
        self.watch, self.number, self.clock = watch, number, {number: 0}

    def record_event(self) -> Event:
        event = Event(self.watch)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        join(self.clock, event.clock)

    def wait_stream(self, stream: Stream) -> None:
        join(self.clock, stream.clock)

    def synchronize(self) -> None:
        join(self.watch.host, self.clock)


class Deaf(Stream):
    """Of the thread's stream: it waits for no event. So labkit was."""

    def wait_event(self, event: Event) -> None:
        pass


class Hasty(Stream):
    """Nobody waits for it."""

    def synchronize(self) -> None:
        pass


class Watch:
    """In place of torch.cuda for labkit, and of torch.cpu for torch. `of_labkit` is the class of the stream on which
    labkit's thread works; None: it knows of no streams, and is on the default one."""

    def __init__(self, of_labkit: type[Stream] | None = Stream):
        self.of_labkit, self.numbers = of_labkit, itertools.count()
        self.here, self.lock = threading.local(), threading.RLock()
        self.host: Clock = {}
        self.default = Stream(self, next(self.numbers))
        self.devices: set[torch.device] = set()
        self.read_by: list[tuple[int, Stream]] = []
        """(address of a tensor, stream) whose memory is kept for what the stream has to read."""
        self.kept: list[Any] = []  # a storage that was freed would leave its number to another
        self.writes: dict[int, tuple[str, Stream, int]] = {}
        self.reads: dict[int, dict[int, tuple[str, Stream, int]]] = {}
        self.races: list[str] = []

    # -- what labkit and torch call

    def Stream(self, device: Any = None, priority: int = 0) -> Stream:
        kind = None if device is None else self.of_labkit  # torch says no device
        return (kind or Stream)(self, next(self.numbers))

    def Event(self) -> Event:
        return Event(self)

    def current_stream(self, device: Any = None) -> Stream:
        return getattr(self.here, "stream", self.default)

    @contextlib.contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        before, self.here.stream = self.current_stream(), stream or self.current_stream()
        try:
            yield
        finally:
            self.here.stream = before

    def set_device(self, device: torch.device) -> None:
        self.devices.add(device)

    def __enter__(self) -> Watch:
        self.stack, run = contextlib.ExitStack(), labkits.Started.run

        def watched(started: Any, *args: Any) -> None:
            with Heard(self):
                run(started, *args)

        def record_stream(x: Tensor, stream: Stream) -> None:
            self.read_by.append((x.data_ptr(), stream))

        module = None if self.of_labkit is None else self
        self.stack.enter_context(mock.patch.object(labkits, "streams_of", return_value=module))
        self.stack.enter_context(mock.patch.object(labkits.Started, "run", watched))
        self.stack.enter_context(mock.patch.object(torch.Tensor, "record_stream", record_stream))
        for name in ("Stream", "Event", "current_stream", "stream"):
            self.stack.enter_context(mock.patch.object(torch.cpu, name, getattr(self, name)))
        self.stack.enter_context(Heard(self))
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    # -- what is noted

    def note(self, name: str, reads: list[Tensor], writes: list[Tensor]) -> None:
        with self.lock:
            stream = self.current_stream()
            join(stream.clock, self.host)
            stream.clock[stream.number] += 1
            mine = name, stream, stream.clock[stream.number]
            for x, kind in [(x, "reads") for x in reads] + [(x, "writes") for x in writes]:
                storage = x.untyped_storage()
                key = storage._cdata
                if key not in self.writes and key not in self.reads:
                    self.kept.append(storage)
                others = [self.writes[key]] if key in self.writes else []
                if kind == "writes":
                    others += self.reads.get(key, {}).values()
                for other, theirs, tick in others:
                    if stream.clock.get(theirs.number, 0) < tick:
                        self.races.append(f"{name} on s{stream.number} {kind} what {other} on s{theirs.number} has")
                if kind == "reads":
                    self.reads.setdefault(key, {})[stream.number] = mine
                else:
                    self.writes[key], self.reads[key] = mine, {}
            if name == "aten._local_scalar_dense":  # the host waits for a number
                join(self.host, stream.clock)


def tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


class Heard(TorchDispatchMode):
    """Hears the operators of a thread."""

    def __init__(self, watch: Watch):
        super().__init__()
        self.watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its parts come here
        kwargs = kwargs or {}
        schema, name = func._schema, str(func.overloadpacket)
        space = func.namespace
        views = any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns)
        if views or "empty" in name or name == "_c10d_functional._wrap_tensor_autograd":
            return func(*args, **kwargs)  # touches no values
        if name == "_c10d_functional.wait_tensor":
            result = func(*args, **kwargs)
            self.watch.note(name, tensors(args), [])
            return result
        given = tensors((args, kwargs))
        if space == "c10d":
            self.watch.note(name, given, [] if name == "c10d.send" else given)
        elif space == "_c10d_functional":
            self.watch.note(name, given, [])  # what it makes is written by the thread
        else:
            named = {a.name: value for a, value in zip(schema.arguments, args, strict=False)} | kwargs
            mutable = (a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
            self.watch.note(name, given, tensors([named.get(argument) for argument in mutable]))
        result = func(*args, **kwargs)
        if space not in ("c10d", "_c10d_functional"):
            fresh = {id(x) for x in given}
            self.watch.note(name, [], [x for x in tensors(result) if id(x) not in fresh])
        return result
