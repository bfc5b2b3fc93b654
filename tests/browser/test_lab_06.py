"""Lab 06 in a real JupyterLab: every widget is touched once, and does what it says."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.steps import enter, no_errors, predict, run_through, widget, without_its_end

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(400)]
PATIENCE = 30_000


def test_lab_06_runs_and_every_widget_does_what_it_says(page, address, tmp_path):
    """Would catch a slider without a picture, a prediction that is lost, and a run that cannot be asked for again."""
    lab = without_its_end(address, "06_data_parallel")
    run_through(page, address, lab, "5 1% on more than 100 ranks")

    for question, said in (
        ("each rank sends in one DDP step?", "you predict 204,800 B = 200 KiB"),
        ("Which bucket size ends the step first?", "you predict 204,800 B = 200 KiB"),
    ):
        predict(page, question, "200 KiB", said)

    buckets = widget(page, "begin of backward to end of the last bucket")
    handles, field = buckets.locator(".noUi-handle"), buckets.locator("input[type=text]").first
    handles.nth(0).focus()
    page.keyboard.press("Home")
    expect(buckets).to_contain_text("buckets of 64 KiB: 12 buckets", timeout=PATIENCE)
    page.keyboard.press("End")
    expect(buckets).to_contain_text("buckets of 768 KiB: 1 bucket; ", timeout=PATIENCE)
    expect(buckets).to_contain_text("0% of the wire hidden")
    enter(field, "huge")
    expect(buckets).to_contain_text("the picture is the last one that made sense", timeout=PATIENCE)
    expect(buckets).to_contain_text("buckets of 768 KiB: 1 bucket; ")
    enter(field, "200 KiB")
    expect(buckets).to_contain_text("buckets of 200 KiB: 4 buckets", timeout=PATIENCE)
    buckets.get_by_role("button", name="run it on the ranks").click()
    expect(buckets).to_contain_text("measured with buckets of 200 KiB: ", timeout=PATIENCE)
    handles.nth(1).focus()
    page.keyboard.press("ArrowRight")
    expect(buckets).not_to_contain_text("measured with buckets of 200 KiB: ", timeout=PATIENCE)
    assert len(buckets.screenshot(path=tmp_path / "buckets.png")) > 10_000

    stale = widget(page, "recorded runs: a dot converged, a cross diverged")
    expect(stale).to_contain_text("gradients 2 steps old, lr × curvature 0.501: swings")
    handles, field = stale.locator(".noUi-handle"), stale.locator("input[type=text]").first
    expect(stale).to_contain_text("recorded: staleness 2, lr × curvature 0.927: diverged")
    handles.nth(0).focus()
    page.keyboard.press("ArrowRight")
    expect(stale).to_contain_text("gradients 3 steps old, lr × curvature 0.501: diverges", timeout=PATIENCE)
    handles.nth(1).focus()
    page.keyboard.press("Home")
    expect(stale).to_contain_text("lr × curvature 0.01: creeps", timeout=PATIENCE)
    enter(field, "steep")
    expect(stale).to_contain_text("the picture is the last one that made sense", timeout=PATIENCE)
    expect(stale).to_contain_text("lr × curvature 0.01: creeps")
    enter(field, "20")
    expect(stale).to_contain_text("lr × curvature 0.2: swings", timeout=PATIENCE)
    assert len(stale.screenshot(path=tmp_path / "stale.png")) > 10_000

    sparse = widget(page, "of 21,768 gradients")
    expect(sparse).to_contain_text("the largest 0.01 of 21,768 gradients, 4 ranks")
    expect(sparse).to_contain_text("measured on 4 ranks: 5,232 B")
    sparse.locator("input[type=checkbox]").click()
    expect(sparse.locator("svg")).to_contain_text("without feedback", timeout=PATIENCE)
    sparse.locator(".noUi-handle").first.focus()
    page.keyboard.press("ArrowRight")
    expect(sparse).to_contain_text("pays below 10 ranks", timeout=PATIENCE)
    field = sparse.locator("input[type=text]").first
    enter(field, "2.5")
    expect(sparse).to_contain_text("no whole number of ranks", timeout=PATIENCE)
    enter(field, "1000")
    expect(sparse).to_contain_text("21,768 gradients, 1,000 ranks", timeout=PATIENCE)
    assert len(sparse.screenshot(path=tmp_path / "sparse.png")) > 10_000
    no_errors(page)
