"""run_fake: run one rank of a program on fake tensors in a world of any size, and measure what it would have taken.

    def step(group):                              one rank's real code: it may build a model, talk, step
        ...
    run = run_fake(step, n_ranks=1024, rank=3)
    run.memory          Breakdown of bytes by kind when their total was highest        run.peak      that total
    run.before, .after  what was held when the measured part began and ended           run.timeline  every moment
    run.ledger          what this rank sent, by verb and axis                          run.largest   largest storages
    run.flops           Breakdown of flops by operator                                 run.saved     held by autograd

Real are all Python code of the program, autograd, torch's optimizers and labkit's strategies; every operator runs on
shapes. Not real are values, kernels, other ranks and time. So memory, bytes and flops come out as on a real rank, in
seconds and without the memory, and nothing that depends on values can be known (see fake_reads.py).

Memory equals what `MemoryProbe` counts on a real rank of gloo, to the byte. Neither counts batches that were made
before (`inputs`), scratch inside kernels, and the buffers of the wire. The process that rehearses is left as it was:
its generators, default dtype and device, modes; torch.distributed is not touched.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from labkit.comm import fake
from labkit.comm.group import Group
from labkit.comm.ledger import Ledger
from labkit.plan.breakdown import REHEARSED, Breakdown, Comparison
from labkit.probe.fake_reads import Fake
from labkit.probe.memory import Holder, MemoryProbe, MemorySample, Saved


@dataclass(frozen=True)
class Rehearsal:
    """The bytes that one rank held and sent, and the flops it computed, in the measured part of a rehearsal.

    memory     bytes by kind at the moment when their total was highest; before, after: when it began and ended
    building   the highest moment of what came before (`setup`): a strategy that shards has the whole model for a moment
    ledger     what this rank sent;   flops   by operator of torch;   seconds   that the whole rehearsal took
    timeline   bytes by kind, moment by moment;   modules   the peak while each module was at work
    saved      what autograd held when the fullest backward began;   largest   the largest holders at the end
    predicted  what the law says, where there is one;   assumed   reads that were answered 0, by place
    notes      what differs from what was asked for;   value   what the function returned
    """

    memory: Breakdown
    before: Breakdown
    after: Breakdown
    building: Breakdown
    ledger: Ledger
    flops: Breakdown
    seconds: float
    n_ranks: int
    rank: int
    timeline: tuple[MemorySample, ...] = field(repr=False)
    modules: Mapping[tuple[str, str], Breakdown] = field(repr=False)
    saved: tuple[Saved, ...] = field(repr=False)
    largest: tuple[Holder, ...] = field(repr=False)
    predicted: Breakdown | None = None
    assumed: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    value: Any = field(default=None, repr=False)

    @property
    def peak(self) -> int:
        """Bytes at the highest moment."""
        return int(self.memory.total)

    @property
    def against(self) -> Comparison:
        """The law's prediction beside what was rehearsed, kind by kind. ValueError where there is no law."""
        if self.predicted is None:
            raise ValueError("no law predicts a function of one's own: labkit.rehearse(shape, layout, recipe) has one")
        return self.predicted.against(self.memory)

    def __repr__(self) -> str:
        head = f"rehearsal of rank {self.rank} of {self.n_ranks:,} on fake tensors, {self.seconds:.1f} s"
        rows = [head, *(f"note: {note}" for note in self.notes), "memory at the peak"]
        rows += [str(self.memory if self.predicted is None else self.against), repr(self.ledger), "flops"]
        rows += [str(self.flops)] if len(self.flops) else ["none"]
        rows += [
            f"0 was assumed for a value at {place} ({'once' if count == 1 else f'{count:,} times'})"
            for place, count in self.assumed.items()
        ]
        return "\n".join(rows)


def run_fake(
    fn: Callable[..., Any],
    n_ranks: int,
    rank: int = 0,
    *,
    setup: Callable[..., Any] | None = None,
    inputs: Callable[[Group], Any] | None = None,
    hear: fake.Hear | None = None,
) -> Rehearsal:
    """Run `fn(group)` as `rank` of a fake world of `n_ranks`, on fake tensors, and measure it.

    setup     setup(group) runs first: what it makes is held, but its peak, bytes and flops do not count; fn is then
              called as fn(group, what setup returned)
    inputs    inputs(group) makes what is not to be counted, a batch say; it goes to setup and fn as their last argument
    hear      hear(axis, source, tag) -> the tensor that global rank `source` would send (labkit.comm.fake says when it
              is needed)

    ValueError where the value of a fake tensor is asked for (with file and line), where a real tensor from outside
    is used, and for a rank that is not there."""
    began = time.perf_counter()
    group = fake.world(n_ranks, rank, hear)
    with undisturbed(), Fake() as mode:
        arguments = () if inputs is None else (inputs(group),)
        probe = MemoryProbe()
        with probe:
            built = () if setup is None else (setup(group, *arguments),)
            building = probe.peak
            before = probe.now
            probe.reset_peak()
            group.ledger.clear()
            mode.flops.clear()
            value = fn(group, *built, *arguments)
            after, largest = probe.now, probe.largest()
            memory, timeline, modules, saved = probe.peak, probe.timeline, probe.modules, probe.saved
    return Rehearsal(
        memory=_as_rehearsed(memory),
        before=_as_rehearsed(before),
        after=_as_rehearsed(after),
        building=_as_rehearsed(building),
        ledger=group.ledger,
        flops=Breakdown.of(mode.flops, "flops", REHEARSED),
        seconds=time.perf_counter() - began,
        n_ranks=n_ranks,
        rank=rank,
        timeline=timeline,
        modules=modules,
        saved=saved,
        largest=largest,
        assumed=dict(mode.assumed),
        value=value,
    )


@contextmanager
def undisturbed() -> Iterator[None]:
    """Restores the process after whatever is done inside: generators, default dtype, default device and modes.

    Inside, gradients are recorded and the default device is the CPU: torch's CPU build has no fake GPU with a gradient.
    """
    dtype, device, grad, python = (
        torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled(), random.getstate(),
    )  # fmt: skip
    log = logging.getLogger("torch._subclasses.fake_tensor")  # it would repeat at length what is raised anyway
    was_silent, log.disabled = log.disabled, True
    with ExitStack() as stack:
        stack.callback(setattr, log, "disabled", was_silent)
        stack.callback(torch.set_grad_enabled, grad)
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if device.type != "cpu":
            stack.enter_context(torch.device("cpu"))
        try:
            yield
        finally:
            random.setstate(python)
            torch.set_default_dtype(dtype)
            if torch.get_default_device() != device and device.type == "cpu":
                torch.set_default_device(device)


def _as_rehearsed(measured: Breakdown) -> Breakdown:
    """The same numbers marked with their source: beside a prediction they are called rehearsed, not measured."""
    return Breakdown.of(dict(measured), "B", REHEARSED)
