"""What a pipeline schedule is, and what it must obey to be run.

A model is cut into stages, a batch into micro-batches. The forward, or the backward, of one micro-batch in one stage is
an action; a schedule is one program of actions for each rank, a value that can be drawn, timed and run.

    F of stage s    needs F of stage s - 1                             of the same micro-batch
    B of stage s    needs F of stage s and B of stage s + 1
    W of stage s    needs B of stage s                                 only where the backward is cut in two

Ranks run their programs in order and wait for what is needed, so an order can be wrong: two ranks wait for each other.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from labkit.plan.checks import is_whole

KINDS = ("F", "B", "W")


class Action(NamedTuple):
    """One piece of work. `kind` "F": forward; "B": backward (where there is a "W", of the input only); "W": of weights.

    `str(Action("F", 1, 0))` is `1F0`: stage 1 runs the forward of micro-batch 0."""

    kind: str
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro}"


Program = tuple[Action, ...]


@dataclass(frozen=True)
class Schedule:
    """One program a rank. Stage s lives on rank `placement[s]`; without a placement on rank s % n_ranks.

    `placement[s]` may be several ranks, `(0, 3)`: each has a copy of the stage, and a micro-batch goes through the copy
    whose rank has its actions. Programs may be written by hand as lists of ("F", 0, 0); `validate` says what is wrong
    with them."""

    name: str
    n_ranks: int
    n_stages: int
    n_micro: int
    programs: tuple[Program, ...]
    placement: tuple[int | tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        programs = tuple(map(_program, self.programs))
        object.__setattr__(self, "programs", programs)

    def rank_of(self, stage: int, micro: int | None = None) -> int:
        """The rank that holds `stage`; of one that has copies, the rank through whose copy `micro` goes.

        ValueError for a stage outside the schedule, and for a stage with copies if `micro` does not tell which."""
        ranks = self.ranks_of(stage)
        if len(ranks) == 1:
            return ranks[0]
        rank = self._copies.get((stage, micro))
        if rank is None:
            raise ValueError(f"stage {stage} of {self.name} has copies on ranks {ranks}: none of them runs {micro=}")
        return rank

    def ranks_of(self, stage: int) -> tuple[int, ...]:
        """The ranks that hold `stage`, one of them unless it has copies. ValueError as `rank_of`."""
        if not 0 <= stage < self.n_stages:
            raise ValueError(f"stages of {self.name} are 0 to {self.n_stages - 1}, got {stage}")
        home = stage % self.n_ranks if self.placement is None else self.placement[stage]
        return (home,) if isinstance(home, int) else home

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages on `rank`, in order."""
        return tuple(stage for stage in range(self.n_stages) if rank in self.ranks_of(stage))

    @cached_property
    def _copies(self) -> dict[tuple[int, int | None], int]:
        """The rank on which a micro-batch goes forward through a stage that has copies."""
        actions = ((rank, action) for rank, program in enumerate(self.programs) for action in program)
        return {(stage, micro): rank for rank, (kind, stage, micro) in actions if kind == "F"}

    @property
    def splits(self) -> bool:
        """True if a backward is two actions: B for the input's gradient, W for those of the weights."""
        return any(action.kind == "W" for program in self.programs for action in program)


def needs(action: Action, n_stages: int) -> list[Action]:
    """The actions, on whatever rank, that must be done before `action` can start. This function alone defines them."""
    kind, stage, i = action
    if kind == "F":
        return [Action("F", stage - 1, i)] if stage > 0 else []
    if kind == "W":
        return [Action("B", stage, i)]
    return [Action("F", stage, i), *([Action("B", stage + 1, i)] if stage < n_stages - 1 else [])]


def play(schedule: Schedule) -> Iterator[tuple[int, Action, list[Action]]]:
    """(rank, action, what it needs) in an order in which everything comes after what it needs; linear in the actions.

    A rank that has to wait is woken by what it waits for. If ranks wait for each other there is no such order, and a
    ValueError names the stuck action of each."""
    done: set[Action] = set()
    waiting: dict[Action, list[int]] = {}
    at, ready = [0] * schedule.n_ranks, deque(range(schedule.n_ranks))
    while ready:
        rank = ready.popleft()
        program = schedule.programs[rank]
        while at[rank] < len(program):
            action = program[at[rank]]
            before = needs(action, schedule.n_stages)
            missing = next((needed for needed in before if needed not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            done.add(action)
            at[rank] += 1
            ready.extend(waiting.pop(action, ()))
            yield rank, action, before
    if waiting:
        stuck = sorted((rank, missing) for missing, ranks in waiting.items() for rank in ranks)
        reasons = "; ".join(
            f"rank {rank} at {schedule.programs[rank][at[rank]]} needs {needed}" for rank, needed in stuck
        )
        raise ValueError(
            f"schedule {schedule.name!r} deadlocks: {reasons}: move what is needed before what waits for it"
        )


def validate(schedule: Schedule) -> Schedule:
    """The schedule itself, if every action is there once, on the rank of its stage, and nobody waits for ever.

    Otherwise ValueError: what is missing or doubled or misplaced, or the stuck action of each rank."""
    check_counts(n_ranks=schedule.n_ranks, n_stages=schedule.n_stages, n_micro=schedule.n_micro)
    name, kinds = f"schedule {schedule.name!r}", KINDS if schedule.splits else KINDS[:2]
    homes = schedule.placement if schedule.placement is not None else range(schedule.n_stages)
    if len(schedule.programs) != schedule.n_ranks or len(homes) != schedule.n_stages:
        raise ValueError(
            f"{name} has {len(schedule.programs)} programs for {schedule.n_ranks} ranks and places for {len(homes)} of "
            f"{schedule.n_stages} stages: one program a rank, one place a stage"
        )
    want = {Action(kind, s, i) for kind in kinds for s in range(schedule.n_stages) for i in range(schedule.n_micro)}
    have = Counter(action for program in schedule.programs for action in program)
    doubled = [action for action, count in have.items() if count > 1]
    for complaint, wrong in (("lacks", want - set(have)), ("knows no", set(have) - want), ("does twice", doubled)):
        if wrong:
            raise ValueError(
                f"{name} {complaint} {_listed(wrong)}: each of {', '.join(kinds)} once for every stage and micro"
            )
    for rank, program in enumerate(schedule.programs):
        if strays := [action for action in program if rank not in schedule.ranks_of(action.stage)]:
            at = " and ".join(f"rank {home}" for home in schedule.ranks_of(strays[0].stage))
            raise ValueError(f"{name} has {_listed(strays)} on rank {rank}, but stage {strays[0].stage} lives on {at}")
        if torn := [action for action in program if schedule.rank_of(action.stage, action.micro) != rank]:
            at = f"rank {schedule.rank_of(torn[0].stage, torn[0].micro)}"
            raise ValueError(
                f"{name} has {_listed(torn)} on rank {rank}, but the forward on {at}: keep both on one rank"
            )
        if idle := set(schedule.stages_of(rank)) - {action.stage for action in program}:
            raise ValueError(
                f"{name} places stage {min(idle)} on rank {rank}, which runs no action of it: leave it out"
            )
    deque(play(schedule), maxlen=0)
    return schedule


def _listed(actions: Iterable[Action]) -> str:
    named = sorted(map(str, actions))
    return ", ".join(named[:6]) + (f" and {len(named) - 6} more" if len(named) > 6 else "")


def _program(actions: Iterable[tuple[str, int, int]]) -> Program:
    """The actions themselves, unless they are written by hand: a long pipeline has a hundred thousand."""
    return tuple([action if isinstance(action, Action) else Action(*action) for action in actions])


def check_counts(**counts: int) -> None:
    """ValueError that names the first that is not a whole number, 1 or more."""
    for name, count in counts.items():
        if not is_whole(count):
            raise ValueError(f"{name} must be a whole number, at least 1, got {count!r}")
