"""Widgets without a browser: what their controls do to their values and pictures."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from html import escape
from pathlib import Path

import pytest
import torch
from IPython.utils.capture import CapturedIO
from nbconvert import HTMLExporter
from nbformat.v4 import new_code_cell, new_notebook, new_output

from labkit import CrossoverExplorer, Film, Play, Predict, RingFilm, compare, ring, run_threads
from labkit.course.widgets import film_player, predict, twin
from labkit.course.widgets.predict import Fold
from labkit.plan.machine.collectives import Line
from labkit.probe import film
from labkit.view.lines import laws

STATE = "application/vnd.jupyter.widget-state+json"


def shoot(group):
    return film.record(ring.all_reduce, 10.0 * torch.arange(group.size) + group.rank, group)[1]


def words(picture) -> str:
    return " ".join(ET.fromstring(str(picture)).itertext())


def test_the_film_widget_holds_every_frame_and_steps_within_it():
    """Would catch a slider that runs off the end."""
    made = Film.of(run_threads(shoot, 3))
    widget = RingFilm(made)
    assert len(widget.frames) == 5
    seen = []
    widget.observe(lambda change: seen.append(change["new"]), "step")
    for asked in (2, 99, -1):
        widget.step = asked
    assert seen == [2, 4, 0]
    for step, text in enumerate(widget.frames[:-1]):
        assert f"before step {step} of 4" in words(text)


def test_a_film_of_many_ranks_is_refused_before_anything_is_drawn():
    """Would catch 64 ranks, whose frames take minutes and all memory of a laptop."""
    with pytest.raises(ValueError, match=r"has 17 ranks, and at most 16 are drawn: film a run of fewer"):
        RingFilm(Film("a film", 17, 17, (), ((),)))


def test_the_film_widgets_page_part_is_beside_it_offline_and_labelled():
    """Would catch a script that is missing from the wheel, loads from elsewhere, or cannot be reached by keyboard."""
    folder = Path(film_player.__file__).parent
    script = (folder / "film_player.js").read_text()
    assert RingFilm._esm is not None
    assert (folder / "film_player.css").is_file()
    assert not re.search(r"https?:|import\s", script)
    for needed in ("ArrowLeft", "ArrowRight", "Home", "End", "aria-label", "aria-live", "clearInterval", "model.off"):
        assert needed in script


def test_every_widget_leaves_a_static_picture_beside_its_live_view():
    """Would catch an export, or a code host, that shows nothing."""
    made = RingFilm(Film.of(run_threads(shoot, 3)))
    guess = Predict("How many bytes?", value=7)
    explorer = CrossoverExplorer(Line(1e-5, 1e-9))
    for widget in (made, guess, explorer):
        bundle = widget._repr_mimebundle_()
        data = bundle[0] if isinstance(bundle, tuple) else bundle
        assert "application/vnd.jupyter.widget-view+json" in data
        assert data["image/svg+xml"] == str(widget.static())
        ET.fromstring(data["image/svg+xml"])
    assert "before step 0" in words(made.static())
    assert "How many bytes?" in words(guess.static())


@pytest.mark.parametrize("keeps_state", [True, False])
def test_an_html_export_without_network_shows_the_picture_of_every_widget_once(monkeypatch, keeps_state):
    """Would catch a picture that is in the notebook and never in the page: nbconvert prefers the live view to it."""
    published: list = []
    monkeypatch.setattr(
        twin,
        "publish_display_data",
        lambda data, metadata=None: published.append(new_output("display_data", data, metadata=metadata or {})),
    )
    made = (
        RingFilm(Film.of(run_threads(shoot, 3))),
        Predict("How many bytes?", value=7),
        CrossoverExplorer(Line(1e-5, 1e-9)),
    )
    for widget in made:
        widget._ipython_display_()
    kept = [output.metadata["labkit"] for output in published if output.metadata]
    # for our own pages, which can play the films and ask the question
    assert [set(facts) & {"film", "question"} for facts in kept] == [{"film"}, {"question"}, {"film"}]
    notebook = new_notebook(cells=[new_code_cell("", outputs=published)])
    if keeps_state:  # as papermill and nbconvert --execute leave it; JupyterLab's own saving leaves none
        state = {widget.model_id: {"model_name": "", "model_module": "", "state": {}} for widget in made}
        notebook.metadata["widgets"] = {STATE: {"version_major": 2, "version_minor": 0, "state": state}}
    page, _ = HTMLExporter().from_notebook_node(notebook)
    for widget in made:
        assert page.count(f'aria-label="{escape(widget.static().label)}"') == 1
        live = re.search(r'widget-view\+json">\s*\{[^}]*' + widget.model_id, page)
        assert (live is not None) == keeps_state  # a page with the network still gets the widget itself
    assert '<img src="data:image/svg' not in page
    assert "Predict(children" not in page
    # hidden only beside what a running widget draws; nbconvert's own wrapper of a dead one must not hide it
    assert ":has(.widget-box,.lk-film) .lk-twin" in page
    assert not re.search(r'class="[^"]*(widget-box|lk-film)', page)


def test_a_prediction_keeps_the_last_number_that_made_sense_and_says_what_is_wrong():
    """Would catch nonsense that becomes zero."""
    guess = Predict("How many?", value=7, unit="B")
    for nonsense in ("lots", "-3", "nan", "", "inf", "1e", "7 apples", "--1", "3 ms", "1 2"):
        guess.field.value = nonsense
        guess.commit()
        assert guess.value == 7
        assert not guess.committed
        assert "is not a number of B, 0 or more: write 1,024 or 5.7 MiB; still 7 B" in guess.message.value
    guess.field.value = "1,024"
    assert guess.value == 1024
    assert guess.committed
    assert guess.message.value == "you predict 1,024 B"


@pytest.mark.parametrize(
    ("unit", "typed", "value"),
    [("B", "2 KiB", 2048), ("B", "1.5e3", 1500), ("B", "3MB", 3e6), ("s", "0.3 ms", 3e-4), ("s", "2", 2),
     ("messages", "6", 6), ("messages", "6 messages", 6), ("B", "12 B", 12)],
)  # fmt: skip
def test_a_number_may_carry_its_unit(unit, typed, value):
    """Would catch 0.3 ms that is taken for 0.3 s."""
    guess = Predict("How many?", unit=unit)
    guess.field.value = typed
    assert guess.value == pytest.approx(value)


def test_a_prediction_is_observable_and_overlaid_with_law_and_measurement():
    """Would catch an overlay that shows the first guess in place of the last, or takes law for measurement."""
    guess = Predict("How many?", value=7, law=512)
    seen = []
    guess.observe(lambda change: seen.append(change["new"]), "value")
    guess.field.value = "1024"
    guess.button.click()
    assert seen == [1024]
    said = words(guess.overlay(measured=500))
    assert "law: 512 B (2.4% above the measurement)" in said
    assert "your prediction: 1,024 B (2.05 times the measurement)" in said
    assert "measured: 500 B" in said
    assert "600 B" in words(guess.overlay(measured=500, law=600))
    assert guess.picture.value == str(guess.answer)


def test_what_tells_the_answer_is_folded_until_a_number_is_committed(monkeypatch):
    """Would catch a table right under the question that prints what is asked, and one that stays folded for ever."""
    pages: list = []
    monkeypatch.setattr(
        predict, "publish_display_data", lambda data, metadata, transient, update: pages.append((data, update))
    )
    guess = Predict("How many messages?", value=7, unit="messages")
    with guess.folded():
        print("48 messages <in all>")
    ((page, anew),) = pages
    assert not anew
    assert page["text/html"].startswith('<details class="lk-fold"><summary>You have not predicted yet.')
    assert "48 messages &lt;in all&gt;" in page["text/html"]
    guess.field.value = "50"
    page, anew = pages[-1]
    assert anew
    assert "details" not in page["text/html"]
    assert "48 messages" in page["text/html"]


def test_a_fold_shows_pictures_as_they_are_and_an_error_openly(monkeypatch, capsys):
    """Would catch a picture that is shown as its name, and lines that are lost with the error that they explain."""
    picture = {"data": {"text/html": "<svg>a picture</svg>", "text/plain": "<picture>"}}
    guess = Predict("How many?", value=7)
    assert Fold(guess, CapturedIO(None, None, [picture])).page() == "<svg>a picture</svg>"
    with pytest.raises(ZeroDivisionError), guess.folded():
        print("before the error")
        print(1 / 0)
    assert capsys.readouterr().out == "before the error\n"
    assert guess.folds == []


def test_nothing_is_overlaid_before_a_number_is_committed_and_each_commit_draws_it_anew(monkeypatch):
    """Would catch a default that is shown as somebody's prediction, an answer that is there before the question is
    answered, and two predictions on one page that contradict each other."""
    shown: dict[str, str] = {}

    def publish(data, metadata, transient, update):
        shown[transient["display_id"]] = data["text/html"]
        assert metadata["labkit"] == answer.kept() == kept

    monkeypatch.setattr(predict, "publish_display_data", publish)
    kept = {"answers": "How many?", "unit": "B", "title": "", "law": 512, "measured": 500, "rehearsed": None}
    guess = Predict("How many?", value=7)
    answer = guess.overlay(measured=500, law=512)
    answer._ipython_display_()
    assert guess.picture.value == ""
    (page,) = shown.values()
    assert page.startswith('<details class="lk-fold"><summary>You have not predicted yet')
    assert "prediction" not in words(answer)
    assert "7 B" not in words(guess.static())
    for number in (600, 300):
        guess.field.value = str(number)
        (page,) = shown.values()
        assert "<details" not in page
        for place in (page, guess.picture.value):
            assert f"your prediction: {number} B" in place


def test_committing_the_number_to_begin_with_keeps_all_its_digits():
    """Would catch 1,234,567 that becomes 1.23457e+06 in the field, and then in the value."""
    guess = Predict("How many?", value=1_234_567)
    guess.commit()
    assert guess.value == 1_234_567


def test_what_a_learner_types_is_shown_and_never_run():
    """Would catch markup in a question or an answer that becomes part of the page."""
    guess = Predict("Is a < b & <i>c</i>?")
    guess.field.value = "<img src=x onerror=alert(1)>"
    assert "<img" not in guess.message.value
    assert guess.children[0].value == "<b>Is a &lt; b &amp; &lt;i&gt;c&lt;/i&gt;?</b>"


def test_the_explorer_redraws_when_a_slider_moves_and_starts_at_the_measured_link():
    """Would catch a picture that does not follow its controls."""
    explorer = CrossoverExplorer(Line(1e-5, 1e-9), n_ranks=4)
    assert explorer.link.alpha_s == pytest.approx(1e-5)
    assert explorer.link.beta_s_per_byte == pytest.approx(1e-9)
    pictures = {explorer.shown.value}
    for control, value in ((explorer.ranks, 32), (explorer.alpha, 500.0), (explorer.rate, 20.0)):
        control.value = value
        pictures.add(explorer.shown.value)
        assert explorer.shown.value == str(explorer.static())
    assert len(pictures) == 4
    assert "32 ranks" in words(explorer.static())


def test_a_browser_that_rounds_a_slider_leaves_the_measured_crossover():
    """Would catch 781 KiB in the widget beside 697 KiB in the next picture, for one and the same link."""
    link = Line(254.3e-6, 1 / 2.634e9)
    explorer = CrossoverExplorer(link, n_ranks=4)
    for slider in (explorer.alpha, explorer.rate):
        slider.value = 10 ** (round(math.log10(slider.value) / slider.step) * slider.step)  # as noUiSlider does
    assert explorer.link.alpha_s == pytest.approx(link.alpha_s, rel=1e-12)
    assert str(explorer.static()) == str(laws(4, link))
    explorer.alpha.value *= 10**explorer.alpha.step
    assert explorer.link.alpha_s > 1.01 * link.alpha_s


def test_the_explorer_takes_links_and_ranks_that_its_sliders_cannot_reach():
    """Would catch an error for a link without latency, and for a thousand ranks."""
    explorer = CrossoverExplorer(Line(0.0, 0.0), n_ranks=1000)
    assert explorer.ranks.value == 64
    assert CrossoverExplorer(Line(9.0, 9.0), n_ranks=1).ranks.value == 2


def test_play_draws_now_and_again_when_a_control_moves():
    """Would catch a picture that is of the controls before, and a notebook that needs an Output widget."""
    play = Play(lambda log2_bytes: compare(law=2.0**log2_bytes, unit="B", title="size"), log2_bytes=(6, 30, 20))
    assert "1,048,576 B" in play.shown.value
    play.controls["log2_bytes"].value = 21
    assert "2,097,152 B" in play.shown.value
    assert play.values == {"log2_bytes": 21}
    assert "2,097,152 B" in str(play.static())
    assert not any("Output" in type(each).__name__ for each in play.children)


def test_play_tells_an_error_and_keeps_the_picture_before_it():
    """Would catch an explorer that dies of one bad value."""

    def draw(n):
        if n == 3:
            raise ValueError("3 <does> not divide")
        return compare(law=float(n), unit="s")

    play = Play(draw, n=(1, 9, 2))
    before = play.shown.value
    play.controls["n"].value = 3
    assert "3 &lt;does&gt; not divide" in play.message.value
    assert play.shown.value == before
    play.controls["n"].value = 4
    assert "4 s" in play.shown.value
    assert "in " in play.message.value


@pytest.mark.parametrize("control", [(6, 3, 4), (1, 2), "x", (1.0, 2.0, 1.5), (1, 5, 9)])
def test_play_refuses_what_is_no_control(control):
    """Would catch a slider that starts outside its range."""
    with pytest.raises(ValueError, match="n: a control is a widget"):
        Play(lambda n: compare(law=1.0), n=control)
