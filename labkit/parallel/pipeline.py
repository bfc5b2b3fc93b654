"""Pipeline parallelism: each rank holds some stages of the model and runs its program of a schedule.

    rank 0: stage 0  --- activation of micro-batch i --->  rank 1: stage 1  ---> ...  last stage: loss
                     <-- gradient of that activation ----                   <---

Any schedule that `validate` accepts runs without a deadlock: a send never waits, and a receive waits only where its
value is needed. Each message is the result of one action, and its tag says which:

    rank 0   F0 ----------- F1 ----------- ...  B0
               \\               \\              /
    rank 1      F0 ----------- B0 ---------             tags: 0F0, 0F1 from rank 0, 1B0 from rank 1

Bytes sent for each micro-batch and each boundary between ranks: its activation forward, a gradient of the same size
back; between stages of one rank nothing. m micro-batches send what one large batch would, in m times as many messages.
Memory: a stage's activations from forward to backward, for as many micro-batches as `in_flight(schedule)` says. A
stage's output is freed when it has been sent: backward needs no more than the place where it left the graph.

DP changes bookkeeping, TP changes layers, PP changes order: a stage is any module, also a tensor-parallel one, and each
may have its own data-parallel strategy, whose sums run while other stages still compute.

A schedule may split a backward in two: B for the gradient of the input, for which the neighbour waits, and W for those
of the weights, which can fill a bubble (`input_first`).

A stage may have copies on several ranks, each for a part of the micro-batches (two directions, as in DualPipe). When
the step ends, those ranks give each other the gradients of their parts, and all have the sum: n copies send (n-1) times
the bytes of the stage's gradients each, once a step. Or the strategies do that (`averaged`): if the group of a strategy
has all ranks with a copy of its stage, it averages over them, and each copy's part of the loss counts n times.

Long because one loop runs every schedule, with its messages, copies, and a backward in two halves.

Source: Huang et al., arXiv:1811.06965, section 2; Narayanan et al., arXiv:2104.04473, section 2.2; B and W: Qi et al.,
arXiv:2401.10241, section 1; copies: DeepSeek-AI, arXiv:2412.19437, section 3.2.1.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from labkit.comm.group import Group, Work
from labkit.plan.program import KINDS
from labkit.plan.schedule import Action, Schedule, Span, needs, validate


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
        self.spans: list[Span] = []
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
        self.batch: tuple[Any, Any, list[float]] = inputs, targets, self._checked(inputs, targets, loss_weights, beside)
        self.beside = beside
        self.held: dict[tuple[int, int], Held] = {}
        self.weights: dict[tuple[int, int], Callable[[], None]] = {}  # the W's whose B is done
        self.total: Tensor | None = None
        self.messages = StageMessages(self.schedule, self.group)
        earlier = self._set_aside()
        self.spans, self.begin = [], time.perf_counter()
        for action in self.program:
            self._run(action)
            if action == self.last[action.stage, "W" if self.splits else "B"] and action.stage in self.sync:
                self.sync[action.stage].finish()  # here and not at the end: other stages compute meanwhile
        self.messages.finish()
        for stage, ranks in self.copied.items():  # in one order on all ranks, so that nobody waits in a circle
            self._join_copies(stage, ranks, earlier)
        self.batch, self.beside = (None, None, []), None
        return self.total

    def _set_aside(self) -> dict[nn.Parameter, Tensor]:
        """Gradients of earlier steps in stages with copies: the ranks have added them up already."""
        plain = [self.stages[stage] for stage in self.copied if stage not in self.sync]
        earlier = {p: p.grad for module in plain for p in module.parameters() if p.grad is not None}
        for p in earlier:
            p.grad = None
        return earlier

    def _join_copies(self, stage: int, ranks: Sequence[int], earlier: Mapping[nn.Parameter, Tensor]) -> None:
        """Add up what the copies of a stage have of its gradients, and of the loss if it is the last."""
        if stage in self.sync:
            for grad in self.sync[stage].grads():  # after finish: a strategy's shards are cut alike on all these ranks
                grad.copy_(self._sum_over(grad, stage, ranks))
        else:
            for p in self.stages[stage].parameters():
                if p.requires_grad:
                    p.grad = self._sum_over(torch.zeros_like(p) if p.grad is None else p.grad, stage, ranks)
                    if p in earlier:
                        p.grad += earlier[p]
        if stage == self.end and self.total is not None:
            self.total = self._sum_over(self.total, stage, ranks)

    def _sum_over(self, x: Tensor, stage: int, ranks: Sequence[int]) -> Tensor:
        """The sum of x over the ranks of a stage, added in the order of ranks, so that all get the same bits."""
        tag = len(KINDS) * self.schedule.n_stages * self.schedule.n_micro + stage  # behind those of actions
        parts = {self.group.rank: x}
        for other in sorted(set(ranks) - {self.group.rank}):
            parts[other] = self.group.exchange(x, other, other, tag).view_as(x)
        first, *rest = (parts[rank] for rank in sorted(parts))
        return sum(rest, start=first)

    def _run(self, action: Action) -> None:
        received = self.messages.receive(action)
        start = time.perf_counter()  # after the wait: a span is work, the gap before it is the bubble
        try:
            result = self._forward(action, received) if action.kind == "F" else self._backward(action, received)
        except Exception as error:
            error.add_note(f"(in {action}: stage {action.stage}, micro-batch {action.micro})")
            raise
        end = time.perf_counter()  # before the next stage may begin, so that spans of one micro-batch never overlap
        self.spans.append(Span(self.group.rank, action, start - self.begin, end - self.begin))
        self.messages.send(action, result)

    def _forward(self, action: Action, received: Tensor | None) -> Tensor:
        """F: returns the stage's output, or this micro-batch's share of the loss."""
        inputs, targets, shares = self.batch
        extra = () if self.beside is None else (self.beside[action.micro],)
        # what was received is a leaf here: the graph ends at the stage's border, and x.grad is what B sends on
        x, ends = inputs[action.micro] if received is None else received.requires_grad_(), action.stage == self.end
        with torch.enable_grad():
            y = self.stages[action.stage](x, *extra)
            if ends:
                y = self.loss(y, targets[action.micro])
            if not isinstance(y, Tensor) or not y.is_floating_point() or (ends and y.numel() != 1):
                wanted = "the loss must be one floating number" if ends else "must give one floating tensor to the next"
                raise ValueError(f"stage {action.stage}: {wanted}, got {_described(y)}{': reduce it, mean()' * ends}")
            # a share of the mean: gradients of all micro-batches then simply add up to those of the mean loss
            y = y.reshape(()) * shares[action.micro] if ends else y
        if ends:
            self.total = y.detach() if self.total is None else self.total + y.detach()
        # the edge and not y: y's memory is freed when it has been sent, and backward needs only where it left the graph
        edge = get_gradient_edge(y) if y.requires_grad else None
        self.held[action.stage, action.micro] = Held(x, edge, torch.ones_like(y) if ends else None)
        return y

    def _backward(self, action: Action, received: Tensor | None) -> Tensor | None:
        """B or W: returns the gradient of the stage's input, if a stage waits for it."""
        key, sync = (action.stage, action.micro), self.sync.get(action.stage)
        last = action == self.last[action.stage, action.kind]
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
            if y is not None and (not self.splits or action.stage in self.sharded):
                torch.autograd.backward([y], [grad])
                if action.stage > 0:
                    gx, x.grad = x.grad, None  # taken, not copied: otherwise it would live until the step ends
            elif y is not None and action.stage == 0:  # there is no input to differentiate: W does it all
                self.weights[key] = lambda: torch.autograd.backward([y], [grad])
            elif y is not None:
                gx, self.weights[key] = input_first(y, grad, x, self.params[action.stage])
            # the neighbour waits for a gradient even if this stage's output does not depend on its input
            return torch.zeros_like(x) if gx is None and action.stage > 0 else gx

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


class StageMessages:
    """One step's messages on one rank: `receive` what an action needs from another stage, `send` what it made.

    Sends never wait; all receives are posted before the first action, so that a message is welcome whenever it comes.
    A sent tensor is freed when a later result arrives from its receiver, which proves delivery."""

    def __init__(self, schedule: Schedule, group: Group):
        self.schedule, self.group = schedule, group
        self.position = {action: k for program in schedule.programs for k, action in enumerate(program)}
        self.local: dict[Action, Tensor] = {}  # made on this rank for another stage of this rank
        self.sent: list[tuple[int, int, Work]] = []  # to which rank, needed at which position of its program
        makers = (_maker(action, schedule) for action in schedule.programs[group.rank])
        self.coming = {
            maker: group.recv_start(self._home(maker), self._tag(maker))
            for maker in makers
            if maker is not None and self._home(maker) != group.rank
        }

    def receive(self, action: Action) -> Tensor | None:
        """Wait for the activation or gradient that `action` needs; None if it needs none."""
        maker, x = _maker(action, self.schedule), None
        if maker in self.local:
            x = self.local.pop(maker)
        elif maker is not None:
            x = self.coming.pop(maker).wait()
            self._free_delivered(self._home(maker), self.position[maker])
        return x

    def send(self, action: Action, x: Tensor | None) -> None:
        """Start to send what `action` made, if another stage waits for it; x is kept until it has arrived."""
        to = _next_stage(action, self.schedule)
        if to is None or x is None:
            return
        rank = self.schedule.rank_of(to, action.micro)
        if rank == self.group.rank:
            self.local[action] = x.detach()  # as if it had come by wire: each stage has a graph of its own
            return
        needed_at = self.position[Action(action.kind, to, action.micro)]
        self.sent.append((rank, needed_at, self.group.send(x, rank, self._tag(action))))

    def finish(self) -> None:
        """Wait until everything sent has been received."""
        for _, _, work in self.sent:
            work.wait()

    def _free_delivered(self, rank: int, position: int) -> None:
        # `rank` has made something at `position` of its program, so what it needed before that has arrived there and
        # wait() returns at once. Without this, all activations sent would live until the step ends
        for to, needed_at, work in self.sent:
            if to == rank and needed_at <= position:
                work.wait()
        self.sent = [(to, at, work) for to, at, work in self.sent if to != rank or at > position]

    def _home(self, action: Action) -> int:
        return self.schedule.rank_of(action.stage, action.micro)

    def _tag(self, maker: Action) -> int:  # one for each action: results may be needed in another order than sent
        return (maker.stage * self.schedule.n_micro + maker.micro) * len(KINDS) + KINDS.index(maker.kind)


def action_of_tag(tag: int, n_micro: int) -> Action:
    """The action whose result travels under `tag`."""
    stage_and_micro, kind = divmod(tag, len(KINDS))
    return Action(KINDS[kind], *divmod(stage_and_micro, n_micro))


def _maker(action: Action, schedule: Schedule) -> Action | None:
    """The action on another stage whose result `action` needs."""
    return next((need for need in needs(action, schedule.n_stages) if need.stage != action.stage), None)


def _next_stage(action: Action, schedule: Schedule) -> int | None:
    """The stage that waits for the result of `action`."""
    to = action.stage + {"F": 1, "B": -1, "W": schedule.n_stages}[action.kind]
    return to if 0 <= to < schedule.n_stages else None


# -- a backward in two halves, B and W -------------------------------------------------------------------------------


class Joint(NamedTuple):
    """A node on the way from y to x where weights come in: its edges at which gradients arrive, and the weights."""

    entries: list[GradientEdge]
    params: set[nn.Parameter]


def input_first(
    y: GradientEdge, grad: Tensor, x: Tensor, params: Iterable[nn.Parameter]
) -> tuple[Tensor, Callable[[], None]]:
    """B now: the gradient of x [shape of x]; and W for later: a function that adds to the gradients of `params`.

        y <- [ linear ] <- h <- [ gelu ] <- g <- [ linear ] <- x
                 |                                   |
                 w2                                  w1

        B   goes from y to x; at each joint, where weights come in, it keeps the gradient that arrives there (of y, g)
        W   starts at every joint with what was kept, and goes only the short way to its weights

    `y` is where the stage's output leaves the graph and `grad` its gradient; x is a leaf that requires a gradient. Both
    halves together cost one backward: no product is computed twice. The price: all that forward saved lives until W.
    Tensor hooks in the middle of a stage run in both halves if they sit at a joint.

    Two kinds of weights cannot be cut off at one joint: those used in several places, for which W goes all the way from
    y again, and those that autograd does not see, as in a function that runs its own backward: they get theirs in B."""
    joints, shared = find_joints(y, x, set(params))
    entries = [entry for joint in joints for entry in joint.entries]
    gx, *arrived = torch.autograd.grad(
        [y],
        [get_gradient_edge(x), *entries],
        [grad],
        retain_graph=True,
        allow_unused=True,  # W needs the graph again
    )
    kept = dict(zip(entries, arrived, strict=True))
    top = (y, grad) if shared or (gx is None and not joints) else None

    def weights() -> None:
        if top is not None:  # an output that does not depend on x has no joints: all its weights are here
            torch.autograd.backward([top[0]], [top[1]], inputs=list(shared) or None, retain_graph=bool(joints))
        while joints:  # those next to y first, as in a whole backward, and nothing is held longer than it must
            joint = joints.pop()
            arrivals = [(entry, kept.pop(entry)) for entry in joint.entries]
            arrivals = [(entry, gradient) for entry, gradient in arrivals if gradient is not None]
            if arrivals:
                starts, gradients = zip(*arrivals, strict=True)
                torch.autograd.backward(starts, gradients, inputs=list(joint.params))

    return torch.zeros_like(x) if gx is None else gx, weights


def find_joints(y: GradientEdge, x: Tensor, params: set[nn.Parameter]) -> tuple[list[Joint], set[nn.Parameter]]:
    """The joints between y and x, from x to y, each with the weights that are its alone; and the shared weights."""
    users: dict[Any, list[Any]] = defaultdict(list)  # not sets: all ranks of a group must go in the same order
    entries: dict[Any, set[int]] = defaultdict(set, {y.node: {y.output_nr}})
    for node in _below(y.node):
        for below, entry in node.next_functions:
            users[below].append(node)
            entries[below].add(entry)
    way = [get_gradient_edge(x).node]  # all nodes between x and y: what lies beside them leads to weights only
    seen = set(way)
    for node in way:
        new = [user for user in dict.fromkeys(users[node]) if user not in seen]
        seen.update(new)
        way += new
    joints = []
    for node in way:
        beside = [below for below, _ in node.next_functions if below is not None and below not in seen]
        # a leaf's node has `variable`: the parameter it adds the gradient to
        leaves = {leaf.variable for start in beside for leaf in _below(start) if hasattr(leaf, "variable")} & params
        if leaves:
            joints.append(Joint([GradientEdge(node, entry) for entry in sorted(entries[node])], leaves))
    uses = Counter(p for joint in joints for p in joint.params)
    shared = {p for p, count in uses.items() if count > 1}
    return [Joint(edges, leaves - shared) for edges, leaves in joints if leaves - shared], shared


def _below(start: Any) -> Iterator[Any]:
    seen, open_ = {None, start}, [start]
    while open_:
        node = open_.pop()
        yield node
        for below, _ in node.next_functions:
            if below not in seen:
                seen.add(below)
                open_.append(below)


def _is_sharded(p: nn.Parameter) -> bool:
    """True if ZeRO-3 has freed the whole weight: its tensor has fewer bytes of memory than its shape asks for."""
    return p.untyped_storage().nbytes() < p.numel() * p.element_size()


def _kind(x: Any) -> str:
    return f"{x.dim()} dims {str(x.dtype)[6:]}" if isinstance(x, Tensor) else type(x).__name__


def _described(y: Any) -> str:
    return f"shape {tuple(y.shape)} {str(y.dtype)[6:]}" if isinstance(y, Tensor) else type(y).__name__
