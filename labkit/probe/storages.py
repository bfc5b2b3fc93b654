"""The storages that are alive, each counted once at its true size, whatever number of tensors look at it.

    tensor  view  tie            three tensors, one storage, one count
        \\    |    /
        storage: n bytes  <---- weak reference: says when the last tensor is gone, keeps nothing alive

A storage is known by its address, which is safe because its death is noticed before the address can be given away
again. Fake tensors have storages with sizes and without memory, so all of this holds for them too; tensors on the meta
device hold nothing and count nothing.

A log has the live bytes of every moment, each storage under the kind that it turned out to be of:

    log      t    storage   change   where                a storage's kind is looked up when the log is read,
             0.1  #1        +4096    forward of mlp.up    not when it is written
             0.2  #2        +4096    backward of mlp.up
             0.3  #1        -4096

That is the whole trick: when backward makes a tensor, nobody can know yet that it will be a weight's gradient. A moment
later it is one, and the log then counts it as one from its birth. Sums over the log are exact and kinds are final.

A log of many steps would itself fill the memory. Its older part is therefore folded from time to time: the sums, the
peak and each module's peak are kept exactly; of the moments in between every other one is dropped.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from labkit.plan.breakdown import KINDS, Breakdown
from labkit.probe.tracker import PLAIN, STRIDED, FakeTensor, Where, has_storage, plain, storage_key

FOLD_AFTER = 1 << 15
KEPT_MOMENTS = 1 << 12


class LiveStorage:
    """One storage that is alive: its true size, its kind (an index into KINDS), and what made it and where.

    `certainty` orders what is known of its kind: 0 guessed at birth, higher for what it was found to be (owners.py)."""

    __slots__ = ("certainty", "device", "dtype", "folded", "kind", "n_bytes", "name", "op", "ref", "shape", "where")

    def __init__(self, tensor: torch.Tensor, n_bytes: int, kind: int, certainty: int, op: str, where: Where, name: str):
        """Remember the tensor's shape, dtype and device, never the tensor: a reference would keep it alive."""
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.n_bytes, self.kind, self.certainty = n_bytes, kind, certainty
        self.op, self.where, self.name = op, where, name
        self.folded = 0
        self.ref: Any = None

    def is_known_as(self, storage: torch.UntypedStorage, kind: int, certainty: int) -> bool:
        """True if this belongs to the storage and has a name and this kind, or a kind that is more certain."""
        alive = self.ref is not None and self.ref() is storage
        if not alive or not self.name:
            return False
        return self.certainty > certainty or (self.certainty == certainty and self.kind == kind)


class MemorySample(NamedTuple):
    """The live bytes at one moment: `t` seconds since the probe was made, `bytes` in the order of KINDS.

    `phase` and `module` say where the storage was made that made the difference, "" when one died."""

    t: float
    phase: str
    module: str
    bytes: tuple[int, ...]

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.bytes)


Event = tuple[float, LiveStorage, int, Where | None]


class History:
    """The log, its running total, and what can be read from it."""

    def __init__(self) -> None:
        """An empty history."""
        self.log: list[Event] = []
        self.total = 0
        self._past = _Replay()

    def add(self, t: float, held: LiveStorage, change: int, where: Where | None) -> None:
        """Record that a storage was born, died or changed its size."""
        self.total += change
        self.log.append((t, held, change, where))
        if len(self.log) >= FOLD_AFTER:
            self.fold()

    def fold(self) -> None:
        """Add the log so far into the sums and forget it; kinds that change later change only what follows."""
        self._past.play(self.log)
        for _, held, change, _ in self.log:
            held.folded += change
        self._past.thin()
        self.log = []

    def rename(self, held: LiveStorage, kind: int) -> None:
        """Change a storage's kind, also for all the time that it has been alive."""
        self._past.bytes[held.kind] -= held.folded
        self._past.bytes[kind] += held.folded
        held.kind = kind

    def reset_peak(self) -> None:
        """Forget the peaks so far; from now on they are those of what follows."""
        self.fold()
        self._past.peak = tuple(self._past.bytes)
        self._past.modules = {}

    def read(self) -> _Replay:
        """The whole history, with the kinds as they are known now."""
        replay = copy(self._past)
        replay.bytes, replay.modules, replay.moments = [*replay.bytes], {**replay.modules}, [*replay.moments]
        replay.play(self.log)
        return replay


class _Replay:
    """The log, played back: bytes by kind, their highest total, the same for each module, and all moments."""

    def __init__(self) -> None:
        self.bytes = [0] * len(KINDS)
        self.peak: tuple[int, ...] = tuple(self.bytes)
        self.modules: dict[Where, tuple[int, ...]] = {}
        self.moments: list[MemorySample] = []

    def play(self, log: Iterable[Event]) -> None:
        total, highest = sum(self.bytes), sum(self.peak)
        tops = {place: sum(by_kind) for place, by_kind in self.modules.items()}
        for t, held, change, where in log:
            self.bytes[held.kind] += change
            total += change
            now = tuple(self.bytes)
            phase, module = where or ("", "")
            self.moments.append(MemorySample(t, phase, module, now))
            if total > highest:
                highest, self.peak = total, now
            for place in _places_of(phase, module):
                if total > tops.get(place, 0):
                    tops[place] = total
                    self.modules[place] = now

    def thin(self) -> None:
        while len(self.moments) > KEPT_MOMENTS:  # of two neighbours the higher stays: hills keep their tops
            pairs = zip(self.moments[::2], self.moments[1::2], strict=False)
            self.moments = [max(pair, key=lambda moment: moment.total) for pair in pairs]


def _places_of(phase: str, module: str) -> Iterator[Where]:
    """The place itself, the modules around it, and the whole phase. Nothing for what is outside of all phases."""
    while phase and module:
        yield phase, module
        module = module.rpartition(".")[0]
    if phase:
        yield phase, ""


def breakdown(by_kind: Iterable[int]) -> Breakdown:
    """Bytes in the order of KINDS as a Breakdown."""
    return Breakdown.of(dict(zip(KINDS, by_kind, strict=True)), "B")


WAITS_S = (0, 0.0001, 0.001, 0.01, 0.03)
"""Pauses in which a thread of gloo's may still free a tensor, before `fits` says that there is no room."""


class _Death(weakref.ref):
    """A weak reference to a storage with its address and its `LiveStorage`, which are both needed after its death."""

    __slots__ = ("held", "key")
    held: LiveStorage
    key: int


class Storages:
    """All storages that are alive and known, and the history of their bytes."""

    def __init__(self, device: str | None, cap_bytes: int | None) -> None:
        """Count storages on this type of device ("cpu", "cuda"), or on all."""
        self.device, self.cap_bytes = device, cap_bytes
        self.history = History()
        self.live: dict[int, LiveStorage] = {}
        self.fake_mode: Any = None
        self.began = time.perf_counter()
        self._deaths: deque[tuple[_Death, float]] = deque()
        self._lock = threading.RLock()

    def born(self, tensor: Tensor, kind: int, op: str, where: Where) -> LiveStorage | None:
        """Count a tensor that an operator gave back. Returns what does not fit under the cap, None if it fits."""
        for part, storage in self._parts(tensor):
            key, n_bytes = storage_key(storage), storage.nbytes()
            with self._lock:
                if self._deaths:
                    self.record_deaths()
                old = self.live.get(key)
                if old and old.ref() is None:  # a dead storage's entry: its address was given away again
                    self.sweep()
                    old = None
                more_bytes = n_bytes - old.n_bytes if old else n_bytes
                if not more_bytes:
                    continue
                wanted = LiveStorage(part, more_bytes, kind, 0, op, where, "")
                if self.cap_bytes is not None and not self.fits(more_bytes):
                    return wanted
                if old:
                    self.resized(storage, where)
                else:
                    self._admit(key, storage, wanted, where)
        return None

    def fits(self, more_bytes: int) -> bool:
        """True if there is room under the cap for so many bytes more.

        Where there is none, it first waits for two things that free memory at no fixed time: Python's garbage
        collector, and a thread of gloo's, which holds the tensors of a collective a moment longer than whoever called
        it (after 12 to 21 % of broadcasts, for 50 microseconds, at most 0.8 ms, and longer on a busy machine:
        benchmarks/held.py)."""
        if self._room(more_bytes):
            return True
        gc.collect()
        for wait_s in WAITS_S:
            time.sleep(wait_s)
            self.sweep()
            if self._room(more_bytes):
                return True
        return False

    def _room(self, more_bytes: int) -> bool:
        return self.cap_bytes is None or more_bytes <= 0 or self.history.total + more_bytes <= self.cap_bytes

    def sure(self, tensor: Tensor, kind: int, certainty: int) -> bool:
        """True if `keep` would change nothing. Asked for every parameter at every look, so it must be quick."""
        if not has_storage(tensor):
            return False
        storage = tensor.untyped_storage()
        held = self.live.get(storage_key(storage))
        return held is not None and held.is_known_as(storage, kind, certainty)

    def keep(self, tensor: Tensor, kind: int, certainty: int, name: str) -> None:
        """Record that a tensor is of this kind, and count it if it is new. A kind that is more certain stays."""
        for part, storage in self._parts(tensor):
            with self._lock:
                self.record_deaths()
                held = self.live.get(storage_key(storage))
                if held is None:
                    held = LiveStorage(part, storage.nbytes(), kind, certainty, "", ("", ""), name)
                    self._admit(storage_key(storage), storage, held, held.where)
                elif certainty >= held.certainty:
                    held.name = name if certainty > held.certainty or not held.name else held.name
                    held.certainty = certainty
                    if kind != held.kind:
                        self.history.rename(held, kind)

    def known(self, tensor: Tensor) -> LiveStorage | None:
        """The record of a tensor's first storage."""
        self.record_deaths()
        return next((self.live.get(storage_key(storage)) for _, storage in self._parts(tensor)), None)

    def resized(self, storage: torch.UntypedStorage, where: Where) -> None:
        """Record that a storage has changed its size."""
        with self._lock:
            self.record_deaths()
            held = self.live.get(storage_key(storage))
            change = storage.nbytes() - held.n_bytes if held else 0
            if held and change:
                held.n_bytes += change
                self.history.add(self.now(), held, change, where if change > 0 else None)

    def growth(self, storage: torch.UntypedStorage, n_bytes: int, where: Where) -> LiveStorage | None:
        """The record of what a resize of a known storage to `n_bytes` would add, None if that fits under the cap."""
        self.record_deaths()
        held = self.live.get(storage_key(storage))
        if held is None or self.fits(n_bytes - held.n_bytes):
            return None
        wanted = copy(held)
        wanted.n_bytes, wanted.op, wanted.where = n_bytes - held.n_bytes, "untyped_storage().resize_", where
        return wanted

    def record_deaths(self) -> None:
        """Write into the log the deaths that weak references have reported."""
        while self._deaths:
            with self._lock:
                if self._deaths:  # another thread may have been quicker
                    ref, t = self._deaths.popleft()
                    self._bury(ref.key, ref.held, t)

    def sweep(self) -> None:
        """Find deaths that were not reported: KeyboardInterrupt can break off the callback of a weak reference."""
        with self._lock:
            self.record_deaths()
            for key, held in [*self.live.items()]:
                if held.ref() is None:
                    self._bury(key, held, self.now())

    def now(self) -> float:
        """Seconds since the probe was made."""
        return time.perf_counter() - self.began

    def by_kind(self) -> Breakdown:
        """Bytes that are alive, by kind."""
        self.record_deaths()
        counts = [0] * len(KINDS)
        for held in list(self.live.values()):
            counts[held.kind] += held.n_bytes
        return breakdown(counts)

    def largest(self, n: int) -> list[LiveStorage]:
        """The n storages that hold the most, largest first."""
        self.record_deaths()
        return sorted(self.live.values(), key=lambda held: -held.n_bytes)[:n]

    def _admit(self, key: int, storage: torch.UntypedStorage, held: LiveStorage, where: Where) -> None:
        ref = _Death(storage, self._died)
        ref.key, ref.held, held.ref = key, held, ref
        self.live[key] = held
        self.history.add(time.perf_counter() - self.began, held, held.n_bytes, where)

    def _bury(self, key: int, held: LiveStorage, t: float) -> None:
        if held.ref is not None:
            if self.live.get(key) is held:
                del self.live[key]
            self.history.add(t, held, -held.n_bytes, None)
            held.ref = None

    def _died(self, ref: Any) -> None:
        # Called in the middle of anything, in any thread: it may only take note. (A deque's append is atomic.)
        self._deaths.append((ref, time.perf_counter() - self.began))

    def _parts(self, tensor: Tensor) -> Iterable[tuple[Tensor, torch.UntypedStorage]]:
        if type(tensor) in PLAIN and tensor.layout is STRIDED and not tensor.is_nested:  # nearly all: no generator
            if not has_storage(tensor):
                return ()
            counts = tensor.device.type == self.device if self.device else not tensor.is_meta
            return ((tensor, tensor.untyped_storage()),) if counts else ()
        return [(part, part.untyped_storage()) for part in plain(tensor) if self._counts(part)]

    def _counts(self, part: Tensor) -> bool:
        if isinstance(part, FakeTensor):
            if self.fake_mode is None and not self.live:
                self.fake_mode = part.fake_mode  # a probe that sees nothing real is a rehearsal's
            if part.fake_mode is not self.fake_mode:
                return False  # DTensor tries its operators on fake tensors of its own, to learn shapes
        return part.device.type == self.device if self.device else part.device.type != "meta"
