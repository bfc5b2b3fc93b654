"""Explain this trace: the pictures without causes, the measurement that settles it, and the widget."""

from __future__ import annotations

import pytest

from labkit.comm.ledger import Transfer
from labkit.course.topics.explain_trace import ExplainTrace
from labkit.course.topics.explain_trace_picture import KINDS, diagnosed, explained, unlabelled
from labkit.probe.recording import Recording
from labkit.probe.rows import OperationSpan, RankTimeline
from tests.view import page

MS = 1e-3


def run(computes, calls, n_ranks=4):
    """A merged recording: rank r is in all_reduce number k from computes[r][k] to calls[k], in ms; else it computes."""
    rows = []
    everybody = tuple(range(n_ranks))
    for rank in everybody:
        entries, transfers = [], []
        for number, (begins, end) in enumerate(zip(computes[rank], calls, strict=True)):
            t0, t1 = begins * MS, end * MS
            entries.append(
                OperationSpan(
                    number, "all_reduce", "world", everybody, None, 0, number + 1, t0, t1, True, False, number
                )
            )
            transfers.append(Transfer("all_reduce", "world", None, 1000, t0, t1))
        rows.append(RankTimeline(rank, 0.0, max(calls) * MS, entries=tuple(entries), transfers=tuple(transfers)))
    return Recording(tuple(rows), merged=True)


EXPOSED = run([[50]] * 4, [100])
LATE = run([[50], [96], [50], [50]], [100])
FINE = run([[50, 96]] * 4, [51, 100])
ALL = {"fine": FINE, "exposed": EXPOSED, "late": LATE}


@pytest.mark.parametrize("kind", ALL)
def test_the_recording_says_what_it_shows(kind):
    """Would catch a wire that is blamed for a straggler."""
    assert diagnosed(ALL[kind]) == kind


@pytest.mark.parametrize(
    ("kind", "words"),
    [("exposed", "waiting for the wire 50%"), ("late", "Rank 1 computes for 96 ms, the others for 50 ms"),
     ("fine", "waiting for the wire 5%")],
)  # fmt: skip
def test_the_measurement_settles_it(kind, words):
    """Would catch a verdict without numbers."""
    assert words in explained(ALL[kind])


def test_ranks_that_take_turns_are_no_stragglers():
    """Would catch a pipeline's fill and drain told as somebody's fault."""
    begins = [0, 25, 50, 75]
    everybody, rows = (0, 1, 2, 3), []
    for rank in everybody:  # each waits for its turn, computes 25 ms, and waits for the end
        first = OperationSpan(0, "all_reduce", "world", everybody, None, 0, 1, 0.0, begins[rank] * MS, True, False, 0)
        last = OperationSpan(
            1, "all_reduce", "world", everybody, None, 0, 2, (begins[rank] + 25) * MS, 0.1, True, False, 1
        )
        moves = (
            Transfer("all_reduce", "world", None, 8, 0, first.t1),
            Transfer("all_reduce", "world", None, 8, last.t0, 0.1),
        )
        entries = (first._replace(seq=rank + 10), last)  # nobody else is in the first one
        rows.append(RankTimeline(rank, begins[rank] * MS if not rank else 0.0, 0.1,
                                 entries=entries[1:] if not rank else entries, transfers=moves))  # fmt: skip
    recording = Recording(
        tuple(row._replace(begin=begins[row.rank] * MS, entries=row.entries[-1:]) for row in rows), True
    )
    assert diagnosed(recording) == "turns"
    assert "nobody is late" in explained(recording)


def test_a_recording_of_one_rank_cannot_tell_who_was_late():
    """Would catch a cause that is made up."""
    alone = Recording(EXPOSED.rows[:1])
    with pytest.raises(ValueError, match="merge those of all"):
        diagnosed(alone)
    with pytest.raises(ValueError, match="shows nothing"):
        unlabelled(Recording((RankTimeline(0, 1.0, 1.0),), True))


@pytest.mark.parametrize("kind", ALL)
def test_the_first_picture_names_no_cause(kind):
    """Would catch an answer that stands in the question."""
    picture = unlabelled(ALL[kind])
    page.check(picture)
    said = page.words(picture) + picture.label
    assert not any(word in said for word in ("exposed", "bubble", "straggler", "waits", "overlap"))
    assert page.texts(picture).count("computes") == len(ALL[kind].rows)


def test_an_answer_brings_the_causes_and_another_trace_hides_them_again():
    """Would catch a verdict on the trace before, and a picture that gives the next answer away."""
    explain = ExplainTrace({"trace A": EXPOSED, "trace B": LATE, "trace C": FINE})
    assert "computing or communicating" in explain.static().label
    explain.says.value = "late"
    assert f"No: {KINDS['exposed']}" in explain.message.value
    assert "exposed" in explain.picture.label
    explain.says.value = "exposed"
    assert "Right" in explain.message.value
    assert "1 of 3 explained" in explain.message.value
    explain.trace.value = "trace B"
    assert explain.says.value == ""
    assert explain.message.value == ""
    assert "computing or communicating" in explain.picture.label
    explain.says.value = "late"
    assert explain.right == 2
    assert "Rank 1 computes for 96 ms" in explain.message.value
    explain.trace.value = "trace A"
    assert explain.says.value == "exposed"
    assert explain.answers == {"trace A": "exposed", "trace B": "late"}


def test_no_traces_are_refused():
    """Would catch an empty menu."""
    with pytest.raises(ValueError, match="no trace to explain"):
        ExplainTrace({})
