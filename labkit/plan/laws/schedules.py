"""The schedules that a recipe can name, each with its law: how it is made, which stages a rank has, what it holds.

    name          stages on a rank      micro-batches that rank r holds at once                      waits (long runs)
    naive         1                     1                                                            (p-1)(F + B)
    gpipe         1                     m                                                            (p-1)(F + B)
    1f1b          1                     min(m, p - r)                                                (p-1)(F + B)
    interleaved   v: r, r + p, ...      min(v m, (v-1) a + 2 (p-1-r) + 1) over its stages            (p-1)(F + B) / v
    zero_bubble   1                     min(m, p)                                                    (p-1)(F + B - 2 W)
    zb_h2         1                     that of the fullest moment of its program                    (p-1)(F + B - 2 W)
    zb_v ...      2: r and 2p - 1 - r   the same
    dualpipe      2, each on 2 ranks    the same                                                     (p/2-1)(F+B-2W)

F, B and W are the seconds of one stage; a is the first round of micro-batches, p if p divides m. The programs, and the
laws of those that are published: schedule.py and published_schedules.py of labkit.plan.schedules. A new schedule is a
row here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from labkit.plan.laws.choices import Choices
from labkit.plan.partition.layout import Layout
from labkit.plan.schedules.program import Program
from labkit.plan.schedules.published_schedules import dualpipe, dualpipe_v, v_half, v_min, zb_h2, zb_v
from labkit.plan.schedules.schedule import (
    Schedule,
    gpipe,
    interleaved,
    naive,
    one_f_one_b,
    program_1f1b,
    program_interleaved,
    program_zero_bubble,
    rounds,
    zero_bubble,
)

Ranks = Callable[[int, int, int, int], Program]
"""(p, m, v, place) -> the program of the rank at `place`."""
Counts = Callable[[int, int, int, int], tuple[int, ...]]
"""(p, m, v, place) -> micro-batches that the rank at `place` holds at once, for each of its v stages."""


@dataclass(frozen=True)
class ScheduleLaw:
    """One schedule.

    make        (p, m, v) -> its programs
    program     that of one rank alone, where it can be made without the others'; its stage s is on rank s % p
    held        micro-batches in flight; None: the program is looked at (labkit.plan.job.stages)
    stages      stages on a rank; None: as many as a recipe says
    splits      True if it cuts a backward in two
    copies      ranks that have a copy of the same stage
    folds       True if a rank has a stage and the one that is as far from the other end
    messages    messages on their way to a neighbour while the next one is made; those of programs that are looked at
                are counted there
    unanswered  True if nothing has come back yet when the last forward runs
    in_turn     True if a message in the steady state is waited for by each micro-batch
    idle        for long runs: what a rank waits for each other one, in a forward and a backward of the slowest stage
                (None: one of each, without both halves of W where it is put off)
    most_micro  micro-batches that it can have at most, if there is a limit
    searched    True if a search for plans tries it, for which it needs a `program`"""

    name: str
    make: Callable[[int, int, int], Schedule]
    held: Counts | None = None
    stages: int | None = 1
    splits: bool = False
    copies: int = 1
    folds: bool = False
    messages: int = 1
    unanswered: bool = False
    in_turn: bool = False
    idle: float | None = None
    most_micro: int | None = None
    searched: bool = False
    program: Ranks | None = None

    def idle_s(self, forward: float, backward: float, weights: float) -> float:
        """Seconds that a rank waits for each other rank; `weights` is W's share of a backward."""
        if self.idle is not None:
            return self.idle * (forward + backward)
        return forward + backward - self.splits * 2 * weights * backward

    def stages_on(self, place: int, n_ranks: int, stages_per_rank: int) -> range:
        """The stages of the rank at `place` of a pipeline of `n_ranks`, in order."""
        n_stages = n_ranks * stages_per_rank // self.copies
        if self.folds:
            near, far = sorted((place, n_stages - 1 - place))
            return range(near, far + 1, far - near)
        return range(place, n_stages, n_ranks)

    def excludes(self, choices: Choices) -> Iterator[str]:
        """Why it cannot be combined with these choices, and the mend."""
        v = choices.stages_per_rank
        if self.stages is not None and self.stages > 1 and v != self.stages:
            yield f"{self.name} has {self.stages} stages on a rank: stages_per_rank={self.stages}, got {v}"
        if self.stages == 1 and v > 1:
            yield f"{v} stages on a rank want schedule='interleaved', got {self.name!r}"
        if self.most_micro is not None and choices.n_micro > self.most_micro:
            yield f"the {self.name} schedule does not cut the batch: n_micro={choices.n_micro} wants 'gpipe'"
        if self.splits and choices.eight_bits:
            yield (
                f"{self.name} computes weight gradients long after input gradients, and a linear in 8 bits or fewer "
                "computes both at once: use '1f1b'"
            )

    def refuses(self, choices: Choices, layout: Layout) -> Iterator[str]:
        """Why it cannot be run on this layout, and the mend."""
        rows, n_micro = choices.batch_size // layout.dp, choices.n_micro
        if self.copies > 1 and (layout.pp % 2 or n_micro % 2 or rows % n_micro):
            pp, m = layout.pp + layout.pp % 2, n_micro + n_micro % 2
            yield (
                f"{self.name} pairs the ranks of a pipeline, and half of the rows enter at each end: it wants an even "
                f"pp, an even n_micro and micro-batches of one size, got pp={layout.pp}, n_micro={n_micro} and {rows} "
                f"rows a rank: pp={pp}, n_micro={m} and batch_size={layout.dp * m * -(-rows // m)} would do; or "
                "'dualpipe_v', which takes any"
            )


@lru_cache(maxsize=4096)
def in_rounds(p: int, m: int, v: int, place: int) -> tuple[int, ...]:
    """Micro-batches in flight of `interleaved`: rounds go to the stages of a rank in turn, until it is full."""
    sizes, counts = rounds(p, m), [0] * v
    left = min(v * m, (v - 1) * sizes[0] + 2 * (p - 1 - place) + 1)
    for size in sizes:
        for index in range(v):
            taken = min(size, left)
            counts[index], left = counts[index] + taken, left - taken
    return tuple(counts)


LAWS: Mapping[str, ScheduleLaw] = MappingProxyType(
    {
        law.name: law
        for law in (
            ScheduleLaw("naive", lambda p, m, v: naive(p), lambda p, m, v, place: (1,), messages=0, most_micro=1),
            ScheduleLaw("gpipe", lambda p, m, v: gpipe(p, m), lambda p, m, v, place: (m,), messages=0, unanswered=True),
            ScheduleLaw(
                "1f1b",
                lambda p, m, v: one_f_one_b(p, m),
                lambda p, m, v, place: (min(m, p - place),),
                in_turn=True,
                searched=True,
                program=lambda p, m, v, place: program_1f1b(p, m, place),
            ),
            ScheduleLaw(
                "interleaved",
                interleaved,
                in_rounds,
                stages=None,
                messages=2,
                searched=True,
                program=program_interleaved,
            ),
            ScheduleLaw(
                "zero_bubble",
                lambda p, m, v: zero_bubble(p, m),
                lambda p, m, v, place: (min(m, p),),
                splits=True,
                searched=True,
                program=lambda p, m, v, place: program_zero_bubble(p, m, place),
            ),
            ScheduleLaw("zb_h2", lambda p, m, v: zb_h2(p, m), splits=True, messages=0),
            ScheduleLaw("zb_v", lambda p, m, v: zb_v(p, m), stages=2, splits=True, folds=True, messages=0),
            ScheduleLaw("v_half", lambda p, m, v: v_half(p, m), None, 2, True, folds=True, messages=0, idle=1.0),
            ScheduleLaw("v_min", lambda p, m, v: v_min(p, m), None, 2, True, folds=True, messages=0, idle=4 / 3),
            ScheduleLaw("dualpipe_v", lambda p, m, v: dualpipe_v(p, m), None, 2, True, folds=True, messages=0),
            ScheduleLaw("dualpipe", lambda p, m, v: dualpipe(p, m), None, 2, True, 2, folds=True, messages=0),
        )
    }
)
"""The laws by their names in a recipe."""
