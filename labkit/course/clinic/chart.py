"""The chart of a run: what labkit's probes, put round a program from outside, saw of it.

    vital signs     one run under a Clock: ledger, times, losses, gradients, weights and buffers of every rank
    memory          one run under a MemoryProbe and a simulated allocator
    reference       the same number of steps in one process

If a program hangs or runs out of memory, the chart has a WorkerError with its autopsy, and no vital signs.
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
from labkit.parallel.expert import layers_of
from labkit.plan.breakdown import Breakdown
from labkit.plan.machine.topology import Links
from labkit.probe.clock import Clock
from labkit.probe.grads import GradientTable, gradient_statistics
from labkit.probe.memory import MemoryProbe, MemorySample
from labkit.probe.recording import Recording

if TYPE_CHECKING:
    from labkit.launch.reply import WorkerError

WINDOWS = 8


class Seen(NamedTuple):
    """Vital signs of one rank. `busy` is the share of the time in which its process used the processor.

    `sizes` has the name and the number of weights of each parameter, in the order in which `weights` has them.
    `rows_by_expert` has, for each mixture of experts in the model, the rows of each expert in the last forward."""

    rank: int
    losses: tuple[float, ...]
    weights: Tensor | None
    buffers: Tensor | None
    gradients: GradientTable | None
    recording: Recording
    busy: float
    sizes: tuple[tuple[str, int], ...] = ()
    rows_by_expert: tuple[tuple[int, ...], ...] = ()


class Stored(NamedTuple):
    """The memory of one rank during a run.

    floors, tops     the lowest and the highest live bytes in each eighth of the run
    peak             bytes by kind at the highest moment
    allocated, reserved, largest_free
                     of the allocator, when it last asked the device for more
    moments          every moment of the run, on rank 0 alone
    """

    floors: tuple[int, ...]
    tops: tuple[int, ...]
    peak: Breakdown
    allocated: int
    reserved: int
    largest_free: int
    moments: tuple[MemorySample, ...]


def vital(
    group: Group, program: Callable[..., Any], steps: int, before: Any, cap: int | None, pool: int | None
) -> Seen:
    """Run the program under the clock, on one rank, and collect its vital signs."""
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
        sizes(model),
        rows_by_expert(model),
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
    """Run the program under the memory probe and the simulated allocator, on one rank, without a limit."""
    with Pool() as pool, MemoryProbe() as probe:
        program(group, steps)
    moments = probe.timeline
    per = max(1, len(moments) // WINDOWS)
    parts = [moments[low : low + per] for low in range(0, per * WINDOWS, per)]
    floors, tops = ([pick(moment.total for moment in part) for part in parts if part] for pick in (min, max))
    seen = moments if group.rank == 0 else ()
    return Stored(tuple(floors), tuple(tops), probe.peak, pool.asked[0], pool.asked[1], pool.asked[2], seen)


def left_behind(model: Any) -> tuple[Tensor | None, Tensor | None, GradientTable | None]:
    """Weights, buffers and gradients of a module, flat, on the CPU; None for those that it does not have."""
    if not isinstance(model, nn.Module):
        return None, None, None
    weights, buffers = (_flat(part) for part in (model.parameters(), model.buffers()))
    named = [(name, p.grad) for name, p in model.named_parameters()]
    return weights, buffers, gradient_statistics(named) if any(grad is not None for _, grad in named) else None


def sizes(model: Any) -> tuple[tuple[str, int], ...]:
    """(name, number of weights) of each parameter of a module."""
    return tuple((name, p.numel()) for name, p in model.named_parameters()) if isinstance(model, nn.Module) else ()


def rows_by_expert(model: Any) -> tuple[tuple[int, ...], ...]:
    """The rows that each expert got in the last forward, for each mixture of experts in a module."""
    mixtures = [layer for _, layer in layers_of(model)] if isinstance(model, nn.Module) else []
    return tuple(tuple(layer.counts.tolist()) for layer in mixtures if layer.counts is not None)


def _flat(tensors: Iterable[Tensor]) -> Tensor | None:
    parts = [tensor.detach().double().cpu().flatten() for tensor in tensors]
    return torch.cat(parts) if parts else None


@dataclass(frozen=True)
class Chart:
    """Everything measured in one run of a program; `program` is "broken", "repaired" or "yours"."""

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
        """The end of the run in words: "finished", "stops for ever", "out of memory", or the error."""
        if self.error is None:
            return "finished"
        if self.error.autopsy.stuck and not self.error.errors.get(self.error.rank):
            return "stops for ever"
        return "out of memory" if isinstance(self.error.__cause__, torch.OutOfMemoryError) else self.error.reason

    @property
    def losses(self) -> tuple[float, ...]:
        """The loss of every step: the mean over the ranks that have one."""
        losses = [rank.losses for rank in self.seen if rank.losses]
        return tuple(sum(step) / len(losses) for step in zip(*losses, strict=True))

    @property
    def rows_by_expert(self) -> tuple[tuple[int, ...], ...]:
        """The rows of all ranks that each expert got in the last step, for each mixture of experts in the model."""
        by_layer = zip(*(rank.rows_by_expert for rank in self.seen), strict=True)
        return tuple(tuple(map(sum, zip(*ranks, strict=True))) for ranks in by_layer)

    @property
    def across(self) -> float:
        """The share of all sent bytes that leaves a node; 0.0 without links."""
        home = self.links.home if self.links else (0,) * len(self.ledgers)
        sent = [
            (message.n_bytes, home[rank] != home[message.to])
            for rank, ledger in enumerate(self.ledgers)
            for message in ledger
            if message.to is not None
        ]
        return sum(n for n, far in sent if far) / max(1, sum(n for n, _ in sent))

    @property
    def recording(self) -> Recording:
        """The clocks of all ranks on one time axis."""
        return Recording.of([rank.recording for rank in self.seen])

    def apart(self, what: str) -> float:
        """The largest difference between the "weights" or "buffers" of two ranks; 0.0 if they have none."""
        held: Sequence[Tensor | None] = [getattr(rank, what) for rank in self.seen]
        tensors = [tensor for tensor in held if tensor is not None]
        different = [tensor for tensor in tensors if not torch.equal(tensor.nan_to_num(), tensors[0].nan_to_num())]
        return max(
            (float((tensor - tensors[0]).abs().nan_to_num(torch.inf).max()) for tensor in different), default=0.0
        )

    def unequal(self) -> dict[str, bool]:
        """For each parameter, whether its weights differ between two ranks; empty if ranks have other parameters."""
        held = [(rank.sizes, rank.weights) for rank in self.seen if rank.weights is not None]
        if len({sizes for sizes, _ in held}) != 1:
            return {}
        names, counts = zip(*held[0][0], strict=True)
        by_parameter = zip(*(weights.split(counts) for _, weights in held), strict=True)
        return {
            name: any(not torch.equal(part.nan_to_num(), parts[0].nan_to_num()) for part in parts)
            for name, parts in zip(names, by_parameter, strict=True)
        }
