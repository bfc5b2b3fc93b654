"""What a learner does at an exercise, as data that can be stored: attempts, opened hints and opened solutions.

said = event.model_dump_json();  event_of(said) == event
events_of(export)                the events in an exported file, or a ValueError that names the field
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, TypeAdapter

from labkit.course.learner.exported import taken
from labkit.course.numbers import full

FORMAT, VERSION = "labkit progress", 1
LEVELS = (1, 2, 3)
KEY = r"\d{2,}[a-z]?\.\w+"


class _Event(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    uid: str = Field(min_length=16, max_length=64)
    key: str = Field(pattern=f"^{KEY}$")
    at: AwareDatetime


class Attempt(_Event):
    """A check of a program: the result, the first broken verdict with its likely cause, and the program itself."""

    kind: Literal["attempt"] = "attempt"
    passed: bool
    starred: bool
    verdict: str = ""
    cause: str = ""
    seconds: float = Field(ge=0)
    source: str
    labkit: str = ""


class Hint(_Event):
    """A hint was opened."""

    kind: Literal["hint"] = "hint"
    level: Literal[1, 2, 3]


class Solution(_Event):
    """The solution was opened."""

    kind: Literal["solution"] = "solution"


Event = Attempt | Hint | Solution
Told = Annotated[Event, Field(discriminator="kind")]


class _Export(BaseModel):
    model_config = ConfigDict(extra="forbid")
    format: Literal["labkit progress"]
    version: int
    events: tuple[Told, ...]


def event_of(text: str) -> Event:
    """The event in a text that `model_dump_json` wrote. ValueError if it is none."""
    event: Event = TypeAdapter(Told).validate_json(text)
    return event


def export_of(events: Sequence[Event]) -> dict[str, Any]:
    """Events as plain data, for json."""
    return {"format": FORMAT, "version": VERSION, "events": [event.model_dump(mode="json") for event in events]}


def events_of(plain: Mapping[str, Any]) -> tuple[Event, ...]:
    """The events that `export_of` was given. ValueError names the field that is wrong."""
    return taken(_Export, plain, VERSION).events


def full_key(key: str) -> str:
    """The full key: `3.2` -> `03.2`. ValueError for what is no key of an exercise."""
    if not re.fullmatch(KEY, wanted := full(str(key))):
        raise ValueError(f"the key of an exercise is a lab and a place, as in '03.2', got {key!r}")
    return wanted


def sound(words: str) -> str:
    """The words as a file can store them: lone surrogates, which a cell may contain, become question marks."""
    return words.encode("utf-8", "replace").decode()
