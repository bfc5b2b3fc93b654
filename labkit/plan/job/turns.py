"""The moments of a pipeline's program that may be the fullest: micro-batches in flight as each action of a rank begins.

    1f1b, rank 0 of 2        F0  F1  B0  F2  B1  F3  B2  B3
    held, its own included    1   2   2   2   2   2   2   1
    done                      0   0   0   1   1   2   2   3

An activation is held from F to B; where backward is cut in two, B keeps other things for W. A message is held until
something comes back that proves its delivery (labkit.parallel.stage_messages). One rank alone has a program as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from labkit.plan.laws.schedules import LAWS
from labkit.plan.schedules.schedule import Action, Program, Schedule, needs

LEAST, ROUNDS = 8, 3
"""More micro-batches than these, or than so many for each rank, change nothing: a pipeline that is full does the same
again. (With gpipe all are held at once.)"""


class Turn(NamedTuple):
    """What a rank holds as it begins an action of one of its stages, the action's own micro-batch included.

    kind       "F", or "B": a backward; where it is cut in two, W of the first stage, whose B has nothing to do
    stage      the place of the action's stage on this rank
    held       micro-batches between F and the end of backward, for each stage; `waiting`: those that wait for W
    done       micro-batches that are through, of which two leave what many leave
    last       True for a stage's last backward;   `then`: the kind of the stage's next action, "" after its last one
    onward, back    messages that nothing which came back has proved delivered: activations, and gradients"""

    kind: str
    stage: int
    held: tuple[int, ...]
    waiting: tuple[int, ...]
    done: tuple[int, ...]
    finished: tuple[bool, ...]
    last: bool
    then: str
    onward: int
    back: int

    @property
    def forward(self) -> bool:
        """True for a forward."""
        return self.kind == "F"

    @property
    def of_strategies(self) -> Turn:
        """This turn as strategies see it: equal for turns in which they hold the same. Messages are none of theirs, and
        of micro-batches in flight they ask whether there is one, or another one beside that at work."""
        held = tuple([min(2, count) for count in self.held])
        return Turn(self.kind, self.stage, held, (), self.done, self.finished, self.last, self.then, 0, 0)

    def weigh(self, sizes: Sequence[tuple[int, int]], message: int) -> int:
        """Bytes of all this, where `sizes` has those of a held micro-batch of each stage and of what a waiting one
        holds more."""
        n_bytes = (self.onward + self.back) * message
        for held, wait, (size, extra) in zip(self.held, self.waiting, sizes, strict=True):
            n_bytes += held * size + wait * extra
        return n_bytes


def turns(schedule: str, p: int, m: int, v: int, place: int) -> tuple[Turn, ...]:
    """The different moments in the program of the rank at `place`."""
    return _turns(schedule, p, m if LAWS[schedule].unanswered else min(m, max(LEAST, ROUNDS * p)), v, place)


@lru_cache(maxsize=1024)
def _turns(schedule: str, p: int, m: int, v: int, place: int) -> tuple[Turn, ...]:
    law, ranks = LAWS[schedule], _RankPrograms(schedule, p, m, v)
    program, n_stages = ranks.program(place), p * v // law.copies
    at: dict[int, dict[Action, int]] = {}  # of each rank that it talks with, the position of each action
    stages = list(law.stages_on(place, p, v))
    coming = {stage: [action.kind for action in program if action.stage == stage][::-1] for stage in stages}
    held, waiting, done = [0] * len(stages), [0] * len(stages), [0] * len(stages)
    sent = list[tuple[int, int, str]]()  # to which rank, needed at which position of its program, by what
    seen: dict[Turn, None] = {}

    def position(action: Action, home: int) -> int:
        if home not in at:
            at[home] = {action: k for k, action in enumerate(ranks.program(home))}
        return at[home][action]

    for action in program:
        kind, stage, micro = action
        for maker in needs(action, n_stages) if sent else ():
            if maker.stage != stage:
                home = ranks.home(maker.stage, micro)
                made = position(maker, home)
                sent = [message for message in sent if message[0] != home or message[1] > made]
        k, goes = stages.index(stage), stage + {"F": 1, "B": -1}.get(kind, n_stages)
        ends_here = kind == ("W" if law.splits else "B")
        coming[stage].pop()
        held[k] += kind == "F"
        waiting[k] -= kind == "W"
        if kind == "F" or (kind == "W") == (law.splits and stage == 0):
            onward = [message[2] for message in sent].count("F")
            finished = tuple([count == m // law.copies for count in done])
            counts = tuple(held), tuple(waiting), tuple([min(2, count) for count in done])
            last = kind != "F" and kind not in coming[stage]
            then = coming[stage][-1] if coming[stage] else ""
            seen[Turn("F" if kind == "F" else "B", k, *counts, finished, last, then, onward, len(sent) - onward)] = None
        waiting[k] += kind == "B" and law.splits
        held[k] -= ends_here
        done[k] += ends_here
        if 0 <= goes < n_stages and (home := ranks.home(goes, micro)) != place:
            sent.append((home, position(Action(kind, goes, micro), home), kind))
    return tuple(seen)


class _RankPrograms:
    """The programs of a schedule's ranks: of those that are asked for alone, where each can be made without others."""

    def __init__(self, schedule: str, p: int, m: int, v: int) -> None:
        self.law, self.counts = LAWS[schedule], (p, m, v)
        self.schedule = None if self.law.program else _schedule(schedule, p, m, v)

    def program(self, place: int) -> Program:
        """The program of the rank at this place."""
        if self.schedule is not None:
            return self.schedule.programs[place]
        assert self.law.program is not None
        return self.law.program(*self.counts, place)

    def home(self, stage: int, micro: int) -> int:
        """The rank on which this micro-batch goes through this stage."""
        return stage % self.counts[0] if self.schedule is None else self.schedule.rank_of(stage, micro)


@lru_cache(maxsize=64)
def _schedule(schedule: str, p: int, m: int, v: int) -> Schedule:
    return LAWS[schedule].make(p, m, v)


def fullest(
    all_turns: Sequence[Turn],
    sizes: Sequence[tuple[int, int]],
    message: int,
    done_differs: bool,
    last_differs: bool,
    then_differs: bool,
) -> list[Turn]:
    """Of turns of one kind and stage those that no other exceeds in bytes and in gradients that are there already.

    done_differs: whether passes leave anything that is not there all the time;   last_differs: whether the last
    backward of a stage holds anything else than those before;   then_differs: whether what comes next does."""
    kept: dict[tuple[str, int, bool, str], list[Turn]] = {}
    fuller: list[Turn] = []
    weights = [turn.weigh(sizes, message) for turn in all_turns]
    for place in sorted(range(len(weights)), key=weights.__getitem__, reverse=True):
        turn = all_turns[place]
        alike = kept.setdefault(
            (turn.kind, turn.stage, last_differs and turn.last, turn.then if then_differs else ""), []
        )
        if not alike or (done_differs and not any(_has_all(other, turn) for other in alike)):
            alike.append(turn)
            fuller.append(turn)
    return fuller


def _has_all(one: Turn, other: Turn) -> bool:
    """True if as many passes or more have left their gradients in each stage of the one as of the other turn, and no
    stage of it has let go of them that has them in the other."""
    return all(map(int.__ge__, one.done, other.done)) and all(map(int.__le__, one.finished, other.finished))
