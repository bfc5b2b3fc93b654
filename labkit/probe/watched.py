"""Modules that are watched: a span for each forward and each backward, through hooks that leave gradients alone.

    forward    begins and ends with the module's call; "recompute" if backward calls it again (checkpointing)
    backward   begins when the gradient of its output is complete; ends when that of its input is, or that of its last
               weight, whichever comes later

Hooks sit on the module's tensors, not on the module: torch's full backward hooks refuse outputs that are changed in
place and warn where no input wants a gradient (the first layer of every model).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from labkit.probe.rows import ProgramSpan
from labkit.probe.tracker import graph_task


class Backward:
    """The backward of one forward, from t0 to the latest that is known of it; 0 until it begins. It lies within that of
    the module around it, whose hooks on the same tensor are called a moment later."""

    def __init__(self, around: Backward | None) -> None:
        self.t0 = self.t1 = 0.0
        self.around, self.over = around, False

    def reach(self, now: float) -> None:
        """Note that this backward, and that of the module around it, has begun or still goes on at `now`."""
        self.t0, self.t1 = self.t0 or now, now
        if self.around is not None:
            self.around.reach(now)


class WatchedModule:
    """The hooks on a module and its parts, until `let_go`."""

    def __init__(self, module: nn.Module, name: str, depth: int, keep: Callable[[ProgramSpan], bool]) -> None:
        """Watch `module` and `depth` levels below it; `keep` takes a forward's span and returns True if it counts."""
        self._keep = keep
        self._handles: list[Any] = []
        self._backwards: list[tuple[str, Backward]] = []
        self._inside: list[tuple[float, Backward]] = []  # a stack: modules call each other, and themselves
        for path, part in _levels(module, name, depth):
            self._watch(part, path or type(module).__name__)

    def backward_spans(self) -> list[ProgramSpan]:
        """The spans of all backwards so far."""
        return [
            ProgramSpan(name, backward.t0, backward.t1, "backward")
            for name, backward in self._backwards
            if backward.t1 > backward.t0
        ]

    def let_go(self) -> None:
        """Take all hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _watch(self, module: nn.Module, name: str) -> None:
        newest: list[Backward] = []  # the backward under way, to which gradients of weights belong

        def before(_: nn.Module, inputs: Any) -> None:
            around = self._inside[-1][1] if self._inside else None
            self._inside.append((time.perf_counter(), Backward(around)))

        def after(_: nn.Module, inputs: Any, output: Any) -> None:
            (t0, backward), t1 = self._inside.pop(), time.perf_counter()
            recomputing = graph_task() != -1
            if (
                self._keep(ProgramSpan(name, t0, t1, "recompute" if recomputing else "forward"))
                and torch.is_grad_enabled()
            ):
                self._backwards.append((name, backward))
                self._expect(backward, list(_wanting(inputs)), list(_wanting(output)), newest)

        def weight(_: Tensor) -> None:
            if newest:
                newest[0].reach(time.perf_counter())

        self._handles.append(module.register_forward_pre_hook(before))
        self._handles.append(module.register_forward_hook(after, always_call=True))
        for p in module.parameters():
            if p.requires_grad:
                self._handles.append(p.register_post_accumulate_grad_hook(weight))

    def _expect(self, backward: Backward, inputs: list[Tensor], outputs: list[Tensor], newest: list[Backward]) -> None:
        def begins(_: Tensor) -> None:
            backward.reach(time.perf_counter())
            newest[:] = [backward]

        def ends(_: Tensor) -> None:
            if backward.t0 and not backward.over:  # a leaf that is used again calls the hooks of every call that saw it
                backward.over = True
                backward.reach(time.perf_counter())

        self._handles += [y.register_hook(begins) for y in outputs]
        self._handles += [x.register_hook(ends) for x in inputs]


def _levels(module: nn.Module, name: str, depth: int) -> Iterator[tuple[str, nn.Module]]:
    yield name, module
    for child_name, child in module.named_children() if depth > 0 else ():
        listed = isinstance(child, nn.ModuleList | nn.ModuleDict)  # it is never called itself: watch its members
        yield from _levels(child, f"{name}.{child_name}".strip("."), depth if listed else depth - 1)


def _wanting(tensors: Any) -> Iterator[Tensor]:
    if isinstance(tensors, Tensor):
        if tensors.requires_grad:
            yield tensors
    elif isinstance(tensors, dict):
        yield from _wanting(tuple(tensors.values()))
    elif isinstance(tensors, list | tuple):
        for item in tensors:
            yield from _wanting(item)
