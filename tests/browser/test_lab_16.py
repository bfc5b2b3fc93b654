"""Lab 16 in a real JupyterLab: every widget is touched once, and does what it says."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.steps import no_errors, predict, run_through, wait_for_every_cell, widget, without_its_end

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(600)]
PATIENCE = 60_000


def test_lab_16_runs_and_every_widget_does_what_it_says(page, address, tmp_path):
    """Would catch controls without a picture, a score that is lost, and an attempt that cannot be stopped."""
    run_through(page, address, without_its_end(address, "16_capstone"), "by score")
    wait_for_every_cell(page)

    predict(page, "highest bytes of a rank, pipeline", "3.5 MB", "you predict 3,500,000 B")
    predict(page, "its score at home", "2", "you predict 2 MB s")

    lab = widget(page, "predicted bytes")
    expect(lab).to_contain_text("home; pp 4: 1f1b of 2, checkpointing: predicted")
    expect(lab).to_contain_text("measured, the reference")
    handles = lab.locator(".noUi-handle")
    layout, place, strategy, schedule, micro = (handles.nth(k) for k in range(5))
    lab.get_by_role("checkbox", name="checkpointing").click()
    expect(lab).to_contain_text("MB over the cap", timeout=PATIENCE)
    lab.locator("select").select_option("roomy")
    expect(lab).to_contain_text("roomy; pp 4: 1f1b of 2: predicted", timeout=PATIENCE)
    expect(lab).to_contain_text("fits under the cap", timeout=PATIENCE)
    micro.focus()
    page.keyboard.press("ArrowRight")
    expect(lab).to_contain_text("1f1b of 4", timeout=PATIENCE)
    schedule.focus()
    page.keyboard.press("ArrowRight")
    expect(lab).to_contain_text("gpipe of 4", timeout=PATIENCE)
    layout.focus()
    page.keyboard.press("Home")
    expect(lab).to_contain_text("the picture is the last one that made sense", timeout=PATIENCE)
    micro.focus()
    page.keyboard.press("Home")
    expect(lab).to_contain_text("roomy; dp 4: ddp", timeout=PATIENCE)
    strategy.focus()
    page.keyboard.press("ArrowRight")
    expect(lab).to_contain_text("dp 4: zero1", timeout=PATIENCE)
    place.focus()
    page.keyboard.press("ArrowRight")
    expect(lab).to_contain_text("dp 4, apart: zero1", timeout=PATIENCE)

    lab.get_by_role("button", name="run on real ranks").click()
    expect(lab).to_contain_text("(added to the board)", timeout=2 * PATIENCE)
    expect(lab).to_contain_text("measured by you", timeout=PATIENCE)
    lab.get_by_role("button", name="run on real ranks").click()
    lab.get_by_role("button", name="stop").click()
    expect(lab).to_contain_text("stopped: nothing is kept", timeout=2 * PATIENCE)
    assert len(lab.screenshot(path=tmp_path / "lab.png")) > 10_000
    page.screenshot(path=tmp_path / "lab16.png")
    no_errors(page)
