"""18.2: a checkpoint that is whole or not there, whenever the power goes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from labkit.course.exercises.exercise_files import beside
from labkit.course.exercises.problem import Problem
from labkit.course.judge.case import Case


def save_step(disk: Any, step: int, content: bytes) -> None:
    """Put `content` on the disk under the name of its step, f"step-{step:06d}", and keep the last two checkpoints.
    Steps go on beyond 999,999, where the name gets a seventh digit.

    disk.write(name, content) makes or replaces a file, disk.sync(name) returns when all of it is on the disk,
    disk.rename(old, new) replaces `new` if there is one, disk.delete(name) removes a file, and disk.names() lists all.
    The power can go after any of these, also within a write. Then the checkpoint of the highest step has to be whole,
    and at least as new as the last call that came to its end; and from the second call on there have to be
    two whole ones. After a call nothing else is left on the disk."""
    disk.write("new", content)
    disk.sync("new")
    disk.rename("new", f"step-{step:06d}")
    whole = [name for name in disk.names() if name.startswith("step-")]
    for old in sorted(whole, key=lambda name: int(name[5:]))[:-2]:
        disk.delete(old)


MOST = 200
"""Operations that a run may need."""


class PowerCut(Exception):
    """The power has gone."""


class Disk:
    """A disk in memory. After `left` operations that change it the power goes."""

    def __init__(self, left: int, seed: int):
        self.left, self.dice = left, random.Random(seed)
        self.now: dict[str, bytes] = {}
        self.synced: dict[str, bytes] = {}

    def write(self, name: str, content: bytes) -> None:
        """Make or replace a file. It is not on the disk before `sync`."""
        if not self.left:
            # whoever replaces a file in place has neither the old nor the new one for a while
            self.synced[name] = self.now[name] = content[: self.dice.randrange(len(content))]
        self._spend()
        self.now[name], self.synced[name] = content, content[: self.dice.randrange(len(content))]

    def sync(self, name: str) -> None:
        """Wait until all of the file is on the disk."""
        self._spend()
        self.synced[name] = self.now[name]

    def rename(self, old: str, new: str) -> None:
        """Give a file another name, in one step."""
        self._spend()
        self.now[new], self.synced[new] = self.now.pop(old), self.synced.pop(old)

    def delete(self, name: str) -> None:
        """Remove a file."""
        self._spend()
        del self.now[name], self.synced[name]

    def names(self) -> list[str]:
        """All names, in no order."""
        names = list(self.now)
        self.dice.shuffle(names)
        return names

    def _spend(self) -> None:
        if not self.left:
            raise PowerCut
        self.left -= 1


def cases() -> Sequence[Case]:
    """Runs that save several times. In the second, steps have more and more digits; in the third, names do."""
    return [
        Case.of(1, first=1, every=1, n_saves=4),
        Case.of(1, first=7, every=33, n_saves=5),
        Case.of(1, first=999_998, every=1, n_saves=4),
    ]


def inputs(case: Case) -> Sequence[tuple[Any, ...]]:
    """The steps, the contents, and a seed for what a cut leaves."""
    dice = case.dice
    steps = [case["first"] + k * case["every"] for k in range(case["n_saves"])]
    return [(steps, [dice.randbytes(40) for _ in steps], dice.randrange(10**6))]


def play(attempt: Any, group: Any, steps: list[int], contents: list[bytes], seed: int) -> Any:
    """What is wrong at the first cut that shows it, or "survives"; then what a run leaves that nobody cuts."""
    whole, ended = run(attempt, steps, contents, Disk(MOST, seed))
    left = sorted([name, content.hex()] for name, content in whole.synced.items())
    if ended < len(steps):
        return ["a save does not come to its end", left]
    for cut in range(MOST - whole.left):
        disk, ended = run(attempt, steps, contents, Disk(cut, seed + cut))
        fault = damage(disk, steps, contents, ended)
        if fault:
            return [f"power cut after {cut} operations, in save number {ended + 1}: {fault}", left]
    return ["survives", left]


def run(attempt: Any, steps: list[int], contents: list[bytes], disk: Disk) -> tuple[Disk, int]:
    """Save step by step until the power goes; the disk, and how many saves came to their end."""
    ended = 0
    try:
        for step, content in zip(steps, contents, strict=True):
            attempt(disk, step, content)
            ended += 1
    except PowerCut:
        pass
    return disk, ended


def damage(disk: Disk, steps: list[int], contents: list[bytes], ended: int) -> str:
    """What is wrong with the disk after a cut, if `ended` saves had come to their end; "" for nothing."""
    names = [f"step-{step:06d}" for step in steps]
    wanted = dict(zip(names, contents, strict=True))
    there = [name for name in names if name in disk.synced]
    whole = [name for name in there if disk.synced[name] == wanted[name]]
    if there and there[-1] not in whole:
        return f"{there[-1]} is not whole"
    if ended and not set(names[ended - 1 :]) & set(whole):
        return "the checkpoint of the last save that came to its end is gone"
    return f"{len(whole)} whole checkpoint is there, and not two" if ended > 1 and len(whole) < 2 else ""


def answer(case: Case, inputs: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
    """It survives, and the last two are there."""
    steps, contents, _ = inputs[0]
    last = [[f"step-{step:06d}", content.hex()] for step, content in zip(steps, contents, strict=True)][-2:]
    return [["survives", sorted(last)]]


PROBLEM = Problem(
    **beside(__file__),
    reference=save_step,
    cases=cases,
    inputs=inputs,
    play=play,
    answer=answer,
)
