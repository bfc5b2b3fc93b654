"""The picture of a schedule: every action is there, where and as wide as it runs, and the numbers are right."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest
import torch
from matplotlib.colors import to_hex
from torch import nn

from labkit import run_threads
from labkit.parallel.pipeline import Pipeline
from labkit.plan.schedules.schedule import (
    Action,
    Span,
    bubble,
    gpipe,
    in_flight,
    interleaved,
    naive,
    one_f_one_b,
    simulate,
    zero_bubble,
)
from labkit.view.schedule import LANE, MOST, rows
from labkit.view.svg import PALETTE

from . import page

SVG = "{http://www.w3.org/2000/svg}"


def drawn(chart) -> list[tuple[str, float, float, float, str, str]]:
    """(what the pointer is told, begin, y, seconds or forwards, colour, words) of each action's box."""
    axes = chart.axes[0]
    words = {text.get_gid(): text.get_text() for text in axes.texts}
    return [
        (hover, box.get_x(), box.get_y(), box.get_width(), to_hex(box.get_facecolor()).upper(), words.get(hover, ""))
        for hover, box in page.boxes(chart).items()
    ]


def texts(picture) -> list[str]:
    return [node.text or "" for node in ET.fromstring(str(picture)).iter(SVG + "text")]


SCHEDULES = [gpipe(4, 8), one_f_one_b(4, 8), interleaved(4, 8, 2), zero_bubble(4, 8), naive(3), gpipe(2, 2, (0, 1, 1))]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.name)
def test_each_action_is_drawn_once_in_its_row_at_its_time(schedule):
    """Would catch an action left out, one in another rank's row, and boxes that overlap or leave a bubble unseen."""
    spans, chart = simulate(schedule), rows(schedule)
    boxes = drawn(chart)
    assert chart.axes[0].get_xlim() == (0, max(span.end for span in spans))
    assert len(boxes) == len(spans)
    for span, (title, x, y, width, _, words) in zip(spans, boxes, strict=True):
        kind, stage, micro = span.action
        word = {"F": "forward", "B": "backward", "W": "weights"}[kind]
        assert title.startswith(f"rank {span.rank}, stage {stage}: {word} of micro-batch {micro}, {span.start:g} to")
        assert y // LANE == span.rank
        assert x == pytest.approx(span.start)
        assert width == pytest.approx(span.end - span.start)
        assert words in ("", str(micro), f"{kind}{micro}", str(span.action))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.name)
def test_the_numbers_beside_the_picture_are_those_of_the_plan(schedule):
    """Would catch a bubble or a memory that is not the one that the laws speak about."""
    picture = rows(schedule)
    assert f"ranks wait {100 * bubble(simulate(schedule)):.3g} %" in picture.label
    assert f"{schedule.n_ranks} ranks" in picture.label
    right = [text.get_text() for text in picture.texts if text.get_horizontalalignment() == "right"]
    assert right == ["held", *map(str, in_flight(schedule))]


def test_no_meaning_rests_on_colour_alone():
    """Would catch forwards and backwards that look alike in print: the letter, or where it has no room the height."""
    boxes = drawn(rows(one_f_one_b(4, 8)))
    assert {words[0] for *_, words in boxes} == {"F", "B"}
    narrow = drawn(rows(one_f_one_b(16, 64)))
    assert {words for *_, words in narrow} == {""}
    lows = {title.split(": ")[1].split()[0]: y % LANE for title, _, y, *_ in narrow}
    assert lows == {"forward": 0, "backward": 4}


def test_stages_of_one_rank_are_told_apart():
    """Would catch interleaved stages that look like one: the stage is named, and later ones are paler."""
    boxes = drawn(rows(interleaved(2, 2, 2)))
    assert {words for *_, words in boxes} >= {"0F0", "2F0", "1B1", "3B1"}
    fills = {words[:2]: fill for *_, fill, words in boxes}
    assert fills["0F"] == PALETTE[0] != fills["2F"]
    assert fills["0F"] == fills["1F"]


def test_words_in_boxes_are_large_enough_to_read_and_dark_on_colour():
    """Would catch labels squeezed into boxes that are too narrow for them."""
    for schedule in [*SCHEDULES, interleaved(4, 12, 3), one_f_one_b(8, 24)]:
        for node in ET.fromstring(str(rows(schedule))).iter(SVG + "text"):
            assert float(node.get("font-size", 13)) >= 9
            assert node.get("fill") in (None, "#111111")


def test_measured_spans_are_in_seconds_and_keep_their_gaps():
    """Would catch a picture of a real run that shows the plan instead."""

    def train(group):
        stage = nn.Linear(4, 4)
        made = Pipeline({group.rank: stage}, one_f_one_b(2, 3), group, loss=lambda y, t: ((y - t) ** 2).mean())
        made.step([torch.ones(2, 4)] * 3, [torch.ones(2, 4)] * 3)
        return made.spans

    spans = [span for each in run_threads(train, 2) for span in each]
    picture = rows(spans, "a real step")
    assert picture.label.startswith("a real step: ")
    assert re.search(r"\d (ms|us|s), of which ranks wait", picture.label)
    assert len(drawn(picture)) == 12
    two = rows([Span(0, Action("F", 0, 0), 1.0, 2.0), Span(1, Action("F", 1, 0), 3.0, 4.0)])
    assert "3 s, of which ranks wait 66.7 %" in two.label
    assert [x for _, x, *_ in drawn(two)] == [0, 2]


def test_a_huge_schedule_is_cut_and_says_so():
    """Would catch a notebook that is drowned in a picture of ten megabytes."""
    schedule = one_f_one_b(16, 300)
    picture = rows(schedule)
    assert len(drawn(picture)) == MOST
    assert f"{2 * 16 * 300 - MOST:,} later ones are not" in " ".join(texts(picture))
    assert len(str(picture)) < 2_500_000
    with pytest.raises(ValueError, match="needs spans"):
        rows([])


def test_one_is_singular():
    """Would catch "1 micro-batches"."""
    assert "naive, 3 ranks, 1 micro-batch:" in rows(naive(3)).label
    assert "naive, 1 rank, 1 micro-batch:" in rows(naive(1)).label
