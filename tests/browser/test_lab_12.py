"""Lab 12 in a real JupyterLab: every widget is touched once, and does what it says."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.steps import enter, no_errors, predict, run_through, widget

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(600)]
PATIENCE = 60_000


def test_lab_12_runs_and_every_widget_does_what_it_says(page, address, tmp_path):
    """Would catch a menu without a picture, a prediction that is lost, and a measurement that cannot be stopped."""
    run_through(page, address, "12_three_dimensions.ipynb", "closed; nothing is left running")

    for question, typed, said in (
        ("how many of the 80 layers", "20", "you predict 20 layers"),
        ("weights, gradients and Adam", "35 GB", "you predict 35,000,000,000 B"),
        ("bytes sent along tp, for each byte along dp", "10", "you predict 10 times"),
    ):
        predict(page, question, typed, said)

    cube = widget(page, "dp group (dotted)")
    expect(cube).to_contain_text("rank 9 is dp 0, pp 1, tp 1")
    handles = cube.locator(".noUi-handle")
    handles.nth(3).focus()
    page.keyboard.press("ArrowRight")
    expect(cube).to_contain_text("rank 10 is dp 0, pp 1, tp 2", timeout=PATIENCE)
    for axis, total in enumerate((224, 168, 147)):
        handles.nth(axis).focus()
        page.keyboard.press("ArrowLeft")
        expect(cube).to_contain_text(f"= {total} ranks", timeout=PATIENCE)

    wires = widget(page, "in each box: rank; dp,pp,tp")
    expect(wires).to_contain_text("4 edges between nodes")
    expect(wires).to_contain_text("measured")
    layout, place = wires.locator(".noUi-handle").nth(0), wires.locator(".noUi-handle").nth(1)
    place.focus()
    page.keyboard.press("ArrowLeft")
    expect(wires).to_contain_text("dp takes", timeout=PATIENCE)
    page.keyboard.press("ArrowRight")
    expect(wires).to_contain_text("tp takes", timeout=PATIENCE)
    layout.focus()
    page.keyboard.press("ArrowLeft")  # dp 1, pp 4, tp 1
    page.keyboard.press("ArrowLeft")
    expect(wires).to_contain_text("dp 2 x pp 2 x tp 1", timeout=PATIENCE)
    expect(wires).to_contain_text("round trips", timeout=PATIENCE)
    fields = wires.locator("input[type=text]")
    for place_of, typed in enumerate(("100 us", "90 MB/s", "soon", "10 MB/s")):
        enter(fields.nth(place_of), typed)
    expect(wires).to_contain_text("the picture is the last one that made sense", timeout=PATIENCE)
    enter(fields.nth(2), "500 us")
    expect(wires).to_contain_text("(0.5 ms, 10 MB/s) between", timeout=PATIENCE)
    wires.get_by_role("button", name="measure on real ranks").click()
    expect(wires).to_contain_text("pp takes", timeout=PATIENCE)
    page.wait_for_function(
        "() => [...document.querySelectorAll('svg')].some(each => (each.getAttribute('aria-label') || '')"
        ".includes('pp measured'))",
        timeout=4 * PATIENCE,
    )
    layout.focus()
    page.keyboard.press("End")
    expect(wires).to_contain_text("tp takes 100%", timeout=PATIENCE)
    wires.get_by_role("button", name="measure on real ranks").click()
    wires.get_by_role("button", name="stop").click()
    expect(wires).to_contain_text("stopped: nothing is kept", timeout=PATIENCE)
    assert len(wires.screenshot(path=tmp_path / "wires.png")) > 10_000
    page.screenshot(path=tmp_path / "lab12.png")
    no_errors(page)
