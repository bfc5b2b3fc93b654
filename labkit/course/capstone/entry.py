"""An entry of the capstone's board: the result of one attempt, as plain data that can be stored and drawn.

    score = seconds of a step x bytes of the fullest rank          in byte-seconds, shown as MB s; lower is better

All of it was measured by the referee (attempts.py), and none of it is taken from the judged program's own word.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from labkit.course.capstone.forecast import Way
from labkit.plan.job.recipe import Recipe
from labkit.plan.partition.layout import Layout


@dataclass(frozen=True)
class Entry:
    """One attempt, whether it finished and counts or not.

    task, task_key   the task's name, and eight hexadecimal digits, a hash of all its fields
    way              layout, recipe, placing
    step_s           seconds of each timed step, of the slowest rank
    peak_bytes       the highest bytes of each rank
    sent_bytes       bytes that each rank sent in the last step
    losses           the training loss that the program reported, step by step
    validation, alone   loss on the validation text with the weights handed in, and with those of one process
    faults           the faults that the referee found; empty for an attempt that counts
    refused          "" or the allocation that went over the cap: the attempt did not finish
    made_by          whose training step it was
    when, machine    day and time; cores, torch
    """

    task: str
    task_key: str
    way: Way
    step_s: tuple[float, ...] = ()
    peak_bytes: tuple[int, ...] = ()
    sent_bytes: tuple[int, ...] = ()
    losses: tuple[float, ...] = ()
    validation: float | None = None
    alone: float | None = None
    faults: tuple[str, ...] = ()
    refused: str = ""
    made_by: str = "labkit"
    when: str = ""
    machine: Mapping[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """The median of the timed steps; infinite for an attempt that did not finish."""
        return statistics.median(self.step_s) if self.step_s and not self.refused else math.inf

    @property
    def peak(self) -> int:
        """The bytes of the fullest rank."""
        return max(self.peak_bytes, default=0)

    @property
    def score(self) -> float:
        """Byte-seconds; infinite for an attempt that does not count."""
        return self.seconds * self.peak if self.counts else math.inf

    @property
    def counts(self) -> bool:
        """True if the attempt finished, and the referee found nothing wrong."""
        return not self.refused and not self.faults and bool(self.step_s)

    def __str__(self) -> str:
        """The score with its factors, `12.3 MB s = 0.61 s x 20.1 MB   dp 4: zero3`, or why there is none."""
        if self.refused:
            return f"did not finish   {self.way}: {self.refused}"
        if self.faults:
            return f"does not count   {self.way}: {'; '.join(self.faults)}"
        return f"{self.score / 1e6:.3g} MB s = {self.seconds:.3g} s x {self.peak / 1e6:.3g} MB   {self.way}"

    def to_json(self) -> str:
        """The entry as text, for the board."""
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, document: str | Mapping[str, Any]) -> Entry:
        """An entry from the text of `to_json`, or its parsed mapping. ValueError if it is none."""
        try:
            row = dict(json.loads(document) if isinstance(document, str) else document)
            way = row.pop("way")
            unknown = set(row) - {column.name for column in fields(cls)}
            kept: dict[str, Any] = {
                name: tuple(value) if isinstance(value, list) else value
                for name, value in row.items()
                if name not in unknown
            }
            return cls(way=way_of(way), **kept)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"this is no entry of the board: {type(error).__name__}: {error}") from None


def way_of(mapping: Mapping[str, Any]) -> Way:
    """A way from the mapping that `asdict` makes of it."""
    return Way(Layout(**mapping["layout"]), Recipe(**mapping["recipe"]), bool(mapping["apart"]))


def best(entries: Iterable[Entry]) -> list[Entry]:
    """The best entry of each way, best score first, without entries that do not count."""
    best_by_way: dict[tuple[str, str], Entry] = {}
    for entry in sorted((entry for entry in entries if entry.counts), key=lambda entry: entry.score):
        best_by_way.setdefault((entry.made_by, str(entry.way)), entry)
    return list(best_by_way.values())
