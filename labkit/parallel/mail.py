"""The messages between the stages of a pipeline: sends never wait, receives wait where the value is needed.

    rank 0   F0 ----------- F1 ----------- ...  B0             a message is the result of one action;
               \\               \\              /               its tag says kind, stage and micro-batch
    rank 1      F0 ----------- B0 ---------                    (the sender's: 0F0, 0F1, 1B0)

All receives are posted before the first action, so that whatever comes first finds its place.

On NCCL this is not enough: it ignores tags, and a send blocks everything queued behind it until the other side receives
it. If rank 0 has queued "send 0F1, receive 1B0" while rank 1 has queued "send 1B0, receive 0F1", both are stuck. So
there every rank queues its messages in one order that all work out from the schedule, the order in which a simulated
step makes them: before a rank sends, it queues the receives of all that was made earlier. What one rank sends next is
then what the other receives next, for any schedule, over a single group.

A sent tensor is let go as soon as something comes back that the receiver made later: it had taken it by then.

Bytes sent: what is given, once for each rank boundary that it crosses; between stages of one rank nothing is sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from torch import Tensor

from labkit.comm.group import Group, Work
from labkit.comm.message import wire_is_device
from labkit.plan.program import KINDS
from labkit.plan.schedule import Action, Schedule, needs, simulate

EMPTY: Mapping[Action, int] = MappingProxyType({})


class Mail:
    """One step's messages on one rank: `take` what an action needs from another stage, `give` what it made to the next.

    `order` is what `one_order` says for this schedule and group, `places` what `places_of` says for the schedule."""

    def __init__(
        self, schedule: Schedule, group: Group, order: Sequence[Action] = (), places: Mapping[Action, int] = EMPTY
    ):
        self.schedule, self.group, self.order, self.places = schedule, group, deque(order), places
        self.here: dict[Action, Tensor] = {}  # made on this rank for this rank
        self.sent: list[tuple[int, int, Work]] = []  # to whom, for which place in its program
        makers = (_maker(action, schedule) for action in schedule.programs[group.rank])
        self.coming = {
            maker: group.recv_start(schedule.rank_of(maker.stage), self._tag(maker))
            for maker in makers
            if maker is not None and schedule.rank_of(maker.stage) != group.rank
        }

    def take(self, action: Action) -> Tensor | None:
        """The activation or gradient that `action` needs, as soon as it is here; None if it needs none."""
        maker, x = _maker(action, self.schedule), None
        if maker in self.here:
            x = self.here.pop(maker)
        elif maker is not None:
            self._take_in_until(maker)
            x = self.coming.pop(maker).wait()
            self._let_go(self.schedule.rank_of(maker.stage), self.places.get(maker, 0))
        return x

    def give(self, action: Action, x: Tensor | None) -> None:
        """Start sending what `action` made, if another stage waits for it; x is kept alive until it has arrived."""
        to = _next_stage(action, self.schedule)
        if to is None or x is None:
            return
        if self.schedule.rank_of(to) == self.group.rank:
            self.here[action] = x.detach()
            return
        self._take_in_until(action)
        rank = self.schedule.rank_of(to)
        wanted = self.places.get(Action(action.kind, to, action.micro), len(self.places))
        self.sent.append((rank, wanted, self.group.send(x, rank, self._tag(action))))

    def finish(self) -> None:
        """Wait until everything sent has been received."""
        for _, _, work in self.sent:
            work.wait()

    def _let_go(self, rank: int, place: int) -> None:
        """`rank` is past `place` in its program, so what it needed before has arrived there."""
        for to, wanted, work in self.sent:
            if to == rank and wanted <= place:
                work.wait()
        self.sent = [each for each in self.sent if each[0] != rank or each[1] > place]

    def _take_in_until(self, action: Action) -> None:
        while self.order and action in self.order:
            if (maker := self.order.popleft()) in self.coming:
                self.coming[maker].open()

    def _tag(self, maker: Action) -> int:
        return (maker.stage * self.schedule.n_micro + maker.micro) * len(KINDS) + KINDS.index(maker.kind)


def said_by(tag: int, n_micro: int) -> Action:
    """The action whose result travels under `tag`: what a message says without being opened."""
    place, kind = divmod(tag, len(KINDS))
    return Action(KINDS[kind], *divmod(place, n_micro))


def places_of(schedule: Schedule) -> dict[Action, int]:
    """Where each action stands in the program of its rank."""
    return {action: place for program in schedule.programs for place, action in enumerate(program)}


def one_order(schedule: Schedule, group: Group) -> tuple[Action, ...]:
    """For a wire without tags: the actions whose results this rank sends or receives, in an order that all agree on."""
    if not wire_is_device(group.wire):
        return ()
    spans = sorted(simulate(schedule), key=lambda span: span.end)
    ends = [(span, _next_stage(span.action, schedule)) for span in spans]
    meets = [(span, schedule.rank_of(to)) for span, to in ends if to is not None]
    return tuple(span.action for span, to in meets if span.rank != to and group.rank in (span.rank, to))


def _maker(action: Action, schedule: Schedule) -> Action | None:
    """The action on another stage whose result `action` needs."""
    return next((each for each in needs(action, schedule.n_stages) if each.stage != action.stage), None)


def _next_stage(action: Action, schedule: Schedule) -> int | None:
    """The stage that waits for the result of `action`."""
    to = action.stage + {"F": 1, "B": -1, "W": schedule.n_stages}[action.kind]
    return to if 0 <= to < schedule.n_stages else None
