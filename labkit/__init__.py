"""labkit: a laboratory for distributed training in JupyterLab.

    import labkit, torch
    with labkit.Cluster(4) as cluster:
        replies = cluster.run(lambda group: group.all_reduce(torch.ones(3)))

Importing labkit starts nothing and imports no torch; each name below is loaded when it is first used.
"""

from __future__ import annotations

import difflib
import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = MappingProxyType(
    {
        "Cluster": "capped",
        "run": "capped",
        "track": "launch.progress",
        "Reply": "launch.reply",
        "WorkerError": "launch.reply",
        "Autopsy": "launch.watch",
        "Group": "comm.group",
        "Work": "comm.work",
        "Ledger": "comm.ledger",
        "Transfer": "comm.ledger",
        "Mesh": "comm.mesh",
        "ring": "comm.ring",
        "tree": "comm.tree",
        "star": "comm.star",
        "run_threads": "comm.local",
        "Layout": "plan.layout",
        "Links": "plan.topology",
        "Link": "plan.link",
        "Film": "probe.film",
        "compare": "view.bars",
        "doctor": "lab.doctor",
        "room": "lab.room",
        "show": "lab.source",
        "Play": "view.widgets.play",
        "Predict": "view.widgets.predict",
        "RingFilm": "view.widgets.ring_film",
        "CrossoverExplorer": "view.widgets.crossover",
        "gpipe": "plan.schedule",
        "one_f_one_b": "plan.schedule",
        "interleaved": "plan.schedule",
        "zero_bubble": "plan.schedule",
        "Action": "plan.schedule",
        "Schedule": "plan.schedule",
        "needs": "plan.schedule",
        "validate": "plan.schedule",
        "simulate": "plan.schedule",
        "Item": "plan.breakdown",
        "Breakdown": "plan.breakdown",
        "Recipe": "plan.recipe",
        "DDP": "parallel.ddp",
        "ZeRO1": "parallel.zero1",
        "ZeRO2": "parallel.zero2",
        "ZeRO3": "parallel.zero3",
        "ColumnParallelLinear": "parallel.tensor",
        "RowParallelLinear": "parallel.tensor",
        "split": "parallel.split",
        "Pipeline": "parallel.pipeline",
        "GPT": "train.gpt",
        "GPTConfig": "train.config",
        "LossScale": "train.loss_scale",
        "Scaler": "train.loss_scale",
        "checkpoint": "train.checkpoint",
        "checkpoint_sequential": "train.checkpoint",
        "LoRALinear": "train.lora",
        "inject_lora": "train.lora",
        "MemoryProbe": "probe.memory",
        "Clock": "probe.clock",
        "VirtualOutOfMemory": "probe.memory",
        "measure_hardware": "probe.machine",
        "ModelShape": "plan.shape",
        "Hardware": "plan.hardware",
        "predict_memory": "plan.memory",
        "predict_step": "plan.time",
        "plans": "plan.search",
        "Plan": "plan.search",
        "hierarchy": "comm.hierarchy",
        "rehearse": "rehearsal",
        "rehearsed": "probe.rehearsal",
        "Rehearsal": "probe.rehearsal",
        "traffic": "view.traffic",
        "cube": "view.cube",
        "roofline": "view.roofline",
        "network": "view.topology",
        "CubeExplorer": "view.widgets.cube",
        "RooflineExplorer": "view.widgets.roofline",
        "CheckpointExplorer": "view.widgets.segments",
        "MemoryAnatomy": "view.widgets.anatomy",
        "FloatExplorer": "view.widgets.floats",
        "GradientHistogram": "view.widgets.histogram",
        "LossScaleExplorer": "view.widgets.scale",
        "BucketExplorer": "view.widgets.buckets",
        "StaleExplorer": "view.widgets.stale",
        "CompressionExplorer": "view.widgets.sparse",
        "ZeROExplorer": "view.widgets.zero",
        "GatherExplorer": "view.widgets.gather",
        "GatherProbe": "probe.gather",
        "SplitExplorer": "view.widgets.split",
        "PipelinePlayer": "view.widgets.player",
        "InFlightExplorer": "view.widgets.inflight",
        "LoRAExplorer": "view.widgets.lora",
        "InterconnectExplorer": "view.widgets.links",
        "BottleneckExplorer": "view.widgets.bottlenecks",
        "PlannerPanel": "view.widgets.planner",
        "Whiteboard": "view.widgets.whiteboard",
        "ExplainTrace": "view.widgets.explain",
        "Ward": "view.widgets.ward",
        "CapstoneExplorer": "view.widgets.capstone",
        "accumulate": "train.accumulate",
        "Recording": "probe.recording",
    }
)

if TYPE_CHECKING:  # for editors and type checkers; `as` says that the name is public
    from labkit.capped import Cluster as Cluster
    from labkit.capped import run as run
    from labkit.comm import hierarchy as hierarchy
    from labkit.comm import ring as ring
    from labkit.comm import star as star
    from labkit.comm import tree as tree
    from labkit.comm.group import Group as Group
    from labkit.comm.ledger import Ledger as Ledger
    from labkit.comm.ledger import Transfer as Transfer
    from labkit.comm.local import run_threads as run_threads
    from labkit.comm.mesh import Mesh as Mesh
    from labkit.comm.work import Work as Work
    from labkit.lab.doctor import doctor as doctor
    from labkit.lab.room import room as room
    from labkit.lab.source import show as show
    from labkit.launch.progress import track as track
    from labkit.launch.reply import Reply as Reply
    from labkit.launch.reply import WorkerError as WorkerError
    from labkit.launch.watch import Autopsy as Autopsy
    from labkit.parallel.ddp import DDP as DDP
    from labkit.parallel.pipeline import Pipeline as Pipeline
    from labkit.parallel.split import split as split
    from labkit.parallel.tensor import ColumnParallelLinear as ColumnParallelLinear
    from labkit.parallel.tensor import RowParallelLinear as RowParallelLinear
    from labkit.parallel.zero1 import ZeRO1 as ZeRO1
    from labkit.parallel.zero2 import ZeRO2 as ZeRO2
    from labkit.parallel.zero3 import ZeRO3 as ZeRO3
    from labkit.plan.breakdown import Breakdown as Breakdown
    from labkit.plan.breakdown import Item as Item
    from labkit.plan.hardware import Hardware as Hardware
    from labkit.plan.layout import Layout as Layout
    from labkit.plan.link import Link as Link
    from labkit.plan.memory import predict_memory as predict_memory
    from labkit.plan.recipe import Recipe as Recipe
    from labkit.plan.schedule import Action as Action
    from labkit.plan.schedule import Schedule as Schedule
    from labkit.plan.schedule import gpipe as gpipe
    from labkit.plan.schedule import interleaved as interleaved
    from labkit.plan.schedule import needs as needs
    from labkit.plan.schedule import one_f_one_b as one_f_one_b
    from labkit.plan.schedule import simulate as simulate
    from labkit.plan.schedule import validate as validate
    from labkit.plan.schedule import zero_bubble as zero_bubble
    from labkit.plan.search import Plan as Plan
    from labkit.plan.search import plans as plans
    from labkit.plan.shape import ModelShape as ModelShape
    from labkit.plan.time import predict_step as predict_step
    from labkit.plan.topology import Links as Links
    from labkit.probe.clock import Clock as Clock
    from labkit.probe.film import Film as Film
    from labkit.probe.gather import GatherProbe as GatherProbe
    from labkit.probe.machine import measure_hardware as measure_hardware
    from labkit.probe.memory import MemoryProbe as MemoryProbe
    from labkit.probe.memory import VirtualOutOfMemory as VirtualOutOfMemory
    from labkit.probe.recording import Recording as Recording
    from labkit.probe.rehearsal import Rehearsal as Rehearsal
    from labkit.probe.rehearsal import rehearsed as rehearsed
    from labkit.rehearsal import rehearse as rehearse
    from labkit.train.accumulate import accumulate as accumulate
    from labkit.train.checkpoint import checkpoint as checkpoint
    from labkit.train.checkpoint import checkpoint_sequential as checkpoint_sequential
    from labkit.train.config import GPTConfig as GPTConfig
    from labkit.train.gpt import GPT as GPT
    from labkit.train.lora import LoRALinear as LoRALinear
    from labkit.train.lora import inject_lora as inject_lora
    from labkit.train.loss_scale import LossScale as LossScale
    from labkit.train.loss_scale import Scaler as Scaler
    from labkit.view.bars import compare as compare
    from labkit.view.cube import cube as cube
    from labkit.view.roofline import roofline as roofline
    from labkit.view.topology import network as network
    from labkit.view.traffic import traffic as traffic
    from labkit.view.widgets.anatomy import MemoryAnatomy as MemoryAnatomy
    from labkit.view.widgets.bottlenecks import BottleneckExplorer as BottleneckExplorer
    from labkit.view.widgets.buckets import BucketExplorer as BucketExplorer
    from labkit.view.widgets.capstone import CapstoneExplorer as CapstoneExplorer
    from labkit.view.widgets.crossover import CrossoverExplorer as CrossoverExplorer
    from labkit.view.widgets.cube import CubeExplorer as CubeExplorer
    from labkit.view.widgets.explain import ExplainTrace as ExplainTrace
    from labkit.view.widgets.floats import FloatExplorer as FloatExplorer
    from labkit.view.widgets.gather import GatherExplorer as GatherExplorer
    from labkit.view.widgets.histogram import GradientHistogram as GradientHistogram
    from labkit.view.widgets.inflight import InFlightExplorer as InFlightExplorer
    from labkit.view.widgets.links import InterconnectExplorer as InterconnectExplorer
    from labkit.view.widgets.lora import LoRAExplorer as LoRAExplorer
    from labkit.view.widgets.planner import PlannerPanel as PlannerPanel
    from labkit.view.widgets.play import Play as Play
    from labkit.view.widgets.player import PipelinePlayer as PipelinePlayer
    from labkit.view.widgets.predict import Predict as Predict
    from labkit.view.widgets.ring_film import RingFilm as RingFilm
    from labkit.view.widgets.roofline import RooflineExplorer as RooflineExplorer
    from labkit.view.widgets.scale import LossScaleExplorer as LossScaleExplorer
    from labkit.view.widgets.segments import CheckpointExplorer as CheckpointExplorer
    from labkit.view.widgets.sparse import CompressionExplorer as CompressionExplorer
    from labkit.view.widgets.split import SplitExplorer as SplitExplorer
    from labkit.view.widgets.stale import StaleExplorer as StaleExplorer
    from labkit.view.widgets.ward import Ward as Ward
    from labkit.view.widgets.whiteboard import Whiteboard as Whiteboard
    from labkit.view.widgets.zero import ZeROExplorer as ZeROExplorer

__all__ = tuple(sorted(_WHERE))


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        near = difflib.get_close_matches(name, _WHERE, 1)
        raise AttributeError(f"labkit has no {name!r}{f'; did you mean {near[0]!r}?' if near else ''}")
    module = importlib.import_module(f"labkit.{_WHERE[name]}")
    return getattr(module, name, module)  # ring, tree and star are modules themselves


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext labkit`: the %%ranks magic, and torch is imported for the ranks while you read on."""
    from labkit.launch import magic

    magic.load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """`%unload_ext labkit`."""
    from labkit.launch import magic

    magic.unload(shell)
