"""A budget of training: tokens, days, devices and money, with the speed of the best plan at each size.

    devices and tokens -> days       devices_s = tokens / (tokens a second of the best plan)
    days and tokens -> devices       the fewest of 1, 2, 4, 8, ... nodes whose best plan takes no longer
    price of a device hour           devices x hours x price

The speed is predicted for each size (plan.search.search), because it is not the same at all sizes: with more devices
each has fewer rows, and more of the step is communication. Not counted: restarts, failures, evaluation, experiments
before the run. Llama 3's run of 54 days was effective for somewhat more than 90% of its time (arXiv:2407.21783, 3.3.4).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from labkit.plan.machine.hardware import Hardware
from labkit.plan.model.shape import ModelShape
from labkit.plan.search.search import Plan, gb, plans

DAY_S = 86_400.0
MOST = 65_536
"""Devices beyond which nobody has trained one model, and this file looks no further."""


def count_words(count: float) -> str:
    """A count as people write it, to three digits: `1T`, `300B`, `1.5M`, `512`."""
    for factor, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if count >= factor * 0.9995:
            return f"{float(f'{count / factor:.3g}'):,g}{letter}"
    return f"{count:,.0f}"


@dataclass(frozen=True)
class Budget:
    """What a run takes: `plan` is the best one on its devices, `days` the time for `tokens`, without any pause.

    price    of a device for an hour, in any currency; None if nobody asked
    asked    days that were asked for; None if the devices were given
    sizes    (devices, days) of the sizes that were looked at, smallest first; endless days where nothing fits"""

    plan: Plan
    tokens: float
    days: float
    price: float | None = None
    asked: float | None = None
    sizes: tuple[tuple[int, float], ...] = ()

    @property
    def n_ranks(self) -> int:
        """Devices of the plan."""
        return self.plan.layout.size

    @property
    def device_hours(self) -> float:
        """Devices times hours."""
        return self.n_ranks * self.days * 24

    @property
    def cost(self) -> float | None:
        """Device hours times the price; None without one."""
        return None if self.price is None else self.device_hours * self.price

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of all devices."""
        return self.tokens / (self.days * DAY_S)

    @property
    def enough(self) -> int:
        """Devices in whole nodes that would do for the days asked for, at the same speed of each; all of them if half
        as many do not fit."""
        if self.asked is None or any(days == math.inf for _, days in self.sizes):
            return self.n_ranks
        node = self.plan.hardware.node_size
        return min(self.n_ranks, math.ceil(self.n_ranks * self.days / self.asked / node) * node)

    def __str__(self) -> str:
        """A few lines: devices, days, speed, device hours, cost, and the sizes that were too slow."""
        plan, model = self.plan, self.plan.shape.name or "the model"
        lines = [
            f"{count_words(self.tokens)} tokens of {model} on {self.n_ranks:,} {plan.hardware.name}: "
            f"{self.days:,.3g} days at {self.tokens_per_s:,.0f} tokens/s, {100 * plan.mfu:.0f}% MFU ({plan})",
            f"  {self.device_hours:,.0f} device hours"
            + (f" at {self.price:g} each: {self.cost:,.0f}" if self.cost is not None else "")
            + ", without restarts, failures and evaluation",
        ]
        if self.asked is not None:
            few = f"; {self.enough:,} devices in whole nodes would do at the same speed" * (self.enough < self.n_ranks)
            lines.append(f"  in {self.asked:g} days that is in time{few}")
        slower = [
            f"{n:,} devices: {f'{days:,.3g} days' if days < math.inf else 'nothing fits'}"
            for n, days in self.sizes
            if n != self.n_ranks
        ]
        return "\n".join(lines + [f"  looked at too: {'; '.join(slower)}"] * bool(slower))


def days_of(
    shape: Any,
    hardware: Hardware | str,
    n_ranks: int,
    tokens: float,
    global_batch: int,
    seq: int | None = None,
    *,
    price: float | None = None,
    **choices: Any,
) -> Budget:
    """The days that `n_ranks` devices need for `tokens`. `choices` are those of `plans`.

    ValueError for tokens and a price that are not above zero, and if no plan fits on so many devices."""
    _above_zero(tokens=tokens, price=price)
    best = plans(shape, hardware, n_ranks, global_batch, seq, **choices)[0]
    if not best.kept:
        raise ValueError(f"nothing fits on {n_ranks} devices, so there are no days to tell; {_nearest([best])}")
    return Budget(best, tokens, _days(best, tokens), price)


def devices_of(
    shape: Any,
    hardware: Hardware | str,
    days: float,
    tokens: float,
    global_batch: int,
    seq: int | None = None,
    *,
    price: float | None = None,
    **choices: Any,
) -> Budget:
    """The fewest of 1, 2, 4, 8, ... nodes that train on `tokens` in so many days. `choices` are those of `plans`.

    ValueError for numbers that are not above zero, if nothing fits, and if more devices make it no faster before the
    days are enough (the batch has no more rows to share)."""
    _above_zero(tokens=tokens, days=days, price=price)
    shape = ModelShape.preset(shape) if isinstance(shape, str) else ModelShape.of(shape)
    hardware = Hardware.preset(hardware) if isinstance(hardware, str) else hardware
    # with an adapter 4 flops a weight of 6: the floor is below both
    flops = shape.flops_per_token(seq) * (2 / 3 if choices.get("adapter") else 1)
    fewest = tokens * flops / (days * DAY_S * hardware.rate("bf16"))
    n, sizes, tight = hardware.node_size, list[tuple[int, float]](), list[Plan]()
    while n < fewest:  # at the rate of a large product it would take longer than that
        n *= 2
    while n <= MOST:
        best = plans(shape, hardware, n, global_batch, seq, **choices)[0]
        before = sizes[-1][1] if sizes else math.inf
        sizes.append((n, _days(best, tokens) if best.kept else math.inf))
        if sizes[-1][1] <= days:
            return Budget(best, tokens, sizes[-1][1], price, days, tuple(sizes))
        if sizes[-1][1] > 0.95 * before and before < math.inf:
            break  # twice the devices win nothing
        tight += [best] * (not best.kept)
        n *= 2
    fastest, most = min(((time, count) for count, time in sizes), default=(math.inf, 0))
    if fastest < math.inf:
        raise ValueError(
            f"{count_words(tokens)} tokens in {days:g} days cannot be had with {global_batch} rows a step: the "
            f"fastest is {fastest:,.3g} days on {most:,} devices; more rows let more devices work"
        )
    raise ValueError(
        f"{count_words(tokens)} tokens in {days:g} days want {fewest:,.0f} {hardware.name} or more, and up to {MOST:,} "
        f"nothing runs with {global_batch} rows a step" + (f"; {_nearest(tight)}" if tight else ": give it more days")
    )


def _days(plan: Plan, tokens: float) -> float:
    return tokens / (plan.recipe.batch_size * plan.shape.seq / plan.step_s) / DAY_S


def _nearest(refused: list[Plan]) -> str:
    """What comes nearest, in words."""
    least = min(refused, key=lambda plan: plan.needs_bytes or math.inf)
    need = f" and needs {gb(least.needs_bytes)} of a device" if least.needs_bytes else ""
    return f"one way has {least.layout.size} devices{need}: {least.refused}"


def _above_zero(**numbers: float | None) -> None:
    for name, value in numbers.items():
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be above 0, got {value!r}")
