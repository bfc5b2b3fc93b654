"""Lab 09 in a real JupyterLab: every widget is touched once, and does what it says."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.steps import clear, no_errors, open_lab, run_all, wait_for_the_end

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(400)]
PATIENCE = 30_000


def test_lab_09_runs_and_every_widget_does_what_it_says(page, address, tmp_path):
    """Would catch a control without an effect, sizes that empty the picture, and a prediction that is lost."""
    open_lab(page, address, "09_tensor_parallel.ipynb")
    clear(page)
    run_all(page)
    wait_for_the_end(page, "nothing is left running")
    no_errors(page)

    for question, typed, said in (
        ("that one rank sends for one block", "768 KiB", "you predict 786,432 B = 768 KiB"),
        ("how many times as fast as tp = 8", "0.9", "you predict 0.9 times"),
    ):
        guess = page.locator(".jp-OutputArea-output", has_text=question).filter(has=page.locator("input")).first
        guess.scroll_into_view_if_needed()
        guess.locator("input").first.fill(typed)
        guess.get_by_role("button", name="commit").click()
        expect(guess).to_contain_text(said, timeout=PATIENCE)

    explorer = page.locator(".jp-OutputArea-output", has_text="as on every rank").filter(has=page.locator("select"))
    explorer = explorer.first
    explorer.scroll_into_view_if_needed()
    expect(explorer).to_contain_text("column, then row on 4 ranks, forward: rank 0 sends 192 KiB")
    expect(explorer).to_contain_text("measured: 196,608 B, as the law")
    explorer.locator(".noUi-handle").first.focus()
    page.keyboard.press("ArrowRight")
    expect(explorer).to_contain_text("rank 1 sends 192 KiB", timeout=PATIENCE)
    page.keyboard.press("End")
    expect(explorer).to_contain_text("rank 3 sends 192 KiB", timeout=PATIENCE)
    explorer.get_by_role("button", name="backward").click()
    expect(explorer).to_contain_text("backward (shown above)", timeout=PATIENCE)
    for kind in ("column", "row", "attention"):
        explorer.locator("select").select_option(kind)
        expect(explorer).to_contain_text(f"{kind} on 4 ranks, backward: rank 3 sends", timeout=PATIENCE)
        expect(explorer).to_contain_text("as the law")

    fields = explorer.locator("input[type=text]")
    expect(fields).to_have_count(6)
    fields.nth(0).fill("3")
    fields.nth(0).press("Enter")
    expect(explorer).to_contain_text("the number of heads = 8 has no 3 equal parts; 1, 2, 4 or 8", timeout=PATIENCE)
    expect(explorer).to_contain_text("attention on 4 ranks")
    fields.nth(0).fill("8")
    fields.nth(0).press("Enter")
    expect(explorer).to_contain_text("attention on 8 ranks", timeout=PATIENCE)
    expect(explorer).not_to_contain_text("measured")
    fields.nth(1).fill("256")
    fields.nth(1).press("Tab")
    expect(explorer).to_contain_text("[256, 256]", timeout=PATIENCE)
    expect(fields.nth(2)).to_be_focused()  # Tab goes from one size to the next
    sizes = ((3, "12", "heads = 12 has no 8 equal parts"), (3, "16", "[256, 32]"))
    for place, typed, said in (*sizes, (4, "2", "[128, 256]"), (5, "32", "[64, 256]")):
        fields.nth(place).fill(typed)
        fields.nth(place).press("Enter")
        expect(explorer).to_contain_text(said, timeout=PATIENCE)
    explorer.locator("select").select_option("column, then row")
    fields.nth(2).fill("1024")
    fields.nth(2).press("Enter")
    expect(explorer).to_contain_text("[256, 1024]", timeout=PATIENCE)
    explorer.locator("input[type=checkbox]").focus()
    page.keyboard.press("Space")
    expect(explorer).to_contain_text("cut by position outside", timeout=PATIENCE)
    expect(explorer).to_contain_text("reduce-scatter of dx")
    assert len(explorer.screenshot(path=tmp_path / "split.png")) > 10_000
    no_errors(page)
