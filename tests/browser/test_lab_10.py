"""Lab 10 in a real JupyterLab: every widget is touched once, and does what it says."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.steps import enter, no_errors, predict, run_through, widget

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(600)]
PATIENCE = 30_000


def test_lab_10_runs_and_every_widget_does_what_it_says(page, address, tmp_path):
    """Would catch a prediction that is lost, a slider without a picture, an order by hand that empties the page."""
    run_through(page, address, "10_pipelines.ipynb", "closed; nothing is left running")

    for question, typed, said in (
        ("how many times as fast as one device?", "1", "you predict 1 times"),
        ("% of the step spent waiting?", "43", "you predict 43 %"),
        ("micro-batches that rank 0 holds at most?", "4", "you predict 4 micro-batches"),
        ("messages of a step, over those of 1F1B?", "2.3", "you predict 2.3 times"),
        ("there and back together?", "48", "you predict 48 messages"),
        ("step on the slow links", "1.2", "you predict 1.2 times"),
        ("% of the time that ranks work?", "70", "you predict 70 %"),
    ):
        predict(page, question, typed, said)

    held = widget(page, "time of one step, from the first forward on")
    expect(held).to_contain_text("a rank holds 4 at most, gpipe 32: 8 times as many")
    expect(held).to_contain_text("measured 4.")
    handles = held.locator(".noUi-handle")
    handles.nth(0).focus()
    page.keyboard.press("ArrowLeft")
    expect(held).to_contain_text("gpipe, p = 4, m = 32: a rank holds 32 at most", timeout=PATIENCE)
    handles.nth(1).focus()
    page.keyboard.press("ArrowRight")
    expect(held).to_contain_text("gpipe, p = 5", timeout=PATIENCE)
    expect(held).to_contain_text("rank 4", timeout=PATIENCE)
    micro = held.locator("input[type=text]").first
    enter(micro, "lots")
    expect(held).to_contain_text("the picture is the last one that made sense", timeout=PATIENCE)
    expect(held).to_contain_text("gpipe, p = 5, m = 32")
    enter(micro, "8")
    expect(held).to_contain_text("gpipe, p = 5, m = 8", timeout=PATIENCE)
    handles.nth(0).focus()
    page.keyboard.press("End")
    expect(held).to_contain_text("interleaved, p = 5, m = 8, v = 2", timeout=PATIENCE)
    handles.nth(2).focus()
    page.keyboard.press("ArrowRight")
    expect(held).to_contain_text("v = 3", timeout=PATIENCE)

    player = widget(page, "ranks wait", "select")
    expect(player).to_contain_text("1f1b, 4 ranks, 8 micro-batches: 33 forwards, ranks wait 27.3%")
    expect(player).to_contain_text("measured in")
    action = player.locator(".noUi-handle").last
    action.focus()
    page.keyboard.press("ArrowRight")
    expect(player).to_contain_text("0F0 runs on rank 0 from 0 to 1; it needs nothing", timeout=PATIENCE)
    box = player.locator(".lk-do").filter(has=page.locator("title", has_text="needs 2F0")).first
    frame = box.locator(".lk-need")
    expect(frame).to_have_css("visibility", "hidden")
    box.locator("rect").first.hover(position={"x": 3, "y": 4})
    expect(frame).to_have_css("visibility", "visible", timeout=PATIENCE)
    handles = player.locator(".noUi-handle")
    handles.nth(1).focus()
    page.keyboard.press("ArrowRight")
    expect(player).to_contain_text("1f1b, 4 ranks, 9 micro-batches: 36 forwards", timeout=PATIENCE)
    expect(player).not_to_contain_text("measured in")
    heavy = player.locator(".noUi-vertical .noUi-handle").nth(2)
    heavy.focus()
    page.keyboard.press("ArrowUp")
    expect(player).not_to_contain_text("1f1b, 4 ranks, 9 micro-batches: 36 forwards", timeout=PATIENCE)
    expect(player).not_to_contain_text("law (p-1)")
    player.locator("select").select_option("zero_bubble")
    expect(player).to_contain_text("zero_bubble, 4 ranks", timeout=PATIENCE)
    expect(player).to_contain_text("W weights")
    player.locator("select").select_option("by hand")
    program = player.locator("textarea")
    expect(program).to_be_visible(timeout=PATIENCE)
    program.fill("F0 F1 B0 B1\nB0 F0 F1 B1")
    program.blur()
    expect(player).to_contain_text("deadlocks: rank 0 at 0B0 needs 1B0", timeout=PATIENCE)
    expect(player).to_contain_text("W weights")
    program.fill("F0 F1 B0 B1\nF0 B0 F1 B1")
    program.blur()
    expect(player).to_contain_text("by hand, 2 ranks, 2 micro-batches", timeout=PATIENCE)
    assert len(player.screenshot(path=tmp_path / "player.png")) > 10_000
    no_errors(page)
