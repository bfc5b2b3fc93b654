"""The picture of a run as the judge saw it."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

from labkit.course.judge.verdict_picture import FAULT, of_verdict

# number, seconds, rank, kind, what, to, bytes, axis, tag, line
SENT = (0, 0.0, 0, "message", "send", 1, 60, "world", 0, 7)
ARRIVED = (1, 0.1, 1, "arrival", "recv", 0, 60, "world", 0, 0)
LOST = (2, 0.2, 1, "message", "send", 0, 8, "world", 3, 9)
SUMMED = (3, 0.3, 0, "collective", "all_reduce", None, 40, "world", 0, 11)
MARKED = (4, 0.4, 1, "mark", "backward ends", None, 0, "world", 0, 0)


def run(*events: tuple[object, ...], **more: object) -> dict[str, object]:
    """A run of two ranks."""
    return {"n_ranks": 2, "events": list(events), "plates": {}, "timelines": [[], []], "peaks": [{}, {}], **more}


def drawing(*given: Any) -> str:
    """The picture of a verdict, as SVG."""
    page = of_verdict(*given)
    return page[page.index("<svg") : page.index("</svg>") + 6]


def test_every_message_collective_and_mark_is_there_and_the_fault_is_thick() -> None:
    """A picture in which nothing stands out, or that leaves out what went wrong."""
    drawn = drawing("wire", run(SENT, ARRIVED, LOST, SUMMED, MARKED, plates={1: "expected 8 bytes"}), (3,), "60 bytes")
    ElementTree.fromstring(drawn)
    for words in ("rank 0", "rank 1", "60 bytes to rank 1, line 7", "never received", "all_reduce", "backward ends"):
        assert words in drawn, words
    assert "expected 8 bytes" in drawn
    assert drawn.count(FAULT) >= 2


def test_a_long_run_is_cut_around_the_fault_and_says_so() -> None:
    """Ten thousand arrows in one picture."""
    many = [(i, i / 10, i % 2, "message", "send", 1 - i % 2, 4, "world", 0, 1) for i in range(500)]
    drawn = drawing("wire", run(*many), (300,), "too many")
    ElementTree.fromstring(drawn)
    assert "40 of 500 events" in drawn
    assert len(drawn) < 60_000


def test_memory_is_drawn_over_time_with_its_peak_by_kind() -> None:
    """A memory verdict with a picture of messages."""
    made = run(timelines=[[(0.0, 0), (0.1, 4096), (0.2, 0)], []], peaks=[{"optimizer": 4096}, {}])
    drawn = drawing("memory", made, (), "4,096 bytes")
    ElementTree.fromstring(drawn)
    assert "peak 4,096 B" in drawn
    assert "optimizer" in drawn


def test_where_nothing_happened_there_is_no_picture() -> None:
    """An empty frame."""
    assert of_verdict("values", run(), (), "2") == ""
