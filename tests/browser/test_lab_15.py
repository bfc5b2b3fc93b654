"""Lab 15 in a real JupyterLab: every widget is touched once, and does what it says."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.steps import no_errors, predict, run_through, widget

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(600)]
PATIENCE = 60_000


def test_lab_15_runs_and_every_widget_does_what_it_says(page, address, tmp_path):
    """Would catch a test that is taken and not shown, a verdict that is lost, and a run that cannot be stopped."""
    run_through(page, address, "15_clinic.ipynb", "closed; nothing is left running")

    for question, typed, said in (
        ("first gradient, against the whole batch", "8", "you predict 8 times"),
        ("time does Rosa", "90", "you predict 90 %"),
    ):
        predict(page, question, typed, said)

    ward = widget(page, "Suspects:", "select")
    menus, run, stop = ward.locator("select"), *(ward.get_by_role("button", name=name) for name in ("run it", "stop"))
    expect(ward).to_contain_text("Dora: stops for ever")
    expect(ward).to_contain_text("No test has been taken.")
    menus.nth(0).select_option("Mia")
    expect(ward).to_contain_text("Mia: loss explodes", timeout=PATIENCE)
    menus.nth(2).select_option("fp16 overflow")
    expect(ward).to_contain_text("It does not fit", timeout=PATIENCE)
    menus.nth(1).select_option("reference")
    expect(ward).to_contain_text("first gradient 8", timeout=PATIENCE)
    menus.nth(2).select_option("accumulation without normalisation")
    expect(ward).to_contain_text("It fits. reference", timeout=PATIENCE)
    expect(ward).to_contain_text("(lab 04)")

    run.click()
    expect(ward).to_contain_text("8 tests are from this run", timeout=4 * PATIENCE)
    expect(ward).to_contain_text("It fits. reference")
    menus.nth(0).select_option("Ada")
    expect(ward).to_contain_text("No test has been taken.", timeout=PATIENCE)
    menus.nth(1).select_option("memory")
    expect(ward).to_contain_text("the job does not come so far", timeout=PATIENCE)
    menus.nth(0).select_option("Ned")
    expect(ward).to_contain_text("Ned: ranks disagree", timeout=PATIENCE)
    run.click()
    stop.click()
    expect(ward.get_by_text("stopped", exact=True)).to_be_visible(timeout=4 * PATIENCE)
    assert len(ward.screenshot(path=tmp_path / "ward.png")) > 10_000
    page.screenshot(path=tmp_path / "lab15.png")
    no_errors(page)
