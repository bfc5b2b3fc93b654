"""Films of widgets: packed and unpacked, what they go over, and that the widget does not notice."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import ipywidgets as widgets
import pytest
import torch

from labkit import Film, RingFilm, ring, run_threads
from labkit.course.topics.pipeline_player import PipelinePlayer
from labkit.course.topics.schedule_pad import SchedulePad
from labkit.course.topics.zero_explorer import ZeROExplorer
from labkit.course.widgets.explorer import Explorer
from labkit.course.widgets.packed import packed, unpacked
from labkit.course.widgets.recorded import Recorded, thinned, unchanged, values_of
from labkit.probe import film
from labkit.view.svg import Picture, text
from tests.counting import lines
from tests.course.widgets.recordings import all_recorded

FEW = 5
"""Frames of a film here."""
LARGEST = 70_000
"""Letters of a packed film; that of the schedule pad, whose drawings have least in common, has 62,500."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> dict[str, tuple[Recorded, dict[str, Any], list[Any], list[Any]]]:
    """For each class that records: a widget, its film, and what its parts showed before and after.

    A film of few frames shows the same as a long one, of which each frame is drawn anew."""
    made = {}
    for widget in all_recorded(tmp_path_factory.mktemp("recorded")):
        widget.most_frames = min(widget.most_frames, FEW)
        before = shown_by(widget)
        kept = widget.kept()
        made[type(widget).__name__] = widget, kept, before, shown_by(widget)
    return made


def shown_by(widget: Any) -> list[Any]:
    """The values, choices and bounds of all parts of a widget, and the picture that it stores."""

    def parts(widget: Any) -> Iterator[Any]:
        yield widget
        for child in getattr(widget, "children", ()):
            yield from parts(child)

    names = ("value", "index", "options", "min", "max", "disabled")
    values = [[getattr(part, name, None) for name in names] for part in parts(widget)]
    return [*values, str(widget.static()), widget.static().label]


def classes_that_record() -> set[str]:
    """The names of all classes with a film; a Play has one only where its cell asks for it."""

    def below(cls: type) -> Iterator[type]:
        for sub in cls.__subclasses__():
            yield from (sub, *below(sub))

    named = {cls.__name__ for cls in below(Recorded) if cls.recorded_over and cls.__module__.startswith("labkit.")}
    return named | {"Play"}


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [""],
        ["no tag"],
        ["<a>1</a>", "<a>1</a>", "<a>2</a>"],
        ["<a/><b/><a/>", "<b/><a/><b/>", "words <a/> “ünd”\n"],
        [f"<svg><rect x='{x}'/>{'<line/>' * 5000}</svg>" for x in range(20)],
    ],
)
def test_what_is_packed_comes_out_again(frames):
    """Would catch a piece that is lost at either end, and one that comes back in another's place."""
    assert unpacked(packed(frames)) == frames


def test_twenty_like_frames_take_little_more_than_one():
    """Would catch frames that are packed one by one: each is longer than zlib's window."""
    lines = [f'<line x1="{k * 7919 % 800}" y1="{k * 104729 % 601}"/>' for k in range(3000)]
    frames = ["".join([*lines[:k], f"<circle r='{k}'/>", *lines[k:]]) for k in range(20)]
    assert len(packed(frames)) < 1.15 * len(packed(frames[:1]))


@pytest.mark.parametrize("letters", ["eJw", "aGVsbG8=", "not base64!"])
def test_other_letters_are_no_film(letters):
    """Would catch a traceback of a library for a torn notebook."""
    with pytest.raises(ValueError, match=r"no film|base64|padding"):
        unpacked(letters)


def test_every_class_that_records_is_tried_here(recorded):
    """Would catch a new explorer whose film nobody has seen."""
    assert set(recorded) == classes_that_record()


def test_every_film_has_different_frames_and_begins_with_the_picture_that_is_shown(recorded):
    """Would catch a control that draws nothing, words that are those of other frames, and another beginning."""
    for name, (widget, kept, _, _) in recorded.items():
        frames, words = unpacked(kept["film"]), kept["over"]["words"]
        assert len(set(frames)) >= 2, name
        assert len(frames) == len(words) <= widget.most_frames, name
        assert len(set(words)) == len(words), name
        assert frames[kept["at"]] == str(widget.static()), name


@pytest.mark.rest
def test_no_film_is_large(tmp_path):
    """Would catch a film that costs more than the lab it stands in."""
    sizes = {type(widget).__name__: len(widget.kept()["film"]) for widget in all_recorded(tmp_path)}
    assert max(sizes.values()) < LARGEST, sizes
    assert sum(sizes.values()) / len(sizes) < LARGEST / 4, sizes


def test_the_widget_is_as_it_was(recorded):
    """Would catch a control that stays where the film ended, and a picture of another value."""
    for name, (_, _, before, after) in recorded.items():
        assert after == before, name


def test_to_move_what_a_film_goes_over_is_little_work(recorded):
    """Would catch a search, a simulation or a model behind a slider: ten million lines of Python take a second."""
    for name, (widget, _, _, _) in recorded.items():
        for control in widget.moved():
            values, at = values_of(control)
            with unchanged(widget):
                moves = partial(setattr, control, "index" if hasattr(control, "options") else "value", values[at - 1])
                assert lines(moves) < 1_000_000, name


class Roots(Explorer):
    """Draws the root of a number, and refuses negative ones."""

    recorded_over = ("number",)

    def __init__(self, number: int = 1) -> None:
        self.number = widgets.IntSlider(number, -3, 3, description="root of")
        self.sign = widgets.Checkbox(True, description="minus")
        super().__init__([self.number, self.sign], [self.number, self.sign])

    def drawn(self) -> Picture:
        if self.number.value < 0:
            raise ValueError("a negative number has no root")
        words = f"{'-' * self.sign.value}{self.number.value**0.5:.2f}"
        return Picture(text(0, 20, words), 40, words)


def test_values_that_make_no_sense_are_left_out():
    """Would catch the last valid picture under the name of an invalid value."""
    kept = Roots().kept()
    assert kept["over"] == {"name": "root of", "words": ["root of 0", "root of 1", "root of 2", "root of 3"]}
    assert kept["at"] == 1
    assert [frame.count("-1.41") for frame in unpacked(kept["film"])] == [0, 0, 2, 0]


def test_a_widget_that_shows_nonsense_has_no_film():
    """Would catch a film beside a picture that is not in it."""
    explorer = Roots()
    explorer.number.value = -2
    shown = explorer.message.value
    assert explorer.kept() == {}
    assert (explorer.message.value, explorer.number.value, explorer.is_valid) == (shown, -2, False)


def test_two_controls_are_gone_through_one_within_the_other():
    """Would catch a film over the second control only, and words that do not tell the frames apart."""
    explorer = Roots()
    explorer.recorded_over = ("sign", "number")
    words = explorer.kept()["over"]["words"]
    assert words[:2] == ["minus off, root of 0", "minus off, root of 1"]
    assert words[-1] == "minus on, root of 3"
    assert len(words) == 8


def test_the_page_of_the_widget_does_not_see_it_move(monkeypatch):
    """Would catch a slider in JupyterLab that runs through all its values when the cell is run."""
    explorer, sent = Roots(), []
    monkeypatch.setattr(widgets.Widget, "send_state", lambda self, key=None: self._holding_sync or sent.append(key))
    explorer.number.value = 2
    assert sent  # outside of a recording each move is told
    sent.clear()
    held = []
    monkeypatch.setattr(
        widgets.Widget,
        "notify_change",
        _watched(widgets.Widget.notify_change, lambda part: held.append(part._holding_sync)),
    )
    explorer.kept()
    assert held
    assert all(held)


def _watched(method, note):
    def noted(self, change):
        note(self)
        return method(self, change)

    return noted


@pytest.mark.parametrize(("most", "at"), [(5, 0), (5, 7), (5, 99), (2, 50), (1, 50), (100, 3), (7, 98)])
def test_many_values_are_thinned_evenly_and_the_present_one_stays(most, at):
    """Would catch a film without its first frame, and one that is longer than it may be."""
    values = thinned(list(range(100)), at, most)
    assert len(values) == most
    assert at in values
    assert values == sorted(set(values))
    if most > 2:
        assert (values[0], values[-1]) == (0, 99)


def test_a_slider_between_two_steps_keeps_its_number():
    """Would catch a measured link that is rounded in its own film."""
    values, at = values_of(widgets.FloatLogSlider(12.34, min=0, max=3, step=0.5))
    assert values[at] == 12.34
    assert len(values) == 7
    assert values_of(widgets.Checkbox(True)) == ([False, True], 1)
    assert values_of(widgets.Dropdown(options=["a", "b"], value="b")) == ([0, 1], 1)


def test_the_film_of_a_collective_keeps_its_frames():
    """Would catch a player whose page has nothing to play."""
    player = RingFilm(Film.of(run_threads(_shoot, 3)))
    player.step = 2
    kept = player.kept()
    assert unpacked(kept.pop("film")) == player.frames
    assert kept == {"name": "film of a collective", "at": 2}


def _shoot(group):
    return film.record(ring.all_reduce, 10.0 * torch.arange(group.size) + group.rank, group)[1]


def test_films_name_what_they_go_over_and_the_page_that_answers_more():
    """Would catch a link to nowhere, and a film that does not say which control it is of."""
    kept = ZeROExplorer().kept()
    assert (kept["over"]["name"], kept["live"]) == ("stage", "memory")
    assert kept["over"]["words"][0] == "stage DDP"
    assert PipelinePlayer().kept()["over"]["words"][0] == "action none"


def test_a_pad_that_has_run_keeps_its_run():
    """Would catch a real run that is forgotten because a film was made."""
    pad = SchedulePad("gpipe")
    pad.run()
    assert pad.ran is not None
    assert pad.kept() == {}
    assert pad.ran is not None
