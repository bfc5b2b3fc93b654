"""plans: every way to lay a model on n ranks, the fast ones first, the impossible ones with the reason.

First comes the plan that is expected to be fastest, by its predicted seconds and by what made published runs like it
slower (labkit.plan.search.risk). A fragile plan is not first because it would be fast if all went well.

    dp x pp x cp x tp = n_ranks  and, for a model with experts, ep: divisors of dp and of the number of experts
      x strategy (ddp, zero1, zero2, zero3, hsdp)  x schedule (1f1b, interleaved, zero_bubble)  x recompute
      x micro-batch

    hsdp   zero3 inside a node, where dp has ranks on several: as many as a node has besides tp, cp and pp
    tp     inside a node only: four sums a block would cross the slow links otherwise
    sp     always with tp, where it divides the sequence: the same bytes on the wire, fewer activations
    cp     with rows so long that each rank keeps 8,192 tokens or more of them: shorter rows are better dealt out along
           dp, which sends less. Attention by ring, gather and, where heads come out even, ulysses;
           where all blocks have a window, by halo
    gpipe  never: 1f1b takes as long and holds less
    ep     with experts, whose products and gradients each rank then has 1/ep of; with tp it has 1/tp of each of these.
           cp beside experts is left out where their balance loss or capacity is counted by row, and routing is taken as
           balanced

For each way: does the batch divide, does the model divide, does it fit the memory (predict_memory on the first and the
last rank of the pipeline, which hold most), how long does a step take (predict_step; bubbles by the schedule's law).
A larger micro-batch holds more, so when one does not fit the larger ones are not tried.

With an adapter (LoRA, QLoRA) the ways are fewer: dp = n_ranks, and each device has the whole frozen model or, with
zero3, 1/n of it; what is left to choose is checkpointing and the micro-batch (labkit.plan.step.adapters).

Long because a search's questions to a plan stand in one place, the cheap ones first.

Sources: Narayanan et al., arXiv:2104.04473, section 3 (what to choose, in this order); Rajbhandari et al.,
arXiv:1910.02054; Korthikanti et al., arXiv:2205.05198.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from typing import Any

from labkit.plan.breakdown import KINDS, Breakdown
from labkit.plan.checks import is_whole
from labkit.plan.job.recipe import PRECISIONS, STRATEGIES, Recipe
from labkit.plan.job.stages import check_plan, lighter_ranks, micro_rows
from labkit.plan.laws.experts import counts_rows
from labkit.plan.laws.precisions import EMULATED
from labkit.plan.laws.schedules import LAWS as SCHEDULES
from labkit.plan.laws.strategies import HYBRID, LAWS
from labkit.plan.machine.hardware import Hardware
from labkit.plan.model.cut_attention import CONTEXTS
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout
from labkit.plan.search.interval import Interval, interval_of
from labkit.plan.search.risk import Risk, full_from, risks
from labkit.plan.search.wanted import Wanted
from labkit.plan.step.adapters import Adapter, adapter_memory, adapter_step
from labkit.plan.step.memory import Sum, highest, predict_memory
from labkit.plan.step.rank import Rank, fullest_ranks
from labkit.plan.step.time import LayoutTables, peak_of, predict_step
from labkit.plan.words import nearest, plural

WORDS = 128
MICRO_ROWS = (1, 2, 4, 8, 16)
AGAIN = ("none", "selective", "full")
"""Recomputations that are tried: "gathers" alone saves less than "selective", for nearly the same seconds."""
LEAST_TOKENS = 8192
"""Tokens of a row that a rank keeps at least where cp cuts it, as many as Llama 3 has of 128k over 16 ranks."""
HEADROOM = 0.06
"""Share of the memory that is left alone: buffers of the wire, kernels' scratch, what the allocator cannot use."""
ORDERS = ("expected", "seconds")
MOST_RANKS = 1 << 20
"""No machine has as many devices; to find the divisors of a much larger number takes for ever."""
SETTLED = 4
"""Plans, the first ones, whose place in the order is settled by their memory, too."""
EDGE = 0.15
"""The share of a device's memory, above and below it, within which it is not sure that a plan fits: of five
published runs four lie so near to what is predicted (labkit.plan.search.compared_with_published)."""


@dataclass(frozen=True)
class Plan:
    """One way to run a model. `refused` is "" for a plan that is kept, else the reason with the numbers.

    step   seconds of a step by what they are spent on, None for a refused plan
    mfu    model flops utilisation, 0 to 1; with an adapter of the flops that it needs (4 a frozen weight)
    needs_bytes   where it was refused for its memory: what a rank would hold, at least
    adapter   what trains in the place of the weights; None: the weights do
    risks   what made published runs like it slower than predicted, with its odds"""

    shape: ModelShape
    hardware: Hardware
    layout: Layout
    recipe: Recipe
    step: Breakdown | None = None
    mfu: float = 0.0
    refused: str = ""
    needs_bytes: float = 0.0
    adapter: Adapter | None = None
    risks: tuple[Risk, ...] = ()

    @cached_property
    def memory(self) -> Breakdown:
        """Bytes of the fullest rank by kind, worked out when it is asked for. ValueError where nothing can be run."""
        lay, device = self.layout, self.hardware.device
        if self.adapter is not None:
            rows, shared = micro_rows(self.recipe, lay), lay.size if self.recipe.cuts.weights else 1
            return adapter_memory(self.shape, self.adapter, rows, self.recipe.recompute == "full", shared)
        breakdowns = [
            predict_memory(self.shape, lay, self.recipe, rank, device)
            for rank in fullest_ranks(self.shape, lay, self.recipe)
        ]
        return max(breakdowns, key=lambda breakdown: breakdown.total)

    @property
    def kept(self) -> bool:
        """True if this plan can be run, that is, if it was not refused."""
        return not self.refused

    @property
    def at_edge(self) -> bool:
        """True if what a rank holds is within EDGE of what a device has, so that it may fit or not."""
        needs = self.memory.total if self.kept else self.needs_bytes
        return abs(needs / self.hardware.memory_bytes.value - 1) <= EDGE

    @property
    def step_s(self) -> float:
        """Seconds of a step; infinite for a refused plan."""
        return self.step.total if self.step is not None else float("inf")

    @property
    def expected_s(self) -> float:
        """Seconds of a step to expect with its risk; infinite for a refused plan."""
        return max([self.step_s, *(risk.expected_s(self.step_s) for risk in self.risks)])

    @property
    def interval(self) -> Interval | None:
        """What nine of ten published runs like it took, in multiples of what is predicted; None for a refused plan,
        with an adapter and on a CPU, since nothing like it is published."""
        if not self.kept or self.adapter is not None or self.hardware.device == "cpu":
            return None
        return interval_of(self.shape, self.layout, self.hardware, self.mfu)

    def __str__(self) -> str:
        """`dp=8 pp=4 tp=8, zero1, 1f1b of 16, checkpointing: 2.1 s, 43% MFU, 61 GB`"""
        lay, r = self.layout, self.recipe
        parts = [f"dp={lay.dp} " * (lay.dp > 1) + f"pp={lay.pp} tp={lay.tp}"]
        parts[0] += f" cp={lay.cp} by {r.context}" * (lay.cp > 1) + f" ep={lay.ep}" * (lay.ep > 1)
        parts += [r.sharded] * (lay.dp * lay.cp > 1)
        parts += [f"{r.schedule} of {r.n_micro}" if lay.pp > 1 else plural(r.n_micro, "micro-batch")]
        parts += [str(self.adapter)] * (self.adapter is not None)
        parts += [r.again] * bool(r.again)
        end = self.refused or f"{self.step_s:.3g} s, {100 * self.mfu:.0f}% MFU, {gb(self.memory.total)}"
        return f"{', '.join(parts)}: {end}"


def gb(n_bytes: float) -> str:
    """`70.3 GB`; below a tenth of a GB `11.2 MB`, for the small devices that a laptop plays."""
    return f"{n_bytes / 1e9:.1f} GB" if n_bytes >= 1e8 else f"{n_bytes / 1e6:.1f} MB"


def plans(
    shape: Any,
    hardware: Hardware | str,
    n_ranks: int,
    global_batch: int,
    seq: int | None = None,
    *,
    precision: str = "bf16",
    optimizer: str = "adamw",
    headroom: float = HEADROOM,
    adapter: str = "",
    rank: int = 16,
    strategy: str = "",
    recompute: str = "",
    n_micro: int | None = None,
    offload: bool = False,
    by: str = "expected",
) -> list[Plan]:
    """All ways to run `shape` (a ModelShape, a preset's name, a GPTConfig) on `n_ranks` devices: kept ones by the
    step time that is expected, best first, then refused ones; with by="seconds" by the predicted step time alone, as if
    none of their risks came true. `global_batch` is rows of a step over all ranks, `seq` tokens of a row. For several
    ranks the vocabulary is padded to a multiple of 128, and a tied head on several stages has a copy at each end, as
    Megatron-LM does both (labkit.assemble wants tied=False there). `plan.shape` is the model that was planned for.

    `adapter` "lora" or "qlora": the model is frozen, and adapters of this `rank` on all linears of the blocks train, in
    bf16 with AdamW.

    `strategy`, `recompute`, `n_micro` and `offload` are tried alone, where they are set (labkit.plan.search.wanted).

    ValueError for numbers below 1, unknown presets and orders, a headroom that is not a share, "fp8" on a device
    without 8-bit units, an adapter in another precision or with another optimizer, and a rank that no weight has."""
    shape = ModelShape.preset(shape) if isinstance(shape, str) else ModelShape.of(shape)
    hardware = Hardware.preset(hardware) if isinstance(hardware, str) else hardware
    for name, value in (
        ("n_ranks", n_ranks),
        ("global_batch", global_batch),
        ("seq", shape.seq if seq is None else seq),
    ):
        if not is_whole(value):
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    if n_ranks > MOST_RANKS:
        raise ValueError(f"plans are made for at most {MOST_RANKS:,} devices, got {n_ranks:,}")
    if precision not in PRECISIONS or not 0 <= headroom < 1:
        raise ValueError(
            f"precision is one of {', '.join(PRECISIONS)}, headroom a share: {precision!r}, {headroom}; "
            f"{nearest(precision, PRECISIONS)}"
        )
    if by not in ORDERS:
        raise ValueError(f"plans are ordered by one of {', '.join(ORDERS)}, got {by!r}; {nearest(by, ORDERS)}")
    wanted = Wanted(strategy, recompute, n_micro, offload)
    if precision == "fp8":
        hardware.peak(precision)
    if precision in EMULATED:
        raise ValueError(f"{precision} is emulated, and no speed is known of it: plan with precision='fp8' or 'bf16'")
    words = shape.vocab + -shape.vocab % WORDS if n_ranks > 1 else shape.vocab
    shape = shape.changed(seq=seq or shape.seq, vocab=words, name=shape.name, source=shape.source)
    search = Search(shape, hardware, headroom, precision, wanted)
    if adapter:
        if precision != "bf16" or optimizer not in ("adamw", "adam"):
            raise ValueError(f"adapters are planned for bf16 with adamw, got precision={precision!r}, {optimizer!r}")
        if offload or recompute not in ("", "none", "full"):
            raise ValueError(
                f"adapters are planned with recompute='none' or 'full', and nothing offloaded, got "
                f"recompute={recompute!r}, offload={offload}"
            )
        return sorted(search.adapted(Adapter(adapter, rank), n_ranks, global_batch), key=lambda plan: plan.expected_s)
    most_cp = 1 if counts_rows(shape) else max(1, shape.seq // LEAST_TOKENS)
    candidates = [
        plan
        for layout in layouts(n_ranks, shape.n_expert, most_cp)
        for plan in search.on(layout, global_batch, optimizer)
    ]
    return search.in_order(candidates) if by == "expected" else sorted(candidates, key=lambda plan: plan.step_s)


def layouts(n_ranks: int, n_expert: int = 0, most_cp: int = 1) -> Iterator[Layout]:
    """Every dp x pp x cp x tp with that many ranks and a cp of `most_cp` at most, with every ep by which dp and the
    number of experts can be divided."""
    for tp in divisors(n_ranks):
        for pp in divisors(n_ranks // tp):
            for cp in (cp for cp in divisors(n_ranks // tp // pp) if cp <= most_cp):
                dp = n_ranks // tp // pp // cp
                for ep in divisors(math.gcd(dp, n_expert)) if n_expert else [1]:
                    yield Layout(dp, pp, tp, cp, ep)


def moment_words(rank: Rank, top: Sum) -> str:
    """`in the optimizer's step 16.1 GB weights, 32.1 GB gradients, ...`: what a rank holds at that moment, by kind."""
    added = (top.weights, top.gradients, 0, top.activations, top.other)
    held = {kind: base + extra for kind, base, extra in zip(KINDS, rank.base(), added, strict=True)}
    return f"at the peak, {top.when}, " + ", ".join(f"{gb(value)} {kind}" for kind, value in held.items() if value)


def divisors(number: int) -> list[int]:
    """The divisors of `number`, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


class Search:
    """Makes the plans of a layout, and asks the cheap questions about each plan first."""

    def __init__(
        self, shape: ModelShape, hardware: Hardware, headroom: float, precision: str, wanted: Wanted | None = None
    ) -> None:
        self.shape, self.hardware, self.precision, self.wanted = shape, hardware, precision, wanted or Wanted()
        self.room = hardware.memory_bytes.value * (1 - headroom)
        self._layout: Layout | None = None
        self._recipe: Recipe | None = None
        self._tables = LayoutTables()
        self._known: dict[tuple[object, ...], dict[int, dict[str, Any]]] = {}
        self._like: dict[int, dict[str, Any]] = {}
        self._runs: dict[int, dict[str, Any]] = {}

    def on(self, layout: Layout, batch: int, optimizer: str) -> Iterator[Plan]:
        """All plans on one layout; a single refused one if nothing there can work."""
        base = Recipe(batch_size=batch, precision=self.precision, optimizer=optimizer)
        reason = self.impossible(layout, base)
        if reason:
            yield Plan(self.shape, self.hardware, layout, base, refused=reason)
            return
        sizes = self.wanted.rows(MICRO_ROWS, batch // layout.dp)
        if not sizes or not self.wanted.strategies(self.strategies(layout)):
            reason = f"{self.wanted} cannot be had with {batch // layout.dp} rows on each of dp={layout.dp}"
            yield Plan(self.shape, self.hardware, layout, base, refused=reason)
            return
        ways = [replace(base, context=kind) for kind in CONTEXTS] if layout.cp > 1 else [base]
        judged = [plan for way in ways if not self.impossible(layout, way) for plan in self.by(layout, way, sizes)]
        if not judged and f"{self.wanted}":
            judged = [Plan(self.shape, self.hardware, layout, base, refused=f"no recipe has {self.wanted} there")]
        yield from judged

    def by(self, layout: Layout, base: Recipe, sizes: list[int]) -> Iterator[Plan]:
        """All plans on one layout whose attention reaches over cp as in `base`, in micro-batches of these rows."""
        for strategy, shard in self.wanted.strategies(self.strategies(layout)):
            for schedule, v in self.schedules(layout):
                for recompute in self.wanted.recomputations(AGAIN):
                    for rows in sizes:
                        plan = self.judge(layout, base, strategy, shard, schedule, v, recompute, rows)
                        if plan is not None:
                            yield plan
                        if plan is not None and plan.refused:
                            break  # a larger micro-batch holds more

    def adapted(self, adapter: Adapter, n_ranks: int, batch: int) -> Iterator[Plan]:
        """All plans that train an adapter: the frozen model whole on each device, or with zero3 cut over all."""
        layout, base = Layout(n_ranks), Recipe(batch_size=batch, precision=self.precision)
        reason = self.impossible(layout, base)
        if reason:
            yield Plan(self.shape, self.hardware, layout, base, refused=reason, adapter=adapter)
            return
        pairs = [("ddp", None), ("zero3", None)] if n_ranks > 1 else [("ddp", None)]
        tried = [strategy for strategy, _ in self.wanted.strategies(pairs)]
        recomputations = self.wanted.recomputations(("none", "full"))
        sizes = self.wanted.rows(MICRO_ROWS, batch // n_ranks)
        ways = [(strategy, recompute, rows) for strategy in tried for recompute in recomputations for rows in sizes]
        if not ways:
            reason = f"adapters are planned with ddp and zero3: {self.wanted} cannot be had"
            yield Plan(self.shape, self.hardware, layout, base, refused=reason, adapter=adapter)
        too_large = set[tuple[str, str]]()
        for strategy, recompute, rows in ways:
            if (strategy, recompute) not in too_large:
                m = batch // n_ranks // rows
                recipe = Recipe(strategy, batch_size=batch, n_micro=m, recompute=recompute, precision=self.precision)
                shared = n_ranks if recipe.cuts.weights else 1
                memory = adapter_memory(self.shape, adapter, rows, recompute == "full", shared)
                if memory.total > self.room:
                    where = f"1/{shared} on each and gathered units" if shared > 1 else "whole on each"
                    reason = (
                        f"{gb(memory.total)} on each device, {gb(self.room)} are there: {gb(memory['parameters'])} "
                        f"weights, {where}, {gb(memory['activations'] + memory['other'])} activations"
                    )
                    yield Plan(self.shape, self.hardware, layout, recipe, None, 0.0, reason, memory.total, adapter)
                    too_large.add((strategy, recompute))  # a larger micro-batch holds more
                    continue
                step = adapter_step(self.shape, adapter, self.hardware, rows, m, recompute == "full", n_ranks, shared)
                flops = batch * self.shape.seq * adapter.flops_per_token(self.shape)
                mfu = flops / (step.total * n_ranks * self.hardware.peak(self.precision))
                yield Plan(self.shape, self.hardware, layout, recipe, step, mfu, adapter=adapter)

    def impossible(self, layout: Layout, recipe: Recipe) -> str:
        """The reason why nothing can work on this layout; "" if something may."""
        if layout.tp > self.hardware.node_size:
            return (
                f"tp={layout.tp} spans {-(-layout.tp // self.hardware.node_size)} nodes of {self.hardware.node_size}: "
                f"4 sums a block would cross a link of {self.hardware.inter.bytes_per_s / 1e9:.3g} GB/s"
            )
        try:
            check_plan(self.shape, recipe, layout)
        except ValueError as error:
            return str(error)
        return ""

    def strategies(self, layout: Layout) -> list[tuple[str, int | None]]:
        """(strategy, ranks that share one copy of its state if not all) worth trying."""
        if layout.dp * layout.cp == 1:
            return [("ddp", None)]
        # neighbours along dp on one node, with their ranks of cp
        inside = self.hardware.node_size // (layout.tp * layout.pp * layout.cp)
        cuts = inside * layout.cp > 1 and 0 < inside < layout.dp and layout.dp % inside == 0
        hybrid = [(HYBRID, inside)] if cuts and layout.ep == 1 else []
        return [*((strategy, None) for strategy in STRATEGIES), *hybrid]

    def schedules(self, layout: Layout) -> list[tuple[str, int]]:
        """(schedule, stages on a rank) worth trying."""
        if layout.pp == 1:
            return [("1f1b", 1)]
        pairs = list[tuple[str, int]]()
        for law in SCHEDULES.values():
            if law.searched and not (law.splits and self.shape.n_expert):
                stages = (law.stages,) if law.stages else (2, 4)
                pairs += [(law.name, v) for v in stages if v == 1 or layout.pp * v <= self.shape.n_layer]
        return pairs

    def judge(
        self,
        layout: Layout,
        base: Recipe,
        strategy: str,
        shard: int | None,
        schedule: str,
        v: int,
        recompute: str,
        rows: int,
    ) -> Plan | None:
        """One plan; None for a combination that no recipe allows, or that equals another one."""
        m = base.batch_size // layout.dp // rows
        if (v > 1 and m % layout.pp) or (SCHEDULES[schedule].splits and recompute != "none"):
            return None
        in_8_bits = "fp8_gathers" in LAWS[strategy].options and self.precision == "fp8"
        try:
            recipe = Recipe(
                strategy, schedule, base.batch_size, m, v, recompute=recompute, precision=self.precision,
                sequence_parallel=layout.tp > 1 and self.shape.seq // layout.cp % layout.tp == 0,
                optimizer=base.optimizer, shard_ranks=shard, fp8_gathers=in_8_bits, context=base.context,
                offload=self.wanted.offload,
            )  # fmt: skip
        except ValueError:
            return None
        needs, reason = self.too_large(layout, recipe)
        if reason:
            return Plan(self.shape, self.hardware, layout, recipe, refused=reason, needs_bytes=needs)
        step = predict_step(self.shape, layout, recipe, self.hardware, simulated=0, tables=self._tables)
        speed = base.batch_size * self.shape.seq / step.total
        mfu = self.shape.mfu(speed, layout.size * peak_of(recipe, self.hardware))
        fragile = risks(layout, recipe, self.hardware)
        return Plan(self.shape, self.hardware, layout, recipe, step, mfu, risks=fragile)

    def in_order(self, candidates: Sequence[Plan]) -> list[Plan]:
        """The plans by the seconds that are expected of them. Memory, which may put a pipeline at risk, takes long to
        find: it is found of those that come first without it, until SETTLED plans are in their place."""
        queue = [(plan.expected_s, place, plan) for place, plan in enumerate(candidates)]
        heapify(queue)
        settled, weighed = list[Plan](), set[int]()
        while queue and len(settled) < SETTLED:
            before, place, plan = heappop(queue)
            if plan.layout.pp > 1 and plan.kept and place not in weighed:
                weighed.add(place)
                needs, _ = self.too_large(plan.layout, plan.recipe, full_from(self.hardware))
                plan = replace(plan, risks=risks(plan.layout, plan.recipe, plan.hardware, needs)) if needs else plan
            if plan.expected_s > before:
                heappush(queue, (plan.expected_s, place, plan))
            else:
                settled.append(plan)
        return settled + [plan for *_, plan in sorted(queue, key=lambda entry: entry[:2])]

    def rank(self, layout: Layout, recipe: Recipe, rank: int) -> Rank:
        """A rank by the recipe that this search has come to, which shares with those of other recipes on this layout
        what they have in common."""
        like, runs = self._like.setdefault(rank, {}), self._runs.setdefault(rank, {})
        return Rank(self.shape, layout, recipe, rank, self.hardware.device, like, runs)

    def _come_to(self, layout: Layout, recipe: Recipe) -> None:
        """Find what is known of ranks by recipes like this one; forget what belongs to another layout, since layouts
        come one after another."""
        if layout != self._layout:
            self._layout, self._recipe, self._tables, self._known = layout, None, LayoutTables(), {}
        if recipe is not self._recipe:
            self._recipe = recipe
            self._like, self._runs = (self._known.setdefault(key, {}) for key in (recipe.lasting, recipe.running))

    def too_large(self, layout: Layout, recipe: Recipe, room: float | None = None) -> tuple[float, str]:
        """Bytes needed, and why that is too much for `room`, by default what a search plans with; 0 and "" if it fits.
        Only near the limit the highest moment is found."""
        self._come_to(layout, recipe)
        lighter, room = list[int](), self.room if room is None else room
        for rank in fullest_ranks(self.shape, layout, recipe):
            if rank in lighter:
                continue  # it holds no more than the first one, which has room for all that it can ever hold
            local = self.rank(layout, recipe, rank)
            needs, most = local.bounds()
            if rank == 0 and most <= room:
                lighter = lighter_ranks(self.shape, layout, recipe)
            prefix, parts = "at least ", ""
            if needs <= room < most and sum(local.base()) + (top := highest(local, room)).total > room:
                needs, prefix, parts = sum(local.base()) + top.total, "", moment_words(local, top)
            if needs > room:
                held = parts or f"{gb(local.in_flight_bytes())} activations, else weights, gradients, optimizer"
                return needs, f"{prefix}{gb(needs)} on rank {rank}, {gb(room)} are there: {held}"
        return 0.0, ""
