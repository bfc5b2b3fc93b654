"""The chart of a run: what labkit's probes, put round a program from outside, saw of it.

    vital signs     one run under a Clock: ledger, times, losses, gradients, weights and buffers of every rank
    memory          one run under a MemoryProbe and a simulated allocator
    reference       the same number of steps in one process

A program that hangs or runs out of memory leaves a WorkerError with its autopsy, and no vital signs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from labkit.comm.group import Group
from labkit.comm.ledger import Ledger
from labkit.course.clinic.pool import Pool
from labkit.plan.breakdown import Breakdown
from labkit.plan.topology import Links
from labkit.probe.clock import Clock
from labkit.probe.grads import GradientTable, gradient_statistics
from labkit.probe.memory import MemoryProbe, Moment
from labkit.probe.recording import Recording

if TYPE_CHECKING:
    from labkit.launch.reply import WorkerError

WINDOWS = 8


class Seen(NamedTuple):
    """Vital signs of one rank. `busy` is the share of the time in which its process had the processor."""

    rank: int
    losses: tuple[float, ...]
    weights: Tensor | None
    buffers: Tensor | None
    gradients: GradientTable | None
    recording: Recording
    busy: float


class Stored(NamedTuple):
    """What one rank held: the lowest and the highest live bytes in each eighth of the run, the peak by kind, what
    the allocator had allocated and reserved, and its largest free piece, when it last asked the device for more, and
    (rank 0 alone) every moment."""

    floors: tuple[int, ...]
    tops: tuple[int, ...]
    peak: Breakdown
    allocated: int
    reserved: int
    largest_free: int
    moments: tuple[Moment, ...]


def vital(
    group: Group, program: Callable[..., Any], steps: int, before: Any, cap: int | None, pool: int | None
) -> Seen:
    """On a rank: run the program under the clock, and look at what it leaves behind."""
    if before is not None:
        before()
    group.ledger.clear()
    began, busy = time.perf_counter(), time.process_time()
    with Clock(group) as clock:
        losses, model = _capped(program, group, steps, cap, pool)
    took = time.perf_counter() - began
    return Seen(
        group.rank,
        tuple(losses),
        *left_behind(model),
        clock.recording,
        (time.process_time() - busy) / took,
    )


def _capped(program: Callable[..., Any], group: Group, steps: int, cap: int | None, pool: int | None) -> Any:
    if pool is not None:
        with Pool(pool):
            return program(group, steps)
    if cap is not None:
        with MemoryProbe(cap_bytes=cap):
            return program(group, steps)
    return program(group, steps)


def stored(group: Group, program: Callable[..., Any], steps: int) -> Stored:
    """On a rank: run the program under the memory probe and the simulated allocator, without a cap."""
    with Pool() as pool, MemoryProbe() as probe:
        program(group, steps)
    moments = probe.timeline
    per = max(1, len(moments) // WINDOWS)
    parts = [moments[low : low + per] for low in range(0, per * WINDOWS, per)]
    floors, tops = ([pick(each.total for each in part) for part in parts if part] for pick in (min, max))
    seen = moments if group.rank == 0 else ()
    return Stored(tuple(floors), tuple(tops), probe.peak, pool.asked[0], pool.asked[1], pool.asked[2], seen)


def left_behind(model: Any) -> tuple[Tensor | None, Tensor | None, GradientTable | None]:
    """Weights, buffers and gradients of a module, flat, on the CPU; None for what there is not."""
    if not isinstance(model, nn.Module):
        return None, None, None
    weights, buffers = (_flat(part) for part in (model.parameters(), model.buffers()))
    named = [(name, p.grad) for name, p in model.named_parameters()]
    return weights, buffers, gradient_statistics(named) if any(grad is not None for _, grad in named) else None


def _flat(tensors: Iterable[Tensor]) -> Tensor | None:
    parts = [each.detach().double().cpu().flatten() for each in tensors]
    return torch.cat(parts) if parts else None


@dataclass(frozen=True)
class Chart:
    """All that is known of one run of a program; `program` is "broken", "repaired" or "yours"."""

    name: str
    program: str
    steps: int
    seen: tuple[Seen, ...] = ()
    ledgers: tuple[Ledger, ...] = ()
    error: WorkerError | None = None
    stored: tuple[Stored, ...] = ()
    links: Links | None = None
    alone: tuple[tuple[float, ...], Tensor | None, GradientTable | None] | None = None

    @property
    def ended(self) -> str:
        """How the run ended: "finished", "stops for ever", "out of memory", or what was raised."""
        if self.error is None:
            return "finished"
        if self.error.autopsy.stuck and not self.error.errors.get(self.error.rank):
            return "stops for ever"
        return "out of memory" if isinstance(self.error.__cause__, torch.OutOfMemoryError) else self.error.reason

    @property
    def losses(self) -> tuple[float, ...]:
        """The loss of every step: the mean over the ranks that have one."""
        told = [each.losses for each in self.seen if each.losses]
        return tuple(sum(step) / len(told) for step in zip(*told, strict=True))

    @property
    def across(self) -> float:
        """Of all bytes that the ranks send, the share that leaves a node; 0.0 without links."""
        home = self.links.home if self.links else (0,) * len(self.ledgers)
        sent = [
            (t.n_bytes, home[r] != home[t.to]) for r, each in enumerate(self.ledgers) for t in each if t.to is not None
        ]
        return sum(n for n, far in sent if far) / max(1, sum(n for n, _ in sent))

    @property
    def recording(self) -> Recording:
        """All ranks' clocks on one time axis."""
        return Recording.of([each.recording for each in self.seen])

    def apart(self, what: str) -> float:
        """How far "weights" or "buffers" of two ranks are apart at most; 0.0 if there are none."""
        held: Sequence[Tensor | None] = [getattr(each, what) for each in self.seen]
        there = [each for each in held if each is not None]
        same = [each for each in there if not torch.equal(each.nan_to_num(), there[0].nan_to_num())]
        return max((float((each - there[0]).abs().nan_to_num(torch.inf).max()) for each in same), default=0.0)
