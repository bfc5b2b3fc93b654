"""Lab 07 in a real JupyterLab: every widget is touched once, and does what it says."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.steps import clear, no_errors, open_lab, run_all, wait_for_the_end

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(500)]
PATIENCE = 60_000


def test_lab_07_runs_and_every_widget_does_what_it_says(page, address, tmp_path):
    """Would catch a prediction that is lost, a control without effect, and nonsense that empties the picture."""
    open_lab(page, address, "07_zero_1_and_2.ipynb")
    clear(page)
    run_all(page)
    wait_for_the_end(page, "closed; nothing is left running")
    no_errors(page)

    for question, typed, said in (
        ("ZeRO-1, mixed precision, AdamW?", "5.5", "you predict 5.5 B"),
        ("what share of DDP's bytes", "1", "you predict 1 of DDP"),
    ):
        guess = page.locator(".jp-OutputArea-output", has_text=question).filter(has=page.locator("input")).first
        guess.scroll_into_view_if_needed()
        guess.locator("input").first.fill(typed)
        guess.get_by_role("button", name="commit").click()
        expect(guess).to_contain_text(said, timeout=PATIENCE)

    explorer = page.locator(".jp-OutputArea-output", has_text="model state of one rank")
    explorer = explorer.filter(has=page.locator(".noUi-handle")).first
    explorer.scroll_into_view_if_needed()
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

    fields.nth(0).fill("70B")
    fields.nth(0).press("Enter")
    expect(explorer).to_contain_text("70 billion parameters", timeout=PATIENCE)
    expect(explorer).not_to_contain_text("measured")
    fields.nth(1).fill("0")
    fields.nth(1).press("Enter")
    expect(explorer).to_contain_text("got 0: the picture is the last one that made sense", timeout=PATIENCE)
    expect(explorer).to_contain_text("70 billion parameters on K = 4")
    fields.nth(1).fill("64")
    fields.nth(1).press("Enter")
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
