"""The picture of a run as the judge saw it."""

from __future__ import annotations

from xml.etree import ElementTree

from labkit.course.judge.case import Case
from labkit.course.judge.run_record import Event, Memory, RunRecord
from labkit.course.judge.verdict_picture import FAULT, of_verdict
from labkit.course.judge.verdicts import BROKEN, Verdict

SENT = Event(0, 0.0, 0, "message", "send", 1, 60, line=7)
ARRIVED = Event(1, 0.1, 1, "arrival", "recv", 0, 60)
LOST = Event(2, 0.2, 1, "message", "send", 0, 8, tag=3, line=9)
SUMMED = Event(3, 0.3, 0, "collective", "all_reduce", n_bytes=40, line=11)
MARKED = Event(4, 0.4, 1, "mark", "backward ends")


def run(*events: Event, memory: tuple[Memory | None, ...] = (None, None)) -> RunRecord:
    """A run of two ranks."""
    return RunRecord(Case(2), events=events, memory=memory)


def drawing(record: RunRecord, name: str, seen: str, **more: object) -> str:
    """The picture of a verdict, as SVG."""
    page = of_verdict(Verdict(name, BROKEN, "", seen=seen)._replace(**more), record)
    return page[page.index("<svg") : page.index("</svg>") + 6]


def test_every_message_collective_and_mark_is_there_and_the_fault_is_thick() -> None:
    """A picture in which nothing stands out, or that leaves out what went wrong."""
    record = run(SENT, ARRIVED, LOST, SUMMED, MARKED)
    drawn = drawing(record, "wire", "60 bytes", expected="8 bytes", rank=1, at=(3,))
    ElementTree.fromstring(drawn)
    for words in ("rank 0", "rank 1", "60 bytes to rank 1, line 7", "never received", "all_reduce", "backward ends"):
        assert words in drawn, words
    assert "expected 8 bytes" in drawn
    assert drawn.count(FAULT) >= 2


def test_a_long_run_is_cut_around_the_fault_and_says_so() -> None:
    """Ten thousand arrows in one picture."""
    many = [Event(i, i / 10, i % 2, "message", "send", 1 - i % 2, 4, line=1) for i in range(500)]
    drawn = drawing(run(*many), "wire", "too many", at=(300,))
    ElementTree.fromstring(drawn)
    assert "40 of 500 events" in drawn
    assert len(drawn) < 60_000


def test_memory_is_drawn_over_time_with_its_peak_by_kind() -> None:
    """A memory verdict with a picture of messages."""
    held = Memory({"optimizer": 4096}, {}, [(0.0, 0), (0.1, 4096), (0.2, 0)], 0)
    drawn = drawing(run(memory=(held, None)), "memory", "4,096 bytes")
    ElementTree.fromstring(drawn)
    assert "peak 4,096 B" in drawn
    assert "optimizer" in drawn


def test_where_nothing_happened_there_is_no_picture() -> None:
    """An empty frame."""
    assert of_verdict(Verdict("values", BROKEN, "", seen="2"), run()) == ""
