"""Megatron-LM: a shell script that starts its pretrain_gpt.py with the sizes of the model and the plan.

    bash plan.sh --data-path ... --tokenizer-model ... --lr ... --train-iters ...

Data, tokenizer, learning rate and the number of steps are no part of a plan: they are added when the script is run. The
defaults of Megatron-LM that a plan relies on (gradients in fp32 for bf16, its order of ranks) are set anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from types import MappingProxyType

from labkit.plan.export.target import ChosenPlan, FileLine, only
from labkit.plan.export.torchrun import launch
from labkit.plan.job.stages import blocks_of
from labkit.plan.model.shape import ModelShape
from labkit.plan.search.search import Plan

Option = tuple[str, str]
"""An option with its value ("" for a flag), and where it comes from."""
SHARDING = MappingProxyType({
    "ddp": (), "zero1": ("--use-distributed-optimizer",),
    "zero2": ("--use-megatron-fsdp", "--data-parallel-sharding-strategy optim_grads", "--ckpt-format fsdp_dtensor"),
    "zero3": (
        "--use-megatron-fsdp", "--data-parallel-sharding-strategy optim_grads_params", "--ckpt-format fsdp_dtensor",
    ),
})  # fmt: skip
PRECISIONS = MappingProxyType({
    "bf16": ("--bf16", "--grad-reduce-in-bf16"), "fp32": (),
    "fp8": ("--bf16", "--grad-reduce-in-bf16", "--fp8-format hybrid", "--fp8-recipe tensorwise"),
})  # fmt: skip
OPTIMIZERS = MappingProxyType({"adamw": "adam", "sgd": "sgd"})
CONTEXTS = MappingProxyType({"ring": "p2p", "gather": "all_gather", "ulysses": "a2a"})
POSITIONS = MappingProxyType({"rotary": "rope", "learned": "learned_absolute", "none": "none"})
NORMS = MappingProxyType({"rms": "RMSNorm", "layer": "LayerNorm"})
ATTENTION = ("query", "key", "value")


class Megatron:
    """The script for Megatron-LM's pretrain_gpt.py."""

    name = "megatron"

    def lacks(self, plan: Plan) -> Iterator[str]:
        """Zero bubbles, recomputation of norms and activations alone, other optimizers and precisions, 8-bit gathers,
        offload as labkit counts it, adapters, and models whose blocks have no options there."""
        lay, recipe = plan.layout, plan.recipe
        if lay.pp > 1:
            yield from only("schedule", recipe.schedule, ("1f1b", "interleaved"))
        yield from only("precision", recipe.precision, PRECISIONS)
        yield from only("optimizer", recipe.optimizer, OPTIMIZERS)
        if recipe.recompute != "gathers" or not recipe.sequence_parallel:  # its linears gather again in any case
            yield from only("recompute", recipe.recompute, ("none", "full"))
        if recipe.fp8_gathers:
            yield "no gathers of 8-bit copies beside weights in bf16 (its --fp8-param-gather keeps no such weights)"
        if recipe.offload:
            yield "no offload of masters with the state of Adam as labkit counts it (its own is another)"
        if plan.adapter is not None:
            yield f"no {plan.adapter} in pretrain_gpt.py"
        yield from _unknown(plan.shape)

    def lines(self, chosen: ChosenPlan, version: str) -> Iterator[FileLine]:
        """The script."""
        plan = chosen.plan
        lay = plan.layout
        yield FileLine("#!/usr/bin/env bash")
        yield from chosen.head(self.name, version)
        yield FileLine(
            "# Not in a plan, and to be given to this script: --data-path, --tokenizer-type, --tokenizer-model,"
        )
        yield FileLine("# --lr, --train-iters and what else your run wants; it is run in a checkout of Megatron-LM")
        if plan.recipe.strategy in ("zero2", "zero3"):
            yield FileLine("unset CUDA_DEVICE_MAX_CONNECTIONS", "Megatron-FSDP refuses 1")
        elif lay.tp * lay.cp > 1:
            yield FileLine(
                "export CUDA_DEVICE_MAX_CONNECTIONS=1", "Megatron-LM wants it for tp and cp before Blackwell"
            )
        yield from launch(chosen)
        yield FileLine("")
        yield FileLine("options=(")
        for option, origin in chain(_model(plan.shape, chosen), _parallel(chosen), _step(chosen)):
            yield FileLine(f"  {option}", origin)
        yield FileLine(")")
        yield FileLine('torchrun "${launch[@]}" pretrain_gpt.py "${options[@]}" "$@"')


def _unknown(shape: ModelShape) -> Iterator[str]:
    """A refusal for each property of a model, such as latent attention, that no option of this file can express."""
    yield from only("norm", shape.norm, NORMS)
    biased = set(shape.biased)
    partly = bool(biased) and biased != set(ATTENTION)
    strange = {
        "latent attention": shape.kv_lora is not None,
        f"windows of {shape.window} tokens in {shape.n_windowed} of {shape.n_layer} blocks": shape.n_windowed > 0,
        f"{shape.norms} norms in a block": shape.norms != 2,
        "norms over all heads' dims of queries and keys": shape.qk_norm == "all",
        "sinks of attention": shape.sinks,
        "a weight of the shared experts": shape.shared_gate,
        f"biases of {', '.join(shape.biased)} alone": partly,
    }
    for words, there in strange.items():
        if there:
            yield f"no {words} that labkit writes for it"


def _model(shape: ModelShape, chosen: ChosenPlan) -> Iterator[Option]:
    """The sizes of the model."""
    own = "the model's shape"
    yield f"--num-layers {shape.n_layer}", own
    yield f"--hidden-size {shape.d_model}", own
    yield f"--ffn-hidden-size {shape.hidden}", own
    yield f"--num-attention-heads {shape.n_head}", own
    yield f"--kv-channels {shape.width}", own
    if shape.kv_heads != shape.n_head:
        yield "--group-query-attention", own
        yield f"--num-query-groups {shape.kv_heads}", own
    yield f"--seq-length {shape.seq}", "asked for" if "seq" in chosen.asked else own
    places = max(shape.places, shape.seq)
    yield f"--max-position-embeddings {places}", own
    yield f"--position-embedding-type {POSITIONS[shape.position]}", own
    yield f"--normalization {NORMS[shape.norm]}", own
    if shape.gated:
        yield "--swiglu", own
    if not shape.tied:
        yield "--untie-embeddings-and-output-weights", own
    if not shape.bias:
        yield "--disable-bias-linear", own
    if shape.biased:
        yield "--add-qkv-bias", own
    if shape.qk_norm:
        yield "--qk-layernorm", own
    yield f"--padded-vocab-size {shape.vocab}", f"{own}, as the plan pads it"
    if shape.n_expert:
        yield f"--num-experts {shape.n_expert}", own
        yield f"--moe-ffn-hidden-size {shape.expert_hidden}", own
        yield f"--moe-router-topk {shape.top_k}", own
        if shape.n_dense:
            yield f'--moe-layer-freq "([0]*{shape.n_dense}+[1]*{shape.n_mixed})"', own
        if shape.n_shared:
            yield f"--moe-shared-expert-intermediate-size {shape.n_shared * shape.expert_hidden}", own
        if shape.capacity is not None:
            yield f"--moe-expert-capacity-factor {shape.capacity}", own
        yield "--moe-token-dispatcher-type alltoall", "the plan counts with an all-to-all"


def _parallel(chosen: ChosenPlan) -> Iterator[Option]:
    """How ranks are laid out, and what data parallelism does with state."""
    plan = chosen.plan
    lay, recipe, shape = plan.layout, plan.recipe, plan.shape
    layout = chosen.origin("layout")
    yield f"--tensor-model-parallel-size {lay.tp}", layout
    if recipe.sequence_parallel:
        yield "--sequence-parallel", layout
    yield f"--pipeline-model-parallel-size {lay.pp}", layout
    counts = blocks_of(shape, recipe.n_stages(lay.pp))
    if len(set(counts)) > 1:
        ends = ["E", *[""] * (len(counts) - 1)], [*[""] * (len(counts) - 1), "L"]
        stages = "|".join(
            first + f"t*{count}" * (count > 0) + last for count, first, last in zip(counts, *ends, strict=True)
        )
        yield f'--pipeline-model-parallel-layout "{stages}"', "chosen by the planner: the head takes as long as blocks"
    elif recipe.stages_per_rank > 1:
        yield f"--num-virtual-stages-per-pipeline-rank {recipe.stages_per_rank}", chosen.origin("schedule")
    yield f"--context-parallel-size {lay.cp}", layout
    if lay.cp > 1:
        yield f"--cp-comm-type {CONTEXTS[recipe.context]}", chosen.origin("context")
    if shape.n_expert:
        yield f"--expert-model-parallel-size {lay.ep}", layout
        yield f"--expert-tensor-parallel-size {lay.tp}", "the plan cuts each expert over tp, as all else"
    if lay.pp > 1 and lay.dp > 1:
        yield "--use-tp-pp-dp-mapping", "the plan's order of ranks: dp outermost"
    if lay.dp * lay.cp > 1:
        for option in SHARDING[recipe.strategy]:
            yield option, chosen.origin("strategy")
        if recipe.shard_ranks is not None:
            yield f"--num-distributed-optimizer-instances {lay.dp // recipe.shard_ranks}", chosen.origin("strategy")
        yield "--overlap-grad-reduce", "the plan hides gradients behind backward"
        if recipe.strategy != "ddp":
            yield "--overlap-param-gather", "the plan hides gathers behind products"


def _step(chosen: ChosenPlan) -> Iterator[Option]:
    """The batch, the numbers and the optimizer of a step."""
    recipe = chosen.plan.recipe
    yield f"--micro-batch-size {chosen.rows}", chosen.origin("n_micro")
    yield f"--global-batch-size {recipe.batch_size}", chosen.origin("batch")
    for option in PRECISIONS[recipe.precision]:
        yield option, chosen.origin("precision")
    yield f"--optimizer {OPTIMIZERS[recipe.optimizer]}", chosen.origin("optimizer")
    if recipe.recompute == "full":
        yield "--recompute-granularity full", chosen.origin("recompute")
        yield "--recompute-method uniform", "of each block the input alone is kept"
        yield "--recompute-num-layers 1", "of each block the input alone is kept"
