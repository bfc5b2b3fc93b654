"""The script of the mock interview: phases, their points and follow-up questions, as mock_interview.yaml has them.

the_script()                         the phases in order; a mistake in the file is told with its line and field
other("eight")                       the case of the same level to try next
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

from pydantic import BaseModel, ConfigDict, Field

from labkit.course.reading.authored import records
from labkit.course.topics.design_cases import case as case_of

FILE = Path(__file__).with_name("mock_interview.yaml")
BREAKS = "breaks"
"""The phase whose points the planner makes."""
FIGURE = re.compile(r"\{(\w+)\}")
LEVELS: Mapping[str, int] = MappingProxyType({"eight": 1, "audio": 1, "seventy": 3, "512": 3})
"""The level of a case: how many axes the planner's best plan cuts along. Cases of one level are equally difficult."""


class Followed(BaseModel):
    """A follow-up question and what a good answer to it says."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    ask: str = Field(min_length=8)
    answer: str = Field(min_length=4)


class RubricPoint(BaseModel):
    """One point of a whole answer; `missed` is asked if it was not ticked, `deeper` if it was."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str = Field(pattern=r"^[a-z]+$")
    words: str = Field(min_length=8)
    topics: tuple[str, ...] = Field(min_length=1)
    missed: Followed
    deeper: Followed


class InterviewPhase(BaseModel):
    """A phase: its minutes, what the interviewer says, and the points of a whole answer."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str = Field(pattern=r"^[a-z]+$")
    title: str
    minutes: float = Field(gt=0)
    ask: str = Field(min_length=8)
    points: tuple[RubricPoint, ...]

    @property
    def budget_s(self) -> float:
        """Seconds of the phase."""
        return 60 * self.minutes


def read_script(text: str, name: str) -> tuple[InterviewPhase, ...]:
    """The phases of a text. ValueError, with the line and the field, for what is wrong in it."""
    phases = tuple(records(text, name, InterviewPhase))
    names = [phase.name for phase in phases]
    points = [point.name for phase in phases for point in phase.points]
    if twice := sorted({word for words in (names, points) for word in words if words.count(word) > 1}):
        raise ValueError(f"{name}: {twice[0]!r} is the name of two: a name belongs to one phase or point")
    if names.count(BREAKS) != 1:
        raise ValueError(f"{name}: one phase is called {BREAKS!r}, got {', '.join(names) or 'none'}")
    if bare := [phase.name for phase in phases if bool(phase.points) == (phase.name == BREAKS)]:
        raise ValueError(
            f"{name}: phase {bare[0]!r}: every phase has points, only those of {BREAKS!r} are the planner's"
        )
    return phases


@cache
def the_script() -> tuple[InterviewPhase, ...]:
    """The phases of labkit's own mock interview."""
    return read_script(FILE.read_text(encoding="utf-8"), FILE.name)


def level_of(case: str) -> int:
    """The level of a case. ValueError for an unknown case."""
    return LEVELS[case_of(case).name]


def other(case: str) -> str:
    """The next case of the same level. ValueError for an unknown case."""
    name = case_of(case).name
    alike = [candidate for candidate, level in LEVELS.items() if level == LEVELS[name]]
    return alike[(alike.index(name) + 1) % len(alike)]
