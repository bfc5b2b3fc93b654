"""Lab 11 in a real JupyterLab: every widget is touched once, and does what it says."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.steps import enter, no_errors, predict, run_through, widget

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(400)]
PATIENCE = 30_000


def test_lab_11_runs_and_every_widget_does_what_it_says(page, address, tmp_path):
    """Would catch a prediction that is lost, and a choice of targets, rank, model or precision that draws nothing."""
    run_through(page, address, "11_lora.ipynb", "closed; nothing is left running")

    for question, typed, said in (
        ("how many times fewer numbers train", "256", "you predict 256 times"),
        ("Bytes that LoRA holds", "4 MiB", "you predict 4,194,304 B = 4 MiB"),
        ("in a step of DDP, with LoRA", "48 KiB", "you predict 49,152 B = 48 KiB"),
    ):
        predict(page, question, typed, said)

    explorer = widget(page, "loss of real runs over the rank", ".noUi-handle, input[type=range]")
    expect(explorer).to_contain_text("8,192 of 210,304 parameters train, 3.895%")
    expect(explorer).to_contain_text("optimizer, measured")
    explorer.locator(".noUi-handle").first.focus()
    page.keyboard.press("ArrowRight")
    expect(explorer).to_contain_text("16,384 of 210,304 parameters train", timeout=PATIENCE)
    expect(explorer).to_contain_text("query, value, rank 16:")
    model, targets, precision = (explorer.locator("select").nth(k) for k in range(3))
    targets.select_option("all linears")
    expect(explorer).to_contain_text("73,728 of 210,304", timeout=PATIENCE)
    width = explorer.locator("input[type=text]").first
    enter(width, "66")
    expect(explorer).to_contain_text("the picture is the last one that made sense", timeout=PATIENCE)
    expect(explorer).to_contain_text("73,728 of 210,304")
    enter(width, "")
    expect(explorer).not_to_contain_text("the last one that made sense", timeout=PATIENCE)
    model.select_option("llama-7b")
    expect(explorer).to_contain_text("39,976,960 of 6,738,415,616 parameters train, 0.593%", timeout=PATIENCE)
    precision.select_option("4 bits")
    expect(explorer).to_contain_text("3.39 GiB", timeout=PATIENCE)
    assert len(explorer.screenshot(path=tmp_path / "explorer.png")) > 10_000
    page.screenshot(path=tmp_path / "lab11.png")
    no_errors(page)
