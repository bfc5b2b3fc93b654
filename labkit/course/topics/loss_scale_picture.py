"""The loss scale over a run: how it grew, where a step was skipped, and how high it could have been.

    2^17 |. . . . . . . . . . .        ceiling: above it some gradient of that step is infinite
    2^16 |____    ______x
    2^15 |    x__|      |_____         the scale, x where the step was skipped
         |_____________________ step

`replay` runs a rule over a recorded run, which has a bool or a float for each step. A bool is True if the gradients
were finite, and means that no scale would change this: an inf then comes from a spike in the data or from the model
itself. A float is the step's ceiling, the largest scale at which its gradients are finite; the scale then decides
whether the step is skipped, as it does in training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from labkit.train.loss_scale import LossScale
from labkit.view import chart
from labkit.view.svg import PALETTE

BLUE, SKIPPED, CEILING = chart.LINES[0], PALETTE[6], PALETTE[2]


@dataclass(frozen=True)
class Replayed:
    """A rule's way through a run: the scale of each step, True for each step that was taken, and the rule at the end.

    `stopped` says why it ended early, because the scale could not change as the rule asked; "" if it did not."""

    scales: tuple[float, ...]
    taken: tuple[bool, ...]
    last: LossScale
    stopped: str = ""

    @property
    def skipped(self) -> tuple[int, ...]:
        """The steps that were not taken."""
        return tuple(step for step, taken in enumerate(self.taken) if not taken)


def replay(rule: LossScale, run: Sequence[bool | float]) -> Replayed:
    """`rule` on a recorded run, which has for each step a bool, True if it was finite, or its ceiling, a float."""
    scales: list[float] = []
    taken: list[bool] = []
    for step in run:
        finite = step if isinstance(step, bool) else rule.scale <= step
        scales.append(rule.scale)
        taken.append(finite)
        try:
            rule = rule.after(finite)
        except ValueError as error:
            return Replayed(tuple(scales), tuple(taken), rule, f"step {len(taken) - 1}: {error}")
    return Replayed(tuple(scales), tuple(taken), rule)


@chart.style()
def scales(run: Replayed, ceilings: Sequence[bool | float] = (), title: str = "loss scale") -> chart.Chart:
    """The scale of each step on a logarithmic axis, skipped steps marked, and finite positive ceilings as dots.

    Raises ValueError for a run without steps."""
    if not run.scales:
        raise ValueError("a run of no steps has no picture")
    tops = {k: float(c) for k, c in enumerate(ceilings) if not isinstance(c, bool) and 0 < c < math.inf}
    exponents = [math.log2(scale) for scale in (*run.scales, *tops.values())]
    low, high = math.floor(min(exponents)) - 1, math.ceil(max(exponents)) + 1
    n, steps = len(run.scales), max(len(run.scales), len(ceilings))
    facts = f"{len(run.skipped)} of {n} steps skipped, next scale 2^{math.log2(run.last.scale):.4g}"
    which = ", ".join(map(str, run.skipped[:12])) + (" and on" if len(run.skipped) > 12 else "")
    label = (
        f"{title}: {facts}" + (f"; skipped were {which}" if which else "") + (f"; {run.stopped}" * bool(run.stopped))
    )
    figure = chart.Chart(336, f"{title}: {facts}", label)
    axes = figure.panel(66, 66, 786, 290, xlim=(-0.5, steps - 0.5), xlabel="step", yscale="log")
    axes.set_yscale("log", base=2)
    axes.set_ylim(2.0**low, 2.0**high)
    axes.stairs(run.scales, [step - 0.5 for step in range(n + 1)], baseline=None, color=BLUE, linewidth=2.5,
                label="loss scale")  # fmt: skip
    skipped: dict[str, Any] = {"color": SKIPPED, "marker": "x", "markeredgewidth": 2.5}
    axes.plot([], [], linestyle="", **skipped, label="step skipped")
    for step in run.skipped:
        hover = f"step {step} skipped at 2^{math.log2(run.scales[step]):.4g}"
        chart.dot(axes, step, run.scales[step], hover, **skipped)
    if tops:
        axes.plot(list(tops), list(tops.values()), "_", color=CEILING, markersize=6, markeredgewidth=2.5, zorder=0.9,
                  label="largest scale at which this step is finite")  # fmt: skip
    often = max(1, round(steps / 10))
    often = next((m for m in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if m >= often), often)
    powers = range(low, high + 1, max(1, math.ceil((high - low) / 9)))
    chart.marks(axes, range(0, steps, often), [2.0**power for power in powers], "{:g}".format,
                lambda scale: f"2^{math.log2(scale):.4g}")  # fmt: skip
    figure.keys(66, 42, axes)
    return figure
