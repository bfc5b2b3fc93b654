"""The grades of a class: a row for each exercise of each student, and sums, as CSV, JSON and in a terminal."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as Drawn
from rich.text import Text

from labkit.course.classroom.private_files import is_private, write_private
from labkit.course.classroom.seed import MOST_SEED
from labkit.course.numbers import natural

FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")
"""A spreadsheet takes a cell that begins with one of these for a formula, and students choose some of the words. The
last four are the wide forms, which count as much in East Asia."""
UNWRITABLE = "backslashreplace"
"""What becomes of halves of letters in a student's words: an escape, not an error that cuts off a class's table."""


@dataclass(frozen=True)
class ExerciseResult:
    """One exercise of one student.

    exercise   its key, "03.2"; "" for a file that could not be searched for exercises
    verdict    the first broken one; "file" if there was nothing to judge, "judge" if the judge itself failed
    cause      the likely mistake, or what was seen
    of         the points that the exercise is worth
    note       what a teacher may want to know; it changes no points
    report     the report for the student, line by line
    """

    student: str
    exercise: str
    passed: bool
    verdict: str
    cause: str
    seconds: float
    star: bool
    points: int
    of: int
    note: str = ""
    file: str = ""
    report: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sum:
    """The sums of one student; `of` counts every exercise that was graded in this class."""

    student: str
    passed: int
    exercises: int
    points: int
    of: int
    stars: int
    seconds: float
    notes: int


@dataclass(frozen=True)
class Table:
    """The grades of a class: `rows`, `sums`, and the seed with which the same cases can be drawn again. `remarks` are
    about the table as a whole."""

    rows: tuple[ExerciseResult, ...]
    seed: int
    seconds: float
    remarks: tuple[str, ...] = ()

    @property
    def exercises(self) -> dict[str, int]:
        """The points of every exercise that was graded, by key."""
        worth = {row.exercise: row.of for row in self.rows if row.exercise}
        return {key: worth[key] for key in sorted(worth, key=natural)}

    @property
    def sums(self) -> tuple[Sum, ...]:
        """The sums of each student, by name."""
        sums, of = [], self.exercises
        for student in sorted({row.student for row in self.rows}):
            own_rows = [row for row in self.rows if row.student == student]
            sums.append(
                Sum(student, sum(row.passed for row in own_rows), len(of), sum(row.points for row in own_rows),
                    sum(of.values()), sum(row.star for row in own_rows), round(sum(row.seconds for row in own_rows), 2),
                    sum(bool(row.note) for row in own_rows))
            )  # fmt: skip
        return tuple(sums)

    def as_dict(self) -> dict[str, Any]:
        """The table as plain data."""
        return {
            "seed": self.seed,
            "seconds": round(self.seconds, 2),
            "remarks": self.remarks,
            "exercises": self.exercises,
            "rows": [asdict(row) for row in self.rows],
            "students": [asdict(sum_) for sum_ in self.sums],
        }

    def write(self, to: Path) -> tuple[Path, Path, Path]:
        """Write `to` (a row per exercise), the same with _students (a row per student), and both as .json. Nobody but
        their owner can open them."""
        rows = [{key: _cell(value) for key, value in asdict(row).items() if key != "report"} for row in self.rows]
        sums = [{key: _cell(value) for key, value in asdict(sum_).items()} for sum_ in self.sums]
        names = [name for name in ExerciseResult.__dataclass_fields__ if name != "report"]
        to, students, plain = files_of(to)
        _write(to, names, rows)
        _write(students, list(Sum.__dataclass_fields__), sums)
        text = json.dumps(self.as_dict(), indent=1, ensure_ascii=False)
        write_private(plain, text + "\n", UNWRITABLE)
        return to, students, plain

    def __str__(self) -> str:
        width = max((len(sum_.student) for sum_ in self.sums), default=0)
        sums = [f"{sum_.student:{width}s}  {_told(sum_)}" for sum_ in self.sums]
        return "\n".join([*sums, *(f"note: {remark}" for remark in self.remarks)])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        drawn = Drawn("student", "exercise", "", "cause", "s", "points", "note")
        for row in self.rows:
            sign = Text("★" if row.star else "✓", "green") if row.passed else Text(f"✗ {row.verdict}", "red")
            words = (
                row.student,
                row.exercise,
                sign,
                row.cause,
                f"{row.seconds:.1f}",
                f"{row.points}/{row.of}",
                row.note,
            )
            drawn.add_row(*(word if isinstance(word, Text) else Text(word) for word in words))
        yield drawn
        yield Text(str(self))

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in ("student", "exercise", "passed", "cause", "points", "note"))
        rows = "".join(
            "<tr>" + "".join(f'<td style="text-align:left">{escape(str(cell))}</td>' for cell in cells) + "</tr>"
            for row in self.rows
            for cells in [(row.student, row.exercise, "✓" if row.passed else f"✗ {row.verdict}", row.cause,
                          f"{row.points}/{row.of}", row.note)]
        )  # fmt: skip
        return f"<table><tr>{head}</tr>{rows}</table><pre>{escape(str(self))}</pre>"


def files_of(to: Path) -> tuple[Path, Path, Path]:
    """The files that `write` makes: rows, students, JSON."""
    return to, to.with_name(f"{to.stem}_students.csv"), to.with_suffix(".json")


def seed_kept(to: Path) -> int | None:
    """The seed of the table that was written there earlier; None without one, and where others may have read it."""
    plain = files_of(to)[2]
    if not is_private(plain):
        return None
    try:
        seed = json.loads(plain.read_text(encoding="utf-8"))["seed"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return seed if type(seed) is int and 0 <= seed < MOST_SEED else None


def _told(total: Sum) -> str:
    stars = f", {total.stars} ★" if total.stars else ""
    notes = f", {total.notes} to look at" if total.notes else ""
    return f"{total.passed} of {total.exercises} passed, {total.points} of {total.of} points{stars}{notes}"


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return round(value, 2)
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value


def _write(path: Path, names: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    file = io.StringIO()
    writer = csv.DictWriter(file, names)
    writer.writeheader()
    writer.writerows(rows)
    write_private(path, file.getvalue(), UNWRITABLE)
