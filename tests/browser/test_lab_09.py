"""Lab 09 in a real JupyterLab: every widget is touched once, and does what it says."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.steps import enter, no_errors, predict, run_through, widget

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(400)]
PATIENCE = 30_000


def test_lab_09_runs_and_every_widget_does_what_it_says(page, address, tmp_path):
    """Would catch a control without an effect, sizes that empty the picture, and a prediction that is lost."""
    run_through(page, address, "09_tensor_parallel.ipynb", "nothing is left running")

    for question, typed, said in (
        ("that one rank sends for one block", "768 KiB", "you predict 786,432 B = 768 KiB"),
        ("how many times as fast as tp = 8", "0.9", "you predict 0.9 times"),
    ):
        predict(page, question, typed, said)

    explorer = widget(page, "as on every rank", "select")
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
    enter(fields.nth(0), "3")
    expect(explorer).to_contain_text("the number of heads = 8 has no 3 equal parts; 1, 2, 4 or 8", timeout=PATIENCE)
    expect(explorer).to_contain_text("attention on 4 ranks")
    enter(fields.nth(0), "8")
    expect(explorer).to_contain_text("attention on 8 ranks", timeout=PATIENCE)
    expect(explorer).not_to_contain_text("measured")
    fields.nth(1).fill("256")
    fields.nth(1).press("Tab")
    expect(explorer).to_contain_text("[256, 256]", timeout=PATIENCE)
    expect(fields.nth(2)).to_be_focused()  # Tab goes from one size to the next
    sizes = ((3, "12", "heads = 12 has no 8 equal parts"), (3, "16", "[256, 32]"))
    for place, typed, said in (*sizes, (4, "2", "[128, 256]"), (5, "32", "[64, 256]")):
        enter(fields.nth(place), typed)
        expect(explorer).to_contain_text(said, timeout=PATIENCE)
    explorer.locator("select").select_option("column, then row")
    enter(fields.nth(2), "1024")
    expect(explorer).to_contain_text("[256, 1024]", timeout=PATIENCE)
    explorer.locator("input[type=checkbox]").focus()
    page.keyboard.press("Space")
    expect(explorer).to_contain_text("cut by position outside", timeout=PATIENCE)
    expect(explorer).to_contain_text("reduce-scatter of dx")
    assert len(explorer.screenshot(path=tmp_path / "split.png")) > 10_000
    no_errors(page)
