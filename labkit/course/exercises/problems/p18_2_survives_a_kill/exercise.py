"""18.2: a checkpoint that is whole or not there, whenever the power goes."""

import random
from typing import Any, NamedTuple

from labkit.comm.group import Group
from labkit.course.exercises.exercise import Answers, Case, Inputs, exercise


def save_step(disk: Any, step: int, content: bytes) -> None:
    """Put `content` on the disk under the name of its step, f"step-{step:06d}", and keep the last two checkpoints.
    Steps go on beyond 999,999, where the name gets a seventh digit.

    disk.write(name, content) makes or replaces a file, disk.sync(name) returns when all of it is on the disk,
    disk.rename(old, new) replaces `new` if there is one, disk.delete(name) removes a file, and disk.names() lists all.
    The power can go after any of these, also within a write. Then the checkpoint of the highest step has to be whole,
    and at least as new as the last call that came to its end; and once there were two whole ones, there have to be two.
    The next call finds what the cut has left, and is for a later step. A call that comes to its end leaves the last two
    checkpoints on the disk, the first call one, and nothing else."""
    disk.write("new", content)
    disk.sync("new")
    disk.rename("new", f"step-{step:06d}")
    whole = [name for name in disk.names() if name.startswith("step-")]
    for old in sorted(whole, key=lambda name: int(name[5:]))[:-2]:
        disk.delete(old)


MOST, LATER = 300, 8
"""Operations that a run may need, and how many steps there are beyond those of the first run."""


class PowerCut(BaseException):
    """The power has gone. No `except Exception` goes on without it."""


class Handle(NamedTuple):
    """What an attempt has of a disk: its five operations, and neither its power nor its content."""

    write: Any
    sync: Any
    rename: Any
    delete: Any
    names: Any


class Disk:
    """A disk in memory. After `left` operations that change it the power goes, until somebody sets `left` anew."""

    def __init__(self, seed: int):
        self.left, self.dice = MOST, random.Random(seed)
        self.now: dict[str, bytes] = {}
        self.synced: dict[str, bytes] = {}

    @property
    def handle(self) -> Handle:
        """The operations alone."""
        return Handle(self.write, self.sync, self.rename, self.delete, self.names)

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

    def start(self, left: int = MOST) -> None:
        """The power is back: what was not synced is lost."""
        self.left, self.now = left, dict(self.synced)

    def _spend(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise PowerCut


def cases() -> list[Case]:
    """Runs that save several times. In the second, steps have more and more digits; in the third, names do."""
    return [
        Case.of(1, first=1, every=1, n_saves=6),
        Case.of(1, first=7, every=33, n_saves=5),
        Case.of(1, first=999_998, every=1, n_saves=4),
    ]


def inputs(case: Case) -> Inputs:
    """The checkpoints by step, how many of them are saved before the power goes, and a seed for what a cut leaves."""
    dice = case.dice
    steps = [case["first"] + k * case["every"] for k in range(case["n_saves"] + LATER)]
    return [({step: dice.randbytes(40) for step in steps}, case["n_saves"], dice.randrange(10**6))]


def play(attempt: Any, group: Group, contents: dict[int, bytes], n_saves: int, seed: int) -> Any:
    """ "survives", or what is wrong at the first cut that shows it; then what a run leaves that nobody cuts.

    Each cut is followed by a second one somewhere in the next saves, and by saves that nobody cuts. The first cuts come
    in a random order, so that nobody who counts the runs knows when the power goes."""
    steps, dice = list(contents), random.Random(seed)
    disk = Disk(seed)
    fault = next(filter(None, [run(attempt, disk, [step], contents) for step in steps[:n_saves]]), "")
    left = sorted([name, content.hex()] for name, content in disk.synced.items())
    if fault or disk.left < 0:
        return [fault or "a save does not come to its end", left]
    n_operations, faults = MOST - disk.left, dict[int, str]()
    for cut in dice.sample(range(n_operations), n_operations):
        disk, todo = Disk(seed + cut), steps[:n_saves]
        for power in (cut, dice.randrange(n_operations // 2), MOST):
            disk.start(power)
            if fault := run(attempt, disk, todo, contents):
                faults[cut] = fault
                break
            newest = max((step for step in steps if name_of(step) in disk.synced), default=0)
            skipped = dice.choice((1, 2))  # the step that was cut, and perhaps one more
            todo = [step for step in steps if step > newest][skipped : skipped + 2]
    return [f"power cut after {min(faults)} operations: {faults[min(faults)]}" if faults else "survives", left]


def run(attempt: Any, disk: Disk, steps: list[int], contents: dict[int, bytes]) -> str:
    """Save step by step until the power goes, from what is on the disk; what is wrong then, or after a save, or ""."""
    ended = whole(disk, contents)
    for step in steps:
        try:
            attempt(disk.handle, step, contents[step])
        except PowerCut:
            return damage(disk, contents, ended)
        ended = [*ended, step][-2:]
        if sorted(disk.synced) != sorted(map(name_of, ended)) or damage(disk, contents, ended):
            return f"after the save of step {step} it has {', '.join(sorted(disk.synced))}, not all of them whole"
    return ""


def damage(disk: Disk, contents: dict[int, bytes], ended: list[int]) -> str:
    """What is wrong with a disk on which the saves of these steps have come to their end, at most the last two counted;
    "" for nothing."""
    there, sound = [step for step in contents if name_of(step) in disk.synced], whole(disk, contents)
    if there and there[-1] not in sound:
        return f"{name_of(there[-1])} is not whole"
    if ended and max(sound, default=0) < ended[-1]:
        return "the checkpoint of the last save that came to its end is gone"
    return f"{len(sound)} whole checkpoint is there, and not two" if len(sound) < len(ended[-2:]) else ""


def whole(disk: Disk, contents: dict[int, bytes]) -> list[int]:
    """The steps whose checkpoints are whole on the disk, in order."""
    return [step for step, content in contents.items() if disk.synced.get(name_of(step)) == content]


def name_of(step: int) -> str:
    """The name of a step's checkpoint."""
    return f"step-{step:06d}"


def answer(case: Case, inputs: Inputs) -> Answers:
    """It survives, and the last two are there."""
    contents, n_saves, _ = inputs[0]
    last = [[name_of(step), content.hex()] for step, content in contents.items()][n_saves - 2 : n_saves]
    return [["survives", sorted(last)]]


PROBLEM = exercise(__name__, save_step)
