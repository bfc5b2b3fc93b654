"""torchrun: the command that starts a script of one's own on the nodes of a plan, and the mesh that it is to build.

torchrun starts processes and knows nothing of what they do, so that any plan can be written: what is the script's to do
stands as comments beside the command.
"""

from __future__ import annotations

from collections.abc import Iterator

from labkit.plan.export.target import ChosenPlan, FileLine
from labkit.plan.search.search import Plan
from labkit.plan.words import plural

SCRIPT = "train.py"
PORT = 29500
"""The port of torchrun's own default."""


class Torchrun:
    """The command line of torchrun for `train.py`."""

    name = "torchrun"

    def lacks(self, plan: Plan) -> Iterator[str]:
        """Nothing: the script does what the plan says."""
        yield from ()

    def lines(self, chosen: ChosenPlan, version: str) -> Iterator[FileLine]:
        """The command, below what the script is to do."""
        plan = chosen.plan
        lay, recipe = plan.layout, plan.recipe
        yield FileLine("#!/usr/bin/env bash")
        yield from chosen.head(self.name, version)
        yield FileLine("#")
        yield FileLine(f"# What {SCRIPT} is to do, which torchrun knows nothing of:")
        sizes = ", ".join(f"{size}" for size in (lay.dp, lay.pp, lay.cp, lay.tp))
        mesh = f'init_device_mesh("{plan.hardware.device}", ({sizes}), mesh_dim_names=("dp", "pp", "cp", "tp"))'
        yield FileLine(f"#   mesh       {mesh}")
        yield FileLine(f"#              {chosen.origin('layout')}: rank order is dp-major, tp-minor")
        if lay.ep > 1:
            yield FileLine(f"#   experts    dealt out over runs of {lay.ep} ranks along dp: {chosen.origin('layout')}")
        if lay.cp > 1:
            yield FileLine(
                f"#   context    rows cut over cp, attention by {recipe.context}: {chosen.origin('context')}"
            )
        yield FileLine(f"#   strategy   {recipe.sharded}: {chosen.origin('strategy')}")
        if lay.pp > 1:
            stages = f", {recipe.stages_per_rank} stages on a rank" * (recipe.stages_per_rank > 1)
            yield FileLine(f"#   schedule   {recipe.schedule}{stages}: {chosen.origin('schedule')}")
        if lay.tp > 1:
            beside = "with" if recipe.sequence_parallel else "without"
            yield FileLine(f"#   tensor     {beside} sequence parallelism: {chosen.origin('layout')}")
        if plan.adapter is not None:
            yield FileLine(f"#   adapter    {plan.adapter}: {chosen.origin('adapter')}")
        yield FileLine(f"#   batch      {recipe.batch_size} rows of a step, all ranks: {chosen.origin('batch')}")
        cut = f"{plural(recipe.n_micro, 'micro-batch')} of {plural(chosen.rows, 'row')}"
        yield FileLine(f"#   micro      {cut}: {chosen.origin('n_micro')}")
        yield FileLine(f"#   sequence   {plan.shape.seq} tokens of a row: {_length(chosen)}")
        yield FileLine(f"#   recompute  {recipe.recompute}: {chosen.origin('recompute')}")
        yield FileLine(f"#   precision  {recipe.precision}: {chosen.origin('precision')}")
        yield FileLine(f"#   optimizer  {recipe.optimizer}: {chosen.origin('optimizer')}")
        if recipe.offload:
            yield FileLine(f"#   offload    of the optimizer's state to the CPU: {chosen.origin('offload')}")
        yield from launch(chosen)
        yield FileLine(f'torchrun "${{launch[@]}}" {SCRIPT} "$@"')


def launch(chosen: ChosenPlan) -> Iterator[FileLine]:
    """The array `launch` of a shell, torchrun's options: nodes, ranks on each, and where they meet."""
    nodes, ranks = chosen.nodes
    yield FileLine("")
    if nodes > 1:
        yield FileLine("# run this on every node, with HEAD set to the name of one of them, the same everywhere")
    yield FileLine("launch=(")
    yield FileLine(f"  --nnodes={nodes}", f"{chosen.plan.layout.size} ranks: {chosen.origin('gpus')}")
    yield FileLine(f"  --nproc-per-node={ranks}", _node(chosen))
    if nodes > 1:
        yield FileLine("  --rdzv-backend=c10d", "assumed: the first node holds the store")
        yield FileLine(f'  --rdzv-endpoint="${{HEAD:?}}:{PORT}"', "assumed: torchrun's own port")
    else:
        yield FileLine("  --standalone", "one node, which needs no other")
    yield FileLine(")")


def _node(chosen: ChosenPlan) -> str:
    return "asked for" if "node_size" in chosen.asked else f"devices of a node of {chosen.plan.hardware.name}"


def _length(chosen: ChosenPlan) -> str:
    return "asked for" if "seq" in chosen.asked else "the model's own"
