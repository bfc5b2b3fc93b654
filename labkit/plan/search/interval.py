"""The interval of a prediction: what nine of ten published runs like a plan took, in multiples of what is predicted.

A plan is like the published runs of its kind, the first of these that is true of it:

    experts               the model has experts
    pipeline, nodes       a pipeline on 2 to 16 nodes
    pipeline, many nodes  a pipeline on more
    pipeline              a pipeline on one node
    many nodes            no pipeline, 64 nodes or more
    small                 a model of fewer than 1e9 parameters
    35%, 20%, 0%          at least so much MFU is predicted

By hand: the kind's `low` and `high` in uncertainty.toml, times the predicted seconds. A 20th of the runs of a kind lies
below `low` and a 20th above `high`, where each source counts as much as the others, however many runs it has: the next
run comes from a further source. benchmarks/uncertainty.py writes them, and holds them against sources that they were
not learnt from. What a device holds has one interval for all.
"""

from __future__ import annotations

from types import MappingProxyType

from labkit.plan.machine.hardware import Hardware
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout
from labkit.plan.search.uncertainty import Interval, constants

MANY_NODES, PIPELINE_NODES = 64, 16
"""Nodes from which on runs without a pipeline are a kind of their own; nodes up to which pipelines are one."""
SMALL = 1e9
"""Parameters below which a model is small: kernels, and not products, decide how long its step takes."""
BANDS = ((0.35, "35%"), (0.20, "20%"), (0.0, "0%"))
MEANING = MappingProxyType({
    "experts": "models with experts",
    "pipeline, nodes": f"pipelines on 2 to {PIPELINE_NODES} nodes",
    "pipeline, many nodes": f"pipelines on more than {PIPELINE_NODES} nodes",
    "pipeline": "pipelines on one node",
    "many nodes": f"no pipeline, {MANY_NODES} nodes and more",
    "small": "no pipeline, fewer than 1e9 parameters",
    "35%": "no pipeline, 35% MFU predicted and more",
    "20%": "no pipeline, 20 to 35% MFU predicted",
    "0%": "no pipeline, less than 20% MFU predicted",
})  # fmt: skip
"""The kinds in words."""


def kind_of(shape: ModelShape, layout: Layout, hardware: Hardware, mfu: float) -> str:
    """The kind of a run of which so much MFU is predicted, 0 to 1."""
    nodes = -(-layout.size // hardware.node_size)
    if shape.n_expert:
        return "experts"
    if layout.pp > 1:
        return "pipeline" if nodes == 1 else "pipeline, nodes" if nodes <= PIPELINE_NODES else "pipeline, many nodes"
    if nodes >= MANY_NODES:
        return "many nodes"
    return "small" if shape.n_params < SMALL else next(name for least, name in BANDS if mfu >= least)


def interval_of(shape: ModelShape, layout: Layout, hardware: Hardware, mfu: float) -> Interval:
    """The interval of its kind, in multiples of the predicted seconds."""
    return constants().seconds[kind_of(shape, layout, hardware, mfu)]
