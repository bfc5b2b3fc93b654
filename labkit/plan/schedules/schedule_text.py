"""Pipeline schedules as plain text: a line for each rank, an action a word.

    # gpipe, two ranks, two micro-batches              what follows a # is a comment
    placement: 0 1                                     the rank of each stage; of copies `0,1`; may be left out
    0F0 0F1 .   0B0 0B1                                0F1: stage 0, forward, micro-batch 1; kinds F, B and W
    .   1F0 1F1 1B0 1B1                                a dot is a pause, which nothing needs: ranks wait by themselves

A word may leave the stage out, `F1`, on a rank that has one stage, that of its own number. Without a placement, a stage
lives where its actions stand, on several ranks if each has a part of its micro-batches.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from labkit.plan.schedules.program import Action, Schedule, validate

MOST = 4000
"""The most actions that are read: a longer text is a mistake, or a way to keep a page busy for ever."""
WORD = re.compile(r"[^\s,;|]+")
SHAPE = re.compile(r"(\d{0,6})([FBW])(\d{1,6})")
PAUSE = re.compile(r"[.\-_]+")


class TextPosition(NamedTuple):
    """The place of a word in the text of a schedule: line and column, both counted from 1."""

    line: int
    column: int

    def __str__(self) -> str:
        return f"line {self.line}, column {self.column}"


def to_text(schedule: Schedule) -> str:
    """The schedule as text that `from_text` reads: its placement if it has one, then a line for each rank."""
    head = []
    if schedule.placement is not None:
        homes = (",".join(map(str, schedule.ranks_of(stage))) for stage in range(schedule.n_stages))
        head = [f"placement: {' '.join(homes)}"]
    return "\n".join(
        [f"# {schedule.name}", *head, *(" ".join(map(str, program)) or "." for program in schedule.programs)]
    )


def from_text(text: str, name: str = "by hand") -> Schedule:
    """The schedule that a text describes, validated. ValueError that names line, column and the mend if it is none."""
    rows: list[list[Action]] = []
    places: dict[tuple[int, Action], TextPosition] = {}
    homes: tuple[int | tuple[int, ...], ...] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#")[0]
        if words.strip().lower().startswith("placement"):
            homes = _homes(words, number)
        elif words.strip():
            row = []
            for word in WORD.finditer(words):
                place = TextPosition(number, word.start() + 1)
                if (action := _action(word[0], place, len(rows))) is not None:
                    places.setdefault((len(rows), action), place)
                    row.append(action)
            rows.append(row)
    if not places:
        raise ValueError("line 1, column 1: no action is there: write a line of actions for each rank, such as F0 B0")
    if sum(map(len, rows)) > MOST:
        raise ValueError(f"{sum(map(len, rows)):,} actions are more than {MOST:,}: take fewer micro-batches")
    for what, index in (("stages", 1), ("micro-batches", 2)):
        numbers = sorted({action[index] for _, action in places})
        if (gap := next((k for k, n in enumerate(numbers) if n != k), None)) is not None:
            at = next(place for (_, action), place in places.items() if action[index] == numbers[gap])
            raise ValueError(f"{at}: {what} count from 0, without gaps, and {gap} is not there: number them anew")
    n_stages = max(action.stage for _, action in places) + 1
    n_micro = max(action.micro for _, action in places) + 1
    if homes is None:
        homes = _found(rows, n_stages)
    made = Schedule(name, len(rows), n_stages, n_micro, tuple(map(tuple, rows)), homes)
    try:
        return validate(made)
    except ValueError as error:
        raise ValueError(_located(str(error), places)) from None


def _action(word: str, place: TextPosition, rank: int) -> Action | None:
    if PAUSE.fullmatch(word):
        return None
    match = SHAPE.fullmatch(word.upper())
    if match is None:
        raise ValueError(
            f"{place}: {word[:20]!r} is no action: write {rank}F0 for stage {rank}, forward, micro-batch 0 (B: "
            "backward, W: weights), or a dot for a pause"
        )
    return Action(match[2], int(match[1] or rank), int(match[3]))


def _homes(text: str, number: int) -> tuple[int | tuple[int, ...], ...]:
    homes: list[int | tuple[int, ...]] = []
    begin = text.lower().index("placement") + len("placement")
    for word in re.finditer(r"[^\s:=]+", text[begin:]):
        place = TextPosition(number, begin + word.start() + 1)
        if not re.fullmatch(r"\d{1,6}(,\d{1,6})*", word[0]):
            raise ValueError(
                f"{place}: {word[0][:20]!r} is no rank: write the rank of each stage, as in placement: 0 1 1 0"
            )
        ranks = tuple(map(int, word[0].split(",")))
        homes.append(ranks if len(ranks) > 1 else ranks[0])
    return tuple(homes)


def _found(rows: list[list[Action]], n_stages: int) -> tuple[int | tuple[int, ...], ...] | None:
    """Where each stage's actions stand; None where that is rank s % p anyway."""
    homes: list[int | tuple[int, ...]] = []
    for stage in range(n_stages):
        micros: dict[int, set[int]] = {}
        for rank, row in enumerate(rows):
            if forwards := {action.micro for action in row if action.stage == stage and action.kind == "F"}:
                micros[rank] = forwards
        ranks = tuple(micros)
        apart = sum(map(len, micros.values())) == len(set().union(*micros.values()))
        homes.append(ranks if len(ranks) > 1 and apart else ranks[0] if ranks else stage % len(rows))
    return None if homes == [stage % len(rows) for stage in range(n_stages)] else tuple(homes)


def _located(message: str, places: dict[tuple[int, Action], TextPosition]) -> str:
    """The message, with the place of the first action that it names and the text has."""
    for stage, kind, micro in re.findall(r"\b(\d+)([FBW])(\d+)\b", message):
        named = Action(kind, int(stage), int(micro))
        if at := next((place for (_, action), place in places.items() if action == named), None):
            return f"{at}: {message}"
    return message
