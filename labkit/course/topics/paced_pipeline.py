"""Steps of a pipeline in slow motion: each stage sleeps for as long as its work would take, messages are real.

    stages that sleep do not slow each other down when their ranks share a core, so a recorded step shows the schedule
    and the wire, and not how many cores there are

`quickest` runs any schedule a few times on the ranks of a cluster and keeps the quickest step. Labs 10 and 10b draw and
measure their schedules by it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from labkit.capped import Cluster
from labkit.comm.group import Group
from labkit.launch.reply import Reply
from labkit.parallel.pipeline import Pipeline
from labkit.plan.schedules.schedule import Schedule, Span
from labkit.probe.clock import Clock
from labkit.probe.paced import PacedLinear
from labkit.probe.recording import Recording

WIDTH, ROWS = 64, 4


class PacedStage(PacedLinear):
    """[..., 64] -> [..., 64]: a linear and a tanh that keep their device busy for F seconds in forward and 2F in
    backward, half of that for the gradient of the input, half for those of the weights."""

    def __init__(self, forward_s: float) -> None:
        """`forward_s` is F, in seconds."""
        super().__init__(WIDTH, WIDTH, forward_s=forward_s, backward_s=forward_s, weight_s=forward_s)

    def forward(self, x: Tensor) -> Tensor:
        """[..., 64] -> [..., 64]"""
        return super().forward(x).tanh()


class RecordedStep(NamedTuple):
    """A step: the spans of all ranks on the clock of rank 0, in seconds; what `Clock` saw; all replies of the run."""

    spans: list[Span]
    recording: Recording
    replies: Sequence[Reply]


def took(spans: Iterable[Span]) -> float:
    """Seconds from the first begin to the last end."""
    listed = list(spans)
    return max(span.end for span in listed) - min(span.start for span in listed)


def pipelined(group: Group, schedule: Schedule, seconds: Sequence[float], repeats: int) -> list:
    """On each rank: (spans, clock) of every step. `seconds` are those of each stage's forward."""
    torch.manual_seed(0)
    stages = {stage: PacedStage(seconds[stage]).to(group.device) for stage in schedule.stages_of(group.rank)}
    pipeline = Pipeline(stages, schedule, group, loss=nn.functional.mse_loss)
    micros = [torch.randn(ROWS, WIDTH, device=group.device) for _ in range(schedule.n_micro)]
    steps = []
    for _ in range(repeats):
        with Clock(group) as clock:
            group.barrier()  # all ranks begin together
            with clock.span("step"):
                pipeline.step(micros, micros)
        ahead = pipeline.begin - clock.recording.rows[0].offset_s  # on the clock of rank 0
        spans = [span._replace(start=span.start + ahead, end=span.end + ahead) for span in pipeline.spans]
        steps.append((spans, clock.recording))
    return steps


def quickest(cluster: Cluster, schedule: Schedule, seconds: Sequence[float], repeats: int = 2) -> RecordedStep:
    """The quickest of some steps of a schedule; `seconds` of each stage's forward.

    Raises ValueError unless there is a number for each stage."""
    if len(seconds) != schedule.n_stages:
        raise ValueError(f"{schedule.name} has {schedule.n_stages} stages, and {len(seconds)} numbers of seconds")
    replies = cluster.run(pipelined, schedule, seconds, repeats)
    steps = [[span for reply in replies for span in reply.value[number][0]] for number in range(repeats)]
    best = min(range(repeats), key=lambda number: took(steps[number]))
    recording = Recording.of([reply.value[best][1] for reply in replies]).during("step")
    return RecordedStep(steps[best], recording, replies)
