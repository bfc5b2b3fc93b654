"""The explorer of generation: what its picture says, and what its controls do."""

from __future__ import annotations

import pytest

from labkit.course.topics.generation_explorer import DEVICES, MODELS, GenerationExplorer
from labkit.course.topics.generation_picture import latency
from labkit.plan.machine.hardware import Hardware
from labkit.plan.model.shape import ModelShape
from labkit.plan.pocket.generation import Generator
from labkit.view.units import plural
from tests.cases import cases
from tests.view import page

PAIRS = [(model, DEVICES[place % len(DEVICES)]) for place, model in enumerate(MODELS)]


@cases(
    ("model", "device", "tp", "rows", "tokens"),
    [(*pair, (1, 8, 2)[place % 3], *((1, 128), (4096, 131_072))[place % 2]) for place, pair in enumerate(PAIRS)],
)
def test_the_picture_is_whole_and_its_lines_are_the_laws(model, device, tp, rows, tokens):
    """Would catch a picture that fails where a model does not fit, and the line of another law."""
    generator = Generator(ModelShape.preset(model), Hardware.preset(device), tp)
    picture = latency(generator, rows, tokens, 0.02)
    page.check(picture)
    at, seconds = page.line_of(picture, "a step")
    assert seconds[-1] == pytest.approx(generator.step_s(at[-1], tokens))
    most = generator.rows_in_memory(tokens)
    assert (f"memory holds {plural(most, 'sequence')}" if most else "do not fit into memory") in page.words(picture)
    points = {hover.split(":")[0]: point for hover, point in page.dots(picture).items()}
    now = generator.step_s(rows, tokens)
    assert points["chosen"] == pytest.approx((now, rows / now / tp))


def test_the_controls_move_the_picture():
    """Would catch a slider without a picture, and a button that goes beyond memory or latency."""
    explorer = GenerationExplorer()
    assert "llama3-70b on 8 x h100, tp 8: 16 sequences of 4,096 tokens" in explorer.shown.value
    explorer.most.click()
    law = explorer.generator().rows_within(0.02, 4096)
    assert explorer.rows.value <= law < 1.5 * explorer.rows.value
    explorer.latency.value = "1 s"
    explorer.most.click()
    assert explorer.rows.value <= explorer.generator().rows_in_memory(4096) < 1.5 * explorer.rows.value
    explorer.tp.value = 1
    assert "do not fit into memory" in explorer.static().label
    explorer.most.click()
    assert explorer.rows.value == 1


def test_nonsense_is_told_and_the_picture_stays():
    """Would catch a typing error that empties the page."""
    explorer = GenerationExplorer()
    before = explorer.shown.value
    for odd in ("soon", "-1 s", "0 s"):
        explorer.latency.value = odd
        explorer.most.click()
        assert "the picture is the last one that made sense" in explorer.message.value
        assert explorer.shown.value == before
    explorer.latency.value = "30 ms"
    assert explorer.message.value == ""
