"""torchtitan: a Python module with a config function, as `--module` and `--config` of its trainer take it.

    torchrun ... -m torchtitan.train --module planned --config planned        # of planned.py, on the Python path

torchtitan 0.3 has no more TOML files: a configuration is a function that returns a Trainer.Config. The one here takes
torchtitan's own for the model (its tokenizer, data set, learning rate) and sets what a plan decides. Models are those
whose sizes torchtitan has (targets.toml).

Beside what `lacks` refuses, two of its ways differ from the plan, and the file says so: fp32 weights are sharded, and
copies of them gathered in bf16, while gradients are reduced in fp32; and selective recomputation runs every second
product again as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from labkit.plan.export.target import ChosenPlan, FileLine, only, text_of
from labkit.plan.export.torchrun import launch
from labkit.plan.job.stages import blocks_of
from labkit.plan.search.search import Plan

SCHEDULES = MappingProxyType({"1f1b": "1F1B", "interleaved": "Interleaved1F1B", "gpipe": "GPipe"})
RECOMPUTE = MappingProxyType({"none": "None", "selective": "SelectiveAC.Config()", "full": "FullAC.Config()"})
PRECISIONS = MappingProxyType({
    "bf16": ("float32", "bfloat16"), "amp": ("float32", "bfloat16"), "fp32": ("float32", "float32"),
    "pure-bf16": ("bfloat16", "bfloat16"),
})  # fmt: skip
"""dtype of the weights that are kept, and of those that are multiplied with."""


@dataclass(frozen=True)
class Torchtitan:
    """The config function of torchtitan. `models` are its own by the names that they have here: "MODULE.FUNCTION"."""

    models: Mapping[str, str]
    name = "torchtitan"

    def lacks(self, plan: Plan) -> Iterator[str]:
        """Models of other sizes, ZeRO-1 and 2, zero bubbles of one stage a rank, other optimizers, offload of the
        optimizer alone, attention over cp by a ring or by heads, experts beside tp, and adapters."""
        lay, recipe = plan.layout, plan.recipe
        yield from only("model", plan.shape.name, self.models)
        if lay.dp * lay.cp > 1:
            yield from only("strategy", recipe.strategy, ("ddp", "zero3"))
        if lay.pp > 1:
            yield from only("schedule", recipe.schedule, SCHEDULES)
        yield from only("recompute", recipe.recompute, RECOMPUTE)
        yield from only("precision", recipe.precision, PRECISIONS)
        yield from only("optimizer", recipe.optimizer, ("adamw",))
        if lay.cp > 1:
            yield from only("attention over cp by", recipe.context, ("gather",))
        if recipe.offload:
            yield "no offload of the optimizer's state alone (its own takes weights and gradients along)"
        if lay.ep > 1 and lay.tp > 1:
            yield f"no experts that are cut over tp={lay.tp} as well (its ep takes the ranks of tp)"
        if plan.adapter is not None:
            yield f"no {plan.adapter} on a frozen model by a config alone"

    def lines(self, chosen: ChosenPlan, version: str) -> Iterator[FileLine]:
        """The module."""
        plan, recipe = chosen.plan, chosen.plan.recipe
        module, _, function = self.models[plan.shape.name].rpartition(".")
        classes = ", ".join(c for c in ("FullAC", "SelectiveAC") if RECOMPUTE[recipe.recompute].startswith(c))
        yield from chosen.head(self.name, version)
        yield FileLine("#")
        yield FileLine("# Save it as planned.py on the Python path, and start it on every node with")
        for row in text_of(launch(chosen)).splitlines():
            yield FileLine(f"#   {row}".rstrip())
        yield FileLine('#   torchrun "${launch[@]}" -m torchtitan.train --module planned --config planned')
        yield FileLine("#")
        yield FileLine("# AdamW, learning rate, data and tokenizer are those that torchtitan has for this model.")
        yield FileLine("# torchtitan places pp outermost and dp inside of it; the plan counts with dp outermost.")
        yield FileLine("")
        if classes:
            yield FileLine(f"from torchtitan.distributed.activation_checkpoint import {classes}")
        yield FileLine(f"from torchtitan.models.{module}.config_registry import {function}")
        yield FileLine("from torchtitan.trainer import Trainer")
        yield FileLine("")
        yield FileLine("")
        yield FileLine("def planned() -> Trainer.Config:")
        yield FileLine(f"    config = {function}()", f"the model's shape: {plan.shape.n_params:,} parameters here")
        for name, value, origin in self._settings(chosen):
            yield FileLine(f"    config.{name} = {value}", origin)
        yield FileLine("    return config")

    def _settings(self, chosen: ChosenPlan) -> Iterator[tuple[str, str, str]]:
        """(option, value, origin) of all that a plan decides."""
        plan = chosen.plan
        lay, recipe = plan.layout, plan.recipe
        sharded = recipe.cuts.weights and lay.dp * lay.cp > 1
        shard = (recipe.shard_ranks or lay.dp) if sharded else 1
        kept, multiplied = PRECISIONS[recipe.precision]
        wider = "; gradients are reduced in float32, which is all that torchtitan has"
        row_origin = "asked for" if "seq" in chosen.asked else "the model's shape"
        local = recipe.batch_size // lay.dp if lay.pp > 1 else chosen.rows
        yield "training.seq_len", f"{plan.shape.seq}", row_origin
        yield (
            "training.local_batch_size",
            f"{local}",
            (f"rows of all {recipe.n_micro} micro-batches" if lay.pp > 1 else chosen.origin("n_micro")),
        )
        yield "training.global_batch_size", f"{recipe.batch_size}", chosen.origin("batch")
        yield "training.dtype", f'"{kept}"', chosen.origin("precision")
        yield "training.mixed_precision_param", f'"{multiplied}"', chosen.origin("precision") + wider
        for axis, size in (
            ("data_parallel_replicate", lay.dp // shard), ("data_parallel_shard", shard), ("tensor_parallel", lay.tp),
            ("pipeline_parallel", lay.pp), ("context_parallel", lay.cp), ("expert_parallel", lay.ep),
        ):  # fmt: skip
            by_strategy = f"{recipe.sharded}: {chosen.origin('strategy')}"
            origin = by_strategy if axis.startswith("data") else chosen.origin("layout")
            yield f"parallelism.{axis}_degree", f"{size}", origin
        if sharded:
            when = '"always"' if recipe.reshard else '"never"'
            yield "parallelism.fsdp_reshard_after_forward", when, chosen.origin("strategy")
        if lay.tp > 1:
            yield "parallelism.enable_sequence_parallel", f"{recipe.sequence_parallel}", chosen.origin("layout")
        if lay.pp > 1:
            schedule = SCHEDULES[recipe.schedule]
            yield "parallelism.pipeline_parallel_schedule", f'"{schedule}"', chosen.origin("schedule")
            yield "parallelism.pipeline_parallel_microbatch_size", f"{chosen.rows}", chosen.origin("n_micro")
            cut = "chosen by the planner: the head takes as long as some blocks"
            yield "parallelism.module_fqns_per_model_part", _parts(plan), cut
        if lay.pp > 1 or lay.ep > 1:
            yield "training.disable_cuda_graphs", "True", "torchtitan has no CUDA graphs with pp, nor with ep"
        deviation = "; it runs every second product again as well: less memory and more time than planned"
        yield (
            "activation_checkpoint",
            RECOMPUTE[recipe.recompute],
            (chosen.origin("recompute") + deviation * (recipe.recompute == "selective")),
        )


def _parts(plan: Plan) -> str:
    """The names of the modules of each stage: `[["tok_embeddings", "layers.0"], ["layers.1", "norm", "lm_head"]]`."""
    counts = blocks_of(plan.shape, plan.recipe.n_stages(plan.layout.pp))
    parts, first = list[list[str]](), 0
    for count in counts:
        parts.append([f"layers.{block}" for block in range(first, first + count)])
        first += count
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "lm_head"]
    stages = ", ".join("[" + ", ".join(f'"{name}"' for name in part) + "]" for part in parts)
    return f"[{stages}]"
