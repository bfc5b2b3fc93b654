"""One small widget of each class that records a film, made without a run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch

from labkit import CrossoverExplorer
from labkit.course.capstone.attempts import strategies, tasks
from labkit.course.capstone.capstone_explorer import CapstoneExplorer
from labkit.course.learner.scores import Scores
from labkit.course.topics.block_explorer import BlockExplorer
from labkit.course.topics.bottleneck_explorer import BottleneckExplorer
from labkit.course.topics.bucket_explorer import BucketExplorer
from labkit.course.topics.checkpoint_explorer import CheckpointExplorer
from labkit.course.topics.compression_explorer import CompressionExplorer
from labkit.course.topics.context_explorer import ContextExplorer
from labkit.course.topics.cube_explorer import CubeExplorer
from labkit.course.topics.explain_trace import ExplainTrace
from labkit.course.topics.gather_explorer import GatherExplorer
from labkit.course.topics.generation_explorer import GenerationExplorer
from labkit.course.topics.gradient_histogram import GradientHistogram
from labkit.course.topics.in_flight_explorer import InFlightExplorer
from labkit.course.topics.interconnect_explorer import InterconnectExplorer
from labkit.course.topics.lora_explorer import LoRAExplorer
from labkit.course.topics.loss_scale_explorer import LossScaleExplorer
from labkit.course.topics.memory_anatomy import MemoryAnatomy
from labkit.course.topics.pipeline_player import PipelinePlayer
from labkit.course.topics.placement_explorer import PlacementExplorer
from labkit.course.topics.planner_panel import PlannerPanel
from labkit.course.topics.roofline_explorer import RooflineExplorer
from labkit.course.topics.router_explorer import RouterExplorer
from labkit.course.topics.schedule_pad import SchedulePad
from labkit.course.topics.split_explorer import SplitExplorer
from labkit.course.topics.stale_explorer import StaleExplorer
from labkit.course.topics.survival_explorer import SurvivalExplorer
from labkit.course.topics.zero_explorer import ZeROExplorer
from labkit.course.widgets.play import Play
from labkit.course.widgets.recorded import Recorded
from labkit.plan.breakdown import Breakdown
from labkit.plan.job.recipe import Recipe
from labkit.plan.machine.collectives import Line
from labkit.plan.machine.link import Link
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout
from labkit.plan.pocket.bucket_replay import Ready
from labkit.plan.pocket.segments import Stack
from labkit.probe.gather import BACKWARD, COMING, FORWARD, SHARDED, WHOLE, Change, GatherFilm
from labkit.probe.grads import gradient_statistics
from labkit.probe.recording import Recording
from labkit.probe.rows import ProgramSpan, RankTimeline
from labkit.view.bars import compare

TINY = ModelShape.gpt(n_layer=4, d_model=64, n_head=4, vocab=128, seq=32)
KIB = 1024


def all_recorded(folder: Path) -> Iterator[Recorded]:
    """A widget of each class; `folder` is for the capstone's board."""
    yield BlockExplorer()
    yield BottleneckExplorer({n: _step(1 / n) for n in (1, 2, 4)})
    yield BucketExplorer([Ready(str(k), 64 * KIB, 0.008 * (12 - k)) for k in range(12)], Line(0.01, 1.2e-7), 0.1)
    yield CapstoneExplorer(tasks(4), strategies(tasks(4)["home"])["pipeline"], lambda *_: (), Scores(folder / "scores"))
    yield CheckpointExplorer(Stack(36, 2**20, 2**20))
    yield CompressionExplorer({(share, True): [2.0, 1.0] for share in (0.01, 0.1)}, [2.0, 0.9], 21_768, 4)
    yield ContextExplorer()
    yield CrossoverExplorer(Line(1e-5, 1e-9))
    yield CubeExplorer(Layout(2, 2, 2), 3)
    yield ExplainTrace({name: _trace(seconds) for name, seconds in (("A", 1.0), ("B", 3.0))})
    yield GatherExplorer({"prefetch 0": _gathers(2)})
    yield GenerationExplorer()
    yield GradientHistogram(gradient_statistics({"block": torch.logspace(-12, 0, 500)}))
    yield InFlightExplorer()
    links = Link("inside", 1e-5, 1e9), Link("between", 1e-4, 1e8)
    yield InterconnectExplorer(TINY, Recipe(batch_size=8), Layout(dp=4), *links)
    yield LoRAExplorer(TINY)
    yield LossScaleExplorer([2.0 ** (17 + math.sin(step)) for step in range(40)])
    yield MemoryAnatomy(TINY)
    yield PipelinePlayer()
    yield PlacementExplorer()
    yield PlannerPanel()
    yield Play(lambda k: compare(law=2.0**k), recorded_over=("k",), k=(6, 30, 20))
    yield RooflineExplorer()
    yield RouterExplorer()
    yield SchedulePad()
    yield SplitExplorer()
    yield StaleExplorer()
    yield SurvivalExplorer()
    yield ZeROExplorer()


def _step(compute: float) -> Breakdown:
    """The parts of a step, in seconds."""
    return Breakdown.of({"compute": compute, "communication": 0.1, "bubble": 0.0, "data": 0.0}, "s")


def _trace(seconds: float) -> Recording:
    """A step of two ranks, of which one computes so long."""
    rows = [
        RankTimeline(rank, 0.0, 4.0, (ProgramSpan("step", 0.0, length),), (), ())
        for rank, length in ((0, seconds), (1, 4.0))
    ]
    return Recording.of([Recording((row,)) for row in rows])


def _gathers(units: int) -> GatherFilm:
    """Units of 40 KiB on 4 ranks, gathered, whole and freed one after the other: forward, then backward."""
    passes = [(unit, FORWARD) for unit in range(units)] + [(unit, BACKWARD) for unit in reversed(range(units))]
    changes = list[Change]()
    for step, (unit, phase) in enumerate(passes):
        changes += [Change(3 * step + 1, unit, COMING), Change(3 * step + 2, unit, WHOLE, phase)]
        changes += [Change(3 * step + 3, unit, SHARDED)]
    held = [(float(step), (10 * KIB * units + 40 * KIB * (step % 2), 0, 0, 0, 0)) for step in range(6 * units + 1)]
    names = tuple(f"blocks.{unit}" for unit in range(units))
    return GatherFilm(names, (40 * KIB,) * units, 4, tuple(changes), tuple(held), 6 * units + 1)
