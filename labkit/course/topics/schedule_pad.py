"""A pad for pipeline schedules: paste one as text, and see it checked, drawn, timed, weighed and run."""

from __future__ import annotations

import copy
from html import escape
from typing import Any, NamedTuple

import ipywidgets as widgets
import torch
from torch import nn

from labkit.comm.group import Group
from labkit.comm.local import run_threads
from labkit.course.topics.pipeline_player_picture import player
from labkit.course.widgets.explorer import Explorer, in_a_row, wide
from labkit.parallel.pipeline import Pipeline
from labkit.plan.job.recipe import TWO_STAGES, Recipe
from labkit.plan.schedules.published_schedules import stretch
from labkit.plan.schedules.schedule import Schedule, Span, bubble, in_flight, one_f_one_b, simulate
from labkit.plan.schedules.schedule_text import from_text, to_text
from labkit.probe.paced import PacedLinear
from labkit.view.svg import Picture

MOST_RANKS, WIDTH = 8, 4
FORWARD_S = 0.04
"""Seconds of a forward. Ranks that are threads take turns in Python, about a millisecond an action: beside stages that
sleep for 20 it is little, beside 2 it would be what a rank waits for most."""


def published(name: str, p: int = 4, m: int = 8) -> Schedule:
    """A published schedule by its name, for p ranks and m micro-batches. ValueError for a name that is not known."""
    if name not in NAMES:
        raise ValueError(f"published schedules are {', '.join(NAMES)}, got {name!r}")
    n_stages = 2 if name in ("interleaved", *TWO_STAGES) else 1
    return Recipe(schedule=name, n_micro=m, stages_per_rank=n_stages).schedule_for(p)


NAMES = (
    "1f1b", "gpipe", "interleaved", "zero_bubble", "zb_h2", "zb_v", "v_half", "v_min", "dualpipe", "dualpipe_v",
)  # fmt: skip


class Weight(NamedTuple):
    """What a schedule costs, where F = B = W and a rank's part of the model takes 3 forwards a micro-batch.

    waits, length: with the ramp;   own_waits: from a rank's first action to its last;   held: micro-batches of a rank's
    whole part, the most of any rank"""

    length: float
    waits: float
    own_waits: float
    held: float


def weigh(schedule: Schedule) -> tuple[Weight, list[Span]]:
    """The cost of a schedule and its simulated spans, in forwards of a rank's part of the model."""
    thin = schedule.n_stages / schedule.n_ranks
    spans = simulate(schedule, 1 / thin, 2 / thin)
    work = 3 * schedule.n_stages * schedule.n_micro / schedule.n_ranks / thin
    own = stretch(spans)
    return Weight(max(s.end for s in spans), bubble(spans), 1 - work / own, max(in_flight(schedule)) / thin), spans


class Ran(NamedTuple):
    """A real step: its spans, and the largest difference of a loss or a gradient from those of one process."""

    spans: list[Span]
    gap: float


def run_on_ranks(schedule: Schedule, forward_s: float = FORWARD_S, timeout_s: float = 30.0) -> Ran:
    """One real step of a schedule on ranks that are threads, each with real messages and real autograd.

    A rank's part of the model takes `forward_s` for a forward. The same model on one process is what it is held to."""
    torch.manual_seed(0)
    stage_s = forward_s * schedule.n_ranks / schedule.n_stages  # of forward, and of each half of backward
    layers = [PacedLinear(WIDTH, WIDTH).double() for _ in range(schedule.n_stages)]
    alone = nn.Sequential(*(nn.Sequential(copy.deepcopy(layer.linear), nn.Tanh()) for layer in layers))
    inputs, targets = ([torch.randn(2, WIDTH, dtype=torch.float64) for _ in range(schedule.n_micro)] for _ in range(2))
    total = torch.zeros((), dtype=torch.float64)
    for x, target in zip(inputs, targets, strict=True):
        total = total + nn.functional.mse_loss(alone(x), target) / schedule.n_micro
    total.backward()

    def step(group: Group, seconds: float) -> tuple[Pipeline, dict[int, nn.Sequential], torch.Tensor | None]:
        modules = {}
        for stage in schedule.stages_of(group.rank):
            layer = copy.deepcopy(layers[stage])
            layer.forward_s = layer.backward_s = layer.weight_s = seconds
            modules[stage] = nn.Sequential(layer, nn.Tanh())
        pipeline = Pipeline(modules, schedule, group, loss=nn.functional.mse_loss)
        group.barrier()
        return pipeline, modules, pipeline.step(inputs, targets)

    def work(group: Group) -> tuple[list[Span], float]:
        step(group, 1e-6)  # what torch loads for the first backward in two halves takes longer than a whole step
        pipeline, modules, loss = step(group, stage_s)
        gaps = [0.0 if loss is None else float((loss - total.detach()).abs())]
        for stage, module in modules.items():
            pairs = zip(module.parameters(), alone[stage].parameters(), strict=True)
            gaps += [
                float((p.grad - q.grad).abs().max()) for p, q in pairs if p.grad is not None and q.grad is not None
            ]
        begin = pipeline.begin
        return [span._replace(start=span.start + begin, end=span.end + begin) for span in pipeline.spans], max(gaps)

    replies = run_threads(work, schedule.n_ranks, timeout_s=timeout_s)
    spans = [span for row, _ in replies for span in row]
    first = min(span.start for span in spans)
    moved = [span._replace(start=span.start - first, end=span.end - first) for span in spans]
    return Ran(moved, max(gap for _, gap in replies))


class SchedulePad(Explorer):
    """A text area for a schedule, filled with a published one on request, with what it costs beside 1f1b's.

    "run it" runs the text's schedule on ranks and draws the recording below the simulation. For a text that is no
    schedule, line, column and mend are shown, and the last picture stays. `.schedule` is what is shown, `.ran` the last
    run of it, None before."""

    recorded_over = ("name",)
    live_page = "schedule"

    def __init__(self, first: str = "1f1b") -> None:
        """Begin with a published schedule for 4 ranks and 8 micro-batches."""
        self.schedule = published(first)
        self.ran: Ran | None = None
        self.name = widgets.Dropdown(options=NAMES, value=first, description="published")
        self.text = widgets.Textarea(
            to_text(self.schedule), description="schedule", continuous_update=False, rows=6, layout=wide()
        )
        self.button = widgets.Button(description="run it", tooltip="one real step, on ranks that are threads")
        self.name.observe(lambda _: self.fill(), "value")
        self.button.on_click(lambda _: self.run())
        super().__init__([in_a_row([self.name, self.button]), self.text], [self.text])

    def kept(self) -> dict[str, Any]:
        """The film over the published schedules; none once it has run, since another schedule forgets the run."""
        return {} if self.ran else super().kept()

    def fill(self) -> None:
        """Put the chosen published schedule into the text area."""
        self.text.value = to_text(published(self.name.value))

    def drawn(self) -> Picture:
        """The picture of the text's schedule. ValueError with line and column for a text that is none."""
        title = self.text.value.strip().split("\n")[0]
        name = title[1:].strip()[:24] if title.startswith("#") and title[1:].strip() else "by hand"
        schedule = from_text(self.text.value, name)
        if schedule.n_ranks > MOST_RANKS:
            raise ValueError(f"{MOST_RANKS} ranks at most, got {schedule.n_ranks} lines: take lines away")
        if schedule.programs != self.schedule.programs:
            self.ran = None
        cost, spans = weigh(schedule)
        picture = player(schedule, spans, recorded=self.ran.spans if self.ran else ())
        self.schedule, self.note = schedule, table(schedule, cost, self.ran)
        return picture

    def run(self) -> None:
        """Run the schedule that is shown, if the text is one."""
        self.draw()
        if not self.is_valid:
            return
        self.button.disabled = True
        try:
            self.ran = run_on_ranks(self.schedule)
            self.draw()
        finally:
            self.button.disabled = False


def table(schedule: Schedule, cost: Weight, ran: Ran | None) -> str:
    """What a schedule costs beside 1f1b for as many ranks and micro-batches, as HTML."""
    usual, _ = weigh(one_f_one_b(schedule.n_ranks, schedule.n_micro))
    rows = [(schedule.name, cost), ("1f1b", usual)]
    head = "<tr><th></th><th>forwards</th><th>ranks wait</th><th>without the ramp</th><th>micro-batches held</th></tr>"
    body = "".join(
        f"<tr><td>{escape(name)}</td><td>{w.length:.4g}</td><td>{w.waits:.1%}</td><td>{abs(w.own_waits):.1%}</td>"
        f"<td>{w.held:g}</td></tr>"
        for name, w in rows
    )
    real = ""
    if ran is not None:
        real = (
            f"<p>run: ranks waited {bubble(ran.spans):.1%}; loss and gradients are one process's to {ran.gap:.0e}</p>"
        )
    return f"<table>{head}{body}</table>{real}"
