"""Reports for programs that read them: JUnit XML for a CI server, and the same as a JSON document.

    <testsuite name="lab 03" tests="2" failures="1" errors="0" skipped="1" time="4.2">
      <testcase name="03.2 A reduce-scatter on a ring" classname="labkit.lab03" time="4.2">
        <failure type="wire" message="wire broken: ...">expected, seen, rank, cause</failure>

A stub that is not written yet is skipped; an attempt that could not be judged, though nothing of it is broken, is an
error.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from typing import Any

from junitparser import Error, Failure, JUnitXml, Skipped, SystemOut, TestCase, TestSuite

from labkit.course.judge.report import Report
from labkit.course.learner.progress import not_written
from labkit.course.numbers import natural

FORMAT, VERSION = "labkit reports", 1
PASSED, FAILED, SKIPPED, ERROR = "passed", "failed", "skipped", "error"
OUTSIDE = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML cannot hold, not even escaped. An attempt may print them."""


def junit(reports: Iterable[Report], name: str = "labkit") -> str:
    """JUnit XML: a testsuite for each lab, in order, a testcase for each report."""
    root = JUnitXml(_plain(name))
    for lab, lab_reports in _labs(reports):
        suite = TestSuite(f"lab {lab}")
        suite.add_testcases([_case(lab, report) for report in lab_reports])
        root.append(suite)
    root.update_statistics()
    written = io.BytesIO()
    root.write(written)
    return written.getvalue().decode() + "\n"


def document(reports: Iterable[Report]) -> dict[str, Any]:
    """The same as plain data: totals, and for each lab its exercises with their verdicts, but without pictures."""
    labs = _labs(reports)
    states = [state_of(report) for _, lab_reports in labs for report in lab_reports]
    totals = {state: states.count(state) for state in (PASSED, FAILED, SKIPPED, ERROR)}
    starred = sum(report.starred for _, lab_reports in labs for report in lab_reports)
    return {
        "format": FORMAT,
        "version": VERSION,
        "totals": {"exercises": len(states), **totals, "starred": starred},
        "labs": [{"lab": lab, "exercises": [_exercise(report) for report in lab_reports]} for lab, lab_reports in labs],
    }


def state_of(report: Report) -> str:
    """`passed`, `failed`, `skipped` or `error`."""
    if not_written(report):
        return SKIPPED
    return PASSED if report.passed else FAILED if report.broken else ERROR


def words_of(report: Report) -> str:
    """The first broken verdict in words, a line for each of verdict, law, expected, seen, rank, line, case, cause and
    what to look at next; "" if none is broken."""
    broken = report.broken
    if broken is None:
        return ""
    rows = [("verdict", broken.name), ("law", broken.law), ("expected", broken.expected), ("seen", broken.seen)]
    rows += [("rank", "" if broken.rank is None else str(broken.rank)), ("line", str(broken.line or ""))]
    rows += [("case", broken.where), ("cause", broken.cause), ("look next", broken.probe)]
    return "\n".join(f"{name}: {words}" for name, words in rows if words)


def _labs(reports: Iterable[Report]) -> list[tuple[str, Sequence[Report]]]:
    by_lab: dict[str, list[Report]] = {}
    for report in reports:
        by_lab.setdefault(report.key.split(".")[0], []).append(report)
    return [(lab, by_lab[lab]) for lab in sorted(by_lab, key=natural)]


def _case(lab: str, report: Report) -> TestCase:
    case = TestCase(_plain(f"{report.key} {report.title}"), f"labkit.lab{lab}", round(report.seconds, 3))
    state, broken = state_of(report), report.broken
    if state == SKIPPED:
        case.result = [Skipped("not written yet")]
    elif state == ERROR:
        opened = ", ".join(verdict.name for verdict in report.verdicts) or "no verdict"
        case.result = [Error(f"it could not be judged: {opened}", "not judged")]
    elif broken is not None:
        failure = Failure(_plain(f"{broken.name} broken: {_first(broken.seen or broken.law)}"), broken.name)
        failure.text = _plain(words_of(report))
        case.result = [failure]
    if report.printed.strip():
        case.append(SystemOut(_plain(report.printed)))
    return case


def _exercise(report: Report) -> dict[str, Any]:
    verdicts = [
        {field: words for field, words in verdict._asdict().items() if field != "picture"}
        for verdict in report.verdicts
    ]
    return {
        "key": report.key,
        "title": report.title,
        "name": report.name,
        "state": state_of(report),
        "broken": report.broken.name if report.broken else "",
        "cause": report.broken.cause if report.broken else "",
        "starred": report.starred,
        "seconds": round(report.seconds, 3),
        "cases": report.n_cases,
        "of": report.of,
        "star": dict(report.star) if report.star else None,
        "verdicts": verdicts,
        "printed": report.printed,
        "notes": list(report.notes),
    }


def _first(words: str) -> str:
    return words.splitlines()[0] if words else ""


def _plain(words: str) -> str:
    return OUTSIDE.sub("\ufffd", words)
