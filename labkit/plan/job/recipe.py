"""Recipe: every choice of a training run, a pure value.

A recipe says nothing about the model (its sizes) and nothing about the machine (a layout). The three together decide
what a step holds, sends and takes: the planner predicts it, `labkit.assemble` builds it.

Long because every choice has its meaning, its refusals and what follows from it in this one place.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import InitVar, dataclass, fields
from functools import cached_property
from math import gcd
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from labkit.plan.checks import is_number, is_whole
from labkit.plan.laws import (
    context,
    data_parallel,
    expert_tensor,
    experts,
    optimizers,
    overlapped_tensor,
    pipeline,
    schedules,
    strategies,
    tensor,
)  # fmt: skip
from labkit.plan.laws.choices import Cuts
from labkit.plan.laws.optimizers import OptimizerLaw
from labkit.plan.laws.precisions import PRECISIONS as PRECISION_LAWS, SCALINGS, Precision
from labkit.plan.laws.schedules import ScheduleLaw
from labkit.plan.laws.sent_gradients import WAYS
from labkit.plan.laws.strategy import Strategy
from labkit.plan.model.cut_attention import CONTEXTS
from labkit.plan.model.setting import RECOMPUTE
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.groups import Grouping
from labkit.plan.partition.layout import Layout
from labkit.plan.schedules.schedule import Schedule
from labkit.plan.words import divisors

STRATEGIES = tuple(strategies.LAWS)
SCHEDULES = tuple(schedules.LAWS)
TWO_STAGES = tuple(law.name for law in schedules.LAWS.values() if law.folds)
"""Schedules with two stages on a rank; with dualpipe each stage is on two ranks as well."""
SPLIT = tuple(law.name for law in schedules.LAWS.values() if law.splits)
"""Schedules that cut a backward in two."""
PRECISIONS = tuple(PRECISION_LAWS)
OPTIMIZERS = tuple(optimizers.LAWS)
DECAY_ON = ("all", "linears")
KNOWN = MappingProxyType(
    {
        "strategy": STRATEGIES,
        "schedule": SCHEDULES,
        "precision": PRECISIONS,
        "recompute": RECOMPUTE,
        "scaling": SCALINGS,
        "optimizer": OPTIMIZERS,
        "decay_on": DECAY_ON,
        "context": CONTEXTS,
        "gradients": tuple(WAYS),
    }
)
"""The words that fields of a recipe may hold."""


@dataclass(frozen=True)
class Recipe:
    """The choices of a run. Raises ValueError for an unknown choice, and for two that exclude each other.

    What stands beside a field is the help of its option of `labkit train`, too.

    strategy         what data parallelism does with state: "ddp", "zero1", "zero2", "zero3"
    schedule         in which order stages work: "naive", "gpipe", "1f1b", "interleaved", "zero_bubble", "zb_h2"; with
                     stages_per_rank=2 also "zb_v", "v_half", "v_min", "dualpipe_v", and "dualpipe", for which pp and
                     `n_micro` are even: half of the micro-batches enter at each end, and each stage is on two ranks
    batch_size       rows of a step, over all ranks
    n_micro          micro-batches that each rank cuts its rows into
    stages_per_rank  stages of a pipeline that each rank has, 2 or more where `schedule` deals several to each
    recompute        what backward runs again: "none"; "gathers": only what sequence parallelism gathered from the
                     ranks; "selective": that, norms and activations, while products and attention are kept;
                     "full": each block, of which only the input is kept
    sequence_parallel  what tp leaves whole is cut over its ranks, along the tokens
    tp_overlap       with sequence_parallel: products are cut into tp pieces, and what tp sends for one piece travels
                     while another one is computed (labkit.parallel.overlapped_tensor)
    precision        "fp32", "fp64": everything in it;
                     "bf16": weights, gradients and activations in bf16, the optimizer steps on fp32 masters;
                     "pure-bf16": the same without masters, and the optimizer's state is in bf16, too: small steps on
                     large weights are rounded away;
                     "fp8": as bf16, but the linears of the blocks multiply 8-bit copies, with units as `scaling` says;
                     "nvfp4": as bf16, but the linears of the blocks multiply 4-bit copies in blocks of 16, emulated;
                     "amp": weights in fp32, products in bf16 (torch's autocast); "fp16": the same with loss scaling
    fp32_gradients   with "bf16", "fp8" and "nvfp4": gradients are added up, over micro-batches and over ranks, in fp32
    offload          with "zero1", "zero2" and "zero3": the optimizer's state is on the CPU, and it steps there
    optimizer        "adamw", "adam", "sgd", "lamb", "lars"; "muon", "shampoo": on the matrices of the blocks, AdamW on
                     the rest
    lr               learning rate
    weight_decay     what a step takes off a weight besides, as a share of it times the learning rate
    warmup_steps     the learning rate rises in a line over this many steps
    clip_norm        limit of the gradients' norm; none if left out
    bucket_bytes     with "ddp", "zero1" and "zero2": bytes of gradients that are sent together
    prefetch         with "zero3": layers whose weights are gathered ahead of the one that works
    seed             of the weights and the data
    shard_ranks      with "zero3": state is sharded in groups of so many ranks of dp, and copied from group to group
                     (HSDP, labkit.parallel.hsdp), or over all of dp if left out. Where cp cuts rows, all ranks of cp
                     are in a group, too: it has so many times cp
    reshard          with "zero3": weights gathered in forward are given back until backward; else they stay whole
    scaling          with "fp8", the units of 8-bit copies: "tensor": one for each tensor; "delayed": the same, known
                     from earlier steps; "tiles": one for 1 x 128 numbers, 128 x 128 of weights, "mx": for 32 numbers, a
                     power of two (both emulated)
    fp8_gathers      with "zero3" and "fp8" scaled by "tensor": the weights of these linears are gathered in 8 bits
    decay_on         what `weight_decay` applies to: "all" parameters; "linears": not to norms, biases and embeddings
    context          where rows are cut over cp ranks, how attention reaches the others' tokens: "ring", "gather" (of
                     keys and values), "ulysses" (tokens for heads) or, for a model whose blocks all have a window,
                     "halo" (the keys that its queries see, and no more); see labkit.parallel.contexts
    gradients        with "ddp", how gradients travel: "exact": as they are added up; "bf16": in 2 bytes; "8bit": in 1
                     byte with a unit for 256 of them, what rounding cuts off being added to the next step's (on its
                     rank: a checkpoint does not hold it). It changes what is learned, so that `plans` does not try it
    checkpointing    the old name of recompute="full"; a recipe keeps `recompute` alone
    """

    strategy: str = "ddp"
    schedule: str = "1f1b"
    batch_size: int = 8
    n_micro: int = 1
    stages_per_rank: int = 1
    recompute: str = "none"
    sequence_parallel: bool = False
    tp_overlap: bool = False
    precision: str = "fp32"
    fp32_gradients: bool = False
    offload: bool = False
    optimizer: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.0
    warmup_steps: int = 0
    clip_norm: float | None = None
    bucket_bytes: int = 25 * 2**20
    prefetch: int = 1
    seed: int = 0
    shard_ranks: int | None = None
    reshard: bool = True
    scaling: str = "tensor"
    fp8_gathers: bool = False
    decay_on: str = "all"
    context: str = "ring"
    gradients: str = "exact"
    checkpointing: InitVar[bool | None] = None

    def __hash__(self) -> int:
        """That of what a search tries: a look-up is quick, and other differences are for __eq__ to find."""
        return hash((self.strategy, self.schedule, self.n_micro, self.stages_per_rank, self.recompute))

    def __post_init__(self, checkpointing: bool | None) -> None:
        if checkpointing and self.recompute == "none":
            object.__setattr__(self, "recompute", "full")
        if checkpointing not in (None, self.recompute == "full"):
            raise ValueError(
                f"checkpointing={checkpointing} contradicts recompute={self.recompute!r}, since it is the old name of "
                "recompute='full': give one of the two"
            )
        for name, known in KNOWN.items():
            value = getattr(self, name)
            if value not in known:
                near = difflib.get_close_matches(f"{value}".lower(), known, 1)
                mend = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}{mend}")
        for name in ("batch_size", "n_micro", "stages_per_rank", "bucket_bytes"):
            value = getattr(self, name)
            if not is_whole(value):
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        for name in ("lr", "weight_decay", "warmup_steps", "prefetch"):
            if not is_number(getattr(self, name)):
                raise ValueError(f"{name} must be a number, 0 or more, got {getattr(self, name)!r}")
        for name in ("sequence_parallel", "tp_overlap", "fp32_gradients", "offload", "reshard", "fp8_gathers"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.clip_norm is not None and not is_number(self.clip_norm, above=True):
            raise ValueError(f"clip_norm must be a number above 0, or None for no clipping; got {self.clip_norm!r}")
        if self.shard_ranks is not None and not is_whole(self.shard_ranks):
            raise ValueError(
                f"shard_ranks is a whole number of ranks, at least 1, or None for all; got {self.shard_ranks!r}"
            )
        for reason in self.exclusions():
            raise ValueError(reason)

    def exclusions(self) -> Iterator[str]:
        """Why two of these choices exclude each other, and the mend; nothing where all go together."""
        for law in (self.schedule_law, self.steps_by, self.precision_law):
            yield from law.excludes(self)
        yield from overlapped_tensor.excludes(self)
        for other in strategies.LAWS.values():
            for option in other.options:
                value = getattr(self, option)
                if other.name != self.strategy and value != getattr(
                    type(self), option
                ):  # that of the class is the default
                    only = f"{option}={value!r} is a choice for strategy={other.name!r}"
                    yield f"{only}, got {self.strategy!r}: leave it out"
        yield from self.strategy_law.excludes(self)

    @property
    def lasting(self) -> tuple[Any, ...]:
        """All choices but the number of micro-batches and what runs again in backward: recipes that differ in these
        alone leave the same on a rank between two steps."""
        return "lasting", *LASTING(self)

    @property
    def running(self) -> tuple[Any, ...]:
        """All choices but the strategy of data parallelism, and whether that gathers weights in the width of products,
        if this is another one than theirs: recipes whose choices are equal in this run a micro-batch alike."""
        return "running", self.precision_law.casts and self.strategy_law.computes_gathered, *RUNNING(self)

    @property
    def strategy_law(self) -> Strategy:
        """The law of the strategy of data parallelism."""
        return strategies.law_of(self.strategy, self.shard_ranks)

    @property
    def cuts(self) -> Cuts:
        """Which of weights, gradients and state the strategy cuts, so that each rank has a part."""
        return self.strategy_law.cuts

    @property
    def schedule_law(self) -> ScheduleLaw:
        """The law of the pipeline's schedule."""
        return schedules.LAWS[self.schedule]

    @property
    def precision_law(self) -> Precision:
        """The law of the precision: bytes of weights, gradients and products, and which of them are cast."""
        return PRECISION_LAWS[self.precision]

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of a weight as a rank keeps it."""
        return self.precision_law.weight_bytes

    @cached_property
    def gathered_bytes(self) -> int:
        """Bytes of a number that flows between layers, and of a weight that ZeRO-3 gathers."""
        return 2 if self.precision_law.casts and self.strategy_law.computes_gathered else self.weight_bytes

    @cached_property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient as it is added up and sent."""
        return 4 if self.fp32_gradients else self.weight_bytes

    @property
    def sent_gradient_bytes(self) -> float:
        """Bytes of a gradient on its way to the other ranks of dp."""
        return WAYS[self.gradients].element_bytes(self.gradient_bytes)

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of one number of the optimizer's state; masters are as wide."""
        return self.weight_bytes if self.precision_law.pure else max(4, self.weight_bytes)

    @property
    def has_masters(self) -> bool:
        """True if the optimizer keeps its own, wider copy of the weights beside them."""
        return self.weight_bytes < self.state_bytes and not self.offload

    @property
    def steps_by(self) -> OptimizerLaw:
        """The law of this recipe's optimizer: the numbers that it keeps, sends and computes."""
        return optimizers.LAWS[self.optimizer]

    @property
    def grouping(self) -> Grouping:
        """Which parameters the optimizer treats alike."""
        return Grouping(self.steps_by.by_matrix is not None, self.decay_on == "linears")

    def sharing(self, layout: Layout) -> int:
        """Of the ranks that have the same weights, those that share one copy of what is sharded."""
        return self.strategy_law.sharing(layout, self.copies)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes along which ranks talk, by the names that the ledger has for them."""
        return (*self.strategy_law.axes, "tp", "pp")

    @property
    def sharded(self) -> str:
        """The strategy in a word or two: `zero3`, `hsdp of 8`."""
        return self.strategy_law.words

    @property
    def products(self) -> str:
        """The precision of matrix products, of whose peak MFU is a share; with 8 or 4 bits that of the wider ones."""
        return self.precision_law.products

    @property
    def splits(self) -> bool:
        """True if the schedule cuts a backward in two."""
        return self.schedule_law.splits

    @property
    def copies(self) -> int:
        """Ranks of a pipeline that have a copy of the same stage, each for its share of the micro-batches."""
        return self.schedule_law.copies

    @property
    def n_turns(self) -> int:
        """Micro-batches that go through one copy of a stage."""
        return self.n_micro // self.copies

    def n_stages(self, n_ranks: int) -> int:
        """The stages into which a pipeline of `n_ranks` cuts the model."""
        return n_ranks * self.stages_per_rank // self.copies

    def data_ranks(self, layout: Layout) -> int:
        """The ranks that have the same weights and see different tokens: they add up gradients."""
        return layout.dp * layout.cp * self.copies

    def stages_on(self, place: int, n_ranks: int) -> range:
        """The stages of the rank at `place` of a pipeline of `n_ranks`, in order."""
        return self.schedule_law.stages_on(place, n_ranks, self.stages_per_rank)

    @property
    def eight_bits(self) -> bool:
        """True if the linears of the blocks multiply numbers of 8 bits or fewer."""
        return self.units != ""

    @property
    def units(self) -> str:
        """How far a unit of those numbers reaches, a key of labkit.train.fp8.SCALINGS; "" if there are none."""
        return self.precision_law.units(self.scaling)

    @property
    def again(self) -> str:
        """The parts that backward runs again, in a few words; "" if there are none."""
        words = {"gathers": "gathers again", "selective": "selective recomputation", "full": "checkpointing"}
        return words.get(self.recompute, "")

    def schedule_for(self, n_ranks: int) -> Schedule:
        """The schedule of a pipeline of `n_ranks`."""
        return self.schedule_law.make(n_ranks, self.n_micro, self.stages_per_rank)

    def __str__(self) -> str:
        """The choices that differ from the defaults: `strategy=zero3, n_micro=4`."""
        usual = Recipe()
        changed = [field for field in fields(self) if getattr(self, field.name) != getattr(usual, field.name)]
        return ", ".join(f"{field.name}={getattr(self, field.name)}" for field in changed) or "the default recipe"


def _all_but(*names: str) -> attrgetter[tuple[Any, ...]]:
    return attrgetter(*[field.name for field in fields(Recipe) if field.name not in names])


LASTING, RUNNING = _all_but("n_micro", "recompute"), _all_but("strategy", "shard_ranks", "fp8_gathers")


def refusals(shape: ModelShape, recipe: Recipe, layout: Layout, tied: bool) -> Iterator[str]:
    """Why this recipe cannot train this model on this layout, and the mend: what each law refuses, one after another.

    `tied`: True if the head's weight is the embedding's on whichever stages these are."""
    yield from experts.refuses(shape, recipe, layout)
    yield from expert_tensor.refuses(shape, layout)
    yield from data_parallel.refuses(recipe, layout)
    yield from recipe.strategy_law.refuses(layout)
    yield from pipeline.refuses(shape, recipe, layout, tied)
    yield from recipe.schedule_law.refuses(recipe, layout)
    yield from context.refuses(shape, recipe, layout)
    yield from tensor.refuses(shape, recipe, layout)


def check(config: Any, recipe: Recipe, layout: Layout) -> None:
    """ValueError, with the numbers and the mend, for a combination that cannot work; `config` is a ModelShape or a
    GPTConfig. Nothing is built for it."""
    shape = ModelShape.of(config)
    for reason in (*refusals(shape, recipe, layout, shape.tied), *experts.unscaled(shape, recipe)):
        raise ValueError(reason)
    parts = {"n_head": shape.n_head, "kv_heads": shape.kv_heads, "the hidden width": shape.hidden, "vocab": shape.vocab}
    for name, number in parts.items():
        if number % layout.tp:
            would = divisors(gcd(*parts.values()))
            raise ValueError(f"{name}={number:,} has no tp={layout.tp} equal parts; tp = {would} would do")
    shape.check_cut(layout.tp, recipe.n_stages(layout.pp), recipe.sequence_parallel)
