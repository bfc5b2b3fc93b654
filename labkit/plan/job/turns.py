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
from labkit.plan.schedules.schedule import Action, Schedule, needs

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

    def weigh(self, sizes: Sequence[tuple[int, int]], message: int) -> int:
        """Bytes of all this, where `sizes` has those of a held micro-batch of each stage and of what a waiting one
        holds more."""
        rows = zip(self.held, self.waiting, sizes, strict=True)
        return (self.onward + self.back) * message + sum(
            held * size + wait * extra for held, wait, (size, extra) in rows
        )


@lru_cache(maxsize=1024)
def turns(schedule: str, p: int, m: int, v: int, place: int) -> tuple[Turn, ...]:
    """The different moments in the program of the rank at `place`."""
    law = LAWS[schedule]
    m = m if law.unanswered else min(m, max(LEAST, ROUNDS * p))
    programs, at = _programs(schedule, p, m, v)
    stages = list(law.stages_on(place, p, v))
    coming = {stage: [action.kind for action in programs.programs[place] if action.stage == stage] for stage in stages}
    held, waiting, done = [0] * len(stages), [0] * len(stages), [0] * len(stages)
    sent = list[tuple[int, int, str]]()  # to which rank, needed at which position of its program, by what
    seen: dict[Turn, None] = {}
    for action in programs.programs[place]:
        kind, stage, micro = action
        for maker in (need for need in needs(action, programs.n_stages) if need.stage != stage):
            home = programs.rank_of(maker.stage, micro)
            sent = [message for message in sent if message[0] != home or message[1] > at[maker]]
        k, goes = stages.index(stage), stage + {"F": 1, "B": -1}.get(kind, programs.n_stages)
        ends_here = kind == ("W" if law.splits else "B")
        del coming[stage][0]
        held[k] += kind == "F"
        waiting[k] -= kind == "W"
        if kind == "F" or (kind == "W") == (law.splits and stage == 0):
            onward = sum(message[2] == "F" for message in sent)
            finished = tuple(count == m // law.copies for count in done)
            counts = tuple(held), tuple(waiting), tuple(min(2, count) for count in done)
            last = kind != "F" and kind not in coming[stage]
            then = coming[stage][0] if coming[stage] else ""
            seen[Turn("F" if kind == "F" else "B", k, *counts, finished, last, then, onward, len(sent) - onward)] = None
        waiting[k] += kind == "B" and law.splits
        held[k] -= ends_here
        done[k] += ends_here
        if 0 <= goes < programs.n_stages and (home := programs.rank_of(goes, micro)) != place:
            sent.append((home, at[Action(kind, goes, micro)], kind))
    return tuple(seen)


@lru_cache(maxsize=64)
def _programs(schedule: str, p: int, m: int, v: int) -> tuple[Schedule, dict[Action, int]]:
    """The programs of all ranks, and the position of each action in its rank's."""
    programs = LAWS[schedule].make(p, m, v)
    return programs, {action: k for program in programs.programs for k, action in enumerate(program)}


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
    kept: list[Turn] = []
    for turn in sorted(all_turns, key=lambda one: -one.weigh(sizes, message)):
        if not any(
            other.kind == turn.kind
            and other.stage == turn.stage
            and (not last_differs or other.last == turn.last)
            and (not then_differs or other.then == turn.then)
            and (
                not done_differs
                or (
                    all(a >= b for a, b in zip(other.done, turn.done, strict=True))
                    and all(a <= b for a, b in zip(other.finished, turn.finished, strict=True))
                )
            )
            for other in kept
        ):
            kept.append(turn)
    return kept
