"""Lab 04 in a real JupyterLab: every widget is touched once, and does what it says."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.steps import enter, no_errors, predict, run_through, widget, without_its_end

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(400)]
PATIENCE = 30_000


def test_lab_04_runs_and_every_widget_does_what_it_says(page, address, tmp_path):
    """Would catch a slider without a picture, a prediction that is lost, and a run that cannot be asked for again."""
    lab = without_its_end(address, "04_one_device_less_memory")
    run_through(page, address, lab, "5 the state: ")

    for question, typed, said in (
        ("take how many times as long", "3", "you predict 3 times"),
        ("36 layers in 6 segments?", "11 MiB", "you predict 11,534,336 B = 11 MiB"),
    ):
        predict(page, question, typed, said)

    explorer = widget(page, "layers in a segment, k")
    expect(explorer).to_contain_text("lowest at k = 6: 11 MiB")
    expect(explorer).to_contain_text("measured with segments of 6")
    handles = explorer.locator(".noUi-handle")
    handles.nth(1).focus()
    page.keyboard.press("ArrowLeft")
    expect(explorer).to_contain_text("36 layers in 8 segments of 4 or 5", timeout=PATIENCE)
    handles.nth(2).focus()
    page.keyboard.press("ArrowRight")
    expect(explorer).to_contain_text("lowest at k = 4.24", timeout=PATIENCE)
    handles.nth(0).focus()
    page.keyboard.press("ArrowRight")
    expect(explorer).to_contain_text("37 layers in 8 segments", timeout=PATIENCE)
    cap = explorer.locator("input[type=text]").last
    enter(cap, "lots")
    expect(explorer).to_contain_text("the picture is the last one that made sense", timeout=PATIENCE)
    enter(cap, "30 MiB")
    expect(explorer).to_contain_text("cap 30 MiB", timeout=PATIENCE)
    assert len(explorer.screenshot(path=tmp_path / "explorer.png")) > 10_000

    player = (
        page.locator(".jp-OutputArea-output", has_text="at the peak").filter(has=page.locator(".noUi-handle")).first
    )
    player.scroll_into_view_if_needed()
    expect(player).to_contain_text("6 segments: peak")
    player.locator(".noUi-handle").first.focus()
    page.keyboard.press("ArrowRight")
    expect(player).to_contain_text("7 segments: peak", timeout=PATIENCE)
    page.keyboard.press("Home")
    expect(player).to_contain_text("VirtualOutOfMemory", timeout=PATIENCE)
    expect(player).to_contain_text("7 segments: peak")
    page.screenshot(path=tmp_path / "lab04.png")
    no_errors(page)
