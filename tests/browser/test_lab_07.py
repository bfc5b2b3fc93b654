"""Lab 07 in a real JupyterLab: every widget is touched once, and does what it says."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.steps import enter, no_errors, predict, run_through, widget

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(500)]
PATIENCE = 60_000


def test_lab_07_runs_and_every_widget_does_what_it_says(page, address, tmp_path):
    """Would catch a prediction that is lost, a control without effect, and nonsense that empties the picture."""
    run_through(page, address, "07_zero_1_and_2.ipynb", "closed; nothing is left running")

    for question, typed, said in (
        ("ZeRO-1, mixed precision, AdamW?", "5.5", "you predict 5.5 B"),
        ("what share of DDP's bytes", "1", "you predict 1 of DDP"),
    ):
        predict(page, question, typed, said)

    explorer = widget(page, "model state of one rank")
    expect(explorer).to_contain_text("ZeRO-1, 407,040 parameters on K = 4 ranks, mixed, adamw")
    expect(explorer).to_contain_text("measured")
    handles, fields, menus = (explorer.locator(each) for each in (".noUi-handle", "input[type=text]", "select"))

    handles.nth(0).focus()
    page.keyboard.press("ArrowRight")
    expect(explorer).to_contain_text("ZeRO-2, 407,040 parameters", timeout=PATIENCE)
    expect(explorer).to_contain_text("2 N + 14 N/4 = 5.5 bytes a parameter")
    handles.nth(1).focus()
    page.keyboard.press("ArrowRight")
    expect(explorer).to_contain_text("sends 1.83 MB a step", timeout=PATIENCE)

    enter(fields.nth(0), "70B")
    expect(explorer).to_contain_text("70 billion parameters", timeout=PATIENCE)
    expect(explorer).not_to_contain_text("measured")
    enter(fields.nth(1), "0")
    expect(explorer).to_contain_text("got 0: the picture is the last one that made sense", timeout=PATIENCE)
    expect(explorer).to_contain_text("70 billion parameters on K = 4")
    enter(fields.nth(1), "64")
    expect(explorer).to_contain_text("1.12 TB", timeout=PATIENCE)
    expect(explorer).to_contain_text("16 B × N")
    menus.nth(2).select_option("h200")
    expect(explorer).to_contain_text("h200: 141 GB", timeout=PATIENCE)
    menus.nth(0).select_option("fp32")
    expect(explorer).to_contain_text("fp32, adamw", timeout=PATIENCE)
    menus.nth(1).select_option("sgd")
    expect(explorer).to_contain_text("fp32, sgd", timeout=PATIENCE)
    assert len(explorer.screenshot(path=tmp_path / "explorer.png")) > 10_000
    page.screenshot(path=tmp_path / "lab07.png")
    no_errors(page)
