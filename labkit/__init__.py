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

_NAMES = MappingProxyType(
    {
        "capped": "Cluster run",
        "comm.group": "Group",
        "comm.hierarchy": "hierarchy",
        "comm.ledger": "Ledger Transfer",
        "comm.local": "run_threads",
        "comm.mesh": "Mesh",
        "comm.ring": "ring",
        "comm.star": "star",
        "comm.tree": "tree",
        "comm.work": "Work",
        "course.cards.mine": "cards",
        "course.exercises.check": "check exercise hint solution progress",
        "course.claims.shown": "claims",
        "course.machine.doctor": "doctor",
        "course.machine.room": "room",
        "course.reading.source": "show",
        "launch.progress": "track",
        "launch.reply": "Reply WorkerError",
        "launch.watch": "Autopsy",
        "parallel.ddp": "DDP",
        "parallel.pipeline": "Pipeline",
        "parallel.split": "split",
        "parallel.tensor": "ColumnParallelLinear RowParallelLinear",
        "parallel.zero1": "ZeRO1",
        "parallel.zero2": "ZeRO2",
        "parallel.zero3": "ZeRO3",
        "plan.breakdown": "Item Breakdown",
        "plan.hardware": "Hardware",
        "plan.layout": "Layout",
        "plan.link": "Link",
        "plan.memory": "predict_memory",
        "plan.recipe": "Recipe",
        "plan.schedule": "gpipe one_f_one_b interleaved zero_bubble Action Schedule needs validate simulate",
        "plan.search": "plans Plan",
        "plan.shape": "ModelShape",
        "plan.time": "predict_step",
        "plan.topology": "Links",
        "probe.clock": "Clock",
        "probe.film": "Film",
        "probe.gather": "GatherProbe",
        "probe.machine": "measure_hardware",
        "probe.memory": "MemoryProbe VirtualOutOfMemory",
        "probe.recording": "Recording",
        "probe.rehearsal": "rehearsed Rehearsal",
        "rehearsal": "rehearse",
        "train.accumulate": "accumulate",
        "train.checkpoint": "checkpoint checkpoint_sequential",
        "train.config": "GPTConfig",
        "train.gpt": "GPT",
        "train.lora": "LoRALinear inject_lora",
        "train.loss_scale": "LossScale Scaler",
        "view.bars": "compare",
        "view.cube": "cube",
        "view.roofline": "roofline",
        "view.topology": "network",
        "view.traffic": "traffic",
        "course.topics.memory_anatomy": "MemoryAnatomy",
        "course.topics.bottleneck_explorer": "BottleneckExplorer",
        "course.topics.bucket_explorer": "BucketExplorer",
        "course.capstone.capstone_explorer": "CapstoneExplorer",
        "course.topics.crossover_explorer": "CrossoverExplorer",
        "course.topics.cube_explorer": "CubeExplorer",
        "course.topics.explain_trace": "ExplainTrace",
        "course.topics.float_explorer": "FloatExplorer",
        "course.topics.gather_explorer": "GatherExplorer",
        "course.exercises.hint_panel": "HintPanel",
        "course.topics.gradient_histogram": "GradientHistogram",
        "course.topics.in_flight_explorer": "InFlightExplorer",
        "course.topics.interconnect_explorer": "InterconnectExplorer",
        "course.interview.interview_panel": "InterviewPanel",
        "course.topics.lora_explorer": "LoRAExplorer",
        "course.topics.planner_panel": "PlannerPanel",
        "course.widgets.play": "Play",
        "course.topics.pipeline_player": "PipelinePlayer",
        "course.widgets.predict": "Predict",
        "course.learner.progress_panel": "ProgressPanel",
        "course.cards.review_panel": "ReviewPanel",
        "course.topics.ring_film": "RingFilm",
        "course.topics.roofline_explorer": "RooflineExplorer",
        "course.topics.loss_scale_explorer": "LossScaleExplorer",
        "course.topics.checkpoint_explorer": "CheckpointExplorer",
        "course.topics.compression_explorer": "CompressionExplorer",
        "course.topics.split_explorer": "SplitExplorer",
        "course.topics.stale_explorer": "StaleExplorer",
        "course.clinic.ward": "Ward",
        "course.whiteboard.whiteboard": "Whiteboard",
        "course.topics.zero_explorer": "ZeROExplorer",
    }
)
_WHERE = MappingProxyType({name: module for module, names in _NAMES.items() for name in names.split()})

if TYPE_CHECKING:  # for editors and type checkers; `as` says that the name is public
    from labkit.capped import Cluster as Cluster, run as run
    from labkit.comm import hierarchy as hierarchy, ring as ring, star as star, tree as tree
    from labkit.comm.group import Group as Group
    from labkit.comm.ledger import Ledger as Ledger, Transfer as Transfer
    from labkit.comm.local import run_threads as run_threads
    from labkit.comm.mesh import Mesh as Mesh
    from labkit.comm.work import Work as Work
    from labkit.course.capstone.capstone_explorer import CapstoneExplorer as CapstoneExplorer
    from labkit.course.cards.mine import cards as cards
    from labkit.course.cards.review_panel import ReviewPanel as ReviewPanel
    from labkit.course.claims.shown import claims as claims
    from labkit.course.clinic.ward import Ward as Ward
    from labkit.course.exercises.check import (
        check as check,
        exercise as exercise,
        hint as hint,
        progress as progress,
        solution as solution,
    )
    from labkit.course.exercises.hint_panel import HintPanel as HintPanel
    from labkit.course.interview.interview_panel import InterviewPanel as InterviewPanel
    from labkit.course.learner.progress_panel import ProgressPanel as ProgressPanel
    from labkit.course.machine.doctor import doctor as doctor
    from labkit.course.machine.room import room as room
    from labkit.course.reading.source import show as show
    from labkit.course.topics.bottleneck_explorer import BottleneckExplorer as BottleneckExplorer
    from labkit.course.topics.bucket_explorer import BucketExplorer as BucketExplorer
    from labkit.course.topics.checkpoint_explorer import CheckpointExplorer as CheckpointExplorer
    from labkit.course.topics.compression_explorer import CompressionExplorer as CompressionExplorer
    from labkit.course.topics.crossover_explorer import CrossoverExplorer as CrossoverExplorer
    from labkit.course.topics.cube_explorer import CubeExplorer as CubeExplorer
    from labkit.course.topics.explain_trace import ExplainTrace as ExplainTrace
    from labkit.course.topics.float_explorer import FloatExplorer as FloatExplorer
    from labkit.course.topics.gather_explorer import GatherExplorer as GatherExplorer
    from labkit.course.topics.gradient_histogram import GradientHistogram as GradientHistogram
    from labkit.course.topics.in_flight_explorer import InFlightExplorer as InFlightExplorer
    from labkit.course.topics.interconnect_explorer import InterconnectExplorer as InterconnectExplorer
    from labkit.course.topics.lora_explorer import LoRAExplorer as LoRAExplorer
    from labkit.course.topics.loss_scale_explorer import LossScaleExplorer as LossScaleExplorer
    from labkit.course.topics.memory_anatomy import MemoryAnatomy as MemoryAnatomy
    from labkit.course.topics.pipeline_player import PipelinePlayer as PipelinePlayer
    from labkit.course.topics.planner_panel import PlannerPanel as PlannerPanel
    from labkit.course.topics.ring_film import RingFilm as RingFilm
    from labkit.course.topics.roofline_explorer import RooflineExplorer as RooflineExplorer
    from labkit.course.topics.split_explorer import SplitExplorer as SplitExplorer
    from labkit.course.topics.stale_explorer import StaleExplorer as StaleExplorer
    from labkit.course.topics.zero_explorer import ZeROExplorer as ZeROExplorer
    from labkit.course.whiteboard.whiteboard import Whiteboard as Whiteboard
    from labkit.course.widgets.play import Play as Play
    from labkit.course.widgets.predict import Predict as Predict
    from labkit.launch.progress import track as track
    from labkit.launch.reply import Reply as Reply, WorkerError as WorkerError
    from labkit.launch.watch import Autopsy as Autopsy
    from labkit.parallel.ddp import DDP as DDP
    from labkit.parallel.pipeline import Pipeline as Pipeline
    from labkit.parallel.split import split as split
    from labkit.parallel.tensor import (
        ColumnParallelLinear as ColumnParallelLinear,
        RowParallelLinear as RowParallelLinear,
    )
    from labkit.parallel.zero1 import ZeRO1 as ZeRO1
    from labkit.parallel.zero2 import ZeRO2 as ZeRO2
    from labkit.parallel.zero3 import ZeRO3 as ZeRO3
    from labkit.plan.breakdown import Breakdown as Breakdown, Item as Item
    from labkit.plan.hardware import Hardware as Hardware
    from labkit.plan.layout import Layout as Layout
    from labkit.plan.link import Link as Link
    from labkit.plan.memory import predict_memory as predict_memory
    from labkit.plan.recipe import Recipe as Recipe
    from labkit.plan.schedule import (
        Action as Action,
        Schedule as Schedule,
        gpipe as gpipe,
        interleaved as interleaved,
        needs as needs,
        one_f_one_b as one_f_one_b,
        simulate as simulate,
        validate as validate,
        zero_bubble as zero_bubble,
    )
    from labkit.plan.search import Plan as Plan, plans as plans
    from labkit.plan.shape import ModelShape as ModelShape
    from labkit.plan.time import predict_step as predict_step
    from labkit.plan.topology import Links as Links
    from labkit.probe.clock import Clock as Clock
    from labkit.probe.film import Film as Film
    from labkit.probe.gather import GatherProbe as GatherProbe
    from labkit.probe.machine import measure_hardware as measure_hardware
    from labkit.probe.memory import MemoryProbe as MemoryProbe, VirtualOutOfMemory as VirtualOutOfMemory
    from labkit.probe.recording import Recording as Recording
    from labkit.probe.rehearsal import Rehearsal as Rehearsal, rehearsed as rehearsed
    from labkit.rehearsal import rehearse as rehearse
    from labkit.train.accumulate import accumulate as accumulate
    from labkit.train.checkpoint import checkpoint as checkpoint, checkpoint_sequential as checkpoint_sequential
    from labkit.train.config import GPTConfig as GPTConfig
    from labkit.train.gpt import GPT as GPT
    from labkit.train.lora import LoRALinear as LoRALinear, inject_lora as inject_lora
    from labkit.train.loss_scale import LossScale as LossScale, Scaler as Scaler
    from labkit.view.bars import compare as compare
    from labkit.view.cube import cube as cube
    from labkit.view.roofline import roofline as roofline
    from labkit.view.topology import network as network
    from labkit.view.traffic import traffic as traffic

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
