"""Pipeline parallelism: each rank holds some stages of the model and runs its program of a schedule.

    rank 0: stage 0  --- activation of micro-batch i --->  rank 1: stage 1  ---> ...  last stage: loss
                     <-- gradient of that activation ----                   <---

Any schedule that `validate` accepts runs without a deadlock (stage_messages.py).

Bytes sent for each micro-batch and each boundary between ranks: its activation forward, a gradient of the same size
back; between stages of one rank nothing. m micro-batches send what one large batch would, in m times as many messages.
Memory: a stage's activations from forward to backward, for as many micro-batches as `in_flight(schedule)` says. A
stage's output is freed when it has been sent: backward needs no more than the place where it left the graph.

DP changes bookkeeping, TP changes layers, PP changes order: a stage is any module, also a tensor-parallel one, and each
may have its own data-parallel strategy, whose sums run while other stages still compute.

A schedule may split a backward in two: B for the gradient of the input, for which the neighbour waits, and W for those
of the weights, which can fill a bubble (backward_halves.py).

A stage may have copies on several ranks, each for a part of the micro-batches (two directions, as in DualPipe). When
the step ends, those ranks give each other the gradients of their parts, and all have the sum: n copies send (n-1) times
the bytes of the stage's gradients each, once a step. Or the strategies do that (`averaged`): if the group of a strategy
has all ranks with a copy of its stage, it averages over them, and each copy's part of the loss counts n times.

Source: Huang et al., arXiv:1811.06965, section 2; Narayanan et al., arXiv:2104.04473, section 2.2; copies:
DeepSeek-AI, arXiv:2412.19437, section 3.2.1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from labkit.comm.group import Group
from labkit.parallel.backward_halves import input_first
from labkit.parallel.stage_messages import StageMessages
from labkit.plan.schedules.program import KINDS
from labkit.plan.schedules.schedule import Action, Schedule, Span, validate
from labkit.plan.words import dtype_name


class Sync(Protocol):
    """The part of a stage's data-parallel strategy that a pipeline calls (see `labkit.parallel.data_parallel`)."""

    def accumulate(self) -> AbstractContextManager[None]:
        """Backward passes inside this context add to the gradients; what can wait is not sent."""

    def finish(self) -> None:
        """The gradients are complete: send what has not been sent, and wait."""

    def grads(self) -> Iterable[Tensor]:
        """The gradients that this rank owns after `finish`; asked for if the stage has copies on other ranks."""


class Held(NamedTuple):
    """The tensors that one micro-batch leaves in a stage between forward and backward."""

    x: Tensor
    y: GradientEdge | None  # where the output left the graph; None if nothing in the stage wants a gradient
    one: Tensor | None  # the output's gradient, where the output is the loss


class Pipeline:
    """This rank's part of a pipeline: `stages` {stage: module}, and `sync` {stage: its data-parallel strategy} if any.

    `loss(output, target)` returns one number; it is called on the rank of the last stage. `averaged`: every stage has a
    strategy, whose group has all ranks with a copy of the stage; these do the same with it in the same order. `params`
    are those of a stage whose gradients W must find where they are not all in its module, as of experts with a strategy
    of their own.

    After `step`, `spans` holds when each action of this rank ran (on a GPU: when it was launched), in seconds since
    `begin`, which is a reading of time.perf_counter on this rank; `labkit.view.schedule` draws them. ValueError for a
    schedule that does not validate or is for another number of ranks, and for stages that are not this rank's."""

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        schedule: Schedule,
        group: Group,
        *,
        loss: Callable[[Tensor, Any], Tensor],
        sync: Mapping[int, Sync] | None = None,
        averaged: bool = False,
        params: Mapping[int, Sequence[nn.Parameter]] | None = None,
    ):
        self.stages, self.schedule, self.group, self.loss = dict(stages), validate(schedule), group, loss
        self.sync, inside = dict(sync or {}), {stage: [*module.parameters()] for stage, module in self.stages.items()}
        self.params = inside | dict(params or {})
        if group.size != schedule.n_ranks:
            raise ValueError(
                f"schedule {schedule.name!r} is for {schedule.n_ranks} ranks, the {group.axis} group has {group.size}"
            )
        own_stages = schedule.stages_of(group.rank)
        if sorted(self.stages) != list(own_stages) or not set(self.sync) <= set(own_stages):
            raise ValueError(
                f"rank {group.rank} holds stages {list(own_stages)} of schedule {schedule.name!r}, got modules for "
                f"{sorted(self.stages)} and strategies for {sorted(self.sync)}"
            )
        self.program, self.splits = schedule.programs[group.rank], schedule.splits
        self.last = {(action.stage, action.kind): action for action in self.program}  # later ones replace earlier ones
        self.end = schedule.n_stages - 1
        self.sharded = {stage for stage, params in self.params.items() if any(map(_is_sharded, params))}
        self.spans, self.begin = list[Span](), 0.0
        counts = {len(schedule.ranks_of(stage)) for stage in range(schedule.n_stages)}
        if averaged and (len(counts) > 1 or set(self.sync) != set(own_stages)):
            raise ValueError(
                f"strategies that average over copies are one for each of stages {list(own_stages)}, and each stage "
                f"has as many copies: got strategies for {sorted(self.sync)}, and stages with {sorted(counts)} copies"
            )
        self.times = max(counts) if averaged else 1
        copied = {} if averaged else {stage: schedule.ranks_of(stage) for stage in own_stages}
        self.copied = {stage: ranks for stage, ranks in copied.items() if len(ranks) > 1}

    def step(
        self,
        inputs: Sequence[Tensor] | None,
        targets: Sequence[Any] | None,
        loss_weights: Sequence[float] | None = None,
        beside: Sequence[Any] | None = None,
    ) -> Tensor | None:
        """Forward and backward of one batch, given as n_micro micro-batches of any sizes; adds to the gradients.

        Returns the mean loss over micro-batches on every rank of the last stage, None elsewhere; if the last stage has
        copies and strategies average over them, the mean over these ranks is that loss. Every micro-batch
        counts the same whatever its size, unless `loss_weights` gives their weights (numbers of tokens, say). Ranks
        that do not hold the first stage may pass None for `inputs`, those without the last one None for `targets`.

        `beside` has something of each micro-batch that every stage needs, such as the documents of its tokens: a stage
        is then called with two arguments, stage(x, beside[i]). It is not sent: each rank passes its own.

        ValueError for a wrong number of micro-batches, an output that is not one floating tensor, a loss that is not
        one number."""
        shares, earlier = self._checked(inputs, targets, loss_weights, beside), self._set_aside()
        step = Step(self, inputs, targets, shares, beside)
        self.spans, self.begin = step.spans, step.begin
        for action in self.program:
            step.run(action)
            if action == self.last[action.stage, "W" if self.splits else "B"] and action.stage in self.sync:
                self.sync[action.stage].finish()  # here and not at the end: other stages compute meanwhile
        step.messages.finish()
        for stage, ranks in self.copied.items():  # in one order on all ranks, so that nobody waits in a circle
            self._join_copies(stage, ranks, earlier)
        if step.loss is not None and self.end in self.copied:
            return self._sum_over(step.loss, self.end, self.copied[self.end])
        return step.loss

    def _set_aside(self) -> dict[nn.Parameter, Tensor]:
        """Gradients of earlier steps in stages with copies: the ranks have added them up already."""
        plain = [self.stages[stage] for stage in self.copied if stage not in self.sync]
        earlier = {p: p.grad for module in plain for p in module.parameters() if p.grad is not None}
        for p in earlier:
            p.grad = None
        return earlier

    def _join_copies(self, stage: int, ranks: Sequence[int], earlier: Mapping[nn.Parameter, Tensor]) -> None:
        """Add up what the copies of a stage have of its gradients."""
        if stage in self.sync:
            for grad in self.sync[stage].grads():  # after finish: a strategy's shards are cut alike on all these ranks
                grad.copy_(self._sum_over(grad, stage, ranks))
        else:
            for p in self.stages[stage].parameters():
                if p.requires_grad:
                    p.grad = self._sum_over(torch.zeros_like(p) if p.grad is None else p.grad, stage, ranks)
                    if p in earlier:
                        p.grad += earlier[p]

    def _sum_over(self, x: Tensor, stage: int, ranks: Sequence[int]) -> Tensor:
        """The sum of x over the ranks of a stage, added in the order of ranks, so that all get the same bits."""
        tag = len(KINDS) * self.schedule.n_stages * self.schedule.n_micro + stage  # behind those of actions
        parts = {self.group.rank: x}
        for other in sorted(set(ranks) - {self.group.rank}):
            parts[other] = self.group.exchange(x, other, other, tag).view_as(x)
        first, *rest = (parts[rank] for rank in sorted(parts))
        return sum(rest, start=first)

    def _checked(
        self, inputs: Any, targets: Any, loss_weights: Sequence[float] | None, beside: Sequence[Any] | None
    ) -> list[float]:
        """The weight of each micro-batch's loss; they add up to 1."""
        m = self.schedule.n_micro
        for name, tensors, stage in (("inputs", inputs, 0), ("targets", targets, self.end)):
            if tensors is None and stage in self.stages:
                raise ValueError(f"rank {self.group.rank} holds stage {stage}, which needs {name}: got None")
            if tensors is not None and len(tensors) != m:
                raise ValueError(f"schedule {self.schedule.name!r} takes {m} micro-batches, got {len(tensors)} {name}")
        if beside is not None and len(beside) != m:
            raise ValueError(f"schedule {self.schedule.name!r} takes {m} micro-batches, got {len(beside)} beside them")
        if len(kinds := sorted({_kind(x) for x in (() if inputs is None else inputs)})) > 1:
            raise ValueError(f"micro-batches may differ in size, not in kind: got inputs of {' and '.join(kinds)}")
        counts = [1.0] * m if loss_weights is None else [float(weight) for weight in loss_weights]
        if len(counts) != m or min(counts) < 0 or sum(counts) <= 0:
            raise ValueError(f"loss_weights are {m} numbers, none below 0, not all 0: got {loss_weights}")
        return [self.times * count / sum(counts) for count in counts]


class Step:
    """One step of a pipeline on its rank: what lives from its first action to its last.

    held      by (stage, micro-batch): what forward has left for backward
    weights   by the same: the W's whose B is done
    loss      the sum of the shares of the loss so far, on a rank of the last stage
    spans     when each action ran, in seconds since `begin`
    """

    def __init__(
        self, pipeline: Pipeline, inputs: Any, targets: Any, shares: Sequence[float], beside: Sequence[Any] | None
    ) -> None:
        """Post the receives of the whole step; the other arguments as in `Pipeline.step`, `shares` of the mean loss."""
        self.pipeline, self.inputs, self.targets = pipeline, inputs, targets
        self.shares, self.beside = shares, beside
        self.held: dict[tuple[int, int], Held] = {}
        self.weights: dict[tuple[int, int], Callable[[], None]] = {}
        self.loss: Tensor | None = None
        self.messages = StageMessages(pipeline.schedule, pipeline.group)
        self.spans, self.begin = list[Span](), time.perf_counter()

    def run(self, action: Action) -> None:
        """Wait for what the action needs, do it, and send what it made."""
        received = self.messages.receive(action)
        start = time.perf_counter()  # after the wait: a span is work, the gap before it is the bubble
        try:
            result = self._forward(action, received) if action.kind == "F" else self._backward(action, received)
        except Exception as error:
            error.add_note(f"(in {action}: stage {action.stage}, micro-batch {action.micro})")
            raise
        end = time.perf_counter()  # before the next stage may begin, so that spans of one micro-batch never overlap
        self.spans.append(Span(self.pipeline.group.rank, action, start - self.begin, end - self.begin))
        self.messages.send(action, result)

    def _forward(self, action: Action, received: Tensor | None) -> Tensor:
        """F: returns the stage's output, or this micro-batch's share of the loss."""
        extra = () if self.beside is None else (self.beside[action.micro],)
        # what was received is a leaf here: the graph ends at the stage's border, and x.grad is what B sends on
        x = self.inputs[action.micro] if received is None else received.requires_grad_()
        ends = action.stage == self.pipeline.end
        with torch.enable_grad():
            y = self.pipeline.stages[action.stage](x, *extra)
            if ends:
                y = self.pipeline.loss(y, self.targets[action.micro])
            if not isinstance(y, Tensor) or not y.is_floating_point() or (ends and y.numel() != 1):
                wanted = "the loss must be one floating number" if ends else "must give one floating tensor to the next"
                raise ValueError(f"stage {action.stage}: {wanted}, got {_described(y)}{': reduce it, mean()' * ends}")
            # a share of the mean: gradients of all micro-batches then simply add up to those of the mean loss
            y = y.reshape(()) * self.shares[action.micro] if ends else y
        if ends:
            self.loss = y.detach() if self.loss is None else self.loss + y.detach()
        # the edge and not y: y's memory is freed when it has been sent, and backward needs only where it left the graph
        edge = get_gradient_edge(y) if y.requires_grad else None
        self.held[action.stage, action.micro] = Held(x, edge, torch.ones_like(y) if ends else None)
        return y

    def _backward(self, action: Action, received: Tensor | None) -> Tensor | None:
        """B or W: returns the gradient of the stage's input, if a stage waits for it."""
        key, sync = (action.stage, action.micro), self.pipeline.sync.get(action.stage)
        last = action == self.pipeline.last[action.stage, action.kind]
        # only the stage's last backward may send gradients: those of earlier micro-batches are not complete
        with nullcontext() if sync is None or last else sync.accumulate():
            if action.kind == "W":
                if weights := self.weights.pop(key, None):  # none where B has done it all
                    weights()
                return None
            x, y, loss_grad = self.held.pop(key)
            grad, gx = received if loss_grad is None else loss_grad, None
            assert grad is not None
            # ZeRO-3 brings weights back for one backward through a whole layer: there W cannot be left for later
            if y is not None and (not self.pipeline.splits or action.stage in self.pipeline.sharded):
                torch.autograd.backward([y], [grad])
                if action.stage > 0:
                    gx, x.grad = x.grad, None  # taken, not copied: otherwise it would live until the step ends
            elif y is not None and action.stage == 0:  # there is no input to differentiate: W does it all
                self.weights[key] = lambda: torch.autograd.backward([y], [grad])
            elif y is not None:
                gx, self.weights[key] = input_first(y, grad, x, self.pipeline.params[action.stage])
            # the neighbour waits for a gradient even if this stage's output does not depend on its input
            return torch.zeros_like(x) if gx is None and action.stage > 0 else gx


def _is_sharded(p: nn.Parameter) -> bool:
    """True if ZeRO-3 has freed the whole weight: its tensor has fewer bytes of memory than its shape asks for."""
    return p.untyped_storage().nbytes() < p.nbytes


def _kind(x: Any) -> str:
    return f"{x.dim()} dims {dtype_name(x.dtype)}" if isinstance(x, Tensor) else type(x).__name__


def _described(y: Any) -> str:
    return f"shape {tuple(y.shape)} {dtype_name(y.dtype)}" if isinstance(y, Tensor) else type(y).__name__
