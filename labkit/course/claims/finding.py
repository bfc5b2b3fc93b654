"""What a proof finds: settings in which a claim was tested, and the verdict that follows from them.

    Setting("K = 8", claimed=9, truth=5.5, unit="N B")         in this setting the claim says 9, and the truth is 5.5
    Finding.of(settings)                                       all hold: holds; none: wrong; some: depends
    Finding.of(settings, premise="equal shards")               some hold: holds with conditions, namely the premise
    Finding.silent("the paper does not say so")                not shown
    finding.quoted("{at[K = 8]:.1f} and not {guess:.0f}")      a text with the finding's numbers in its places

A proof states no verdict. It compares numbers, and the verdict follows from the comparison.
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
    """One test of a claim: what it says, what is true, and how far apart the two may be.

    claimed, truth    numbers (`within` is the share of `claimed` that they may differ by), or words that must be equal
    rule              "equal", or `truth` must be "at least", "at most", "above" or "below" `claimed`
    measured          True if `truth` was measured on real processes or tensors, False if it was computed
    """

    name: str
    claimed: float | str
    truth: float | str
    unit: str = ""
    within: float = 0.05
    rule: str = "equal"
    measured: bool = False

    def __post_init__(self) -> None:
        if self.rule not in ("equal", "at least", "at most", "above", "below"):
            raise ValueError(f"{self.name}: no rule is called {self.rule!r}")
        if isinstance(self.claimed, str) != isinstance(self.truth, str) or (
            isinstance(self.claimed, str) and self.rule != "equal"
        ):
            raise ValueError(f"{self.name}: {self.claimed!r} and {self.truth!r} cannot be compared")

    @property
    def holds(self) -> bool:
        """True if the claim is true in this setting."""
        if isinstance(self.claimed, str) or isinstance(self.truth, str):
            return self.claimed == self.truth
        if self.rule == "equal":
            return math.isclose(self.truth, self.claimed, rel_tol=0, abs_tol=abs(self.claimed) * self.within)
        room = abs(self.claimed) * self.within
        return {
            "at least": self.truth >= self.claimed - room,
            "at most": self.truth <= self.claimed + room,
            "above": self.truth > self.claimed,
            "below": self.truth < self.claimed,
        }[self.rule]


@dataclass(frozen=True)
class Finding:
    """The verdict on a claim, with the settings that it follows from.

    premise    if only some settings hold: what those have in common, "" if neither case is the usual one
    reason     if nothing can be computed or measured: the reason
    numbers    other measured numbers, by name, which cards may quote
    """

    settings: tuple[Setting, ...]
    premise: str = ""
    reason: str = ""
    numbers: MappingProxyType[str, float] = field(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def of(cls, settings: Sequence[Setting], premise: str = "", **numbers: float) -> Finding:
        """A finding from at least one setting. The keywords `numbers` are what cards may quote."""
        if not settings:
            raise ValueError("a finding needs a setting; where nothing can be tested say Finding.silent(why)")
        return cls(tuple(settings), premise, numbers=MappingProxyType(numbers))

    @classmethod
    def silent(cls, why: str) -> Finding:
        """A finding for a claim that can be neither computed nor measured; `why` says so."""
        if not why:
            raise ValueError("say why nothing can be shown")
        return cls((), reason=why)

    @property
    def verdict(self) -> str:
        """One of VERDICTS, which follows from the settings alone."""
        if not self.settings:
            return NOT_SHOWN
        true = sum(setting.holds for setting in self.settings)
        if true == len(self.settings):
            return HOLDS
        return WRONG if not true else CONDITIONS if self.premise else DEPENDS

    def stored(self) -> dict[str, Any]:
        """The verdict, and every number by its name, as plain data."""
        numbers = {setting.name: setting.truth for setting in self.settings if not isinstance(setting.truth, str)}
        return {"verdict": self.verdict, "numbers": {**numbers, **self.numbers}}

    def quoted(self, text: str) -> str:
        """The text with this finding's values in its places: `{at[NAME]:.1f}` is what is true in the setting NAME, and
        `{name:.0%}` is one of `numbers`. ValueError, with the names that there are, for another place."""
        at = {setting.name: setting.truth for setting in self.settings}
        try:
            return text.format(at=at, **self.numbers)
        except (LookupError, ValueError) as error:
            names = ", ".join([*(f"at[{name}]" for name in at), *self.numbers]) or "nothing"
            raise ValueError(f"{text!r} quotes what was not found: {error}; there is {names}") from error
