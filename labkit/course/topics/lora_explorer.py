"""Which rank, which targets? Change them, the model and the precision; see bytes by kind, and losses of runs."""

from __future__ import annotations

from collections.abc import Mapping

import ipywidgets as widgets

from labkit.course.topics.lora_picture import Seen, lora
from labkit.course.widgets.explorer import Explorer
from labkit.plan.breakdown import Breakdown
from labkit.plan.model.shape import ModelShape
from labkit.plan.step.adapters import FROZEN_BYTES, TARGETS, adapters, lora_memory
from labkit.plan.typed import whole
from labkit.view.svg import Drawing

MINE, FULL = "the lab's GPT", "full fine-tuning"
OTHERS = ("gpt2", "llama-7b", "llama2-70b")
RANKS = tuple(2**k for k in range(9))


class LoRAExplorer(Explorer):
    """Bytes by kind of full fine-tuning and of LoRA, by law, for `shape` and published models; arrow keys choose.

    `measured` maps (targets, rank) to bytes by kind of `shape` on `rows` sequences in fp32: bars that are drawn while
    just that is shown; `quality` has the losses of real runs. A typed width replaces the model's; for an impossible
    one, or a rank above it, the reason is shown, and `.picture` stays the last valid picture."""

    recorded_over = ("rank",)

    def __init__(
        self,
        shape: ModelShape,
        rows: int = 1,
        rank: int = 8,
        measured: Mapping[tuple[str, int], Mapping[str, float]] | None = None,
        quality: Seen | None = None,
    ) -> None:
        self.first, self.rows, self.measured, self.quality = shape, rows, dict(measured or {}), quality
        self.model = _choice("model", (MINE, *OTHERS), MINE)
        self.width = widgets.Text("", description="width D", placeholder="the model's", continuous_update=False)
        self.targets = _choice("targets", (*TARGETS, FULL), next(iter(TARGETS)))
        self.rank = widgets.SelectionSlider(
            options=tuple(sorted({*RANKS, rank})), value=rank, description="rank r", tooltip="rows of A, columns of B"
        )
        self.precision = _choice("frozen in", tuple(FROZEN_BYTES), "fp32")
        controls = (self.model, self.width, self.targets, self.rank, self.precision)
        super().__init__(controls, controls)

    @property
    def shape(self) -> ModelShape:
        """The model that the controls describe. ValueError for a width that it cannot have."""
        shape = self.first if self.model.value == MINE else ModelShape.preset(self.model.value)
        if not self.width.value.strip():
            return shape
        return shape.changed(d_model=whole(self.width.value, "width D"), head_width=None)

    def drawn(self) -> Drawing:
        """The picture for the present controls."""
        targets, rank, precision, shape = self.targets.value, self.rank.value, self.precision.value, self.shape
        rows = self.rows if self.model.value == MINE else 1
        full = lora_memory(shape, None, rows=rows, precision=precision)
        law = None if targets == FULL else lora_memory(shape, TARGETS[targets], rank, rows, precision)
        n = shape.n_params if law is None else int(adapters(shape, TARGETS[targets], rank).total)
        title = f"{n:,} of {shape.n_params:,} parameters train, {n / shape.n_params:.3%}"
        runs = (parts for (name, r), parts in self.measured.items() if name == targets and (r == rank or name == FULL))
        seen = next(runs, None) if shape == self.first and precision == "fp32" else None
        self.note = "" if seen else "<small>by law; bars of a run stand beside it where there was one</small>"
        return lora(full, law, Breakdown.of(seen) if seen else None, self.quality, targets, rank, title)


def _choice(name: str, options: tuple[str, ...], value: str) -> widgets.Dropdown:
    return widgets.Dropdown(options=options, value=value, description=name)
