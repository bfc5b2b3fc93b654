"""The tools that a plan can be written for: a row each, and the file that is written for the plan that was chosen."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from labkit.plan.export.accelerate import Accelerate
from labkit.plan.export.megatron import Megatron
from labkit.plan.export.target import ChosenPlan, Target, text_of
from labkit.plan.export.torchrun import Torchrun
from labkit.plan.export.torchtitan import Torchtitan
from labkit.plan.search.search import Plan
from labkit.plan.tables import Key, checked, toml
from labkit.plan.words import nearest

FILE = Path(__file__).with_suffix(".toml")
KEYS = MappingProxyType({
    "version": Key(str, needed=True), "source": Key(str, needed=True), "options": Key(list), "models": Key(dict),
})  # fmt: skip


@cache
def tools() -> Mapping[str, Mapping[str, Any]]:
    """The facts of targets.toml, by tool. ValueError for a row that lacks a key."""
    return MappingProxyType({name: checked(f"{FILE.name}, [{name}]", row, KEYS) for name, row in toml(FILE).items()})


@cache
def targets() -> Mapping[str, Target]:
    """The tools by their names. A new one is a row here."""
    rows: tuple[Target, ...] = (Torchtitan(tools()["torchtitan"]["models"]), Megatron(), Accelerate(), Torchrun())
    return MappingProxyType({target.name: target for target in rows})


def check_target(name: str) -> Target:
    """The tool of this name. ValueError, with the nearest, for one that plans are not written for."""
    if name not in targets():
        raise ValueError(f"plans are written for {', '.join(targets())}, got {name!r}; {nearest(name, targets())}")
    return targets()[name]


def exported(name: str, plans: Sequence[Plan], choice: int = 1, asked: Collection[str] = ()) -> str:
    """The file of a tool for plan number `choice` of those that were kept, the first being 1; `asked` are the choices
    that somebody made (labkit.plan.export.target).

    ValueError for an unknown tool and for no such plan; and for a plan of which the tool lacks something: it says what,
    and which is the first of these plans that it has."""
    target = check_target(name)
    kept = [plan for plan in plans if plan.kept]
    if not kept:
        raise ValueError(f"there is no plan to write, since none fits: the first is refused for {plans[0].refused}")
    if not 1 <= choice <= len(kept):
        raise ValueError(f"plans that fit are numbered 1 to {len(kept)}, got {choice}")
    version, plan = tools()[name]["version"], kept[choice - 1]
    lacking = list(target.lacks(plan))
    if lacking:
        raise ValueError(f"{version} cannot run plan {choice}, {plan}: {'; '.join(lacking)}. {_has(target, kept)}")
    return text_of(target.lines(ChosenPlan(plan, asked), version))


def _has(target: Target, kept: Sequence[Plan]) -> str:
    """A sentence: the first plan that the tool can run, and how it is chosen."""
    number = next((number for number, plan in enumerate(kept, 1) if not any(target.lacks(plan))), None)
    if number is None:
        return f"Of the {len(kept)} plans that fit it has none: another model, precision or optimizer may be one"
    times = kept[number - 1].expected_s / kept[0].expected_s
    return (
        f"The first that it has is plan {number}, {kept[number - 1]}, which is expected to take {times:.2f} times as "
        f"long as plan 1: --choice {number}"
    )
