"""Recipe: every choice of a training run, a pure value.

A recipe says nothing about the model (its sizes) and nothing about the machine (a layout). The three together decide
what a step holds, sends and takes: the planner predicts it, `labkit.assemble` builds it.

Long because every choice has its meaning, its refusals and what follows from it in this one place.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Protocol

from labkit.plan.checks import is_whole
from labkit.plan.groups import Grouping
from labkit.plan.layout import CUT_AXES, Layout
from labkit.plan.optimizers import LAWS, OptimizerLaw
from labkit.plan.published_schedules import dualpipe, dualpipe_v, v_half, v_min, zb_h2, zb_v
from labkit.plan.schedule import Schedule, gpipe, interleaved, naive, one_f_one_b, zero_bubble
from labkit.plan.sent_gradients import WAYS, element_bytes, refused
from labkit.plan.words import multiples

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
IN_V = ("zb_v", "v_half", "v_min", "dualpipe_v")
"""Schedules with two stages on a rank, the way there and back (labkit.plan.published_schedules)."""
TWO_STAGES = (*IN_V, "dualpipe")
"""Schedules with two stages on a rank; with dualpipe each stage is on two ranks as well."""
SPLIT = ("zero_bubble", "zb_h2", *TWO_STAGES)
"""Schedules that cut a backward in two."""
SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", *SPLIT)
RECOMPUTE = ("none", "gathers", "selective", "full")
PRECISIONS = ("fp64", "fp32", "bf16", "fp8", "nvfp4", "amp", "fp16")
NARROW = ("bf16", "fp8", "nvfp4")
"""Precisions of which weights and gradients are in bf16, and masters in fp32."""
SCALINGS = ("tensor", "delayed", "tiles", "mx")
"""How far the unit of 8-bit copies reaches (labkit.train.fp8, labkit.train.blocks)."""
EMULATED = ("tiles", "mx", "nvfp4")
"""Scalings that labkit computes with plain tensor operations: what they take on a device is not predicted."""
HISTORY = 16
"""Steps that delayed scaling looks back over (TransformerEngine: 1,024 unless told otherwise)."""
OPTIMIZERS = tuple(LAWS)
DECAY_ON = ("all", "linears")
CONTEXTS = ("ring", "gather", "ulysses")


class _Stored(str):
    """The choice that a recipe keeps: a word like any other, whose type says that nobody asks for it just now."""


@dataclass(frozen=True)
class Recipe:
    """The choices of a run. Raises ValueError for an unknown choice, and for two that exclude each other.

    strategy         what data parallelism does with state: "ddp", "zero1", "zero2", "zero3"
    schedule         in which order stages work: "naive", "gpipe", "1f1b", "interleaved", "zero_bubble", "zb_h2"; with
                     stages_per_rank=2 also "zb_v", "v_half", "v_min", "dualpipe_v", and "dualpipe", for which pp and
                     n_micro are even: half of the micro-batches enter at each end, and each stage is on two ranks
    batch_size       rows of a step, over all ranks;  n_micro: micro-batches that each rank cuts its rows into
    recompute        what backward runs again: "none"; "gathers": only what sequence parallelism gathered from the
                     ranks; "selective": that, norms and activations, while products and attention are kept;
                     "full": each block, of which only the input is kept
    checkpointing    True: the old name of recompute="full"; where both are given, recompute counts
    precision        "fp32", "fp64": everything in it
                     "bf16": weights, gradients and activations in bf16, the optimizer steps on fp32 masters
                     "fp8": as bf16, but the linears of the blocks multiply 8-bit copies, with units as `scaling` says
                     "nvfp4": as bf16, but the linears of the blocks multiply 4-bit copies in blocks of 16, emulated
                     "amp": weights in fp32, products in bf16 (torch's autocast); "fp16": the same with loss scaling
    scaling          with "fp8", the units of 8-bit copies: "tensor": one for each tensor; "delayed": the same, known
                     from earlier steps; "tiles": one for 1 x 128 numbers, 128 x 128 of weights, "mx": for 32 numbers, a
                     power of two (both emulated)
    fp8_gathers      with "zero3" and "fp8" scaled by "tensor": the weights of these linears are gathered in 8 bits
    fp32_gradients   with "bf16", "fp8" and "nvfp4": gradients are added up, over micro-batches and over ranks, in fp32
    optimizer        "adamw", "adam", "sgd", "lamb", "lars"; "muon", "shampoo": on the matrices of the blocks, AdamW on
                     the rest
    decay_on         what weight_decay applies to: "all" parameters; "linears": not to norms, biases and embeddings
    clip_norm        limit of the gradients' norm, None for no limit
    warmup_steps     the learning rate rises in a line over this many steps
    shard_ranks      with "zero3": state is sharded in groups of so many ranks of dp, and copied from group to group
                     (HSDP, labkit.parallel.hsdp); None: over all of dp. Where cp cuts rows, all ranks of cp are in a
                     group, too: it has shard_ranks x cp ranks
    reshard          False, with "zero3": weights gathered in forward stay whole until backward
    context          where rows are cut over cp ranks, how attention reaches the others' tokens: "ring", "gather" (of
                     keys and values) or "ulysses" (tokens for heads); see labkit.parallel.context
    gradients        with "ddp", how gradients travel: "exact": as they are added up; "bf16": in 2 bytes; "8bit": in 1
                     byte with a unit for 256 of them, what rounding cuts off being added to the next step's (on its
                     rank: a checkpoint does not hold it). It changes what is learned, so that `plans` does not try it
    """

    strategy: str = "ddp"
    schedule: str = "1f1b"
    batch_size: int = 8
    n_micro: int = 1
    stages_per_rank: int = 1
    checkpointing: bool = None  # type: ignore[assignment]
    sequence_parallel: bool = False
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
    recompute: str = None  # type: ignore[assignment]
    shard_ranks: int | None = None
    reshard: bool = True
    scaling: str = "tensor"
    fp8_gathers: bool = False
    decay_on: str = "all"
    context: str = "ring"
    gradients: str = "exact"

    def __post_init__(self) -> None:
        self._settle_recompute()
        choices = {
            "strategy": STRATEGIES,
            "schedule": SCHEDULES,
            "precision": PRECISIONS,
            "recompute": RECOMPUTE,
            "scaling": SCALINGS,
            "optimizer": OPTIMIZERS,
            "decay_on": DECAY_ON,
            "context": CONTEXTS,
            "gradients": WAYS,
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        for name in ("batch_size", "n_micro", "stages_per_rank", "bucket_bytes"):
            value = getattr(self, name)
            if not is_whole(value):
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        for name in ("lr", "weight_decay", "warmup_steps", "prefetch"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)!r}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm must be above 0, or None for no clipping; got {self.clip_norm}")
        if self.schedule in TWO_STAGES and self.stages_per_rank != 2:
            raise ValueError(f"{self.schedule} has 2 stages on a rank: stages_per_rank=2, got {self.stages_per_rank}")
        if self.schedule not in ("interleaved", *TWO_STAGES) and self.stages_per_rank > 1:
            raise ValueError(
                f"{self.stages_per_rank} stages on a rank want schedule='interleaved', got {self.schedule!r}"
            )
        if self.schedule == "naive" and self.n_micro > 1:
            raise ValueError(f"the naive schedule does not cut the batch: n_micro={self.n_micro} wants 'gpipe'")
        if self.steps_by.by_layer and self.strategy != "ddp":
            raise ValueError(
                f"{self.optimizer} looks at whole layers, {self.strategy} gives a rank 1/n of their elements: use ddp"
            )
        if self.steps_by.by_matrix and self.offload:
            raise ValueError(
                f"{self.optimizer} puts matrices together from the pieces of all ranks, on the device that they talk "
                "with, and offload moves the pieces to the CPU: leave offload out, or take adamw"
            )
        if self.fp32_gradients and self.precision not in NARROW:
            raise ValueError(
                f"fp32_gradients is a choice for precision={', '.join(map(repr, NARROW))}, got {self.precision!r}: "
                "leave it out"
            )
        if self.offload and self.strategy == "ddp":
            raise ValueError("offload moves the shard that a rank steps on: it wants zero1, zero2 or zero3")
        self._check_sharding()
        self._check_eight_bits()
        if why := refused(self.gradients, self.strategy, self.precision, self.gradient_bytes):
            raise ValueError(why)

    def _check_eight_bits(self) -> None:
        """The choices of precision="fp8". A unit that is agreed on belongs to a whole tensor."""
        if self.scaling != "tensor" and self.precision != "fp8":
            raise ValueError(
                f"scaling={self.scaling!r} is a choice for precision='fp8', got {self.precision!r}: leave it out"
            )
        if self.fp8_gathers and (self.strategy, self.precision, self.scaling) != ("zero3", "fp8", "tensor"):
            raise ValueError(
                "fp8_gathers sends codes with one unit for each weight: it wants strategy='zero3', precision='fp8' and "
                f"scaling='tensor', got {self.strategy!r}, {self.precision!r} and {self.scaling!r}"
            )

    def _check_sharding(self) -> None:
        """The choices that only ZeRO-3 has. Whether dp is a multiple of `shard_ranks` is asked where dp is known."""
        groups = self.shard_ranks
        if groups is not None and not is_whole(groups):
            raise ValueError(f"shard_ranks is a whole number of ranks, at least 1, or None for all; got {groups!r}")
        if self.strategy != "zero3" and (groups is not None or not self.reshard):
            option = f"shard_ranks={groups}" if groups is not None else "reshard=False"
            raise ValueError(f"{option} is a choice for strategy='zero3', got {self.strategy!r}: leave it out")

    def _settle_recompute(self) -> None:
        """Let the two names of one choice agree. Of two that do not, the one that was given counts, not the stored one.

        `dataclasses.replace` gives every field again, so a changed `checkpointing` comes with the old `recompute`: the
        type of what is stored tells it from what somebody wrote.
        """
        old_name = "full" if self.checkpointing else "none"
        stale = isinstance(self.recompute, _Stored) and self.checkpointing != (self.recompute == "full")
        chosen = old_name if self.recompute is None or stale else self.recompute
        object.__setattr__(self, "recompute", _Stored(chosen))
        object.__setattr__(self, "checkpointing", chosen == "full")

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight, and of what flows between layers (ZeRO-3 gathers, and computes, in `products`)."""
        return 2 if self.precision in NARROW else 8 if self.precision == "fp64" else 4

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient as it is added up and sent."""
        return 4 if self.fp32_gradients else self.weight_bytes

    @property
    def sent_gradient_bytes(self) -> float:
        """Bytes of a gradient on its way to the other ranks of dp."""
        return element_bytes(self.gradients, self.gradient_bytes)

    @property
    def state_bytes(self) -> int:
        """Bytes of one number of the optimizer's state; masters are as wide."""
        return max(4, self.weight_bytes)

    @property
    def has_masters(self) -> bool:
        """True if the optimizer keeps its own, wider copy of the weights beside them."""
        return self.weight_bytes < self.state_bytes and not self.offload

    @property
    def steps_by(self) -> OptimizerLaw:
        """The law of this recipe's optimizer: the numbers that it keeps, sends and computes."""
        return LAWS[self.optimizer]

    @property
    def grouping(self) -> Grouping:
        """Which parameters the optimizer treats alike."""
        return Grouping(self.steps_by.by_matrix is not None, self.decay_on == "linears")

    def sharing(self, layout: Layout) -> int:
        """Of the ranks that have the same weights, those that share one copy of what is sharded."""
        return self.data_ranks(layout) if self.shard_ranks is None else self.shard_ranks * layout.cp

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes along which ranks talk, by the names that the ledger has for them."""
        return (*(("dp",) if self.shard_ranks is None else CUT_AXES), "tp", "pp")

    @property
    def sharded(self) -> str:
        """The strategy in a word or two: `zero3`, `hsdp of 8`."""
        return self.strategy if self.shard_ranks is None else f"hsdp of {self.shard_ranks}"

    @property
    def products(self) -> str:
        """The precision of matrix products, of whose peak MFU is a share; with 8 or 4 bits that of the wider ones."""
        return "bf16" if self.precision in ("amp", "fp8", "nvfp4") else self.precision

    @property
    def splits(self) -> bool:
        """True if the schedule cuts a backward in two."""
        return self.schedule in SPLIT

    @property
    def copies(self) -> int:
        """Ranks of a pipeline that have a copy of the same stage, each for its share of the micro-batches."""
        return 2 if self.schedule == "dualpipe" else 1

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
        if self.schedule in TWO_STAGES:  # a stage and the one that is as far from the other end
            near, far = sorted((place, self.n_stages(n_ranks) - 1 - place))
            return range(near, far + 1, far - near)
        return range(place, n_ranks * self.stages_per_rank, n_ranks)

    @property
    def eight_bits(self) -> bool:
        """True if the linears of the blocks multiply numbers of 8 bits or fewer."""
        return self.units != ""

    @property
    def units(self) -> str:
        """How far a unit of those numbers reaches, a key of labkit.train.fp8.SCALINGS; "" if there are none."""
        return self.scaling if self.precision == "fp8" else "nvfp4" if self.precision == "nvfp4" else ""

    @property
    def again(self) -> str:
        """The parts that backward runs again, in a few words; "" if there are none."""
        words = {"gathers": "gathers again", "selective": "selective recomputation", "full": "checkpointing"}
        return words.get(self.recompute, "")

    def schedule_for(self, n_ranks: int) -> Schedule:
        """The schedule of a pipeline of `n_ranks`."""
        if self.schedule == "interleaved":
            return interleaved(n_ranks, self.n_micro, self.stages_per_rank)
        if self.schedule == "naive":
            return naive(n_ranks)
        makers = {
            "gpipe": gpipe, "1f1b": one_f_one_b, "zero_bubble": zero_bubble, "zb_h2": zb_h2, "zb_v": zb_v,
            "v_half": v_half, "v_min": v_min, "dualpipe_v": dualpipe_v, "dualpipe": dualpipe,
        }  # fmt: skip
        return makers[self.schedule](n_ranks, self.n_micro)

    def __str__(self) -> str:
        """The choices that differ from the defaults: `strategy=zero3, n_micro=4`."""
        usual = Recipe()
        changed = [field for field in fields(self) if getattr(self, field.name) != getattr(usual, field.name)]
        changed = [field for field in changed if field.name != "recompute" or not self.checkpointing]  # said once
        return ", ".join(f"{field.name}={getattr(self, field.name)}" for field in changed) or "the default recipe"


class Sizes(Protocol):
    """Those of a model's sizes that decide whether a recipe fits it."""

    @property
    def n_layer(self) -> int:
        """Number of blocks."""

    @property
    def seq(self) -> int:
        """Length of a row."""

    @property
    def n_head(self) -> int:
        """Number of attention heads."""

    @property
    def n_kv_head(self) -> int | None:
        """Number of key heads; None for as many as attention heads."""

    @property
    def tied(self) -> bool:
        """True if the head's weight is the embedding's."""


def check(config: Sizes, recipe: Recipe, layout: Layout) -> None:
    """ValueError, with the numbers and the mend, for a combination that cannot work. Nothing is built for it."""
    n_stages = recipe.n_stages(layout.pp)
    rows = recipe.batch_size // layout.dp
    if n_stages > config.n_layer:
        raise ValueError(
            f"{config.n_layer} blocks cannot fill {n_stages} stages ({layout.pp} ranks x {n_stages // layout.pp}): "
            f"n_layer={n_stages}, or fewer stages"
        )
    if config.tied and n_stages > 1:
        raise ValueError(
            f"a tied head is one weight on two stages, the first and the last of {n_stages}: GPTConfig(tied=False)"
        )
    if recipe.batch_size % layout.dp:
        raise ValueError(
            f"a batch of {recipe.batch_size} rows does not cut evenly for dp={layout.dp}: "
            + multiples("batch_size", recipe.batch_size, layout.dp)
        )
    if recipe.shard_ranks is not None and layout.dp % recipe.shard_ranks:
        near = max(s for s in range(1, recipe.shard_ranks + 1) if layout.dp % s == 0)
        raise ValueError(
            f"dp={layout.dp} ranks do not cut into groups of shard_ranks={recipe.shard_ranks}: {near} would do"
        )
    if rows < recipe.n_micro:
        raise ValueError(
            f"{rows} rows a rank (batch_size={recipe.batch_size} / dp={layout.dp}) are fewer than n_micro="
            f"{recipe.n_micro}: batch_size={layout.dp * recipe.n_micro} would do"
        )
    if recipe.copies > 1 and (layout.pp % 2 or recipe.n_micro % 2 or rows % recipe.n_micro):
        pp, m = layout.pp + layout.pp % 2, recipe.n_micro + recipe.n_micro % 2
        raise ValueError(
            "dualpipe pairs the ranks of a pipeline, and half of the rows enter at each end: it wants an even pp, an "
            f"even n_micro and micro-batches of one size, got pp={layout.pp}, n_micro={recipe.n_micro} and {rows} rows "
            f"a rank: pp={pp}, n_micro={m} and batch_size={layout.dp * m * -(-rows // m)} would do; or 'dualpipe_v', "
            "which takes any"
        )
    if config.seq % layout.cp:
        raise ValueError(
            f"rows of seq={config.seq} tokens do not cut into cp={layout.cp} equal parts: "
            + multiples("seq", config.seq, layout.cp)
        )
    if recipe.sequence_parallel and config.seq // layout.cp % layout.tp:
        cut = f"the {config.seq // layout.cp} tokens of a rank, seq={config.seq} / cp={layout.cp}," * (layout.cp > 1)
        raise ValueError(
            f"sequence parallel cuts {cut or f'seq={config.seq}'} into tp={layout.tp} equal parts: "
            + multiples("seq", config.seq, layout.cp * layout.tp)
        )
    if recipe.context == "ulysses" and layout.cp > 1 and config.n_head // layout.tp % layout.cp:
        raise ValueError(
            f"ulysses deals a rank's n_head={config.n_head} / tp={layout.tp} heads out over cp={layout.cp} ranks, and "
            "they do not come out even: take another cp, or context='ring' or 'gather', which cut no heads"
        )
    keys = max(1, (config.n_kv_head or config.n_head) // layout.tp)  # with more ranks than key heads each has a copy
    if recipe.context == "ulysses" and layout.cp > 1 and keys % layout.cp:
        raise ValueError(
            f"ulysses deals a rank's {keys} key heads out over cp={layout.cp} ranks, and they do not come out even: "
            "take another cp, or context='ring' or 'gather', which cut no heads"
        )
    if recipe.splits and recipe.strategy == "zero3":
        raise ValueError(
            f"{recipe.schedule} computes weight gradients long after input gradients, and zero3 lets go of what they "
            "need in between: use '1f1b'"
        )
    if recipe.splits and recipe.eight_bits:
        raise ValueError(
            f"{recipe.schedule} computes weight gradients long after input gradients, and a linear in 8 bits or fewer "
            "computes both at once: use '1f1b'"
        )
