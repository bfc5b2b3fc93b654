"""The two files beside the program of an exercise, in the exercise's folder: `exercise.md` and `mutants.yaml`.

exercise.md     begins with facts as YAML between two lines `---`: title, objectives, difficulty, importance, minutes.
                The story that the learner reads follows, in markdown, then three hints, each below a line `## Hint`.
mutants.yaml    is a list of mistakes that people make:

    - cause: nobody waits for what was started       the sentence that the judge must name as the cause
      verdict: values                                the verdict that must reject it
      swaps:                                         texts of the reference; each occurs in it exactly once
        - old: work.wait()
          new: pass

                In place of `swaps`, `instead: |` may hold a whole other program.

A mistake in one of these files is a ValueError that names the file, the line and the field.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Annotated, Literal, TypedDict

from pydantic import BaseModel, ConfigDict, Field, model_validator

from labkit.course.reading.authored import record, records

VERDICTS = ("values", "wire", "memory", "order", "liveness")
HINT = "\n## Hint\n"
Words = Annotated[str, Field(min_length=1)]
Stars = Annotated[int, Field(ge=1, le=5)]


class Swap(BaseModel):
    """A text of the reference, and the text that replaces it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    old: Words
    new: str


class Mutant(BaseModel):
    """A mistake that people make: the reference with some texts swapped, or another program `instead`.

    `verdict` is the verdict that must reject it ("rules": the static check), and `cause` the sentence that the judge
    must then name as the cause."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cause: Words
    verdict: Literal["values", "wire", "memory", "order", "liveness", "rules"]
    swaps: tuple[Swap, ...] = ()
    instead: str = ""

    @model_validator(mode="after")
    def _one_of_both(self) -> Mutant:
        if bool(self.swaps) == bool(self.instead):
            raise ValueError("swaps: a mutant has either swaps or a program instead of the reference")
        return self

    def source(self, reference: str) -> str:
        """The program with this mistake. ValueError if a text to swap does not occur in the reference exactly once."""
        if self.instead:
            return textwrap.dedent(self.instead).strip() + "\n"
        for swap in self.swaps:
            if reference.count(swap.old) != 1:
                raise ValueError(
                    f"mutant {self.cause!r}: {swap.old!r} stands {reference.count(swap.old)} times in the reference, "
                    f"and must stand there once"
                )
            reference = reference.replace(swap.old, swap.new)
        return reference


class Facts(BaseModel):
    """The head of exercise.md. Difficulty and importance go from 1 to 5."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: Words
    objectives: Annotated[tuple[Words, ...], Field(min_length=1)]
    difficulty: Stars
    importance: Stars
    minutes: Annotated[int, Field(ge=1)]


class Written(TypedDict):
    """The fields of a Problem that are read from files."""

    key: str
    title: str
    story: str
    objectives: tuple[str, ...]
    difficulty: int
    importance: int
    minutes: int
    hints: tuple[str, str, str]
    mutants: tuple[Mutant, ...]


def beside(program: str) -> Written:
    """The fields that are written in the folder of `program`, the path "problems/p06_4_overlap/exercise.py"."""
    folder = Path(program).parent
    name = f"{folder.name}/exercise.md"
    head, body = _parted((folder / "exercise.md").read_text(encoding="utf-8"), name)
    story, *hints = f"\n{body.strip()}\n".split(HINT)
    if len(hints) != 3:
        raise ValueError(f"{name}: three hints must stand there, each below a line `## Hint`, got {len(hints)}")
    one, two, three = (hint.strip() for hint in hints)
    facts = record(head, name, Facts)
    mutants = (folder / "mutants.yaml").read_text(encoding="utf-8")
    return Written(
        key=key_of(folder.name),
        title=facts.title,
        story=story.strip(),
        objectives=facts.objectives,
        difficulty=facts.difficulty,
        importance=facts.importance,
        minutes=facts.minutes,
        hints=(one, two, three),
        mutants=tuple(records(mutants, f"{folder.name}/mutants.yaml", Mutant)),
    )


def key_of(folder: str) -> str:
    """The key of an exercise's folder: "p06_4_overlap" -> "06.4"."""
    lab, place, _ = folder.removeprefix("p").split("_", 2)
    return f"{lab}.{place}"


def _parted(text: str, name: str) -> tuple[str, str]:
    """(the YAML between the first two lines `---`, the rest).

    An empty line stands for the first `---`, so that the line numbers of errors are those of the file."""
    opening, *rest = text.split("---\n", 2)
    if opening or len(rest) != 2:
        raise ValueError(f"{name}, line 1: the facts must stand there, in YAML between two lines `---`")
    return "\n" + rest[0], rest[1]
