"""The storages that are alive, each counted once at its true size, whatever number of tensors look at it.

    tensor  view  tie            three tensors, one storage, one count
        \\    |    /
        storage: n bytes  <---- weak reference: says when the last tensor is gone, keeps nothing alive

A storage is known by its address, which is safe because its death is heard before the address can be given away again.
Fake tensors have storages with sizes and without memory, so all of this holds for them too; tensors on the meta device
hold nothing and count nothing.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch._C import _has_storage
from torch._subclasses.fake_tensor import FakeTensor

from labkit.plan.breakdown import KINDS, Breakdown
from labkit.probe.history import Held, History, Where, breakdown
from labkit.probe.parts import PLAIN, STRIDED, plain
from labkit.probe.refusal import Holder, VirtualOutOfMemory, holder, refusal

WAITS_S = (0, 0.0001, 0.001, 0.01, 0.03)
"""How long a thread of somebody else's may take to let go of a tensor, before there is said to be no room."""


class _Death(weakref.ref):
    """A weak reference that knows whose it is."""

    __slots__ = ("held", "key")
    held: Held
    key: int


class Storages:
    """All storages that are alive and known, and the history of their bytes."""

    def __init__(self, device: str | None, cap_bytes: int | None) -> None:
        """Count storages on this type of device ("cpu", "cuda"), or on all."""
        self.device, self.cap_bytes = device, cap_bytes
        self.history = History()
        self.live: dict[int, Held] = {}
        self.fake_mode: Any = None
        self.began = time.perf_counter()
        self._deaths: deque[tuple[_Death, float]] = deque()
        self._lock = threading.RLock()

    def born(self, tensor: Tensor, kind: int, op: str, where: Where) -> Held | None:
        """A tensor that an operator gave back. Returns what there is no room for under the cap, otherwise None."""
        for part, storage in self._parts(tensor):
            key, n_bytes = storage._cdata, storage.nbytes()
            with self._lock:
                if self._deaths:
                    self.settle()
                old = self.live.get(key)
                if old and old.ref() is None:  # another's, at an address that was given away again
                    self.sweep()
                    old = None
                more_bytes = n_bytes - old.n_bytes if old else n_bytes
                if not more_bytes:
                    continue
                wanted = Held(part, more_bytes, kind, 0, op, where, "")
                if self.cap_bytes is not None and not self.fits(more_bytes):
                    return wanted
                if old:
                    self.resized(storage, where)
                else:
                    self._admit(key, storage, wanted, where)
        return None

    def fits(self, more_bytes: int) -> bool:
        """Is there room under the cap for so many bytes more?

        Where there is none, two things are awaited that would otherwise let go whenever they happen to: Python's
        garbage, and a thread of gloo's, which holds the tensors of a collective a moment longer than whoever called
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

    def sure(self, tensor: Tensor, kind: int, rank: int) -> bool:
        """Is nothing new to be learned if `keep` is told this? (The quick answer to what is asked most.)"""
        if not torch._C._has_storage(tensor):
            return False
        storage = tensor.untyped_storage()
        held = self.live.get(storage._cdata)
        return held is not None and held.settled(storage, kind, rank)

    def keep(self, tensor: Tensor, kind: int, rank: int, name: str) -> None:
        """A tensor that is known to be of this kind. `rank` orders what can be known: a higher one is not undone."""
        for part, storage in self._parts(tensor):
            with self._lock:
                self.settle()
                held = self.live.get(storage._cdata)
                if held is None:
                    held = Held(part, storage.nbytes(), kind, rank, "", ("", ""), name)
                    self._admit(storage._cdata, storage, held, held.where)
                elif rank >= held.rank:
                    held.name = name if rank > held.rank or not held.name else held.name
                    held.rank = rank
                    if kind != held.kind:
                        self.history.rename(held, kind)

    def known(self, tensor: Tensor) -> Held | None:
        """What is known of a tensor's (first) storage."""
        self.settle()
        return next((self.live.get(storage._cdata) for _, storage in self._parts(tensor)), None)

    def resized(self, storage: torch.UntypedStorage, where: Where) -> None:
        """A storage has changed its size."""
        with self._lock:
            self.settle()
            held = self.live.get(storage._cdata)
            change = storage.nbytes() - held.n_bytes if held else 0
            if held and change:
                held.n_bytes += change
                self.history.add(self.now(), held, change, where if change > 0 else None)

    def growth(self, storage: torch.UntypedStorage, n_bytes: int, where: Where) -> Held | None:
        """What there is no room for if a known storage is resized to `n_bytes`; None if there is."""
        self.settle()
        held = self.live.get(storage._cdata)
        if held is None or self.fits(n_bytes - held.n_bytes):
            return None
        wanted = copy(held)
        wanted.n_bytes, wanted.op, wanted.where = n_bytes - held.n_bytes, "untyped_storage().resize_", where
        return wanted

    def settle(self) -> None:
        """Write down the deaths that have been heard of."""
        while self._deaths:
            with self._lock:
                if self._deaths:  # another thread may have been quicker
                    ref, t = self._deaths.popleft()
                    self._bury(ref.key, ref.held, t)

    def sweep(self) -> None:
        """Find the dead that were not heard of: a stop button's KeyboardInterrupt can end the hearing of a death."""
        with self._lock:
            self.settle()
            for key, held in [*self.live.items()]:
                if held.ref() is None:
                    self._bury(key, held, self.now())

    def now(self) -> float:
        """Seconds since the probe was made."""
        return time.perf_counter() - self.began

    def by_kind(self) -> Breakdown:
        """Bytes that are alive."""
        self.settle()
        counts = [0] * len(KINDS)
        for held in list(self.live.values()):
            counts[held.kind] += held.n_bytes
        return breakdown(counts)

    def largest(self, n: int) -> tuple[Holder, ...]:
        """The n storages that hold the most, largest first."""
        self.settle()
        return tuple(map(holder, sorted(self.live.values(), key=lambda held: -held.n_bytes)[:n]))

    def refusal(self, wanted: Held) -> VirtualOutOfMemory:
        """The error that says what there is no room for, and who has taken it."""
        assert self.cap_bytes is not None
        return refusal(wanted, self.by_kind(), self.largest(5), self.cap_bytes)

    def _admit(self, key: int, storage: torch.UntypedStorage, held: Held, where: Where) -> None:
        ref = _Death(storage, self._died)
        ref.key, ref.held, held.ref = key, held, ref
        self.live[key] = held
        self.history.add(time.perf_counter() - self.began, held, held.n_bytes, where)

    def _bury(self, key: int, held: Held, t: float) -> None:
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
            if not _has_storage(tensor):
                return ()
            counts = tensor.device.type == self.device if self.device else not tensor.is_meta
            return ((tensor, tensor.untyped_storage()),) if counts else ()
        return [(each, each.untyped_storage()) for each in plain(tensor) if self._counts(each)]

    def _counts(self, part: Tensor) -> bool:
        if isinstance(part, FakeTensor):
            if self.fake_mode is None and not self.live:
                self.fake_mode = part.fake_mode  # a probe that sees nothing real is a rehearsal's
            if part.fake_mode is not self.fake_mode:
                return False  # DTensor tries its operators on fake tensors of its own, to learn shapes
        return part.device.type == self.device if self.device else part.device.type != "meta"
