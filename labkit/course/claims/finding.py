"""What a proof finds: settings in which a claim was put to the test, and the verdict that follows from them.

    Setting("K = 8", claimed=9, found=5.5, unit="N B")         in this setting the claim says 9, and 5.5 is the truth
    Finding.of(settings)                                       all hold: holds; none: wrong; some: depends
    Finding.of(settings, premise="equal shards")               some: holds with conditions, where they are so
    Finding.silent("the paper does not say so")                not shown

A proof says no verdict. It puts numbers beside numbers, and the verdict is what they say.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

HOLDS, CONDITIONS, WRONG, DEPENDS, NOT_SHOWN = "holds", "holds with conditions", "wrong", "depends", "not shown"
VERDICTS = (HOLDS, CONDITIONS, WRONG, DEPENDS, NOT_SHOWN)


@dataclass(frozen=True)
class Setting:
    """One test of a claim: what it says, what is the case, and how far apart the two may be.

    claimed, found    numbers (`within` is the share of `claimed` that they may differ by), or words that must be equal
    rule              "equal", or that what is found is "at least", "at most", "above" or "below" what is claimed
    measured          whether `found` was measured on real processes or tensors; else it is computed
    """

    name: str
    claimed: float | str
    found: float | str
    unit: str = ""
    within: float = 0.05
    rule: str = "equal"
    measured: bool = False

    def __post_init__(self) -> None:
        if self.rule not in ("equal", "at least", "at most", "above", "below"):
            raise ValueError(f"{self.name}: no rule is called {self.rule!r}")
        if isinstance(self.claimed, str) != isinstance(self.found, str) or (
            isinstance(self.claimed, str) and self.rule != "equal"
        ):
            raise ValueError(f"{self.name}: {self.claimed!r} and {self.found!r} cannot be compared")

    @property
    def holds(self) -> bool:
        """Whether the claim is true in this setting."""
        if isinstance(self.claimed, str) or isinstance(self.found, str):
            return self.claimed == self.found
        if self.rule == "equal":
            return math.isclose(self.found, self.claimed, rel_tol=0, abs_tol=abs(self.claimed) * self.within)
        room = abs(self.claimed) * self.within
        return {
            "at least": self.found >= self.claimed - room,
            "at most": self.found <= self.claimed + room,
            "above": self.found > self.claimed,
            "below": self.found < self.claimed,
        }[self.rule]


@dataclass(frozen=True)
class Finding:
    """The verdict on a claim, with the settings that it follows from.

    premise    where some settings hold and some do not: what those have that hold, "" if neither is the usual one
    said       where nothing can be computed or measured: why
    numbers    what else was measured and cards may quote, by name
    """

    settings: tuple[Setting, ...]
    premise: str = ""
    said: str = ""
    numbers: MappingProxyType[str, float] = field(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def of(cls, settings: Sequence[Setting], premise: str = "", **numbers: float) -> Finding:
        """From settings, one at least. The keyword `numbers` are what cards may quote."""
        if not settings:
            raise ValueError("a finding needs a setting; where nothing can be tested say Finding.silent(why)")
        return cls(tuple(settings), premise, numbers=MappingProxyType(numbers))

    @classmethod
    def silent(cls, why: str) -> Finding:
        """Nothing that can be computed or measured decides the claim."""
        if not why:
            raise ValueError("say why nothing can be shown")
        return cls((), said=why)

    @property
    def verdict(self) -> str:
        """One of VERDICTS, from the settings alone."""
        if not self.settings:
            return NOT_SHOWN
        true = sum(setting.holds for setting in self.settings)
        if true == len(self.settings):
            return HOLDS
        return WRONG if not true else CONDITIONS if self.premise else DEPENDS

    def stored(self) -> dict[str, Any]:
        """As JSON: the verdict, and every number by its name."""
        found = {each.name: each.found for each in self.settings if not isinstance(each.found, str)}
        return {"verdict": self.verdict, "numbers": {**found, **self.numbers}}
