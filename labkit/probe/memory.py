"""MemoryProbe: the live and the highest bytes of a step, by what they are held for.

    with MemoryProbe(model, optimizer) as probe:
        cross_entropy(model(tokens), targets).backward()
        optimizer.step()
    probe.peak              parameters 4 N, gradients 4 N, optimizer 8 N (AdamW), activations ..., other ...
    probe.now               the same for this moment            probe.timeline      the same for every moment
    probe.modules           the peak while each module was at work
    probe.saved             what autograd held when a backward began, by operator and module
    probe.largest(5)        the storages that hold the most

Bytes are those of storages: views and ties count once, a storage resized to 0 counts 0. They are the same for real
tensors on any device and for fake ones, so that a prediction, a rehearsal and a run can be held against each other.

    parameters     of modules and optimizers, by identity
    gradients      what reaches a parameter, and its .grad
    optimizer      tensors in an optimizer's state, and the wider copies that mixed precision steps on
    activations    made in a module's forward or recorded by autograd, and whatever autograd holds
    other          the rest: buffers, gradients of activations, temporaries of a step

Counted are tensors that are made in the context, and those of what is watched. Not counted are tensors made before and
not watched (a batch) or by other threads, and what C++ allocates for itself: scratch of kernels and of gloo or NCCL,
the allocator's rounding, buckets of torch's DDP that were made before the context and are no `.grad`'s storage; and
what mkldnn's tensors hold (`x.to_mkldnn()`), which is no storage. Nothing is polled or copied.

Kinds follow Rajbhandari 2020, arXiv:1910.02054, section 3.1 ("where did all the memory go"): 16 N bytes for fp32 AdamW.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from labkit.comm.private import private
from labkit.plan.breakdown import KINDS, Breakdown
from labkit.probe.owners import ACTIVATIONS, OTHER, Saved, TensorOwners, held_bytes, walk, would_have_been
from labkit.probe.storages import LiveStorage, MemorySample, Storages, breakdown
from labkit.probe.tracker import (
    ModuleTracker,
    Operators,
    current_node,
    given_back,
    graph_task,
    plain,
    resizes,
    storage_key,
    tensors_in,
)

__all__ = ("Allocator", "Holder", "MemoryProbe", "MemorySample", "Saved", "VirtualOutOfMemory")


class MemoryProbe:
    """Counts storages by kind while it is entered; it can be entered again, and read at any time, also afterwards."""

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        cap_bytes: int | None = None,
        device: str | None = None,
    ) -> None:
        """Watch a model and an optimizer, and have VirtualOutOfMemory raised where `cap_bytes` would be exceeded.

        Modules that are called and optimizers that step in the context are found without being named. `device` is the
        type to count ("cuda": leave out what lies on the host); None counts all. ValueError for a cap below 1."""
        self._storages = Storages(device, None)
        self._entered: ExitStack | None = None
        self.cap_bytes = cap_bytes
        self._mode = Operators(self._after_operator)
        self._modules = ModuleTracker(self._mode.heard_here, self._called)
        self._owners = TensorOwners(self._storages, self._modules, self._mode)
        self._ends: deque[weakref.ref[Tensor]] = deque(maxlen=64)
        self._saved: tuple[Saved, ...] = ()
        self._fields: dict[type, tuple[str, ...]] = {}
        self._backward = -1
        if model is not None or optimizer is not None:
            self.watch(model, optimizer)

    def watch(self, module: nn.Module | None = None, optimizer: Any = None, name: str = "") -> None:
        """Watch a module's parameters and an optimizer's state, also those that they get later.

        `name` goes before the names of the module's parts. ValueError if the cap is already exceeded."""
        if module is not None:
            self._modules.add(module, name)
        if optimizer is not None:
            self._owners.add(optimizer)
        if self._entered:
            self._look()
            self._check_cap()

    def label(self, tensor: Tensor, kind: str, name: str = "") -> None:
        """Say what a tensor's storage is held for, such as a bucket or a flat shard. It is counted from now on.

        A label overrules what the probe finds out. Gradients of a leaf that is labelled as a parameter are found too.
        ValueError for a kind that is not one of KINDS."""
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is no kind of memory; there are {', '.join(KINDS)}")
        self._owners.label(tensor, KINDS.index(kind), name)

    def __enter__(self) -> MemoryProbe:
        if self._entered:
            raise ValueError("this probe is at work already: leave it first, or make a second one")
        world = private("torch._guards.active_fake_mode")()
        self._storages.fake_mode = world or self._storages.fake_mode or self._owners.fake_mode()
        with ExitStack() as stack:
            stack.enter_context(self._modules.watching())
            stack.enter_context(self._owners.watching())
            stack.enter_context(resizes(self._resizing, self._resized))
            stack.enter_context(self._mode)
            self._look()
            self._check_cap()
            self._storages.cap_bytes = self.cap_bytes
            self._entered = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        assert self._entered
        entered, self._entered = self._entered, None
        self._storages.cap_bytes = None
        entered.__exit__(*error)

    @property
    def cap_bytes(self) -> int | None:
        """The most bytes that may be alive, None for no cap. A new cap holds from now on. ValueError if below 1."""
        return self._cap_bytes

    @cap_bytes.setter
    def cap_bytes(self, cap_bytes: int | None) -> None:
        if cap_bytes is not None and cap_bytes < 1:
            raise ValueError(f"cap_bytes={cap_bytes}: a cap is a positive number of bytes, or None for no cap")
        self._cap_bytes = cap_bytes
        self._storages.cap_bytes = cap_bytes if self._entered else None

    @property
    def live_bytes(self) -> int:
        """Bytes of all kinds that are alive. Quick, and safe to read from any thread: no owner is looked at."""
        self._storages.record_deaths()
        return self._storages.history.total

    @property
    def now(self) -> Breakdown:
        """Bytes that are alive, by kind. After the context: those that are left of what was seen in it."""
        self._look()
        return self._storages.by_kind()

    @property
    def peak(self) -> Breakdown:
        """Bytes by kind at the moment at which their total was highest."""
        self._look()
        return breakdown(self._storages.history.read().peak)

    @property
    def timeline(self) -> tuple[MemorySample, ...]:
        """The bytes by kind after each birth, death and change of size (of long runs the older part is thinned)."""
        self._look()
        return tuple(self._storages.history.read().moments)

    @property
    def seconds(self) -> float:
        """Seconds since this probe was made: now, on the clock of `timeline`."""
        return self._storages.now()

    @property
    def modules(self) -> Mapping[tuple[str, str], Breakdown]:
        """(phase, module) -> bytes by kind when their total was highest while that module, or one in it, was at work.

        Phases are "forward", "recompute" (of a checkpoint), "backward" and "step"; module "" is the whole phase."""
        self._look()
        return {place: breakdown(by_kind) for place, by_kind in self._storages.history.read().modules.items()}

    @property
    def saved(self) -> tuple[Saved, ...]:
        """The most that autograd held when any backward began; before the first backward, what it holds now."""
        if self._saved:
            return self._saved
        return self._walk([tensor.grad_fn for ref in self._ends if (tensor := ref()) is not None])

    @property
    def allocator(self) -> Allocator | None:
        """The allocator's own numbers for the current CUDA device, None without one."""
        return Allocator.read()

    def largest(self, n: int = 5) -> tuple[Holder, ...]:
        """The n storages that hold the most now, largest first."""
        self._look()
        return tuple(map(holder, self._storages.largest(n)))

    def reset_peak(self) -> None:
        """Forget all peaks so far, also those of modules, and `saved`."""
        self._look()
        self._storages.history.reset_peak()
        self._saved = ()

    def _look(self) -> None:
        self._storages.sweep()
        self._owners.look()

    def _after_operator(self, op: str, args: tuple[Any, ...], output: Any) -> Exception | None:
        where = self._modules.here()
        kind = ACTIVATIONS if where[0] in ("forward", "recompute") else OTHER
        if where[0] == "backward":
            task = graph_task()
            if task != self._backward:
                self._backward = task
                saved = self._walk([current_node()])
                self._saved = max(saved, self._saved, key=held_bytes)
        elif not where[0] and any(tensor.requires_grad for tensor in given_back(args)):
            kind = ACTIVATIONS if torch.is_grad_enabled() else OTHER
            self._ends.extend(weakref.ref(tensor) for tensor in given_back(output))
        for tensor in given_back(output):
            wanted = self._storages.born(tensor, kind, op, where)
            if wanted is not None:
                self._look()  # so that the holders have their final kinds and names
                wanted.kind = would_have_been(wanted)
                return self._refusal(wanted)
        return None

    def _called(self, module: nn.Module, name: str, output: Any) -> None:
        self._owners.called(module, name)
        if not self._modules.stack:
            self._ends.extend(weakref.ref(tensor) for tensor in tensors_in(output))

    def _resizing(self, storage: torch.UntypedStorage, n_bytes: int) -> None:
        wanted = self._storages.growth(storage, n_bytes, self._modules.here())
        if wanted is not None:
            raise self._refusal(wanted)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        self._storages.resized(storage, self._modules.here())

    def _refusal(self, wanted: LiveStorage) -> VirtualOutOfMemory:
        assert self.cap_bytes is not None
        return refusal(wanted, self._storages.by_kind(), list(map(holder, self._storages.largest(5))), self.cap_bytes)

    def _check_cap(self) -> None:
        held = self._storages.by_kind()
        if self.cap_bytes is not None and held.total > self.cap_bytes:
            kinds = ", ".join(f"{name} {held[name]:,}" for name in held if held[name])
            raise ValueError(
                f"cap_bytes={self.cap_bytes:,} is less than the {held.total:,} bytes that are there before anything "
                f"runs ({kinds}): raise the cap, or shard the model"
            )

    def _walk(self, roots: list[Any]) -> tuple[Saved, ...]:
        self._storages.record_deaths()
        return walk(roots, self._modules.owner, self._autograd_holds, self._fields)

    def _autograd_holds(self, tensor: Tensor) -> list[tuple[int, int, str]]:
        storages = []
        for part in plain(tensor):
            storage = part.untyped_storage()
            held = self._storages.live.get(storage_key(storage))
            if held is not None and held.kind == OTHER and not held.certainty and not held.name:
                self._storages.history.rename(held, ACTIVATIONS)
            storages.append((storage_key(storage), storage.nbytes(), KINDS[held.kind] if held else ""))
        return storages


class Holder(NamedTuple):
    """One storage that holds memory, for people to read: what it is, what made it and where, and its bytes."""

    kind: str
    n_bytes: int
    name: str
    op: str
    phase: str
    module: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        origin = "made from data" if self.op == "lift_fresh" else f"made by {self.op}" if self.op else ""
        place = f"in {self.phase} of {self.module}" if self.module else f"in {self.phase}" if self.phase else ""
        looks = f"{self.dtype} {list(self.shape)}"
        return " ".join(f"{self.n_bytes:,} B of {self.kind}: {self.name} {looks} {origin} {place}".split())


class VirtualOutOfMemory(torch.OutOfMemoryError):
    """A storage would not have fitted under `cap_bytes`. The program's memory is untouched, so it can go on. Code that
    catches torch's error of a GPU catches this one too.

    wanted  the Holder that was refused    held  Breakdown of what was alive    largest  the Holders of most"""

    wanted: Holder
    held: Breakdown
    largest: tuple[Holder, ...]
    cap_bytes: int


def holder(held: LiveStorage) -> Holder:
    """A storage as a Holder, for people to read."""
    looks = (tuple(held.shape), str(held.dtype).removeprefix("torch."))
    return Holder(KINDS[held.kind], held.n_bytes, held.name, held.op, *held.where, *looks)


def refusal(wanted: LiveStorage, held: Breakdown, largest: Sequence[Holder], cap_bytes: int) -> VirtualOutOfMemory:
    """The error for `wanted`, which does not fit under `cap_bytes` beside what is held."""
    room = cap_bytes - int(held.total)
    free = f"{room:,} are free" if room >= 0 else f"{-room:,} more are held already"
    lines = [
        f"out of memory under a cap of {cap_bytes:,} bytes: {free}",
        f"wanted   {holder(wanted)}",
        "held     " + ", ".join(f"{name} {held[name]:,}" for name in held) + f": {held.total:,} B",
        *(f"largest  {holding}" for holding in largest),
    ]
    error = VirtualOutOfMemory("\n".join(lines))
    error.wanted, error.held, error.largest, error.cap_bytes = holder(wanted), held, tuple(largest), cap_bytes
    return error


@dataclass(frozen=True)
class Allocator:
    """The numbers of CUDA's caching allocator, to be read beside what a probe counts.

        |###|#######|....|##|......................|      # allocated: handed out to tensors, rounded up to 512 bytes
        |<------------ reserved ------------------>|      . free: kept for later, the device sees it as taken
                    |....| fragmented: a free piece of a block whose other pieces are in use; only smaller tensors fit

    Out of memory with much reserved and little allocated is fragmentation. Peaks are since torch's last
    `reset_peak_memory_stats`. Source: torch's notes on CUDA semantics, memory management; `torch.cuda.memory_stats`."""

    allocated_bytes: int
    reserved_bytes: int
    fragmented_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int

    @classmethod
    def read(cls) -> Allocator | None:
        """The numbers of the current CUDA device; None without one."""
        if not torch.cuda.is_available():
            return None
        stats = torch.cuda.memory_stats()
        now, top = (
            [int(stats.get(f"{name}_bytes.all.{which}", 0)) for name in ("allocated", "reserved", "inactive_split")]
            for which in ("current", "peak")
        )
        return cls(*now, *top[:2])
