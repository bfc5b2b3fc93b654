"""Lab 11 in a real JupyterLab: every widget is touched once, and does what it says."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.steps import clear, no_errors, open_lab, run_all, wait_for_the_end

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(400)]
PATIENCE = 30_000


def test_lab_11_runs_and_every_widget_does_what_it_says(page, address, tmp_path):
    """Would catch a prediction that is lost, and a choice of targets, rank, model or precision that draws nothing."""
    open_lab(page, address, "11_lora.ipynb")
    clear(page)
    run_all(page)
    wait_for_the_end(page, "closed; nothing is left running")
    no_errors(page)

    for question, typed, said in (
        ("how many times fewer numbers train", "256", "you predict 256 times"),
        ("Bytes that LoRA holds", "4 MiB", "you predict 4,194,304 B = 4 MiB"),
        ("in a step of DDP, with LoRA", "48 KiB", "you predict 49,152 B = 48 KiB"),
    ):
        guess = page.locator(".jp-OutputArea-output", has_text=question).filter(has=page.locator("input")).first
        guess.scroll_into_view_if_needed()
        guess.locator("input").first.fill(typed)
        guess.get_by_role("button", name="commit").click()
        expect(guess).to_contain_text(said, timeout=PATIENCE)

    explorer = page.locator(".jp-OutputArea-output", has_text="loss of real runs over the rank").filter(
        has=page.locator(".noUi-handle, input[type=range]")
    )
    explorer = explorer.first
    explorer.scroll_into_view_if_needed()
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
    width.fill("66")
    width.press("Enter")
    expect(explorer).to_contain_text("the picture is the last one that made sense", timeout=PATIENCE)
    expect(explorer).to_contain_text("73,728 of 210,304")
    width.fill("")
    width.press("Enter")
    expect(explorer).not_to_contain_text("the last one that made sense", timeout=PATIENCE)
    model.select_option("llama-7b")
    expect(explorer).to_contain_text("39,976,960 of 6,738,415,616 parameters train, 0.593%", timeout=PATIENCE)
    precision.select_option("4 bits")
    expect(explorer).to_contain_text("3.39 GiB", timeout=PATIENCE)
    assert len(explorer.screenshot(path=tmp_path / "explorer.png")) > 10_000
    page.screenshot(path=tmp_path / "lab11.png")
    no_errors(page)
