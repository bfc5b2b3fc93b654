"""The picture of what was done, and its panel: every state by word and sign, what comes next, and reading again."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from datetime import UTC, datetime
from html.parser import HTMLParser

import pytest

from labkit.course.exercises.catalogue import problem
from labkit.course.learner.progress import Progress, Standing
from labkit.course.learner.progress_panel import ALL, ProgressPanel
from labkit.course.learner.progress_picture import next_up, progress, standing, table, totals
from tests.counting import lines
from tests.view import page

WHEN = datetime(2026, 3, 1, tzinfo=UTC)
NEW = Standing("03.1", "A <ring> & more", "03", 20, 3, 5)
FAILED = replace(NEW, key="03.2", tries=3, hints=2, cause="the whole is sent")
DONE = replace(NEW, key="03.3", tries=2, passed=True, first_passed=WHEN)
STARRED = replace(DONE, key="07.1", lab="07", starred=True, hints=3, seen=True)
ROWS = (NEW, FAILED, DONE, STARRED)


def many(labs: int, each: int) -> list[Standing]:
    kinds = [NEW, replace(FAILED, tries=1234, hints=3, seen=True, cause="words " * 60), DONE, STARRED]
    return [
        replace(kinds[(lab * 7 + place) % 4], key=f"{lab:02}.{place}", lab=f"{lab:02}", title="A long title " * 9)
        for lab in range(1, labs + 1)
        for place in range(1, each + 1)
    ]


@pytest.mark.parametrize("rows", [(), ROWS, (NEW,), many(18, 5), many(1, 1), many(3, 23)], ids=len)
def test_the_picture_is_whole_for_any_number_of_labs_and_exercises(rows):
    """Would catch words on words, a lab that leaves the page, and a picture of nothing."""
    page.check(progress(rows))
    page.check(progress(rows, "lab 03"))


def test_the_totals_are_those_of_the_rows():
    """Would catch a starred exercise that is not counted as done, and minutes of what is done."""
    assert totals(ROWS) == "2 of 4 exercises done, 1 starred, 1 tried; 5 hints; about 40 min to go"
    assert totals((DONE,)) == "1 of 1 exercise done, 0 starred, 0 tried; 0 hints; nothing is left"
    assert totals(()) == "0 of 0 exercises done, 0 starred, 0 tried; 0 hints"
    assert "about 3 h to go" in totals([NEW] * 9)
    words = page.texts(progress(ROWS))
    assert words[0] == totals(ROWS)
    assert ("lab 03" in words, "1 of 3" in words, "1 of 1" in words) == (True, True, True)
    assert progress(ROWS, "mine").label.startswith("mine: 2 of 4 exercises done")


def test_every_state_has_its_word_number_and_sign_without_any_colour():
    """Would catch meaning that rests on colour alone."""
    assert [standing(row) for row in ROWS] == ["not yet", "tried", "done", "starred"]
    words = page.texts(progress(ROWS))
    assert all(each in words for each in ("not yet", "tried, 3", "done, 2", "star, 2"))
    assert "tried, 99+" in page.texts(progress([replace(FAILED, tries=1234)]))  # more would lie on the hints
    shapes = [_shapes(replace(row, key="03.1", lab="03", hints=0, seen=False)) for row in ROWS]
    assert len(set(shapes)) == 4
    assert len({_shapes(replace(FAILED, hints=k, seen=seen)) for k in range(4) for seen in (False, True)}) == 8


def _shapes(row: Standing) -> str:
    """The box of an exercise without words and fills."""
    root = ET.fromstring(str(progress([row])))
    (group,) = [each for each in root.iter(page.SVG + "g") if _title(each).startswith(row.key)]
    kept = [(each.tag, each.get("d"), each.get("stroke-dasharray"), each.get("stroke-width"), each.get("transform"))
            for each in group.iter() if each.tag.split("}")[1] in ("path", "rect", "circle")]  # fmt: skip
    return str(kept)


def _title(group) -> str:
    found = group.find(page.SVG + "title")
    return "" if found is None else found.text or ""


def test_pointer_and_reader_are_told_the_same_in_words():
    """Would catch a picture that only eyes can read."""
    picture = progress(ROWS)
    bad = "03.2 A <ring> & more: tried, 3 attempts, 2 hints, last: the whole is sent"
    assert bad in page.told(picture)
    assert bad in picture.label
    assert "solution seen before passing" in picture.label
    assert "Next: 03.2, 03.1." in picture.label


def test_what_comes_next_begins_with_what_failed_then_what_matters_then_what_is_easy():
    """Would catch a list that sends a learner to the hardest first, or again to what is done."""
    rows = [
        replace(NEW, key="01.1", importance=2, difficulty=1),
        replace(NEW, key="01.2", importance=5, difficulty=4),
        replace(NEW, key="01.3", importance=5, difficulty=2),
        replace(NEW, key="01.4", importance=5, difficulty=2),
        replace(FAILED, key="01.5", importance=1, difficulty=5),
        replace(FAILED, key="01.6", importance=3, difficulty=5),
        DONE,
        STARRED,
    ]
    assert [row.key for row in next_up(rows, 9)] == ["01.6", "01.5", "01.3", "01.4", "01.2", "01.1"]
    assert [row.key for row in next_up(rows, 2)] == ["01.6", "01.5"]
    words = page.texts(progress(rows))
    assert (
        words.index("1. 01.6 A <ring> & more (tried 3 times; importance 3 of 5, very hard, 20 min)")
        == words.index("last time: the whole is sent") - 1
    )
    assert "What next" not in page.texts(progress([DONE]))


class Cells(HTMLParser):
    """The cells of a table, row by row."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.scopes: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        assert tag in ("table", "caption", "tr", "th", "td")
        if tag == "tr":
            self.rows.append([])
        if tag in ("th", "td"):
            self.rows[-1].append("")
            self.scopes += [dict(attrs)["scope"]] if tag == "th" else []

    def handle_data(self, data):
        if self.rows:
            self.rows[-1][-1] += data


def test_the_table_holds_every_number_and_only_words():
    """Would catch a title that becomes markup, and a column under another's name."""
    said = Cells(table([replace(FAILED, cause="<script>alert(1)</script>", seen=True), STARRED]))
    head, bad, good = said.rows
    assert dict(zip(head[2:], bad[2:], strict=True)) == {
        "state": "tried", "tries": "3", "hints": "2", "star": "", "solution seen": "yes", "passed": "",
        "minutes": "20", "last cause": "<script>alert(1)</script>"}  # fmt: skip
    assert bad[:2] == ["03.2", "A <ring> & more"]
    assert good[2:8] == ["starred", "2", "3", "★", "before passing", "2026-03-01"]
    assert said.scopes == ["col"] * 10 + ["row"] * 2


# The panel


def test_the_menu_chooses_a_lab_for_picture_and_table():
    """Would catch a filter of the picture alone."""
    panel = ProgressPanel(lambda: ROWS)
    assert panel.lab.options == (ALL, "03", "07")
    assert panel.rows == ROWS
    panel.lab.value = "07"
    assert panel.rows == (STARRED,)
    assert panel.static().label.startswith("lab 07: 1 of 1 exercise done")
    assert panel.shown.value == str(panel.static())
    assert [row[0] for row in Cells(panel.table.value).rows] == ["exercise", "07.1"]
    assert ProgressPanel(lambda: ROWS, "03").rows == ROWS[:3]
    with pytest.raises(ValueError, match="lab '09' has no exercise; there are 03, 07"):
        ProgressPanel(lambda: ROWS, "09")


def test_the_button_reads_again_and_the_lab_stays():
    """Would catch a panel of yesterday, and one that jumps back to all labs."""
    now = [*ROWS]
    panel = ProgressPanel(lambda: now, "07")
    now.append(replace(NEW, key="08.1", lab="08"))
    now[3] = replace(STARRED, tries=9)
    assert "star, 2" in page.texts(panel.static())
    panel.refresh_button.click()
    assert "star, 9" in page.texts(panel.static())
    assert (panel.lab.value, panel.lab.options) == ("07", (ALL, "03", "07", "08"))
    now[:] = ROWS[:2]
    panel.refresh_button.click()
    assert (panel.lab.value, panel.rows) == (ALL, ROWS[:2])


@pytest.mark.parametrize("fault", [OSError("the <file> is locked"), ValueError("the <file> is locked")])
def test_what_cannot_be_read_is_told_and_the_last_picture_stays(fault):
    """Would catch an empty page for who has done much."""
    answers = [ROWS]

    def ask():
        if isinstance(answers[-1], Exception):
            raise answers[-1]
        return answers[-1]

    panel = ProgressPanel(ask)
    answers.append(fault)
    panel.refresh_button.click()
    assert panel.message.value == "the &lt;file&gt; is locked: this is how far you were before"
    assert panel.rows == ROWS
    panel.lab.value = "03"
    assert "locked" in panel.message.value
    answers.append(ROWS)
    panel.refresh_button.click()
    assert panel.message.value == ""
    answers.append(fault)
    never = ProgressPanel(ask)
    assert "locked" in never.message.value
    page.check(never.static())


def test_a_static_twin_stands_below_the_live_view():
    """Would catch an export that shows nothing."""
    panel = ProgressPanel(lambda: ROWS)
    bundle = panel._repr_mimebundle_()
    data = bundle[0] if isinstance(bundle, tuple) else bundle
    assert data["image/svg+xml"] == str(panel.static())
    assert "application/vnd.jupyter.widget-view+json" in data


def test_controls_can_be_reached_by_keyboard_and_say_what_they_are():
    """Would catch a control that only a pointer can use, or that a reader of screens calls 'combobox'."""
    panel = ProgressPanel(lambda: ROWS)
    assert (panel.lab.description, panel.refresh_button.description) == ("lab", "refresh")
    assert panel.lab.tooltip
    assert panel.refresh_button.tooltip
    assert (panel.lab.disabled, panel.refresh_button.disabled) == (False, False)
    assert {type(each).__name__ for each in panel.children} == {"HBox", "HTML"}


def test_the_panel_shows_what_was_kept(tmp_path):
    """Would catch a Standing without a field that the picture needs."""
    kept = Progress(tmp_path / "p.sqlite3")
    panel = ProgressPanel(lambda: kept.rows([problem("03.2")]))
    assert [row.key for row in panel.rows] == ["03.2"]
    kept.hint("03.2", 1)
    panel.refresh_button.click()
    assert "1 hint;" in panel.static().label


def test_a_redraw_is_little_work():
    """Would catch a menu that stutters: 100 ms are some 500,000 lines of Python."""
    panel = ProgressPanel(lambda: many(18, 6))

    def move() -> None:
        panel.lab.value = ALL if panel.lab.value != ALL else "03"

    move()
    assert lines(move) < 60_000


def test_no_ids_no_scripts_no_addresses():
    """Would catch two panels on one page that share a mark."""
    said = str(progress(many(4, 4)))
    assert not re.search(r"\bid=|<script|href|url\(", said)
