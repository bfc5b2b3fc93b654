"""Lab 14 in a real JupyterLab: every widget is touched once, and does what it says."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from labkit.plan.cases import case
from tests.browser.steps import enter, no_errors, predict, run_through, widget

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(600)]
PATIENCE = 60_000


def test_lab_14_runs_and_every_widget_does_what_it_says(page, address, tmp_path):
    """Would catch a menu without an answer, a prediction that is lost, and nonsense that empties the panel."""
    run_through(page, address, "14_system_design.ipynb", "closed; nothing is left running")

    for question, typed, said in (
        ("how long for a trillion", "700", "you predict 700 days"),
        ("what is left beside the state", "32 GB", "you predict 32,000,000,000 B"),
        ("activations of ONE block", "2 GB", "you predict 2,000,000,000 B"),
        ("flops of one token", "2e10", "you predict 2e+10 flops"),
    ):
        predict(page, question, typed, said)

    panel = widget(page, "eight devices of 80 GB, 60 GB of state", "select")
    menus, fields = panel.locator("select"), panel.locator("input[type=text]")
    found = case("eight").found
    fit = f"{sum(plan.kept for plan in found)} of {len(found)} plans fit"
    expect(panel).to_contain_text(f"8 x a100-80gb, 128 rows of 2,048: {fit}")
    expect(panel).to_contain_text("opened: dp 8, pp 1, tp 1, ZeRO-3")
    menus.nth(4).select_option(index=6)
    expect(panel).to_contain_text("opened: dp 8, pp 1, tp 1, DDP", timeout=PATIENCE)
    menus.nth(1).select_option("h200")
    expect(panel).to_contain_text("of 141 GB a device", timeout=PATIENCE)
    menus.nth(2).select_option("fp32")
    expect(panel).not_to_contain_text(fit, timeout=PATIENCE)
    menus.nth(3).select_option("sgd")
    expect(panel).to_contain_text("(sgd)", timeout=PATIENCE)
    for place, typed, said in ((0, "16", "16 x h200"), (1, "64", "64 rows of 2,048"), (2, "1024", "64 rows of 1,024")):
        enter(fields.nth(place), typed)
        expect(panel).to_contain_text(said, timeout=PATIENCE)
    enter(fields.nth(0), "many")
    expect(panel).to_contain_text("the picture is the last one that made sense", timeout=PATIENCE)
    expect(panel).to_contain_text("16 x h200")
    enter(fields.nth(0), "8")
    expect(panel).to_contain_text("8 x h200", timeout=PATIENCE)
    menus.nth(0).select_option("gpt2-xl")
    expect(panel).to_contain_text("gpt2-xl, 8 x h200", timeout=PATIENCE)
    menus.nth(0).select_option("own sizes")
    expect(panel).to_contain_text("own sizes, 8 x h200", timeout=PATIENCE)
    for place, typed in ((3, "12"), (4, "1024"), (5, "16"), (6, "32000")):
        enter(fields.nth(place), typed)
    n_params = 12 * 12 * 1024**2 + 2 * 32_000 * 1024  # about: the formula of the opened plan has N exactly
    expect(panel).to_contain_text(re.compile(f"N = {n_params // 10**6}|N = {n_params // 10**6 + 1}"), timeout=PATIENCE)
    assert len(panel.screenshot(path=tmp_path / "panel.png")) > 10_000
    page.screenshot(path=tmp_path / "lab14.png")
    no_errors(page)
