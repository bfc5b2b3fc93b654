"""Explain this trace: look at a recorded run, choose what it shows, and see the measurement that decides it."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

import ipywidgets as widgets

from labkit.course.topics.explain_trace_picture import KINDS, diagnosed, explained, unlabelled
from labkit.course.widgets.explorer import Explorer
from labkit.probe.recording import Recording
from labkit.view.overlap import overlap
from labkit.view.svg import Drawing

LOOK = "look first"


class ExplainTrace(Explorer):
    """A menu of recorded runs, and a menu of what they may show. Until you have chosen an answer, no cause is drawn.

    `traces` maps a name that gives nothing away to the merged recording of a run. `.answers` has the last answer for
    each, `.right` how many of them the measurement confirms. ValueError for no traces, and for one without time."""

    recorded_over = ("trace",)

    def __init__(self, traces: Mapping[str, Recording]) -> None:
        if not traces:
            raise ValueError("there is no trace to explain: give at least one name and its recording")
        self.traces, self.truth = dict(traces), {name: diagnosed(trace) for name, trace in traces.items()}
        self.answers: dict[str, str] = {}
        wide = {"layout": {"width": "auto", "max_width": "500px"}, "style": {"description_width": "90px"}}
        self.trace = widgets.Dropdown(options=tuple(traces), description="trace", **wide)
        choices = [(LOOK, ""), *((words, kind) for kind, words in KINDS.items())]
        self.says = widgets.Dropdown(options=choices, value="", description="it shows", **wide)
        self._last = self.trace.value
        super().__init__([self.trace, self.says], [self.trace, self.says])

    @property
    def right(self) -> int:
        """The number of traces whose last answer is the measured one."""
        return sum(self.truth[name] == answer for name, answer in self.answers.items())

    def drawn(self) -> Drawing:
        """The trace as a profiler shows it; once there is an answer, also what every rank waited for."""
        name = self.trace.value
        if name != self._last:
            self._last, self.says.value = name, self.answers.get(name, "")
        answer, recording = self.says.value, self.traces[name]
        if not answer:
            self.answers.pop(name, None)
            return unlabelled(recording, f"{name}: what does it show?")
        self.answers[name] = answer
        verdict = "Right" if answer == self.truth[name] else f"No: {KINDS[self.truth[name]]}"
        count = f"{self.right} of {len(self.traces)} explained"
        self.note = f"<b>{escape(verdict)}</b> · {count}<br>{escape(explained(recording))}"
        return overlap(recording, name)
