"""Lab 05 in a real JupyterLab: every widget is touched once, and does what it says."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.browser.steps import enter, predict, run_through, widget

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(400)]
PATIENCE = 30_000


def test_lab_05_runs_and_every_widget_does_what_it_says(page, address, tmp_path):
    """Would catch bits that cannot be flipped by key, a slider without a picture, and a prediction that is lost."""
    run_through(page, address, "05_precision.ipynb", "nothing is left running")

    floats = widget(page, "bits of", "button")
    bits = floats.locator("button.jupyter-widget-toggle-button, button.widget-toggle-button")
    expect(bits).to_have_count(16)
    bits.nth(0).click()
    expect(floats).to_contain_text("-0.000120162963867 in 7 formats", timeout=PATIENCE)
    bits.nth(0).focus()
    page.keyboard.press("Space")
    expect(floats).to_contain_text(re.compile(r"(?<!-)0\.000120162963867 in 7 formats"), timeout=PATIENCE)
    page.keyboard.press("Tab")
    expect(bits.nth(1)).to_be_focused()
    number = floats.locator("input[type=text]").first
    enter(number, "1 + 2^-9")
    expect(floats).to_contain_text("1.001953125 in 7 formats", timeout=PATIENCE)
    enter(number, "one")
    expect(floats).to_contain_text("'one' is no number", timeout=PATIENCE)
    expect(floats).to_contain_text("1.001953125 in 7 formats")
    floats.locator("select").select_option("fp32")
    expect(bits).to_have_count(32, timeout=PATIENCE)
    assert len(floats.screenshot(path=tmp_path / "floats.png")) > 10_000

    for question, typed, said in (
        ("What does it hold, in units of 1e-9?", "119", "you predict 119 e-9"),
        ("zero after a step in fp16?", "95", "you predict 95 %"),
        ("before the first one is taken?", "10", "you predict 10 steps"),
    ):
        predict(page, question, typed, said)

    sliders = page.locator(".jp-OutputArea-output").filter(has=page.locator(".noUi-handle"))
    histogram = sliders.filter(has_text="scale 2^").first
    histogram.scroll_into_view_if_needed()
    expect(histogram).to_contain_text("gradients times 2^16, as fp16 holds them")
    histogram.locator(".noUi-handle").first.focus()
    page.keyboard.press("ArrowRight")
    expect(histogram).to_contain_text("gradients times 2^17", timeout=PATIENCE)
    histogram.locator("select").first.select_option("fp8_e5m2")
    expect(histogram).to_contain_text("as e5m2 holds them", timeout=PATIENCE)
    histogram.locator("select").last.select_option("head.norm.weight")
    expect(histogram).to_contain_text("head.norm.weight: 32 gradients", timeout=PATIENCE)
    assert len(histogram.screenshot(path=tmp_path / "histogram.png")) > 10_000

    machine = sliders.filter(has_text="interval").first
    machine.scroll_into_view_if_needed()
    title = machine.locator("svg text").first
    expect(title).to_contain_text("of 40 steps skipped")
    handles = machine.locator(".noUi-handle")
    expect(handles).to_have_count(4)
    for handle in range(4):
        before = machine.locator("svg").inner_html()
        handles.nth(handle).focus()
        for _ in range(4):
            page.keyboard.press("ArrowLeft")
        page.wait_for_function(
            "([node, before]) => node.querySelector('svg').innerHTML !== before",
            arg=[machine.element_handle(), before],
        )
    assert len(machine.screenshot(path=tmp_path / "scale.png")) > 10_000
