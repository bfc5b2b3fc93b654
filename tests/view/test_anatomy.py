"""The anatomy of a step: what the stack says, and what the widget's controls do to it."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from labkit import Breakdown, GPTConfig, Item, Layout, ModelShape, Recipe, predict_memory, rehearse
from labkit.course.topics import memory_anatomy as module
from labkit.course.topics.memory_anatomy import MemoryAnatomy
from labkit.plan.breakdown import KINDS
from labkit.plan.job.recipe import PRECISIONS
from labkit.plan.machine.devices import DEVICES
from labkit.plan.model.models import MODELS
from labkit.view.anatomy import anatomy, fits
from tests.view.page import SVG, check, texts, told, words

MIB = float(1 << 20)
SIZES = dict(zip(KINDS, (4 * MIB, 3 * MIB, 8 * MIB, 16 * MIB, MIB), strict=True))
TINY = GPTConfig(n_layer=2, d_model=32, n_head=4, vocab=64, seq=32)


def bars(picture) -> dict[str, tuple[float, float]]:
    """What the pointer is told of a segment -> its top and height."""
    found = {}
    for group in ET.fromstring(str(picture)).iter(SVG + "g"):
        title, rect = group.find(SVG + "title"), group.find(SVG + "rect")
        if title is not None and rect is not None:
            found[title.text.partition(":")[0]] = (float(rect.get("y")), float(rect.get("height")))
    return found


def device_line(picture) -> float | None:
    """Where the device's line is drawn."""
    found = re.search(r'y1="([\d.]+)"[^>]*stroke-width="2.5" stroke-dasharray="9 4"', str(picture))
    return float(found[1]) if found else None


def test_segments_stand_on_one_another_and_are_as_high_as_their_bytes():
    """Would catch a stack with gaps, and a measured bar on a scale of its own."""
    picture = anatomy(Breakdown.of(SIZES), Breakdown.of({**SIZES, "activations": 32 * MIB}), n_params=1 << 20)
    check(picture)
    found = bars(picture)
    for side in ("predicted", "measured"):
        below = [found[f"{side} {kind}"] for kind in KINDS]
        for (top, _), (next_top, next_high) in zip(below, below[1:], strict=False):
            assert next_top + next_high == pytest.approx(top, abs=0.01)
    per_mib = found["predicted parameters"][1] / 4
    assert found["predicted activations"][1] == pytest.approx(16 * per_mib, rel=1e-3)
    assert found["measured activations"][1] == pytest.approx(32 * per_mib, rel=1e-3)
    assert "50% below" in words(picture)
    assert "exact" in words(picture)


def test_the_device_is_a_line_at_its_bytes_and_a_sentence():
    """Would catch a line on another scale than the stack, and a verdict that says the opposite."""
    found = {room: anatomy(Breakdown.of(SIZES), device=("box", room * MIB)) for room in (16, 64, 1000)}
    foot, high = bars(found[16])["predicted parameters"]
    per_mib = high / 4
    assert device_line(found[16]) == pytest.approx(foot + high - 16 * per_mib, abs=0.1)
    assert "do not fit box" in words(found[16])
    assert "2 times what it has" in words(found[16])
    assert device_line(found[64]) is not None
    assert "32 MiB are left" in words(found[64])
    assert device_line(found[1000]) is None, "far above the stack there is no line, or the stack would be a sliver"
    assert "fit box" in words(found[1000])
    for picture in found.values():
        check(picture)
    assert "fit box" in fits(5.0, ("box", 5.0)), "a device that is exactly full is not too small"


def test_formulas_bytes_a_parameter_and_the_moment_of_the_peak_are_told():
    """Would catch a table without reasons: 16 N is the point of it."""
    shape = ModelShape.preset("llama-7b")
    law = predict_memory(shape, Layout(), Recipe(batch_size=1))
    picture = anatomy(law, n_params=shape.n_params, title="7B")
    check(picture)
    for needed in (
        "8 N (adamw)",
        "4 N, N = 6,738,415,616 parameters here",
        "the peak is in: ",
        "predicted",
        "bytes / N",
    ):
        assert needed in words(picture)
    assert f"predicted optimizer: {law['optimizer']:,.0f} B" in told(picture)
    assert f"optimizer {law['optimizer']:,.0f} B" in picture.label


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"predicted": Breakdown.of({"weights": 3.0})}, "predicted needs bytes of parameters"),
        ({"predicted": Breakdown.of({"other": -1.0})}, "none below 0"),
        ({"predicted": Breakdown([])}, "some above"),
        ({"predicted": Breakdown.of(SIZES), "measured": Breakdown.of({"other": 0.0})}, "measured needs"),
        ({"predicted": Breakdown.of(SIZES), "device": ("toy", 0.0)}, "more than 0 bytes"),
    ],
)
def test_nonsense_is_refused_with_the_numbers(given, said):
    """Would catch a stack of nothing, and a division by zero."""
    with pytest.raises(ValueError, match=said):
        anatomy(**given)


def test_every_model_and_precision_makes_a_picture_that_can_be_read():
    """Would catch words on words, or a bar that leaves the page, at any size there is in the menus."""
    for name in MODELS:
        for precision in PRECISIONS:
            shape = ModelShape.preset(name)
            predicted = predict_memory(shape, Layout(), Recipe(batch_size=2, precision=precision))
            check(anatomy(predicted, predicted, shape.n_params, ("rtx-4090", 24e9), f"{name} in {precision}"))


def test_a_formula_is_cut_and_kinds_that_are_missing_count_as_nothing():
    """Would catch a sentence that leaves the page, and a KeyError for a stack without an optimizer."""
    picture = anatomy(Breakdown([Item("activations", 5.0, "B", "x" * 200)]))
    check(picture)
    assert "…" in words(picture)


# The widget


def test_each_control_changes_what_is_predicted():
    """Would catch a control that is not connected, and a picture that lags behind."""
    widget = MemoryAnatomy(TINY, Recipe(batch_size=2))
    seen = [widget.static().label]
    for control, value in (
        (widget.rows, 8), (widget.seq, 16), (widget.optimizer, "sgd"), (widget.precision, "bf16"),
        (widget.checkpointing, True), (widget.device, "v100"), (widget.model, "gpt2"),
    ):  # fmt: skip
        control.value = value
        assert widget.static().label not in seen
        assert str(widget.static()) == widget.shown.value
        seen.append(widget.static().label)
    assert widget.shape == ModelShape.preset("gpt2"), "a model comes with its own length"
    assert widget.recipe == Recipe(batch_size=8, optimizer="sgd", precision="bf16", recompute="full")


def test_what_was_measured_stands_beside_its_prediction_and_nowhere_else():
    """Would catch a measurement shown for settings that nobody ran."""
    recipe = Recipe(batch_size=2)
    run = predict_memory(TINY, Layout(), recipe)
    widget = MemoryAnatomy(TINY, recipe, measured=[(TINY, recipe, run)])
    assert "measured" in words(widget.static())
    widget.rows.value = 3
    assert "measured" not in words(widget.static())
    widget.rows.value = 2
    assert "measured" in words(widget.static())


def test_the_button_rehearses_the_step_that_the_controls_describe():
    """Would catch a measurement of other settings, simulated devices called measured, a button that stays off."""
    widget = MemoryAnatomy(TINY, Recipe(batch_size=2, recompute="full"), device=("toy", 1e6))
    widget.button.click()
    found = rehearse(TINY, Layout(), widget.recipe).memory
    assert f"rehearsed: parameters {found['parameters']:,.0f} B" in widget.static().label
    assert "measured" not in words(widget.static())
    assert "rehearsed in" in widget.message.value
    assert not widget.button.disabled
    widget.rows.value = 4
    assert "rehearsed" not in words(widget.static())
    assert widget.message.value == "", "what was said of the last step is not true of this one"


def test_nonsense_keeps_the_last_good_picture_and_says_why():
    """Would catch an empty page where somebody typed a minus sign."""
    widget = MemoryAnatomy(TINY)
    before = widget.shown.value
    widget.seq.value = -5
    assert widget.shown.value == before == str(widget.static())
    assert "seq must be a whole number of at least 1, got -5" in widget.message.value
    widget.button.click()
    assert "not rehearsed" in widget.message.value
    assert not widget.button.disabled
    widget.seq.value = 32
    assert widget.message.value == ""


def test_a_stopped_rehearsal_leaves_a_widget_that_works(monkeypatch):
    """Would catch a button that is off for good after the kernel's stop button."""

    def stopped(*args):
        raise KeyboardInterrupt

    widget = MemoryAnatomy(TINY)
    monkeypatch.setattr(module, "rehearse", stopped)
    with pytest.raises(KeyboardInterrupt):
        widget.rehearse()
    assert widget.message.value == "stopped"
    assert not widget.button.disabled


def test_its_menus_begin_with_what_was_given_and_name_all_there_is():
    """Would catch a device of the lab's own that cannot be chosen again."""
    widget = MemoryAnatomy(TINY, device=("32 MiB cap", 32 * MIB))
    assert widget.device.options == ("32 MiB cap", *DEVICES)
    assert widget.model.options == (module.OWN, *MODELS)
    assert "32 MiB cap" in words(widget.static())
    assert MemoryAnatomy("llama-7b").model.options[0] == "llama-7b"
    for bad in ({"shape": "lama-7b"}, {"device": "h10"}):
        with pytest.raises(ValueError, match="did you mean"):
            MemoryAnatomy(**bad)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_formula_is_cut_and_one_row_is_a_row(precision):
    """Would catch "tempora…" in every picture of memory, "1 micro-batches of 1 rows", and 6 bytes a parameter that are
    explained by 2 N."""
    shape = ModelShape.preset("llama-7b")
    found = predict_memory(shape, Layout(), Recipe(batch_size=1, precision=precision))
    shown = texts(anatomy(found, found, shape.n_params))
    assert not [word for word in shown if "…" in word]
    assert "1 micro-batch of 1 row in flight" in shown
    assert ("2 N, and 4 N in fp32 for the masters" in shown) == (precision == "bf16")
    long = Breakdown([Item("parameters", 8.0, "B", "a formula of many words " * 6, "")])
    check(anatomy(long))
    assert not [word for word in texts(anatomy(long)) if "…" in word]
