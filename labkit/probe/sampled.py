"""A few steps of somebody's training script, looked at closely from inside; all others run as they are.

    step 1   2        3             4   5 6             7 ...
             |MemoryProbe, lines|       |torch's profiler|        the rest: one clock reading a step

The end of a step is the end of the optimizer's `step`, which torch tells (a script with several optimizers: the first).
Step 3 is run under a MemoryProbe, so it is slower, once, and says what is held at its highest moment, by kind and by
line of the script. Steps 5 and 6 are run under torch's profiler, which says when operators ran and when collectives
were on their way. Nothing of the script is changed, and what cannot be seen is left out with its reason.
"""

from __future__ import annotations

import gc
import re
import sys
import time
import weakref
from collections import Counter, deque
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from labkit.comm.dumps import Frame
from labkit.plan.breakdown import KINDS
from labkit.probe.intervals import common, seconds, union, without
from labkit.probe.memory import MemoryProbe
from labkit.probe.same_on_ranks import SameOnRanks
from labkit.probe.tracker import has_compiled_code, has_storage, storage_key

MEMORY_AFTER, TIMED_AFTER, TIMED_STEPS = 2, 4, 2
KEPT_STEPS, KEPT_SPANS, KEPT_LINES = 4096, 20_000, 12
ON_THE_WIRE = ("gloo:", "nccl:", "ncclDevKernel")
HOST_ALLOCATOR = "DefaultCPUAllocator"
"""What torch's error is called by if the host has no memory left: a RuntimeError like any other, without a type."""


class Sampled:
    """Looks at the script of this process (an `Observer` of launch/observer.py)."""

    def __init__(self) -> None:
        """Nothing is looked at before the script begins."""
        self.optimizer: Any = None
        self.ends: deque[int] = deque(maxlen=KEPT_STEPS)
        self.n_steps = 0
        self.same = SameOnRanks()
        self.seen: dict[str, Any] = {}
        self.probe: LineProbe | None = None
        self.profiler: Any = None
        self.began = 0
        self.raised = False
        self._sent: set[str] = set()
        self._notes_sent = 0

    def begin(self) -> None:
        """Listen to optimizers from now on."""
        self.same.listen()
        register_optimizer_step_post_hook(self._stepped)

    def failed(self, error: BaseException) -> None:
        """Note what was held, if memory ran out. The weights of the end are not compared: it came at any moment."""
        self.raised = True
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or HOST_ALLOCATOR in str(error):
            wanted = re.search(r"allocate ([\d.]+) ?(\w*)", str(error))
            self.seen["at_failure"] = {"held": census(), "wanted": " ".join(wanted.groups()) if wanted else ""}

    def result(self) -> dict[str, Any]:
        """Everything that was seen, as plain values."""
        self._close()
        if not self.raised:
            self.same.end()
        steps = list(self.ends)
        apart = sorted((b - a) / 1e9 for a, b in zip(steps, steps[1:], strict=False))
        return {
            **self.seen,
            "same": self.same.result(),
            "n_steps": self.n_steps,
            "step_s": apart[len(apart) // 2] if apart else None,
            "ends_ns": steps[:KEPT_LINES],
        }

    def news(self) -> dict[str, Any]:
        """The number of steps, and what was seen since the last call. Safe from one other thread."""
        fresh = {key: value for key, value in list(self.seen.items()) if key not in self._sent}
        n_notes = len(self.same.notes) + len(self.same.norms)
        if n_notes != self._notes_sent:
            fresh["same"] = self.same.result()
        self._sent, self._notes_sent = self._sent | fresh.keys(), n_notes
        return {**fresh, "n_steps": self.n_steps}

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.optimizer is None:
            self.optimizer = weakref.ref(optimizer)
        if self.optimizer() is not optimizer:
            return
        self.ends.append(time.time_ns())
        self.n_steps += 1
        if self.n_steps > TIMED_AFTER + TIMED_STEPS:
            return
        try:
            self._look(optimizer)
        except Exception as error:
            self._close()
            self.seen["unseen"] = f"{type(error).__name__}: {error}"

    def _look(self, optimizer: Optimizer) -> None:
        if self.n_steps == 1:
            self.seen |= sizes(optimizer)
        if self.probe is not None:
            self._close()
        elif self.n_steps == MEMORY_AFTER and has_compiled_code():
            self.seen["memory_unseen"] = "torch.compile was used, and what compiled code allocates is not observed"
        elif self.n_steps == MEMORY_AFTER:
            self.probe = LineProbe(optimizer=optimizer)
            self.probe.__enter__()
        elif self.n_steps == TIMED_AFTER:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                kinds.append(torch.profiler.ProfilerActivity.CUDA)
            self.profiler = torch.profiler.profile(activities=kinds)
            self.profiler.start()
            self.began = time.time_ns()
        elif self.n_steps == TIMED_AFTER + TIMED_STEPS and self.profiler is not None:
            ended = time.time_ns()
            profiler, self.profiler = self.profiler, None
            profiler.stop()
            self.seen["overlap"] = overlap_of(profiler, self.began, ended)

    def _close(self) -> None:
        """Leave what is still open: at its step's end, and at the script's."""
        probe, self.probe = self.probe, None
        if probe is not None:
            probe.__exit__(None, None, None)
            self.seen["memory"] = {"peak": {k: int(probe.peak[k]) for k in KINDS}, "lines": probe.lines()}
        profiler, self.profiler = self.profiler, None
        if profiler is not None:
            profiler.stop()


class LineProbe(MemoryProbe):
    """A MemoryProbe that also remembers which line of the script made each storage."""

    def _after_operator(self, op: str, args: tuple[Any, ...], output: Any) -> Exception | None:
        return super()._after_operator(f"{op}\n{_line()}", args, output)

    def lines(self) -> list[tuple[str, str, int, str]]:
        """(kind, line, bytes, operator or name) at the moment of the peak, most bytes first."""
        self._look()
        total = highest = at = 0
        log = self._storages.history.log
        for place, (_, _, change, _) in enumerate(log):
            total += change
            if total > highest:
                highest, at = total, place
        held: Counter[tuple[str, str]] = Counter()
        what: dict[tuple[str, str], Counter[str]] = {}
        for _, storage, change, _ in log[: at + 1]:
            op, _, line = storage.op.partition("\n")
            key = KINDS[storage.kind], line
            held[key] += change
            what.setdefault(key, Counter())[op if line else storage.name] += change
        rows = [(kind, line, n, what[kind, line].most_common(1)[0][0]) for (kind, line), n in held.items() if n > 0]
        return sorted(rows, key=lambda row: -row[2])[:KEPT_LINES]


def sizes(optimizer: Optimizer) -> dict[str, int]:
    """Of the parameters that an optimizer trains: the numbers that this rank holds, and their bytes."""
    held = numel = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            if parameter.requires_grad:
                numel += local.numel()
                held += local.nbytes
    return {"held_numel": numel, "held_bytes": held}


def census() -> dict[str, int]:
    """Bytes by kind of all tensors that there are now, found by the garbage collector: slow, and needs no probe."""
    kinds: dict[int, tuple[int, int]] = {}  # storage -> bytes, kind
    objects = gc.get_objects()
    parameters = [thing for thing in objects if isinstance(thing, nn.Parameter)]
    optimizers = [thing for thing in objects if isinstance(thing, Optimizer)]
    states = [value for o in optimizers for state in o.state.values() for value in state.values()]
    tensors = [thing for thing in objects if isinstance(thing, torch.Tensor)]
    gradients = [p.grad for p in parameters if p.grad is not None]
    for kind, some in ((0, parameters), (1, gradients), (2, states), (4, tensors)):
        for tensor in some:
            if isinstance(tensor, torch.Tensor):
                local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                if has_storage(local) and not local.is_meta:
                    storage = local.untyped_storage()
                    recorded = tensor.grad_fn is not None or (kind == 4 and tensor.requires_grad)
                    kinds.setdefault(storage_key(storage), (storage.nbytes(), 3 if kind == 4 and recorded else kind))
    out = dict.fromkeys(KINDS, 0)
    for n_bytes, kind in kinds.values():
        out[KINDS[kind]] += n_bytes
    return out


def overlap_of(profiler: Any, began_ns: int, ended_ns: int) -> dict[str, Any]:
    """Seconds of the profiled steps: `step_s`, `compute_s` in operators, `wire_s` of collectives on their way,
    `hidden_s` of these while an operator ran, `exposed_s` of these while none did; and the spans themselves."""
    spans, compute, wire = [], [], []
    for event in profiler.profiler.kineto_results.events():
        name, t0, t1 = event.name(), event.start_ns(), event.start_ns() + event.duration_ns()
        if name.startswith(ON_THE_WIRE):
            wire.append((t0, t1))
            spans.append((name, t0, t1, "communication"))
        elif name.startswith("aten::"):
            compute.append((t0, t1))
        elif name.startswith("c10d"):
            continue
        else:
            spans.append((name, t0, t1, "spans"))
    busy, moving = union(compute), union(wire)
    spans += [("compute", int(a), int(b), "compute") for a, b in busy]
    return {
        "step_s": (ended_ns - began_ns) / 1e9 / TIMED_STEPS,
        "compute_s": seconds(busy) / 1e9 / TIMED_STEPS,
        "wire_s": seconds(moving) / 1e9 / TIMED_STEPS,
        "hidden_s": seconds(common(moving, busy)) / 1e9 / TIMED_STEPS,
        "exposed_s": seconds(without(moving, busy)) / 1e9 / TIMED_STEPS,
        "spans": sorted(spans, key=lambda span: span[1])[:KEPT_SPANS],
    }


def _line() -> str:
    """`train.py:31`, the script's innermost line."""
    frame = sys._getframe(2)
    while frame is not None:
        at = Frame.of(frame)
        if not at.library:
            return str(at)
        frame = frame.f_back  # type: ignore[assignment]
    return ""
