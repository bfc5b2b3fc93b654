"""The names that labkit gives, each from where it is written: for __init__.py, editors and type checkers.

`__all__` are the public ones; the others are widgets, and names that a reader meets less often.
"""

from typing import Any

from labkit.capped import Cluster as Cluster, run as run
from labkit.comm import hierarchy as hierarchy, ring as ring, star as star, tree as tree
from labkit.comm.group import Group as Group, Work as Work
from labkit.comm.ledger import Ledger as Ledger, Transfer as Transfer
from labkit.comm.local import run_threads as run_threads
from labkit.comm.mesh import Mesh as Mesh
from labkit.course.capstone.capstone_explorer import CapstoneExplorer as CapstoneExplorer
from labkit.course.cards.own_cards import cards as cards
from labkit.course.cards.review_panel import ReviewPanel as ReviewPanel
from labkit.course.claims.shown_claims import claims as claims
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
from labkit.course.interview.mock_panel import MockInterviewPanel as MockInterviewPanel
from labkit.course.interview.what_breaks_panel import WhatBreaksPanel as WhatBreaksPanel
from labkit.course.learner.progress_panel import ProgressPanel as ProgressPanel
from labkit.course.machine.doctor import doctor as doctor
from labkit.course.machine.room import room as room
from labkit.course.reading.source import show as show
from labkit.course.topics.bottleneck_explorer import BottleneckExplorer as BottleneckExplorer
from labkit.course.topics.bucket_explorer import BucketExplorer as BucketExplorer
from labkit.course.topics.checkpoint_explorer import CheckpointExplorer as CheckpointExplorer
from labkit.course.topics.compression_explorer import CompressionExplorer as CompressionExplorer
from labkit.course.topics.context_explorer import ContextExplorer as ContextExplorer
from labkit.course.topics.crossover_explorer import CrossoverExplorer as CrossoverExplorer
from labkit.course.topics.cube_explorer import CubeExplorer as CubeExplorer
from labkit.course.topics.dispatch_film import DispatchFilm as DispatchFilm
from labkit.course.topics.explain_trace import ExplainTrace as ExplainTrace
from labkit.course.topics.float_explorer import FloatExplorer as FloatExplorer
from labkit.course.topics.gather_explorer import GatherExplorer as GatherExplorer
from labkit.course.topics.generation_explorer import GenerationExplorer as GenerationExplorer
from labkit.course.topics.gradient_histogram import GradientHistogram as GradientHistogram
from labkit.course.topics.in_flight_explorer import InFlightExplorer as InFlightExplorer
from labkit.course.topics.interconnect_explorer import InterconnectExplorer as InterconnectExplorer
from labkit.course.topics.lora_explorer import LoRAExplorer as LoRAExplorer
from labkit.course.topics.loss_scale_explorer import LossScaleExplorer as LossScaleExplorer
from labkit.course.topics.memory_anatomy import MemoryAnatomy as MemoryAnatomy
from labkit.course.topics.pipeline_player import PipelinePlayer as PipelinePlayer
from labkit.course.topics.placement_explorer import PlacementExplorer as PlacementExplorer
from labkit.course.topics.planner_panel import PlannerPanel as PlannerPanel
from labkit.course.topics.ring_film import RingFilm as RingFilm
from labkit.course.topics.roofline_explorer import RooflineExplorer as RooflineExplorer
from labkit.course.topics.router_explorer import RouterExplorer as RouterExplorer
from labkit.course.topics.split_explorer import SplitExplorer as SplitExplorer
from labkit.course.topics.stale_explorer import StaleExplorer as StaleExplorer
from labkit.course.topics.survival_explorer import SurvivalExplorer as SurvivalExplorer
from labkit.course.topics.zero_explorer import ZeROExplorer as ZeROExplorer
from labkit.course.whiteboard.whiteboard import Whiteboard as Whiteboard
from labkit.course.widgets.play import Play as Play
from labkit.course.widgets.predict import Predict as Predict
from labkit.launch.hang_diagnosis import Autopsy as Autopsy
from labkit.launch.progress import track as track
from labkit.launch.reply import Reply as Reply, WorkerError as WorkerError
from labkit.parallel.ddp import DDP as DDP
from labkit.parallel.hsdp import HSDP as HSDP
from labkit.parallel.pipeline import Pipeline as Pipeline
from labkit.parallel.tensor import ColumnParallelLinear as ColumnParallelLinear, RowParallelLinear as RowParallelLinear
from labkit.parallel.tensor_plan import split as split
from labkit.parallel.zero1 import ZeRO1 as ZeRO1
from labkit.parallel.zero2 import ZeRO2 as ZeRO2
from labkit.parallel.zero3 import ZeRO3 as ZeRO3
from labkit.plan.breakdown import Breakdown as Breakdown, Item as Item
from labkit.plan.job.recipe import Recipe as Recipe
from labkit.plan.machine.hardware import Hardware as Hardware
from labkit.plan.machine.link import Link as Link
from labkit.plan.machine.topology import Links as Links
from labkit.plan.model.shape import ModelShape as ModelShape
from labkit.plan.partition.layout import Layout as Layout
from labkit.plan.schedules.schedule import (
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
from labkit.plan.search.search import Plan as Plan, plans as plans
from labkit.plan.step.memory import predict_memory as predict_memory
from labkit.plan.step.time import predict_step as predict_step
from labkit.probe.clock import Clock as Clock
from labkit.probe.film import Film as Film
from labkit.probe.first_difference import first_difference as first_difference
from labkit.probe.gather import GatherProbe as GatherProbe
from labkit.probe.machine import measure_hardware as measure_hardware
from labkit.probe.memory import MemoryProbe as MemoryProbe, VirtualOutOfMemory as VirtualOutOfMemory
from labkit.probe.recording import Recording as Recording
from labkit.probe.rehearsal import Rehearsal as Rehearsal, run_fake as run_fake
from labkit.probe.tensor_probe import TensorProbe as TensorProbe
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

__version__: str
__all__ = (
    "Action",
    "Breakdown",
    "Clock",
    "Cluster",
    "ColumnParallelLinear",
    "DDP",
    "GPT",
    "GPTConfig",
    "Group",
    "HSDP",
    "Hardware",
    "Layout",
    "Ledger",
    "Links",
    "LossScale",
    "MemoryProbe",
    "Mesh",
    "ModelShape",
    "Pipeline",
    "Recipe",
    "Reply",
    "RowParallelLinear",
    "Schedule",
    "TensorProbe",
    "WorkerError",
    "ZeRO1",
    "ZeRO2",
    "ZeRO3",
    "cards",
    "check",
    "checkpoint",
    "claims",
    "compare",
    "doctor",
    "exercise",
    "first_difference",
    "gpipe",
    "hint",
    "inject_lora",
    "interleaved",
    "one_f_one_b",
    "plans",
    "predict_memory",
    "predict_step",
    "progress",
    "rehearse",
    "ring",
    "room",
    "run",
    "show",
    "simulate",
    "solution",
    "split",
    "tree",
    "validate",
)

def __getattr__(name: str) -> Any: ...
def load_ipython_extension(shell: Any) -> None: ...
def unload_ipython_extension(shell: Any) -> None: ...
