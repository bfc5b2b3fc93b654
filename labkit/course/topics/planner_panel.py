"""How would you train it? Model, devices and batch, and the planner's answer: kept plans, refused ones, and why."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import ipywidgets as widgets

from labkit.course.topics import design_cases
from labkit.course.widgets.explorer import Explorer, in_two_columns, wide
from labkit.plan.job.recipe import OPTIMIZERS, PRECISIONS
from labkit.plan.machine.devices import DEVICES
from labkit.plan.model.models import MODELS
from labkit.plan.model.shape import ModelShape
from labkit.plan.search.search import HEADROOM, Plan, plans
from labkit.plan.typed import whole
from labkit.view.plans import name_of, plan_list, shortlist
from labkit.view.svg import Picture
from labkit.view.units import plural

OWN = "own sizes"
MOST = MappingProxyType({"devices": 65_536, "layers": 1_000})
"""Upper limits, beyond which a search would take long."""
SIZES = (("n_layer", "layers"), ("d_model", "width"), ("n_head", "heads"), ("vocab", "vocabulary"))


class PlannerPanel(Explorer):
    """Menus for model, device, precision and optimizer; fields for devices, sequences, tokens; a menu opens a plan.

    `case` is a DesignCase or its name ("eight", "seventy", "audio", "512"), with which the panel starts. Sizes may be
    typed if the model is "own sizes". `.answer` is the planner's whole answer, `.listed` the plans that are shown,
    `.picture` the last valid picture; invalid input keeps it and shows the reason. ValueError for an unknown case."""

    recorded_over = ("plan",)
    live_page = "plan"

    def __init__(self, case: design_cases.DesignCase | str = "eight") -> None:
        self.case = design_cases.case(case)
        self.answer: Sequence[Plan] = ()
        self.listed: list[Plan] = []
        self._asked: Any = None
        menu, first = widgets.Dropdown, self.case
        own = {first.shape.name: first.shape} if first.shape.name not in MODELS else {}
        self.shapes = own | {name: ModelShape.preset(name) for name in MODELS}
        self.model = menu(options=[*self.shapes, OWN], value=first.shape.name, description="model")
        self.sizes = {name: _typed(getattr(first.shape, name), words) for name, words in SIZES}
        self.hardware = menu(options=[*DEVICES], value=first.hardware, description="device")
        self.ranks, self.rows = _typed(first.n_ranks, "devices"), _typed(first.batch, "sequences a step")
        self.seq = _typed(first.seq, "tokens a sequence")
        self.precision = menu(options=PRECISIONS, value=first.precision, description="precision")
        self.optimizer = menu(options=OPTIMIZERS, value=OPTIMIZERS[0], description="optimizer")
        self.plan = menu(options=[("", 0)], description="open plan", layout=wide())
        asked = [self.model, self.hardware, self.ranks, self.rows, self.seq, self.precision, self.optimizer]
        asked += self.sizes.values()
        story = widgets.HTML(f"<b>{self.case.title}</b><br>{self.case.question}")
        super().__init__([story, in_two_columns(asked), self.plan], [*asked, self.plan])

    @property
    def shape(self) -> ModelShape:
        """The model that the controls describe. ValueError for impossible sizes."""
        if self.model.value == OWN:
            sizes = {name: _number(field) for name, field in self.sizes.items()}
            return ModelShape.gpt(**sizes, seq=_number(self.seq), tied=False, name=OWN)
        return self.shapes[self.model.value]

    def drawn(self) -> Picture:
        """The picture for the present controls. ValueError for settings that cannot be planned."""
        n, rows, seq = (_number(field) for field in (self.ranks, self.rows, self.seq))
        shape = self.shape
        for name, field in self.sizes.items():
            field.value, field.disabled = str(getattr(shape, name)), self.model.value != OWN
        asked = (shape, self.hardware.value, n, rows, seq, self.precision.value, self.optimizer.value)
        if asked != self._asked:
            self.answer = self._search(*asked)
            self.listed, self._asked = shortlist(self.answer), asked
            names = [", ".join(name_of(plan)) + ("" if plan.kept else ": refused") for plan in self.listed]
            self.plan.options = [(f"{number + 1}  {words}", number) for number, words in enumerate(names)]
        kept = sum(plan.kept for plan in self.answer)
        title = f"{shape.name}, {n:,} x {self.hardware.value}, {plural(rows, 'sequence')} of {seq:,}: "
        return plan_list(self.listed, self.plan.value, f"{title}{kept} of {len(self.answer)} plans fit", HEADROOM)

    def _search(self, shape: ModelShape, hardware: str, n: int, rows: int, seq: int, *choices: str) -> Sequence[Plan]:
        first = self.case
        known = (first.shape, first.hardware, first.n_ranks, first.batch, first.seq, first.precision, OPTIMIZERS[0])
        if (shape, hardware, n, rows, seq, *choices) == known:
            return first.found
        self.message.value = "<i>searching ...</i>"
        return plans(shape, hardware, n, rows, seq, precision=choices[0], optimizer=choices[1])


def _typed(value: int, words: str) -> widgets.Text:
    return widgets.Text(str(value), description=words, continuous_update=False)


def _number(field: widgets.Text) -> int:
    return whole(field.value, field.description, most=MOST.get(field.description, 10**9))
