"""What a student handed in: text that is read and never run, and what the judge says of an exercise in it.

    blocks = read(path)                      the code of a notebook, cell by cell; ValueError, in words, for a torn one
    defined(blocks)["ring_reduce_scatter"]   how often a name is defined there
    outcome = judged(problem, blocks, seed)  the attempt is taken out as text, and judged in fresh processes

Students' programs run in the judge's processes and nowhere else (labkit/course/judge/prefork.py): so it does not matter
what a notebook patches, imports, prints or never ends.
"""

from __future__ import annotations

import ast
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from labkit.course.exercises.problem import Problem
from labkit.course.judge.attempt import Attempt, attempt_in, blocks_of
from labkit.course.judge.prefork import prefork_server
from labkit.course.judge.report import Report

MOST_BYTES = 20 << 20
MOST_CODE = 300_000
MOST_ATTEMPT = 20_000
"""Characters of an attempt with all that it uses; references have a tenth of it at most."""
UNREAD = "file"
"""The verdict on what cannot be read; "judge" is the one on a check that failed by itself."""
MOST_SEED = 1 << 61

Judge = Callable[[str, Attempt, int | None], Report]


class Outcome(NamedTuple):
    """What came of one exercise of one student.

    verdict   the first broken one; "file" if there is nothing to judge, "judge" if the judge itself failed
    cause     the likely mistake, or what was seen
    said      the report, line by line, for the student: it names the case, not the numbers in it
    text      the attempt without white space, to be compared with others'
    """

    key: str
    passed: bool
    starred: bool = False
    verdict: str = ""
    cause: str = ""
    said: tuple[str, ...] = ()
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    text: str = ""


def points_of(it: Problem) -> int:
    """What an exercise is worth: a point for each dot of its difficulty, 1 to 5."""
    return it.difficulty


def read(path: Path) -> list[str]:
    """The code of a notebook, cell by cell. ValueError, in words, for what is no notebook, or too large."""
    if path.is_symlink() or not path.is_file():
        raise ValueError(f"{path.name} is no plain file: put the notebook itself there")
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise ValueError(
            f"{path.name} has {size / 2**20:.0f} MiB, {MOST_BYTES >> 20} at most: clear its outputs and save it again"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old notebooks have no cell ids: that is no fault of the student's
        try:
            found = blocks_of(path)
        except ValueError as error:
            raise ValueError(str(error).replace(str(path), path.name)) from None
        except Exception as error:  # JSON that is no notebook fails in as many ways as there are
            raise ValueError(f"{path.name} cannot be read as a notebook ({type(error).__name__})") from None
    if not all(isinstance(each, str) for each in found):
        raise ValueError(f"{path.name} cannot be read as a notebook: the source of a cell is not text")
    return modest(found, path.name)


def modest(blocks: list[str], name: str) -> list[str]:
    """The same blocks. ValueError if there is more code than anybody writes for exercises."""
    size = sum(map(len, blocks))
    if size > MOST_CODE:
        raise ValueError(f"{name} has {size} characters of code, {MOST_CODE} at most: hand in the exercises only")
    return blocks


def defined(blocks: Sequence[str]) -> Counter[str]:
    """How often each name is defined at the top of the cells that are Python."""
    return Counter(name for block in blocks for node in _body(block) or () for name in _names(node))


def mentions(blocks: Sequence[str], name: str) -> bool:
    """Whether a name is defined, or stands after `def` or `class` in a cell that is not Python yet."""
    if defined(blocks)[name]:
        return True
    broken = [block for block in blocks if _body(block) is None]
    return any(f"def {name}" in block or f"class {name}" in block for block in broken)


def text_of(it: Problem, blocks: Sequence[str]) -> str:
    """The attempt without white space; "" if there is none, or nothing but the stub."""
    try:
        found = _bare(taken(it, blocks))
    except ValueError:
        return ""
    return "" if found == _bare(attempt_in([it.stub], it.name)) else found


def taken(it: Problem, blocks: Sequence[str]) -> Attempt:
    """The attempt: the last definition that is Python. ValueError if there is none, or it cannot be read."""
    try:
        return attempt_in(blocks, it.name)
    except (RecursionError, MemoryError):
        raise ValueError(f"{it.name} cannot be read: something in the notebook is nested too deeply") from None


def judged(it: Problem, blocks: Sequence[str], seed: int | None = None, judge: Judge | None = None) -> Outcome:
    """Judge the attempt at an exercise in these cells. Whatever is in them, there is an outcome."""
    try:
        attempt = taken(it, blocks)
    except ValueError as error:
        return unjudged(it, str(error))
    if (size := len(attempt.before) + len(attempt.source.lstrip())) > MOST_ATTEMPT:
        return unjudged(it, f"{it.name} and what it uses have {size} characters, {MOST_ATTEMPT} at most")
    try:
        report = (judge or _warm)(it.key, attempt, seed)
    except (RuntimeError, OSError) as error:
        told = f"the judge itself failed on {it.key}: this is no verdict on the attempt; grade it again"
        return Outcome(it.key, False, False, "judge", told, (told, *str(error).splitlines()[-3:]))
    return _outcome(it, report, defined(blocks)[it.name], text_of(it, blocks))


def unjudged(it: Problem, words: str) -> Outcome:
    """The outcome if there is nothing to judge, and why."""
    return Outcome(it.key, False, False, UNREAD, words, (f"{it.key} {it.title}: nothing to judge", f"seen: {words}"))


def plain(words: str, most: int = 300) -> str:
    """Words of a student's program on one line, and without what a terminal would obey."""
    return "".join(each if each.isprintable() else " " for each in words)[:most]


def _outcome(it: Problem, report: Report, count: int, text: str) -> Outcome:
    notes = [f"{it.name} is defined {count} times: the last one counts"] if count > 1 else []
    if text and text == _bare(attempt_in([it.solution], it.name)):
        notes.append("the same text as labkit's reference, white space apart")
    broken = report.broken
    if report.passed or broken is None:
        said = (report.headline,)
        return Outcome(it.key, report.passed, report.starred, "", "", said, report.seconds, tuple(notes), text)
    lines = [f"{what + ':':14s}{plain(words)}" for what, words in report.lines(broken)]
    seen = f"expected {broken.expected}, seen {broken.seen}" if broken.expected else broken.seen
    told = (report.headline, f"{'the law:':14s}{broken.law}", *lines)
    return Outcome(
        it.key, False, False, broken.name, plain(broken.cause or seen), told, report.seconds, tuple(notes), text
    )


def _warm(key: str, attempt: Attempt, seed: int | None) -> Report:
    try:
        return prefork_server().judge(key, attempt, seed)
    except OSError:  # it has been ended meanwhile
        return prefork_server().judge(key, attempt, seed)


def _bare(attempt: Attempt) -> str:
    return "".join((attempt.before + attempt.source).split())


def _body(block: str) -> list[ast.stmt] | None:
    """Statements of a cell, magics left out; None if it is not Python, or nested too deeply."""
    lines = ("pass" if line.lstrip().startswith(("%", "!", "?")) else line for line in block.splitlines())
    try:
        return ast.parse("\n".join(lines)).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        return [node.name]
    if isinstance(node, ast.ImportFrom):
        return [each.asname or each.name for each in node.names]
    if isinstance(node, ast.Assign):
        return [each.id for each in node.targets if isinstance(each, ast.Name)]
    return []
