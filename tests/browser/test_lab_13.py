"""Lab 13 in a real JupyterLab: every widget is touched once, and does what it says."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.steps import no_errors, predict, run_through, widget

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(600)]
PATIENCE = 60_000


def test_lab_13_runs_and_every_widget_does_what_it_says(page, address, tmp_path):
    """Would catch a slider without a picture, and a prediction that is lost."""
    run_through(page, address, "13_scaling_limits.ipynb", "closed; nothing is left running")

    for question, typed, said in (
        ("2% serial, 256 devices", "42", "you predict 42 times"),
        ("the same 24 rows", "2", "you predict 2 times"),
        ("24 rows *each*", "85", "you predict 85 %"),
        ("one worker: a step takes?", "80 ms", "you predict 80 ms"),
        ("endless stages", "8", "you predict 8 times"),
        ("wait for gradients: MFU?", "30", "you predict 30 %"),
        ("messages become 1", "2", "you predict 2 times"),
        ("read in the background: a step takes?", "60 ms", "you predict 60 ms"),
    ):
        predict(page, question, typed, said)

    explorer = widget(page, "the recorded steps fit a serial share of")
    expect(explorer).to_contain_text("a step by its parts")
    ranks, serial, wire, data = (explorer.locator(".noUi-handle").nth(k) for k in range(4))
    ranks.focus()
    page.keyboard.press("End")
    expect(explorer).to_contain_text("at 1,024 ranks, by Amdahl's law", timeout=PATIENCE)
    serial.focus()
    page.keyboard.press("Home")
    expect(explorer).to_contain_text("1024 times, 100% efficient, no limit", timeout=PATIENCE)
    wire.focus()
    page.keyboard.press("End")
    expect(explorer).to_contain_text("; what if: ", timeout=PATIENCE)
    expect(explorer).to_contain_text("times as fast", timeout=PATIENCE)
    data.focus()
    page.keyboard.press("ArrowRight")
    expect(explorer).to_contain_text("1.5 x", timeout=PATIENCE)
    for slider in (wire, data):
        slider.focus()
        page.keyboard.press("Home")
    expect(explorer).not_to_contain_text("what if", timeout=PATIENCE)
    ranks.focus()
    page.keyboard.press("Home")
    expect(explorer).to_contain_text("1 rank: ", timeout=PATIENCE)
    assert len(explorer.screenshot(path=tmp_path / "explorer.png")) > 10_000
    page.screenshot(path=tmp_path / "lab13.png")
    no_errors(page)
