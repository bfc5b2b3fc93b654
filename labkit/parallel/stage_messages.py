"""Messages between the stages of a pipeline: each is the result of one action, and its tag says which.

    rank 0   F0 ----------- F1 ----------- ...  B0
               \\               \\              /
    rank 1      F0 ----------- B0 ---------             tags: 0F0, 0F1 from rank 0, 1B0 from rank 1

A send never waits, and a receive waits only where its value is needed: so every schedule that `validate` accepts runs
without a deadlock. Bytes for each micro-batch and each boundary between ranks: its activation forward, and a gradient
of the same size back; between stages of one rank nothing.

Source: Narayanan et al., arXiv:2104.04473, section 2.2.
"""

from __future__ import annotations

from torch import Tensor

from labkit.comm.group import Group, Work
from labkit.plan.schedules.program import KINDS
from labkit.plan.schedules.schedule import Action, Schedule, needs


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
