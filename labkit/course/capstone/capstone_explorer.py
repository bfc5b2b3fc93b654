"""Which way would you take? Choose task, layout and recipe; see predicted bytes and seconds; run it on real ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from html import escape
from typing import Any

import ipywidgets as widgets

from labkit.course.capstone.entry import Entry, best
from labkit.course.capstone.forecast import Task, Way, forecast
from labkit.course.capstone.score_plot import Mark, plane, score_text
from labkit.course.learner.scores import Scores
from labkit.course.widgets.explorer import Explorer, in_two_columns
from labkit.course.widgets.real_run import Pieces, RealRun
from labkit.plan.job.recipe import STRATEGIES
from labkit.plan.step.wire_time import layouts_of
from labkit.view.svg import Drawing

SCHEDULES = ("1f1b", "gpipe", "zero_bubble")
MICROS = (1, 2, 4, 8)
SHOWN = 6


class CapstoneExplorer(Explorer):
    """Controls over the laws for `tasks`, starting at `way`; Tab goes from one to the next, arrow keys move them.

    The button does `run(task, way)`, an iterable of the Progress in attempts.py, and adds the entry to `board`; it can
    be stopped between two steps. `attempt()` does it at once. `reference` are entries that are drawn as such. Invalid
    input keeps the last valid picture, and shows the reason."""

    recorded_over = ("layout_", "strategy")

    def __init__(
        self, tasks: Mapping[str, Task], way: Way, run: Callable[[Task, Way], Any], board: Scores,
        reference: Sequence[Entry] = (),
    ) -> None:  # fmt: skip
        self.tasks, self.run, self.board, self.reference = dict(tasks), run, board, tuple(reference)
        self.entry: Entry | None = None
        slide = widgets.SelectionSlider
        first, recipe = next(iter(self.tasks.values())), way.recipe
        ways = [(f"dp{layout.dp} pp{layout.pp} tp{layout.tp}", layout) for layout in layouts_of(first.n_ranks)]
        self.task = widgets.Dropdown(options=[*self.tasks], description="task")
        self.layout_ = slide(options=ways, value=way.layout, description="layout")
        self.place = slide(options=[("together", False), ("apart", True)], value=way.apart, description="neighbours")
        self.strategy = slide(options=STRATEGIES, value=recipe.strategy, description="strategy")
        self.schedule = slide(options=SCHEDULES, value=recipe.schedule, description="schedule")
        self.micro = slide(options=MICROS, value=recipe.n_micro, description="micros")
        self.checkpointing = widgets.Checkbox(recipe.recompute == "full", description="checkpointing")
        self.ahead = widgets.Checkbox(recipe.prefetch > 0, description="prefetch (zero3)")
        self.real = RealRun(
            self._pieces, self._ended, "run on real ranks", "under the cap, over the links of the task", "attempt"
        )
        controls = [
            self.task,
            self.layout_,
            self.place,
            self.strategy,
            self.schedule,
            self.micro,
            self.checkpointing,
            self.ahead,
        ]
        super().__init__([in_two_columns(controls), self.real], controls)

    @property
    def chosen(self) -> tuple[Task, Way]:
        """The task and the way that the controls describe. ValueError for an impossible way."""
        task = self.tasks[self.task.value]
        choices = {"strategy": self.strategy.value, "schedule": self.schedule.value, "n_micro": self.micro.value}
        recompute = "full" if self.checkpointing.value else "none"
        recipe = task.recipe(**choices, recompute=recompute, prefetch=int(self.ahead.value))
        return task, Way(self.layout_.value, recipe, self.place.value)

    def drawn(self) -> Drawing:
        """The picture for the present controls."""
        task, way = self.chosen
        law = forecast(task, way)
        over = law.memory.total - task.cap_bytes
        fits = "fits under the cap" if law.fits else f"{over / 1e6:.2f} MB over the cap"
        title = f"{task.name}; {way}: predicted {score_text(law.score)}, {fits}"
        best_entries = best(self.board.entries(task))[:SHOWN]
        theirs = [entry for entry in self.reference if entry.task == task.name and entry.counts]
        marks = [Mark(name, entry.seconds, entry.peak, kind, str(entry))
                 for kind, entries in (("reference", theirs), ("yours", best_entries))
                 for name, entry in zip(_numbers(kind, entries), entries, strict=True)]  # fmt: skip
        return plane(marks, task.cap_bytes, title, Mark("chosen", law.step.total, law.memory.total, "law"), law.memory)

    def attempt(self) -> CapstoneExplorer:
        """Run the chosen way now, to its end. Returns the explorer."""
        self.real.run()
        return self

    def _pieces(self) -> Pieces:
        """Run the attempt step by step; yields the share that is done."""
        self.entry = None
        task, way = self.chosen
        task.check(way)
        with closing(self.run(task, way)) as calls:
            for progress in calls:
                self.entry = progress.entry
                yield progress.done / progress.of

    def _ended(self, why: str) -> None:
        message = why
        if self.entry is not None:  # the last step was done when the button was pressed, so the attempt counts
            message = f"{self.entry}" + (" (added to the board)" if self.board.add(self.entry).counts else "")
        self.draw()
        self.message.value = escape(message)


def _numbers(kind: str, entries: Sequence[Entry]) -> list[str]:
    """The names of entries by score: `1`, `2`, ... for one's own; `R1`, ... for the reference's."""
    order = sorted(entries, key=lambda entry: entry.score)
    return [f"{'R' if kind == 'reference' else ''}{order.index(entry) + 1}" for entry in entries]
