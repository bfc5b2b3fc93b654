"""torchrun: the command that starts a script of one's own on the nodes of a plan, and the mesh that it is to build.

torchrun starts processes and knows nothing of what they do, so that any plan can be written: what is the script's to do
stands as comments beside the command.
"""

from __future__ import annotations

from collections.abc import Iterator

from labkit.plan.export.target import ChosenPlan, Line
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

    def lines(self, chosen: ChosenPlan, version: str) -> Iterator[Line]:
        """The command, below what the script is to do."""
        plan = chosen.plan
        lay, recipe = plan.layout, plan.recipe
        yield Line("#!/usr/bin/env bash")
        yield from chosen.head(self.name, version)
        yield Line("#")
        yield Line(f"# What {SCRIPT} is to do, which torchrun knows nothing of:")
        sizes = ", ".join(f"{size}" for size in (lay.dp, lay.pp, lay.cp, lay.tp))
        mesh = f'init_device_mesh("{plan.hardware.device}", ({sizes}), mesh_dim_names=("dp", "pp", "cp", "tp"))'
        yield Line(f"#   mesh       {mesh}")
        yield Line(f"#              {chosen.origin('layout')}: rank order is dp-major, tp-minor")
        if lay.ep > 1:
            yield Line(f"#   experts    dealt out over runs of {lay.ep} ranks along dp: {chosen.origin('layout')}")
        if lay.cp > 1:
            yield Line(f"#   context    rows cut over cp, attention by {recipe.context}: {chosen.origin('context')}")
        yield Line(f"#   strategy   {recipe.sharded}: {chosen.origin('strategy')}")
        if lay.pp > 1:
            stages = f", {recipe.stages_per_rank} stages on a rank" * (recipe.stages_per_rank > 1)
            yield Line(f"#   schedule   {recipe.schedule}{stages}: {chosen.origin('schedule')}")
        if lay.tp > 1:
            beside = "with" if recipe.sequence_parallel else "without"
            yield Line(f"#   tensor     {beside} sequence parallelism: {chosen.origin('layout')}")
        if plan.adapter is not None:
            yield Line(f"#   adapter    {plan.adapter}: {chosen.origin('adapter')}")
        yield Line(f"#   batch      {recipe.batch_size} rows of a step, all ranks: {chosen.origin('batch')}")
        cut = f"{plural(recipe.n_micro, 'micro-batch')} of {plural(chosen.rows, 'row')}"
        yield Line(f"#   micro      {cut}: {chosen.origin('n_micro')}")
        yield Line(f"#   sequence   {plan.shape.seq} tokens of a row: {_length(chosen)}")
        yield Line(f"#   recompute  {recipe.recompute}: {chosen.origin('recompute')}")
        yield Line(f"#   precision  {recipe.precision}: {chosen.origin('precision')}")
        yield Line(f"#   optimizer  {recipe.optimizer}: {chosen.origin('optimizer')}")
        if recipe.offload:
            yield Line(f"#   offload    of the optimizer's state to the CPU: {chosen.origin('offload')}")
        yield from launch(chosen)
        yield Line(f'torchrun "${{launch[@]}}" {SCRIPT} "$@"')


def launch(chosen: ChosenPlan) -> Iterator[Line]:
    """The array `launch` of a shell, torchrun's options: nodes, ranks on each, and where they meet."""
    nodes, ranks = chosen.nodes
    yield Line("")
    if nodes > 1:
        yield Line("# run this on every node, with HEAD set to the name of one of them, the same everywhere")
    yield Line("launch=(")
    yield Line(f"  --nnodes={nodes}", f"{chosen.plan.layout.size} ranks: {chosen.origin('gpus')}")
    yield Line(f"  --nproc-per-node={ranks}", _node(chosen))
    if nodes > 1:
        yield Line("  --rdzv-backend=c10d", "assumed: the first node holds the store")
        yield Line(f'  --rdzv-endpoint="${{HEAD:?}}:{PORT}"', "assumed: torchrun's own port")
    else:
        yield Line("  --standalone", "one node, which needs no other")
    yield Line(")")


def _node(chosen: ChosenPlan) -> str:
    return "asked for" if "node_size" in chosen.asked else f"devices of a node of {chosen.plan.hardware.name}"


def _length(chosen: ChosenPlan) -> str:
    return "asked for" if "seq" in chosen.asked else "the model's own"
