"""The loss scale over a run: how it grew, where a step was skipped, and how high it could have been.

    2^17 |. . . . . . . . . . .        ceiling: above it some gradient of that step is infinite
    2^16 |____    ______x
    2^15 |    x__|      |_____         the scale, x where the step was skipped
         |_____________________ step

`replay` runs a rule over a recorded run. What is recorded of a step is whether its gradients were finite, and then they
are so at any scale (a spike in the data, an inf of the model's own); or its ceiling, the largest scale at which they
are finite, and then skipping follows from the scale, as it does in training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from labkit.train.loss_scale import LossScale
from labkit.view.svg import PALETTE, Picture, headline, line, text

LEFT, RIGHT, TOP, BOTTOM = 66.0, 786.0, 66.0, 290.0
BLUE, SKIPPED, CEILING = "#2B8CD6", PALETTE[6], PALETTE[2]


@dataclass(frozen=True)
class Replayed:
    """A rule's way through a run: the scale of each step, whether its step was taken, and the rule at the end.

    `stopped` says why it ended early, if it did: the scale had nowhere to go."""

    scales: tuple[float, ...]
    taken: tuple[bool, ...]
    last: LossScale
    stopped: str = ""

    @property
    def skipped(self) -> tuple[int, ...]:
        """The steps that were not taken."""
        return tuple(step for step, taken in enumerate(self.taken) if not taken)


def replay(rule: LossScale, run: Sequence[bool | float]) -> Replayed:
    """`rule` on a recorded run: for each step whether it was finite (a bool), or its ceiling (a float, maybe inf)."""
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


def scales(run: Replayed, ceilings: Sequence[bool | float] = (), title: str = "loss scale") -> Picture:
    """The scale of each step on a logarithmic axis, skipped steps marked, and finite positive ceilings as dots.

    Raises ValueError for a run without steps."""
    if not run.scales:
        raise ValueError("a run of no steps has no picture")
    tops = {k: float(c) for k, c in enumerate(ceilings) if not isinstance(c, bool) and 0 < c < math.inf}
    exponents = [math.log2(each) for each in (*run.scales, *tops.values())]
    frame = _Frame(max(len(run.scales), len(ceilings)), math.floor(min(exponents)) - 1, math.ceil(max(exponents)) + 1)
    n = len(run.scales)
    said = f"{len(run.skipped)} of {n} steps skipped, next scale 2^{math.log2(run.last.scale):.4g}"
    body = [headline(f"{title}: {said}"), *_legend(bool(tops)), *frame.axes()]
    dots = (frame.at(k + 0.5, math.log2(top)) for k, top in tops.items())
    body += [f'<path d="M{x - 3:.1f} {y:.1f}h6" stroke="{CEILING}" stroke-width="2.5"/>' for x, y in dots]
    path = []
    for k, scale in enumerate(run.scales):
        x, y = frame.at(k, math.log2(scale))
        path.append(f"{x:.1f} {y:.1f}H{frame.at(k + 1, 0)[0]:.1f}")
    body.append(f'<path d="M{"L".join(path)}" fill="none" stroke="{BLUE}" stroke-width="2.5"/>')
    for k in run.skipped:
        x, y = frame.at(k + 0.5, math.log2(run.scales[k]))
        cross = f'<path d="M{x - 5:.1f} {y - 5:.1f}l10 10m0 -10l-10 10" stroke="{SKIPPED}" stroke-width="2.5"/>'
        body.append(f"<g><title>step {k} skipped at 2^{math.log2(run.scales[k]):.4g}</title>{cross}</g>")
    which = ", ".join(map(str, run.skipped[:12])) + (" and on" if len(run.skipped) > 12 else "")
    label = f"{title}: {said}" + (f"; skipped were {which}" if which else "") + (f"; {run.stopped}" * bool(run.stopped))
    return Picture("".join(body), BOTTOM + 46, label)


@dataclass(frozen=True)
class _Frame:
    """Steps across, powers of two up."""

    steps: int
    low: int
    high: int

    def at(self, step: float, exponent: float) -> tuple[float, float]:
        up = (exponent - self.low) / (self.high - self.low)
        return LEFT + step / self.steps * (RIGHT - LEFT), BOTTOM - up * (BOTTOM - TOP)

    def axes(self) -> list[str]:
        out = [line(LEFT, BOTTOM, RIGHT, BOTTOM), line(LEFT, TOP, LEFT, BOTTOM)]
        every = max(1, math.ceil((self.high - self.low) / 9))
        for exponent in range(self.low, self.high + 1, every):
            _, y = self.at(0, exponent)
            out += [line(LEFT, y, RIGHT, y, "1 5"), text(LEFT - 8, y + 4, f"2^{exponent}", "end", 12)]
        often = max(1, round(self.steps / 10))
        often = next((m for m in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if m >= often), often)
        for step in range(0, self.steps, often):
            x, _ = self.at(step + 0.5, self.low)
            out += [line(x, BOTTOM, x, BOTTOM + 4), text(x, BOTTOM + 19, step, "middle", 12)]
        return [*out, text((LEFT + RIGHT) / 2, BOTTOM + 38, "step", "middle", 12)]


def _legend(ceiling: bool) -> list[str]:
    out = [line(LEFT, 42, LEFT + 24, 42, "", 2.5, BLUE), text(LEFT + 30, 46, "loss scale", size=12)]
    x = LEFT + 112
    out += [f'<path d="M{x:g} 37l10 10m0 -10l-10 10" stroke="{SKIPPED}" stroke-width="2.5"/>']
    out.append(text(x + 18, 46, "step skipped", size=12))
    if ceiling:
        out.append(f'<path d="M{x + 112:g} 42h6" stroke="{CEILING}" stroke-width="2.5"/>')
        out.append(text(x + 126, 46, "largest scale at which this step is finite", size=12))
    return out
