"""Reports for other programs: read back by the library and by a plain parser, and held against what CI servers ask."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest
from junitparser import Error, Failure, JUnitXml, Skipped

from labkit.course.exercises.catalogue import problem
from labkit.course.exercises.junit import document, junit, state_of, words_of
from labkit.course.judge.judge import judge
from labkit.course.judge.report import Report
from labkit.course.judge.verdicts import BROKEN, HOLDS, OPEN, Verdict

TOLD = ("each rank sends 3 parts", "384 B", "512 B <&> more\non two lines", 2, 7, "4 ranks, float32")
BAD = Verdict("wire", BROKEN, *TOLD, "the whole is sent", "look at the ledger", "<svg/>", (1, 2))


def report(key="03.2", *verdicts, seconds=1.25, **more) -> Report:
    return Report(key, "A <ring> & more", "ring", verdicts or (Verdict("values", HOLDS, "law"),), seconds, **more)


@pytest.fixture(scope="module")
def reports() -> list[Report]:
    stub = problem("07.2")
    return [
        report("07.1", seconds=0.5),
        report("03.2", Verdict("values", HOLDS, "law"), BAD),
        report("03.1", star={"words": "bytes", "unit": "B", "cost": 8, "target": 9, "won": True}),
        judge(stub, stub.stub),
        report("03.3", Verdict("values", OPEN, "law")),
    ]


def test_the_library_reads_back_a_suite_for_each_lab_and_a_case_for_each_exercise(reports):
    """Would catch exercises of two labs in one suite, labs in the order of the checks, and a count that is off."""
    root = JUnitXml.fromstring(junit(reports).encode())
    assert [(suite.name, suite.tests, suite.failures, suite.errors, suite.skipped) for suite in root] == [
        ("lab 03", 3, 1, 1, 0), ("lab 07", 2, 0, 0, 1)]  # fmt: skip
    assert (root.tests, root.failures, root.errors, root.skipped) == (5, 1, 1, 1)
    cases = {case.name: case for suite in root for case in suite}
    assert list(cases) == ["03.2 A <ring> & more", "03.1 A <ring> & more", "03.3 A <ring> & more",
                           "07.1 A <ring> & more", f"07.2 {problem('07.2').title}"]  # fmt: skip
    kinds = [[type(each) for each in case.result] for case in cases.values()]
    assert kinds == [[Failure], [], [Error], [], [Skipped]]
    assert [case.classname for case in cases.values()] == ["labkit.lab03"] * 3 + ["labkit.lab07"] * 2


def test_every_attribute_is_there_that_a_server_asks_for(reports):
    """Would catch a case that a server drops without a word: no name, no classname, a time that is no number."""
    root = ET.fromstring(junit(reports).encode())
    assert root.tag == "testsuites"
    assert {each.tag for each in root.iter()} <= {"testsuites", "testsuite", "testcase", "failure", "error", "skipped"}
    for suite in root:
        for what in ("tests", "failures", "errors", "skipped"):
            kind = {"failures": "failure", "errors": "error", "tests": "testcase"}.get(what, what)
            assert int(suite.get(what)) == len(list(suite.iter(kind)))
        times = [float(case.get("time")) for case in suite]
        assert float(suite.get("time")) == pytest.approx(sum(times), abs=1e-3)
        assert all(0 <= each < 1e6 and "e" not in case.get("time") for each, case in zip(times, suite, strict=True))
        assert all(case.get("name") and case.get("classname") for case in suite)
    assert junit(reports).startswith("<?xml version='1.0' encoding='utf-8'?>")


def test_a_failure_says_what_the_report_says(reports):
    """Would catch 'failed', and nothing more, in the mail of a server."""
    (case,) = [case for suite in JUnitXml.fromstring(junit(reports).encode()) for case in suite if "03.2" in case.name]
    (failure,) = case.result
    assert failure.type == "wire"
    assert failure.message == "wire broken: 512 B <&> more"
    assert failure.text == words_of(reports[1]) == (
        "verdict: wire\nlaw: each rank sends 3 parts\nexpected: 384 B\nseen: 512 B <&> more\non two lines\nrank: 2\n"
        "line: 7\ncase: 4 ranks, float32\ncause: the whole is sent\nlook next: look at the ledger")  # fmt: skip


def test_rank_nought_is_a_rank():
    """Would catch the most common rank left out, since 0 is false."""
    assert "rank: 0" in words_of(report("03.2", BAD._replace(rank=0)))
    assert "rank:" not in words_of(report("03.2", BAD._replace(rank=None)))


def test_what_xml_cannot_hold_does_not_spoil_the_file():
    """Would catch one coloured print of a learner for which a server reads none of the results."""
    odd = "\x1b[31mred\x00 \ud800 \uffff ]]> ä→"
    told = report("03.2", BAD._replace(seen=odd), printed=odd)
    (case,) = ET.fromstring(junit([told]).encode()).iter("testcase")
    assert case.find("system-out").text == "\ufffd[31mred\ufffd \ufffd \ufffd ]]> ä→"
    assert "ä→" in case.find("failure").text


def test_no_reports_make_an_empty_file_that_can_be_read():
    """Would catch an error of a server that asked for a lab without exercises."""
    root = ET.fromstring(junit([]).encode())
    assert (root.get("tests"), len(root)) == ("0", 0)
    assert document([])["totals"]["exercises"] == 0


def test_the_document_holds_the_same_without_pictures(reports):
    """Would catch a document whose totals are not those of the XML, and one that json cannot write."""
    said = json.loads(json.dumps(document(reports), allow_nan=False))
    assert said["totals"] == {"exercises": 5, "passed": 2, "failed": 1, "skipped": 1, "error": 1, "starred": 1}
    assert [(lab["lab"], [each["key"] for each in lab["exercises"]]) for lab in said["labs"]] == [
        ("03", ["03.2", "03.1", "03.3"]), ("07", ["07.1", "07.2"])]  # fmt: skip
    states = [each["state"] for lab in said["labs"] for each in lab["exercises"]]
    assert states == ["failed", "passed", "error", "passed", "skipped"]
    bad = said["labs"][0]["exercises"][0]
    assert (bad["broken"], bad["cause"], bad["seconds"]) == ("wire", "the whole is sent", 1.25)
    verdict = bad["verdicts"][1]
    assert {**verdict, "at": tuple(verdict["at"]), "picture": "<svg/>"} == BAD._asdict()
    assert "svg" not in json.dumps(said)


def test_the_state_is_one_of_four(reports):
    """Would catch a report that is both, or neither."""
    assert [state_of(each) for each in reports] == ["passed", "failed", "passed", "skipped", "error"]
