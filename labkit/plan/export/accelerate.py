"""Accelerate: the YAML file that `accelerate launch --config_file` reads.

    ddp                      MULTI_GPU    torch's DDP, in bf16 under autocast: precision "amp"
    zero1, zero2, offload    DEEPSPEED    stages 1 and 2, and with offload 3; weights in bf16 and masters in fp32
    zero3, hsdp              FSDP         version 2, with a parallelism_config where there are copies or cp

The model, rows, optimizer and number of tokens are your script's; what it is to do stands above the keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType

from labkit.plan.export.target import ChosenPlan, FileLine, only
from labkit.plan.search.search import Plan

CONTEXTS = MappingProxyType({"gather": "allgather", "ring": "alltoall"})
"""Its alltoall passes keys and values on from rank to rank, as a ring does."""
STAGES = MappingProxyType({"zero1": 1, "zero2": 2, "zero3": 3})
PRECISIONS = MappingProxyType({
    "MULTI_GPU": ("fp32", "amp"), "NO": ("fp32", "amp"), "DEEPSPEED": ("bf16",), "FSDP": ("fp32", "bf16", "amp"),
})  # fmt: skip
"""What each kind of run computes in; "bf16" has narrow weights, or gathers narrow copies, beside masters in fp32."""


def kind_of(plan: Plan) -> str:
    """The `distributed_type` that runs the plan."""
    recipe, shared = plan.recipe, plan.layout.dp * plan.layout.cp > 1
    if recipe.offload or (shared and recipe.strategy in ("zero1", "zero2")):
        return "DEEPSPEED"
    if shared and recipe.cuts.weights:
        return "FSDP"
    return "MULTI_GPU" if shared else "NO"


class Accelerate:
    """The YAML of Accelerate for a run over dp, and with FSDP over cp."""

    name = "accelerate"

    def lacks(self, plan: Plan) -> Iterator[str]:
        """Pipelines, tensor parallelism as it is planned, experts that are dealt out, selective recomputation, and
        precisions that the kind of run does not have."""
        lay, recipe, kind = plan.layout, plan.recipe, kind_of(plan)
        if lay.pp > 1:
            yield f"no pipeline, pp={lay.pp}"
        if lay.tp > 1:
            yield f"no tp={lay.tp} with sequence parallelism (a model's own tp_plan cuts no tokens)"
        if lay.ep > 1:
            yield f"no experts dealt out over ep={lay.ep}"
        if lay.cp > 1:
            yield from only("attention over cp by", recipe.context, CONTEXTS)
            if kind != "FSDP":
                yield f"no cp={lay.cp} beside {recipe.sharded} (with zero3 alone)"
        yield from only("recompute", recipe.recompute, ("none", "full"))
        if plan.adapter is None:
            yield from only(f"precision of {recipe.sharded},", recipe.precision, PRECISIONS[kind])

    def lines(self, chosen: ChosenPlan, version: str) -> Iterator[FileLine]:
        """The YAML."""
        plan, (nodes, _) = chosen.plan, chosen.nodes
        lay, recipe, kind = plan.layout, plan.recipe, kind_of(plan)
        yield from chosen.head(self.name, version)
        yield from _script(chosen, kind)
        yield FileLine("compute_environment: LOCAL_MACHINE", "assumed: no SageMaker")
        yield FileLine(f"distributed_type: {kind}", f"{recipe.sharded}: {chosen.origin('strategy')}")
        yield FileLine(f"num_machines: {nodes}", "the machine: devices of a node")
        yield FileLine(
            "machine_rank: 0", "assumed: set it to 1, 2, ... on the other machines" * (nodes > 1) or "one machine"
        )
        if nodes > 1:
            yield FileLine("main_process_ip: HEAD", "yours: the name of machine 0")
            yield FileLine("main_process_port: 29500", "assumed")
            yield FileLine("rdzv_backend: static", "assumed: each machine has its machine_rank")
        yield FileLine(f"num_processes: {lay.size}", f"of all machines: {chosen.origin('gpus')}")
        yield FileLine(f'mixed_precision: "{_mixed(plan)}"', f"{recipe.precision}: {chosen.origin('precision')}")
        yield FileLine(f"use_cpu: {'true' if plan.hardware.device == 'cpu' else 'false'}", "the machine")
        if kind == "FSDP":
            yield from _fsdp(chosen)
        if kind == "DEEPSPEED":
            yield from _deepspeed(chosen)


def _mixed(plan: Plan) -> str:
    """The word of Accelerate for a precision; an adapter's frozen weights are in bf16 already."""
    return "no" if plan.recipe.precision == "fp32" else "bf16"


def _script(chosen: ChosenPlan, kind: str) -> Iterator[FileLine]:
    """Comments on what the script is to do, since no key says it."""
    plan = chosen.plan
    recipe = plan.recipe
    length = "asked for" if "seq" in chosen.asked else "the model's own"
    yield FileLine("#")
    yield FileLine("# Your script's part, for which there are no keys:")
    yield FileLine(f"#   rows of a micro-batch on a rank    {chosen.rows}: {chosen.origin('n_micro')}")
    yield FileLine(f"#   gradient_accumulation_steps        {recipe.n_micro}: {chosen.origin('n_micro')}")
    yield FileLine(f"#   tokens of a row                    {plan.shape.seq}: {length}")
    yield FileLine(f"#   optimizer                          {recipe.optimizer}: {chosen.origin('optimizer')}")
    if plan.adapter is not None:
        yield FileLine(f"#   adapter                            {plan.adapter}: {chosen.origin('adapter')}")
    if recipe.recompute == "full" and kind != "FSDP":
        yield FileLine(f"#   gradient checkpointing             of each block: {chosen.origin('recompute')}")
    yield FileLine("")


def _fsdp(chosen: ChosenPlan) -> Iterator[FileLine]:
    """The tables of FSDP 2 and of its mesh."""
    plan = chosen.plan
    lay, recipe = plan.layout, plan.recipe
    strategy, cut = f"{recipe.sharded}: {chosen.origin('strategy')}", recipe.shard_ranks or lay.dp
    full = "true" if recipe.recompute == "full" else "false"
    yield FileLine("fsdp_config:")
    yield FileLine("  fsdp_version: 2", "fully_shard, which the plan's zero3 is")
    yield FileLine(f"  fsdp_reshard_after_forward: {'true' if recipe.reshard else 'false'}", strategy)
    yield FileLine("  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP", "the plan gathers block by block")
    yield FileLine(f"  fsdp_activation_checkpointing: {full}", chosen.origin("recompute"))
    yield FileLine("  fsdp_offload_params: false", "the plan keeps all on the device")
    if cut == lay.dp and lay.cp == 1:
        return
    yield FileLine("parallelism_config:")
    yield FileLine(f"  parallelism_config_dp_replicate_size: {lay.dp // cut}", strategy)
    yield FileLine(f"  parallelism_config_dp_shard_size: {cut}", strategy)
    yield FileLine("  parallelism_config_tp_size: 1", chosen.origin("layout"))
    yield FileLine(f"  parallelism_config_cp_size: {lay.cp}", chosen.origin("layout"))
    if lay.cp > 1:
        yield FileLine(f"  parallelism_config_cp_comm_strategy: {CONTEXTS[recipe.context]}", chosen.origin("context"))


def _deepspeed(chosen: ChosenPlan) -> Iterator[FileLine]:
    """The table of DeepSpeed."""
    recipe = chosen.plan.recipe
    device = "cpu" if recipe.offload else "none"
    yield FileLine("deepspeed_config:")
    yield FileLine(f"  zero_stage: {STAGES[recipe.strategy]}", chosen.origin("strategy"))
    yield FileLine(f"  offload_optimizer_device: {device}", chosen.origin("offload"))
    yield FileLine("  offload_param_device: none", "the plan keeps weights on the device")
    yield FileLine(f"  gradient_accumulation_steps: {recipe.n_micro}", chosen.origin("n_micro"))
