"""The result of a training run and its costs: the table, the picture, plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rich.box import SIMPLE

from labkit.plan.breakdown import KINDS
from labkit.plan.job.recipe import Recipe
from labkit.plan.partition.layout import SHORT, Layout
from labkit.view.curve import curve
from labkit.view.svg import Drawing
from labkit.view.terminal_table import TerminalTable
from labkit.view.units import binary_text, metric_text, seconds_text


@dataclass(frozen=True)
class TrainingReport:
    """The result of a run and its costs.

    losses          (step, loss) from step 0, including those before a resume
    step_s          median seconds of a step (without the probed one)
    memory          by rank: bytes by kind at the peak of one step
    sent, law       by rank: bytes sent in that step by axis, and those of the laws (None under autocast)
    charged         that part of `sent` which was not counted: of collectives that the backend carried out
    peak_flops      flop/s of a matrix product on one rank while all ranks compute, the best before and after the run
    mfu             share of that which the model's flops are; above 1 where the machine was busy both times, and then
                    no utilisation at all
    """

    config: dict[str, Any]
    recipe: dict[str, Any]
    layout: dict[str, int]
    losses: list[tuple[int, float]]
    step_s: float
    tokens_per_s: float
    mfu: float
    peak_flops: float
    memory: list[dict[str, float]]
    sent: list[dict[str, float]]
    law: list[dict[str, float]] | None
    skipped: int = 0
    saved: str = ""
    resumed_at: int = 0
    charged: list[dict[str, float]] = field(default_factory=list)

    def picture(self) -> Drawing:
        """The loss curve."""
        return curve({"loss": self.losses}, f"loss of {Layout(**self.layout)}, {Recipe(**self.recipe)}")

    def __rich__(self) -> TerminalTable:
        """A table for the terminal: one row per rank, memory with its total, and bytes sent with their law."""
        table = TerminalTable(
            title=self._headline(), title_justify="left", caption=self._caption(), caption_justify="left",
            box=SIMPLE, show_edge=False, pad_edge=False,
        )  # fmt: skip
        table.add_column("rank")
        for kind in (*KINDS, "peak"):
            table.add_column(kind, justify="right", no_wrap=True)
        axes = [axis for axis in self.sent[0] if any(sent.get(axis) for sent in (*self.sent, *(self.law or ())))]
        for axis in axes:
            table.add_column(f"{SHORT.get(axis, axis)} sent", justify="right", no_wrap=True)
        for rank, (memory, sent) in enumerate(zip(self.memory, self.sent, strict=True)):
            held = [binary_text(memory.get(kind, 0)) for kind in KINDS]
            law = self.law[rank] if self.law else None
            charged = self.charged[rank] if self.charged else {}
            wire = [_beside(sent.get(axis, 0), law[axis] if law else None, charged.get(axis, 0)) for axis in axes]
            table.add_row(str(rank), *held, binary_text(sum(memory.values())), *wire)
        return table

    def _headline(self) -> str:
        (first, start), (last, end) = self.losses[0], self.losses[-1]
        return (
            f"loss {start:.4f} at step {first} -> {end:.4f} at step {last}\n"
            f"{seconds_text(self.step_s)} a step, {self.tokens_per_s:,.0f} tokens/s, {self._utilisation()}"
            + (f"\n{self.skipped} steps were skipped for gradients that were not finite" if self.skipped else "")
        )

    def _utilisation(self) -> str:
        peak = f"{metric_text(self.peak_flops, 'flop/s')} a rank (the best matrix product while all ranks work)"
        if self.mfu <= 1:
            return f"MFU {self.mfu:.1%} of {peak}"
        return (
            f"MFU not measurable: a step did {self.mfu:.2f} times the flops of {peak}. The machine was busy with other "
            "programs while that was measured, before and after the run"
        )

    def _caption(self) -> str:
        note = "memory: at the peak of one step; sent: in that step, by this rank"
        note += ", beside the law" if self.law else " (the laws are for fp32, fp64, bf16 and fp8)"
        if self.layout.get("ep", 1) > 1 and self.law:
            note += "\nep: the law is for experts that are equally busy; a router that is not sends more or less"
        if any(any(of_rank.values()) for of_rank in self.charged):
            note += "\n* charged by the law of a ring: the backend does not say what it sent; the rest was counted"
        return note + (f"\nsaved: {self.saved}" if self.saved else "")


def _beside(sent: float, law: float | None, charged: float) -> str:
    star = "*" * bool(charged)
    if law is None or (not law and not sent):
        return f"{binary_text(sent)}{star}" if sent else "-"
    return f"{binary_text(sent)}{star} = law" if sent == law else f"{sent:,.0f} B{star} (law {law:,.0f})"
