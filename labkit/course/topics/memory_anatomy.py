"""Where did all the memory go? Choose a model and how it is trained, and see what a step holds, by kind."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

import ipywidgets as widgets

from labkit.course.widgets.explorer import Explorer, in_two_columns
from labkit.plan.breakdown import Breakdown
from labkit.plan.job.recipe import OPTIMIZERS, PRECISIONS, Recipe
from labkit.plan.machine.devices import DEVICES
from labkit.plan.machine.hardware import Hardware
from labkit.plan.model.models import MODELS
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout
from labkit.plan.step.memory import predict_memory
from labkit.rehearsal import rehearse
from labkit.view.anatomy import anatomy
from labkit.view.svg import Picture

OWN, MOST_ROWS = "the lab's GPT", 64
ONE = Layout()


class MemoryAnatomy(Explorer):
    """Controls over predict_memory on one device: model, rows, sequence, optimizer, precision, checkpointing, device.

    `shape`: a preset's name, or a ModelShape or GPTConfig of your own; `device`: a preset's name, or a name and bytes;
    both then come first in their menus. `measured` are (shape, recipe, Breakdown) of runs; if the controls show one of
    them, it is drawn beside its prediction. The button adds such a measurement by rehearsing the step on fake tensors;
    the kernel's stop button ends that. For invalid settings the reason is shown, and the last picture stays. `.shape`
    and `.recipe` are what the controls show. ValueError for an unknown preset."""

    recorded_over = ("rows",)
    live_page = "memory"

    def __init__(
        self,
        shape: Any = "gpt2",
        recipe: Recipe | None = None,
        device: str | tuple[str, float] = "h100",
        measured: Iterable[tuple[Any, Recipe, Breakdown]] = (),
    ):
        recipe = recipe or Recipe(batch_size=1)
        first = ModelShape.preset(shape) if isinstance(shape, str) else ModelShape.of(shape)
        name = first.name or OWN
        self.known = {name: first} | {model: ModelShape.preset(model) for model in MODELS} | {name: first}
        self.seen: dict[tuple[ModelShape, Recipe], tuple[Breakdown | None, Breakdown | None]] = {}
        self.seen |= {
            (ModelShape.of(run_shape), run_recipe): (None, breakdown) for run_shape, run_recipe, breakdown in measured
        }
        menu, row = widgets.Dropdown, recipe.batch_size
        self.model = menu(options=[*self.known], value=name, description="model")
        self.rows = widgets.IntSlider(row, 1, max(MOST_ROWS, row), description="rows", tooltip="sequences of a step")
        self.seq = widgets.IntText(first.seq, step=128, description="sequence", tooltip="tokens of a row")
        self.optimizer = menu(options=OPTIMIZERS, value=recipe.optimizer, description="optimizer")
        self.precision = menu(options=PRECISIONS, value=recipe.precision, description="precision")
        self.checkpointing = widgets.Checkbox(recipe.recompute == "full", description="checkpointing")
        sizes = {preset: Hardware.preset(preset).memory_bytes.value for preset in DEVICES}
        own = (Hardware.preset(device).name, sizes[device.lower()]) if isinstance(device, str) else device
        self.sizes = {own[0]: own[1]} | sizes
        self.device = menu(options=[*self.sizes], value=own[0], description="device")
        self.button = widgets.Button(description="rehearse", tooltip="measure this step on fake tensors, in seconds")
        self.button.on_click(lambda _: self.rehearse())
        self._drawn_model = name
        controls = [self.model, self.rows, self.seq, self.optimizer, self.precision, self.checkpointing, self.device]
        super().__init__([in_two_columns([*controls, self.button])], controls)

    @property
    def shape(self) -> ModelShape:
        """The model that the controls describe. ValueError for an impossible length."""
        chosen = self.known[self.model.value]
        return chosen if self.seq.value == chosen.seq else chosen.changed(seq=self.seq.value)

    @property
    def recipe(self) -> Recipe:
        """The recipe that the controls describe."""
        return Recipe(
            batch_size=self.rows.value,
            optimizer=self.optimizer.value,
            precision=self.precision.value,
            recompute="full" if self.checkpointing.value else "none",
        )

    def drawn(self) -> Picture:
        """The picture for the present controls; a model that was just chosen comes with its own length."""
        if self.model.value != self._drawn_model:
            self._drawn_model, self.seq.value = self.model.value, self.known[self.model.value].seq
        shape, recipe = self.shape, self.recipe
        of_run, measured = self.seen.get((shape, recipe), (None, None))
        predicted = of_run or predict_memory(shape, ONE, recipe)
        room = (self.device.value, self.sizes[self.device.value])
        how = f"{recipe.precision}, {recipe.optimizer}{', checkpointing' * self.checkpointing.value}"
        title = f"{self.model.value}, {recipe.batch_size} x {shape.seq:,} tokens, {how}"
        return anatomy(predicted, measured, shape.n_params, room, title)

    def rehearse(self) -> None:
        """Measure the step that the controls describe, on fake tensors, and draw it beside the prediction."""
        self.button.disabled = True
        self.message.value = "<i>rehearsing on fake tensors ... (the stop button ends it)</i>"
        try:
            shape, recipe = self.shape, self.recipe
            rehearsal = rehearse(shape, ONE, recipe)
            self.seen[shape, recipe] = (rehearsal.predicted, rehearsal.memory)
            self.draw()
            remarks = "; ".join((f"rehearsed in {rehearsal.seconds:.1f} s, without the memory", *rehearsal.notes))
            self.message.value = f"<small>{escape(remarks)}</small>"
        except ValueError as error:
            self.message.value = f"<b>not rehearsed</b>: {escape(str(error))}"
        except KeyboardInterrupt:
            self.message.value = "stopped"
            raise
        finally:
            self.button.disabled = False
