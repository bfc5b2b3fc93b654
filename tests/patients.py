"""Two patients whom the clinic does not know. They are alike in everything but what the cause is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rival:
    """Another cause."""

    cause: str
    test: str
    would_show: str


@dataclass(frozen=True)
class Plain:
    """A patient with three suspects."""

    name: str = "Zoe"
    complaint: str = "It is cold."
    symptom: str = "cold"
    cause: str = "no heating"
    test: str = "thermometer"
    shows: str = "5 degrees"
    repair: str = "heat"
    diff: str = "-off\n+on"
    lab: str = "00"
    suspects: tuple[str, ...] = ("draught", "no heating", "winter")
    differential: tuple[Rival, ...] = (Rival("draught", "candle", "a flicker"), Rival("winter", "calendar", "January"))


ZOE = Plain()
YVES = Plain(
    cause="winter",
    test="calendar",
    shows="January",
    repair="wait",
    diff="-go\n+stay",
    lab="01",
    differential=(Rival("draught", "candle", "a flicker"), Rival("no heating", "thermometer", "5 degrees")),
)
"""Zoe's complaint, and her name, of another cause."""
MINUTES = {"calendar": 1, "candle": 4, "thermometer": 10}
SIGNS = {"Zoe": {"calendar": "May", "candle": "still", "thermometer": "5 degrees"}}
