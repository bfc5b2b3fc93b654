"""What breaks first: an interviewer changes one number of a design case; the planner says what becomes of the plan.

    fracture = what_breaks("eight", "half the memory")
    fracture.kind          "memory", "layout", "tp", "dp", "pp", "bubble", "compute", "once" or "nothing"
    fracture.words         why, in a sentence with the planner's numbers
    fracture.mend          the best plan after the change, searched for when it is asked for; None if nothing fits
    fracture.mend_words    the same in a sentence: what changed in the plan
    choices(fracture, 7)   four answers to choose from, one of which is right
    drawn("eight", 7)      three changes of which as many as possible break something else

The old plan is carried over as it is: its layout, strategy and recomputation, and micro-batches of as many rows. Three
questions are asked of it, in the order in which a run would meet them:

    1  layout    can the ranks, the batch and the model still be cut so?     check_plan and Recipe
    2  memory    does the fullest rank still fit, and if not, when?          labkit.plan.step.memory
    3  time      which part of a step grew most?                             labkit.plan.step.time

Time is counted in device-seconds per token, so that steps of other sizes can be compared; of the wires only what no
computing hides counts. A plan of which no part grew by `LEAST` of the whole is not broken.
"""

from __future__ import annotations

import difflib
import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

from labkit.course.topics.design_cases import DesignCase, case as case_of
from labkit.plan.job.recipe import Recipe
from labkit.plan.job.stages import check_plan, micro_rows
from labkit.plan.laws import data_parallel, pipeline
from labkit.plan.machine.hardware import Hardware
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout
from labkit.plan.search.search import HEADROOM, Plan, gb, moment_words, plans
from labkit.plan.step.memory import highest
from labkit.plan.step.rank import Rank, fullest_ranks
from labkit.plan.step.time import StepTime
from labkit.plan.words import plural

EXPERTS = "experts"
LAYOUT, MEMORY, NOTHING, COMPUTE, ONCE, BUBBLE = "layout", "memory", "nothing", "compute", "once", "bubble"
WIRES = ("tp", "cp", "ep", "pp", "dp")
KINDS: Mapping[str, str] = MappingProxyType(
    {
        LAYOUT: "the cut: ranks, sequences or layers no longer divide",
        MEMORY: "memory: a device no longer holds its part",
        "tp": "communication along tp",
        "cp": "communication along cp",
        "ep": "communication along ep",
        "pp": "communication along pp",
        "dp": "communication along dp",
        BUBBLE: "the bubble of the pipeline",
        COMPUTE: "computing",
        ONCE: "the host and the optimizer, once a step",
        NOTHING: "nothing: the plan goes on as it was",
    }
)
"""All that the planner tells apart, in the words of a choice."""
LEAST = 0.05
"""The growth, as a share of the old step, from which a part counts as broken."""
OFFERED = 4
"""The number of answers to choose from."""
ROUND = 3
"""The number of changes in a round."""
N_EXPERT, TOP_K = 8, 2
MOST_WITH_EXPERTS = 64
"""Devices up to which a round asks about experts: the search for a mend on more of them takes half a minute."""


@dataclass(frozen=True)
class Situation:
    """What a plan is made for: the arguments of `labkit.plans`. `shape` has the length of its sequences."""

    shape: ModelShape
    hardware: Hardware
    n_ranks: int
    batch: int
    precision: str

    @property
    def n_tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.shape.seq


@dataclass(frozen=True)
class NumberChange:
    """One number that the interviewer changes: its name, the question, and the situation that it makes of another."""

    name: str
    question: str
    of: Callable[[Situation], Situation]


def _with_memory(old: Situation, times: float) -> Situation:
    return replace(old, hardware=old.hardware.changed(memory_bytes=old.hardware.memory_bytes.value * times))


def _with_inter(old: Situation, times: float) -> Situation:
    inter = replace(old.hardware.inter, bytes_per_s=old.hardware.inter.bytes_per_s * times)
    return replace(old, hardware=old.hardware.changed(inter=inter))


def _resized(old: Situation, **sizes: int) -> Situation:
    return replace(old, shape=old.shape.changed(**sizes, name=old.shape.name, source=old.shape.source))


CHANGES: tuple[NumberChange, ...] = (
    NumberChange("half the memory", "Each device has half the memory.", lambda old: _with_memory(old, 1 / 2)),
    NumberChange("slow link", "The link between nodes is ten times slower.", lambda old: _with_inter(old, 1 / 10)),
    NumberChange(
        "long sequences", "Sequences are four times as long, and as many as before.",
        lambda old: _resized(old, seq=4 * old.shape.seq),
    ),
    NumberChange(
        "small batch", "A step has a sixteenth of the sequences.", lambda old: replace(old, batch=old.batch // 16)
    ),
    NumberChange(
        "twice the devices", "You get twice the devices, for the same batch.",
        lambda old: replace(old, n_ranks=2 * old.n_ranks),
    ),
    NumberChange(
        EXPERTS,
        f"In the place of each MLP there are {N_EXPERT} of its size, and a token goes to {TOP_K}. Your plan has no ep.",
        lambda old: _resized(old, n_expert=N_EXPERT, top_k=TOP_K),
    ),
    NumberChange(
        "fp32", "Weights, gradients and products have to be in fp32.", lambda old: replace(old, precision="fp32")
    ),
    NumberChange(
        "one is missing", "One device of one node has died, and there is no spare.",
        lambda old: replace(old, n_ranks=old.n_ranks - 1),
    ),
)  # fmt: skip
"""The numbers that an interviewer changes, one at a time."""


@dataclass(frozen=True)
class GrownPart:
    """One part of a step before and after a change, in device-seconds per token."""

    name: str
    before: float
    after: float

    @property
    def growth(self) -> float:
        """Device-seconds per token that were added; below zero if it shrank."""
        return self.after - self.before


@dataclass(frozen=True)
class Fracture:
    """What a change does to the best plan of a case.

    kind       what breaks first, a key of KINDS
    words      the reason, in a sentence
    over       bytes above what a device can hold, on the fullest rank; 0 if the plan fits or cannot be cut so
    moment     when that rank holds most; "" if the plan cannot be cut so
    parts      parts of the step, those that grew most first; () for a plan that cannot run
    """

    case: DesignCase
    change: NumberChange
    old: Plan
    now: Situation
    kind: str
    words: str
    over: float = 0.0
    moment: str = ""
    parts: tuple[GrownPart, ...] = ()

    @property
    def question(self) -> str:
        """The question in words."""
        follows = ", with as many more or fewer ranks along dp" * (self.now.n_ranks != self.old.layout.size)
        return f"{self.change.question} All else stays, and so does your plan{follows}. What breaks first?"

    @cached_property
    def mend(self) -> Plan | None:
        """The planner's best plan after the change, None if nothing fits.

        Where a device is missing it may be for fewer devices than there are: all that are left, without the rest of
        that node, or half of them, whatever takes the fewest seconds."""
        now, counts = self.now, [self.now.n_ranks]
        if now.n_ranks < self.old.layout.size:
            counts += [self.old.layout.size - now.hardware.node_size, self.old.layout.size // 2]
        best = [_best(replace(now, n_ranks=count)) for count in dict.fromkeys(counts) if count > 0]
        return min((plan for plan in best if plan is not None), key=lambda plan: plan.step_s, default=None)

    @cached_property
    def differences(self) -> tuple[str, ...]:
        """What the new plan has otherwise than the old one: `tp 1 -> 2`. () if nothing, or if nothing fits."""
        return () if self.mend is None else _differences(self.old, self.mend)

    @property
    def mend_words(self) -> str:
        """The planner's mend, in a sentence."""
        if self.mend is None:
            return (
                f"The planner knows no plan for {plural(self.now.n_ranks, 'device')} that fits: ask for more of them."
            )
        if not self.differences:
            return f"The planner keeps the plan, which is still the fastest: {self.mend}."
        return f"The planner changes {', '.join(self.differences)}: {self.mend}."


def change_of(name: str | NumberChange) -> NumberChange:
    """A change by its name. ValueError, with the nearest name, for an unknown one."""
    if isinstance(name, NumberChange):
        return name
    known = {change.name: change for change in CHANGES}
    if name in known:
        return known[name]
    near = difflib.get_close_matches(str(name).lower(), known, 1, 0.4)
    mend = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
    raise ValueError(f"no change is called {name!r}; {mend}")


def what_breaks(case: DesignCase | str, change: NumberChange | str) -> Fracture:
    """What the change does to the case's best plan. ValueError for unknown names, and a case of which no plan fits."""
    design, changed = case_of(case), change_of(change)
    old = design.found[0] if design.found else None
    if old is None or not old.kept:
        raise ValueError(f"no plan of the case {design.name!r} fits: nothing is there that could break")
    before = Situation(old.shape, old.hardware, old.layout.size, old.recipe.batch_size, old.recipe.precision)
    now = changed.of(before)
    try:
        layout, recipe = carried(old, now)
    except ValueError as error:
        return Fracture(design, changed, old, now, LAYOUT, f"The plan cannot be cut so any more: {error}.")
    room = now.hardware.memory_bytes.value * (1 - HEADROOM)
    peak, moment, rank, kinds = fullest(now, layout, recipe)
    if peak > room:
        over = peak - room
        words = (
            f"Rank {rank} holds {gb(peak)}, and {gb(room)} may be used of each device: {gb(over)} too much. It holds "
            f"{kinds}."
        )
        return Fracture(design, changed, old, now, MEMORY, words, over, moment)
    parts = _grown(costs(before, old.layout, old.recipe), costs(now, layout, recipe))
    return Fracture(design, changed, old, now, *_slower(parts, peak, room), moment=moment, parts=parts)


def carried(old: Plan, now: Situation) -> tuple[Layout, Recipe]:
    """The old plan for a new situation: with another number of devices another dp, and micro-batches of as many rows as
    before, or of all rows that a rank has if these are fewer. ValueError if it cannot be cut so."""
    one = old.layout.size // old.layout.dp
    if now.n_ranks % one:
        raise ValueError(f"{plural(now.n_ranks, 'device')} cannot be cut into parts of pp x cp x tp = {one}")
    layout = replace(old.layout, dp=now.n_ranks // one)
    if not now.batch or now.batch % layout.dp:
        raise ValueError(f"{plural(now.batch, 'sequence')} cannot be dealt evenly to dp={layout.dp}")
    of_rank = now.batch // layout.dp
    rows = min(micro_rows(old.recipe, old.layout), of_rank)
    if of_rank % rows:
        raise ValueError(
            f"{plural(of_rank, 'sequence')} of a rank make no whole micro-batches of {plural(rows, 'sequence')}"
        )
    recipe = replace(old.recipe, batch_size=now.batch, n_micro=of_rank // rows, precision=now.precision)
    check_plan(now.shape, recipe, layout)
    return layout, recipe


def fullest(now: Situation, layout: Layout, recipe: Recipe) -> tuple[int, str, int, str]:
    """(bytes at the highest moment, that moment, the rank, all that it holds then, in words) of the fullest rank."""
    moments = []
    for rank in fullest_ranks(now.shape, layout, recipe):
        local = Rank(now.shape, layout, recipe, rank, now.hardware.device)
        top = highest(local)
        moments.append((sum(local.base()) + top.total, top.when, rank, moment_words(local, top)))
    return max(moments, key=lambda moment: moment[0])


def costs(now: Situation, layout: Layout, recipe: Recipe) -> Mapping[str, float]:
    """Device-seconds per token of each part of a step, which add up to the planner's step: computing, the host and the
    optimizer, the bubble, and of each axis's wire what nothing hides."""
    step = StepTime(now.shape, layout, recipe, now.hardware, simulated=0)
    seconds = dict(step.breakdown())
    along_dp = data_parallel.waiting_s(recipe.strategy_law, step.states, step.work(), step.timing)
    along_pp, _ = pipeline.waiting_s(step.timing, step.passes.lasts)
    exposed = {
        COMPUTE: seconds["compute"],
        ONCE: seconds["host"] + seconds["optimizer"],
        BUBBLE: seconds["bubble"],
        "tp": seconds["tp"],
        "cp": seconds.get("cp", 0.0) - step.passes.spent.hidden,
        "ep": seconds.get("ep", 0.0),
        "pp": along_pp.longer,
        "dp": along_dp.longer,
    }
    per_token = layout.size / now.n_tokens
    return MappingProxyType({name: value * per_token for name, value in exposed.items()})


def possible(plan: Plan) -> tuple[str, ...]:
    """The kinds that can come true for a plan: an axis of one rank has no wire, and one stage no bubble."""
    sizes = {axis: getattr(plan.layout, axis) for axis in WIRES}
    idle = {axis for axis, size in sizes.items() if size == 1} | ({BUBBLE} if plan.layout.pp == 1 else set())
    return tuple(kind for kind in KINDS if kind not in idle)


def choices(fracture: Fracture, seed: int) -> tuple[str, ...]:
    """Four kinds in an order that tells nothing, one of which is right; the same ones for the same seed."""
    numbers = random.Random(f"{seed} {fracture.case.name} {fracture.change.name}")
    others = [kind for kind in possible(fracture.old) if kind != fracture.kind]
    offered = [fracture.kind, *numbers.sample(others, OFFERED - 1)]
    numbers.shuffle(offered)
    return tuple(offered)


def drawn(case: DesignCase | str, seed: int, without: Iterable[str] = (), count: int = ROUND) -> tuple[Fracture, ...]:
    """The fractures of `count` changes, drawn by the seed, none of whose names is in `without`: of as many kinds
    as possible, so that one answer is not always right. ValueError if too few changes are left."""
    design, out = case_of(case), {change_of(name).name for name in without}
    left = [change for change in CHANGES if change.name not in out]
    if design.n_ranks > MOST_WITH_EXPERTS:
        left = [change for change in left if change.name != EXPERTS]
    if not 1 <= count <= len(left):
        raise ValueError(f"a round of {count} changes cannot be drawn from {len(left)}: leave fewer of them out")
    random.Random(f"{seed} {design.name}").shuffle(left)
    kinds, chosen, others = set[str](), list[Fracture](), list[Fracture]()
    for change in left:
        fracture = what_breaks(design, change)
        (others if fracture.kind in kinds else chosen).append(fracture)
        kinds.add(fracture.kind)
    return tuple([*chosen, *others][:count])


def _micro(seconds: float) -> str:
    """Microseconds in words: `1.43`, `252`, `1,290`."""
    value = seconds * 1e6
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _grown(before: Mapping[str, float], after: Mapping[str, float]) -> tuple[GrownPart, ...]:
    """The parts that are there before or after, those that grew most first."""
    parts = [GrownPart(name, before[name], after[name]) for name in before if before[name] or after[name]]
    return tuple(sorted(parts, key=lambda part: -part.growth))


def _slower(parts: tuple[GrownPart, ...], peak: float, room: float) -> tuple[str, str]:
    """(kind, words) of a plan that still runs."""
    most, whole = parts[0], math.fsum(part.before for part in parts)
    fits = f"It still fits ({gb(peak)} of {gb(room)})"
    if most.growth < LEAST * whole:
        sum_of_all = math.fsum(part.growth for part in parts)
        return NOTHING, (
            f"{fits}, and no part of a step grows by {LEAST:.0%} of it: a token costs {sum_of_all / whole:+.1%} "
            "device-seconds."
        )
    times = f" ({most.after / most.before:.3g} times as much)" if most.before else ""
    return most.name, (
        f"{fits}, but more of the devices' time per token goes to {KINDS[most.name]}: {_micro(most.before)} before, "
        f"{_micro(most.after)} device-microseconds now{times}, {most.growth / whole:+.0%} of the old step."
    )


def _best(now: Situation) -> Plan | None:
    answers = plans(now.shape, now.hardware, now.n_ranks, now.batch, precision=now.precision, by="seconds")
    return answers[0] if answers and answers[0].kept else None


def _differences(old: Plan, new: Plan) -> tuple[str, ...]:
    """Each choice that differs, as `name old -> new`."""

    def chosen(plan: Plan) -> dict[str, object]:
        layout, recipe = plan.layout, plan.recipe
        sizes = {"devices": layout.size} | {axis: getattr(layout, axis) for axis in ("dp", "pp", "cp", "tp", "ep")}
        shared = recipe.sharded if layout.dp * layout.cp > 1 else "whole state"
        schedule = f"{recipe.schedule} x{recipe.stages_per_rank}" if layout.pp > 1 else "none"
        rows = micro_rows(recipe, layout)
        return sizes | {
            "strategy": shared, "schedule": schedule, "recomputation": recipe.recompute,
            "micro-batches": f"{recipe.n_micro} of {plural(rows, 'sequence')}",
        }  # fmt: skip

    before, after = chosen(old), chosen(new)
    return tuple(f"{name} {before[name]} -> {after[name]}" for name in before if before[name] != after[name])
