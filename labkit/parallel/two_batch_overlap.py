"""Blocks with experts, run for two halves of a batch in turns: one half computes while the other's rows travel.

A mixture whose experts lie on other ranks waits twice in each block (expert.py): rows go to their experts, and what the
experts made comes home. Nothing else of the same sequences can be computed meanwhile. Another half of the batch can:

    half A    attention | experts     . . . | attention     . . . | experts     . . .       of the next block
    half B    . . . . . | attention . | experts | . . . . | attention . |                    | waits for its rows
    A's rows            dispatch      combine             dispatch
    B's rows                      dispatch    combine               dispatch

Each half is a generator that stops wherever it has just sent its rows, so the program of a half reads as if it were
alone, and two of them are run in turns. Backward needs no program. Autograd runs what was recorded last first, and the
mirror image of this order is as good: where forward waits for rows, backward sends their gradients, and where forward
sends, backward waits, so that between the two stands the same work of the other half.

    sent by a rank    what expert.py sends: 2 (out + in) D w bytes a layer, the rows of both halves together; and the
                      counts once for each half, 8 E (n-1)/n bytes more. They go as messages and not as a collective
    memory            activations of the whole batch, as without halves; besides, rows of one half that travel
    time              with a seconds of a half's attention, e of its experts and c of its rows on the way:
                      whole       L (2 a + 2 e + 4 c)
                      in halves   L (2 a + 2 e), and what is not hidden (labkit.plan.laws.two_batch_overlap)

The price: experts compute two smaller products, and gradients of weights are sums of two halves, which rounds them once
more. Halves are equal or differ by one sequence. Under recomputation a block would be run again half by half without
the other half beside it, so blocks that are recomputed are refused, and so are experts cut over tp and ZeRO-3, whose
hooks stand around a whole block.

Source: deepseek-ai/profile-data, README. There training pairs a forward with a backward of another micro-batch
(DualPipe), and prefill and decoding take two micro-batches whose all_to_alls hide behind each other's computation, as
here.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from labkit.comm.group import Group, Work
from labkit.parallel.expert import Dispatch
from labkit.parallel.expert_tensor import TermRouter
from labkit.plan.contracts import RoutesInSteps

Half = Generator[None, None, Tensor]
"""The program of a half, which stops where its rows are on their way, and returns the half's [B/2, T, D]."""


def in_two_batches(blocks: Iterable[nn.Module], x: Tensor, halves: int = 2) -> Tensor:
    """What the blocks make of x one after another, each half of its sequences in turn.   [B, T, D] -> [B, T, D]

    `blocks` are those of a labkit.train.gpt.GPT whose experts `labkit.parallel.expert.deal` has dealt out. All ranks of
    that group call it with the same `halves`; more than two are possible, and one is the plain program. A block whose
    experts are all here, or that has none, has nothing to wait for. Sends the bytes of the plain program, and counts
    once for each half. ValueError for fewer than one half, and for blocks that cannot be run so."""
    blocks = list(blocks)
    for index, block in enumerate(blocks):
        check(block, f"block {index}")
    if halves < 1:
        raise ValueError(f"a batch is cut into 1 part or more, got halves={halves}")
    programs = [through(blocks, part, len(x), tag) for tag, part in enumerate(x.tensor_split(halves))]
    answers: dict[int, Tensor] = {}
    while len(answers) < halves:
        for number, program in enumerate(programs):
            if number not in answers:
                try:
                    next(program)
                except StopIteration as end:
                    answers[number] = end.value
    return torch.cat([answers[number] for number in range(halves)])


def through(blocks: Sequence[nn.Module], x: Tensor, n_sequences: int, tag: int) -> Half:
    """One half through all blocks. `n_sequences`: of the whole batch, over which a balance loss is a mean."""
    block: Any
    for block in blocks:
        x = x + block.attention(block.norm1(x))
        mixture, normed = block.mlp, block.norm2(x)
        if not isinstance(mixture, RoutesInSteps):
            x = x + mixture(normed)
            continue
        routed = mixture.begin(normed, n_sequences)
        if not isinstance(mixture.journey, Dispatch):
            out = mixture.journey(routed.tokens, routed.token, routed.counts, mixture.experts, routed.read)
            x = x + mixture.with_shared(mixture.end(routed, out), normed)
            continue
        way = HalfJourney(mixture.journey, routed, tag)
        going = way.out(routed.tokens[routed.token])
        yield
        coming = way.back(mixture.experts(way.arrived(going)[way.order], way.per_expert)[way.order.argsort()])
        yield
        y = mixture.end(routed, way.home(coming))
        x = x + mixture.with_shared(y, normed)
    return x


def check(block: Any, name: str) -> None:
    """ValueError for a block that is no block of a GPT, or that is not run as it is written."""
    parts = [getattr(block, part, None) for part in ("norm1", "attention", "norm2", "mlp")]
    if None in parts:
        raise ValueError(f"{name} is no block of a GPT, which has norm1, attention, norm2 and mlp: {type(block)}")
    cut = isinstance(getattr(parts[-1], "route", None), TermRouter)
    if "forward" in vars(block) or cut or any(p.numel() == 0 for p in block.parameters()):
        raise ValueError(
            f"{name} is wrapped (by recomputation, by tp, or by ZeRO-3, which has freed its weights), and halves would "
            "go past what wraps it: use ep with DDP or ZeRO-1, recompute='none' and tp=1"
        )


class HalfJourney:
    """The way of one half's rows through one mixture: to the experts, and home."""

    def __init__(self, dispatch: Dispatch, routed: Any, tag: int) -> None:
        """Ranks tell each other how many rows come for which expert, which takes an all_to_all of E numbers."""
        self.group, self.tag = dispatch.group, tag
        self.send, self.receive, self.per_expert, self.order = dispatch.rows(routed.counts, routed.read)
        self.dispatch = Trip(self.group, self.send, self.receive, 2 * tag, scale=self.group.size)
        self.combine = Trip(self.group, self.receive, self.send, 2 * tag + 1, scale=1 / self.group.size)

    def out(self, rows: Tensor) -> Tensor:
        """Send rows to their experts.   [s, D] -> room for what comes [r, D], not to be read before `arrived`"""
        return _Start.apply(rows, self.dispatch)  # type: ignore[no-any-return]

    def arrived(self, room: Tensor) -> Tensor:
        """The rows that came for the experts of this rank.   [r, D]"""
        return _Wait.apply(room, self.dispatch)  # type: ignore[no-any-return]

    def back(self, rows: Tensor) -> Tensor:
        """Send home what the experts made.   [r, D] -> room for what comes [s, D]"""
        return _Start.apply(rows, self.combine)  # type: ignore[no-any-return]

    def home(self, room: Tensor) -> Tensor:
        """What other ranks' experts made of this rank's rows.   [s, D]"""
        return _Wait.apply(room, self.combine)  # type: ignore[no-any-return]


class Trip:
    """A ragged all_to_all that is started at one place and waited for at another, forward and backward.

    send[j] rows go to rank j, receive[i] come from rank i; gradients go the other way, times `scale`."""

    def __init__(self, group: Group, send: list[int], receive: list[int], tag: int, scale: float) -> None:
        """`tag` keeps the messages of different halves apart."""
        self.group, self.send, self.receive, self.tag, self.scale = group, send, receive, tag, scale
        self.room: Tensor | None = None
        self.works: list[Work] = []

    def start(self, x: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """Let the rows of x leave, and make room for those that come. All are started before one is waited for."""
        group, parts = self.group, x.contiguous().split(send)
        self.room = x.new_empty((sum(receive), *x.shape[1:]))
        places = self.room.split(receive)
        others = [rank for rank in range(group.size) if rank != group.rank]
        self.works = [group.recv_start(rank, self.tag, into=places[rank]) for rank in others]
        self.works += [group.send(parts[rank], rank, self.tag) for rank in others]
        places[group.rank].copy_(parts[group.rank])
        return self.room

    def wait(self) -> Tensor:
        """The rows that all ranks have sent here, once the last of them has arrived.   [received, D]"""
        for work in self.works:
            work.wait()
        room, self.room, self.works = self.room, None, []
        assert room is not None
        return room


class _Start(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        return trip.start(x, trip.send, trip.receive)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # `grad` is what _Wait's backward has sent off: what counts is what has come meanwhile from the other ranks
        return ctx.trip.wait() * ctx.trip.scale, None


class _Wait(Function):
    @staticmethod
    def forward(ctx: Any, room: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        return trip.wait().view_as(room)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.trip.start(grad, ctx.trip.receive, ctx.trip.send)
        return grad, None
