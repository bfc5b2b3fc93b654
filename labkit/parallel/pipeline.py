"""Pipeline parallelism: each rank holds some stages of the model and runs its program of a schedule.

    rank 0: stage 0  --- activation of micro-batch i --->  rank 1: stage 1  ---> ...  last stage: loss
                     <-- gradient of that activation ----                   <---

Any schedule that `validate` accepts runs without a deadlock: a send never waits, and a receive waits only where its
value is needed. Each message is the result of one action and travels under a tag that says which.

Bytes sent for each micro-batch and each boundary between ranks: its activation forward, a gradient of the same size
back; m micro-batches send what one large batch would, in m times as many messages. Memory: a stage's activations from
forward to backward, for as many micro-batches as `in_flight(schedule)` says. A stage's output is let go when it has
been sent: backward needs no more than the place where it left the graph.

DP changes bookkeeping, TP changes layers, PP changes order: a stage is any module, also a tensor-parallel one, and each
may have its own data-parallel strategy, whose sums run while other stages still compute.

Source: Huang et al., arXiv:1811.06965, section 2; Narayanan et al., arXiv:2104.04473, section 2.2.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from labkit.comm.group import Group
from labkit.parallel.backward import input_first
from labkit.parallel.mail import Mail, one_order, places_of
from labkit.plan.schedule import Action, Schedule, Span, validate


class Sync(Protocol):
    """What a pipeline asks of a stage's data-parallel strategy (see `labkit.parallel.sync`)."""

    def accumulate(self) -> AbstractContextManager[None]:
        """Backward passes inside add to the gradients; what can wait is not sent."""

    def finish(self) -> None:
        """The gradients are complete: send what has not been sent, and wait."""


class Held(NamedTuple):
    """What one micro-batch leaves in a stage between forward and backward."""

    x: Tensor
    y: GradientEdge | None  # where the output left the graph; None if nothing in the stage wants a gradient
    one: Tensor | None  # the output's gradient, where the output is the loss


class Pipeline:
    """This rank's part of a pipeline: `stages` {stage: module}, and `sync` {stage: its data-parallel strategy} if any.

    `loss(output, target)` gives one number; it is called on the rank of the last stage. After `step`, `spans` says when
    each action of this rank ran (on a GPU: when it was handed over) in seconds since this rank's `begin`, a reading of
    time.perf_counter; `labkit.view.schedule` draws them. ValueError for a schedule that does not validate or is for
    another number of ranks, and for stages that are not this rank's."""

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        schedule: Schedule,
        group: Group,
        *,
        loss: Callable[[Tensor, Any], Tensor],
        sync: Mapping[int, Sync] | None = None,
    ):
        self.stages, self.schedule, self.group, self.loss = dict(stages), validate(schedule), group, loss
        self.sync = dict(sync or {})
        if group.size != schedule.n_ranks:
            raise ValueError(
                f"schedule {schedule.name!r} is for {schedule.n_ranks} ranks, the {group.axis} group has {group.size}"
            )
        mine = schedule.stages_of(group.rank)
        if sorted(self.stages) != list(mine) or not set(self.sync) <= set(mine):
            raise ValueError(
                f"rank {group.rank} holds stages {list(mine)} of schedule {schedule.name!r}, got modules for "
                f"{sorted(self.stages)} and strategies for {sorted(self.sync)}"
            )
        self.program, self.splits = schedule.programs[group.rank], schedule.splits
        self.last = {(action.stage, action.kind): action for action in self.program}  # later ones replace earlier ones
        self.end, self.order = schedule.n_stages - 1, one_order(schedule, group)
        self.places = places_of(schedule)
        self.away = {stage for stage, module in self.stages.items() if any(map(_is_away, module.parameters()))}
        self.spans: list[Span] = []

    def step(
        self,
        inputs: Sequence[Tensor] | None,
        targets: Sequence[Any] | None,
        loss_weights: Sequence[float] | None = None,
    ) -> Tensor | None:
        """Forward and backward of one batch, given as n_micro micro-batches of any sizes; adds to the gradients.

        Returns the mean loss over micro-batches on the rank of the last stage, None elsewhere: the plain mean whatever
        their sizes, unless `loss_weights` says how much each of them counts (its tokens, say). Ranks that do not hold
        the first stage may pass None for `inputs`, those without the last one None for `targets`. ValueError for a
        wrong number of micro-batches, an output that is not one floating tensor, a loss that is not one number."""
        self.batch: tuple[Any, Any, list[float]] = inputs, targets, self._checked(inputs, targets, loss_weights)
        self.held: dict[tuple[int, int], Held] = {}
        self.weights: dict[tuple[int, int], Callable[[], None]] = {}  # W's whose B is done
        self.total: Tensor | None = None
        self.mail, self.spans, self.begin = (
            Mail(self.schedule, self.group, self.order, self.places),
            [],
            time.perf_counter(),
        )
        for action in self.program:
            self._run(action)
            if action == self.last[action.stage, "W" if self.splits else "B"] and action.stage in self.sync:
                self.sync[action.stage].finish()  # here and not at the end: other stages go on meanwhile
        self.mail.finish()
        self.batch = None, None, []
        return self.total

    def _run(self, action: Action) -> None:
        came = self.mail.take(action)
        start = time.perf_counter()
        try:
            result = self._forward(action, came) if action.kind == "F" else self._backward(action, came)
        except Exception as error:
            error.add_note(f"(in {action}: stage {action.stage}, micro-batch {action.micro})")
            raise
        self.mail.give(action, result)
        self.spans.append(Span(self.group.rank, action, start - self.begin, time.perf_counter() - self.begin))

    def _forward(self, action: Action, came: Tensor | None) -> Tensor:
        """F; the stage's output, or this micro-batch's share of the loss."""
        inputs, targets, shares = self.batch
        x, ends = inputs[action.micro] if came is None else came.requires_grad_(), action.stage == self.end
        with torch.enable_grad():
            y = self.stages[action.stage](x)
            if ends:
                y = self.loss(y, targets[action.micro])
            if not isinstance(y, Tensor) or not y.is_floating_point() or (ends and y.numel() != 1):
                wanted = "the loss must be one floating number" if ends else "must give one floating tensor to the next"
                raise ValueError(f"stage {action.stage}: {wanted}, got {_what(y)}{': reduce it, mean()' * ends}")
            y = y.reshape(()) * shares[action.micro] if ends else y
        if ends:
            self.total = y.detach() if self.total is None else self.total + y.detach()
        edge = get_gradient_edge(y) if y.requires_grad else None
        self.held[action.stage, action.micro] = Held(x, edge, torch.ones_like(y) if ends else None)
        return y

    def _backward(self, action: Action, came: Tensor | None) -> Tensor | None:
        """B or W; the gradient of the stage's input, if a stage waits for it."""
        key, sync = (action.stage, action.micro), self.sync.get(action.stage)
        last = action == self.last[action.stage, action.kind]
        with nullcontext() if sync is None or last else sync.accumulate():
            if action.kind == "W":
                if weights := self.weights.pop(key, None):  # none where B has done it all
                    weights()
                return None
            x, y, one = self.held.pop(key)
            grad, gx = came if one is None else one, None
            assert grad is not None
            if y is not None and (not self.splits or action.stage in self.away):
                torch.autograd.backward([y], [grad])
                if action.stage > 0:
                    gx, x.grad = x.grad, None
            elif y is not None and action.stage == 0:  # there is no input to differentiate: W does it all
                self.weights[key] = lambda: torch.autograd.backward([y], [grad])
            elif y is not None:
                gx, self.weights[key] = input_first(y, grad, x, self.stages[action.stage].parameters())
            return torch.zeros_like(x) if gx is None and action.stage > 0 else gx

    def _checked(self, inputs: Any, targets: Any, loss_weights: Sequence[float] | None) -> list[float]:
        """How much each micro-batch's loss counts; they add up to 1."""
        m = self.schedule.n_micro
        for name, given, stage in (("inputs", inputs, 0), ("targets", targets, self.end)):
            if given is None and stage in self.stages:
                raise ValueError(f"rank {self.group.rank} holds stage {stage}, which needs {name}: got None")
            if given is not None and len(given) != m:
                raise ValueError(f"schedule {self.schedule.name!r} takes {m} micro-batches, got {len(given)} {name}")
        if len(kinds := sorted({_kind(x) for x in (() if inputs is None else inputs)})) > 1:
            raise ValueError(f"micro-batches may differ in size, not in kind: got inputs of {' and '.join(kinds)}")
        counts = [1.0] * m if loss_weights is None else [float(each) for each in loss_weights]
        if len(counts) != m or min(counts) < 0 or sum(counts) <= 0:
            raise ValueError(f"loss_weights are {m} numbers, none below 0, not all 0: got {loss_weights}")
        return [count / sum(counts) for count in counts]


def _is_away(p: nn.Parameter) -> bool:
    """Whether a strategy has taken the weight away until it is needed (ZeRO-3). It brings weights back for a backward
    through the whole layer, so B cannot leave W for later."""
    return p.untyped_storage().nbytes() < p.numel() * p.element_size()


def _kind(x: Any) -> str:
    return f"{x.dim()} dims {str(x.dtype)[6:]}" if isinstance(x, Tensor) else type(x).__name__


def _what(y: Any) -> str:
    return f"shape {tuple(y.shape)} {str(y.dtype)[6:]}" if isinstance(y, Tensor) else type(y).__name__
