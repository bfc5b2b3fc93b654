"""What a student handed in: text that is read and never run, and the judge's result for an exercise in it.

    blocks = read(path)                      the code of a notebook, cell by cell; ValueError, with a reason, if damaged
    defined(blocks)["ring_reduce_scatter"]   how often a name is defined there
    outcome = judged(problem, blocks, seed)  the attempt is taken out as text, and judged in fresh processes

Students' programs run in the judge's processes and nowhere else (labkit/course/judge/prefork.py). So it does not matter
what a notebook patches, imports or prints, or whether it ever ends.
"""

from __future__ import annotations

import ast
import stat
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from labkit.course.classroom.file_names import shown
from labkit.course.classroom.seed import exercise_seed
from labkit.course.exercises.problem import Problem
from labkit.course.judge.attempt import Attempt, attempt_in, blocks_of
from labkit.course.judge.prefork import prefork_server
from labkit.course.judge.report import Report

MOST_BYTES = 20 << 20
MOST_CODE = 300_000
MOST_ATTEMPT = 20_000
"""Characters of an attempt with all that it uses; references have at most a tenth of that."""
UNREAD = "file"
"""The verdict on a file that cannot be read; "judge" is the verdict if the judge itself failed."""

Judge = Callable[[str, Attempt, int | None], Report]


class Outcome(NamedTuple):
    """The result for one exercise of one student.

    verdict   the first broken one; "file" if there is nothing to judge, "judge" if the judge itself failed
    cause     the likely mistake, or what was seen
    report    the report, line by line, for the student: it names the case, not the numbers in it
    text      the attempt without white space, to be compared with others'
    """

    key: str
    passed: bool
    starred: bool = False
    verdict: str = ""
    cause: str = ""
    report: tuple[str, ...] = ()
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    text: str = ""


def points_of(it: Problem) -> int:
    """The points for an exercise: one for each dot of its difficulty, 1 to 5."""
    return it.difficulty


def read(path: Path) -> list[str]:
    """The code of a notebook, cell by cell. ValueError, with a reason, for what is no notebook, too large, or cannot be
    opened."""
    name = shown(path.name)
    try:
        about = path.lstat()
    except OSError as error:
        raise ValueError(f"{name} cannot be read ({error.strerror})") from None
    if stat.S_ISLNK(about.st_mode):
        raise ValueError(f"{name} is a symbolic link, and these are not followed: put the notebook itself there")
    if stat.S_ISDIR(about.st_mode):
        raise ValueError(f"{name} is a folder that cannot be opened: give it the right to be read")
    if not stat.S_ISREG(about.st_mode):
        raise ValueError(f"{name} is no plain file: put the notebook itself there")
    size = about.st_size
    if size > MOST_BYTES:
        raise ValueError(
            f"{name} has {size / 2**20:.0f} MiB, {MOST_BYTES >> 20} at most: clear its outputs and save it again"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old notebooks have no cell ids, which is not the student's fault
        try:
            blocks = blocks_of(path)
        except ValueError as error:
            raise ValueError(str(error).replace(str(path), name)) from None
        except Exception as error:  # JSON that is no notebook can fail in many ways
            raise ValueError(f"{name} cannot be read as a notebook ({type(error).__name__})") from None
    if not all(isinstance(block, str) for block in blocks):
        raise ValueError(f"{name} cannot be read as a notebook: the source of a cell is not text")
    return modest(blocks, name)


def modest(blocks: list[str], name: str) -> list[str]:
    """The same blocks. ValueError if they hold far more code than exercises need."""
    size = sum(map(len, blocks))
    if size > MOST_CODE:
        raise ValueError(f"{name} has {size} characters of code, {MOST_CODE} at most: hand in the exercises only")
    return blocks


def defined(blocks: Sequence[str]) -> Counter[str]:
    """The number of definitions of each name at the top level of the cells that are valid Python."""
    return Counter(name for block in blocks for node in _body(block) or () for name in _names(node))


def mentions(blocks: Sequence[str], name: str) -> bool:
    """True if a name is defined, or follows `def` or `class` in a cell that is not valid Python yet."""
    if defined(blocks)[name]:
        return True
    broken = [block for block in blocks if _body(block) is None]
    return any(f"def {name}" in block or f"class {name}" in block for block in broken)


def text_of(it: Problem, blocks: Sequence[str]) -> str:
    """The attempt without white space; "" if there is none, or only the stub."""
    try:
        bare = _bare(taken(it, blocks))
    except ValueError:
        return ""
    return "" if bare == _bare(attempt_in([it.stub], it.name)) else bare


def taken(it: Problem, blocks: Sequence[str]) -> Attempt:
    """The attempt: the last valid definition. ValueError if there is none, or it cannot be read."""
    try:
        return attempt_in(blocks, it.name)
    except (RecursionError, MemoryError):
        raise ValueError(f"{it.name} cannot be read: something in the notebook is nested too deeply") from None


def judged(it: Problem, blocks: Sequence[str], seed: int | None = None, judge: Judge | None = None) -> Outcome:
    """Judge the attempt at an exercise in these cells. Whatever they contain, there is an outcome.

    seed    the teacher's; the same one draws the same hidden cases again. None: drawn for this attempt alone"""
    try:
        attempt = taken(it, blocks)
    except ValueError as error:
        return unjudged(it, str(error))
    if (size := len(attempt.before) + len(attempt.source.lstrip())) > MOST_ATTEMPT:
        return unjudged(it, f"{it.name} and what it uses have {size} characters, {MOST_ATTEMPT} at most")
    try:
        report = (judge or _warm)(it.key, attempt, None if seed is None else exercise_seed(seed, it.key))
    except (RuntimeError, OSError) as error:
        message = f"the judge itself failed on {it.key}: this is no verdict on the attempt; grade it again"
        return Outcome(it.key, False, False, "judge", message, (message, *str(error).splitlines()[-3:]))
    return _outcome(it, report, defined(blocks)[it.name], text_of(it, blocks))


def unjudged(it: Problem, words: str) -> Outcome:
    """The outcome if there is nothing to judge, with the reason."""
    return Outcome(it.key, False, False, UNREAD, words, (f"{it.key} {it.title}: nothing to judge", f"seen: {words}"))


def plain(words: str, most: int = 300) -> str:
    """Words of a student's program on one line, without control characters that a terminal would obey."""
    return "".join(char if char.isprintable() else " " for char in words)[:most]


def _outcome(exercise: Problem, report: Report, count: int, text: str) -> Outcome:
    notes = [f"{exercise.name} is defined {count} times: the last one counts"] if count > 1 else []
    if text and text == _bare(attempt_in([exercise.solution], exercise.name)):
        notes.append("the same text as labkit's reference, white space apart")
    broken = report.broken
    if report.passed or broken is None:
        summary = (report.headline,)
        return Outcome(exercise.key, report.passed, report.starred, "", "", summary, report.seconds, tuple(notes), text)
    details = [f"{heading + ':':14s}{plain(words)}" for heading, words in report.lines(broken)]
    seen = f"expected {broken.expected}, seen {broken.seen}" if broken.expected else broken.seen
    lines = (report.headline, f"{'the law:':14s}{broken.law}", *details)
    return Outcome(
        exercise.key, False, False, broken.name, plain(broken.cause or seen), lines, report.seconds, tuple(notes), text
    )


def _warm(key: str, attempt: Attempt, seed: int | None) -> Report:
    try:
        return prefork_server().judge(key, attempt, seed)
    except OSError:  # the server has ended in the meantime: start a new one
        return prefork_server().judge(key, attempt, seed)


def _bare(attempt: Attempt) -> str:
    return "".join((attempt.before + attempt.source).split())


def _body(block: str) -> list[ast.stmt] | None:
    """The statements of a cell, without magics; None if it is not Python, or nested too deeply."""
    lines = ("pass" if line.lstrip().startswith(("%", "!", "?")) else line for line in block.splitlines())
    try:
        return ast.parse("\n".join(lines)).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        return [node.name]
    if isinstance(node, ast.ImportFrom):
        return [name.asname or name.name for name in node.names]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []
