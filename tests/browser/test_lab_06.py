"""Lab 06 in a real JupyterLab: every widget is touched once, and does what it says."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.steps import clear, no_errors, open_lab, run_all, wait_for_the_end

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(400)]
PATIENCE = 30_000


def without_its_end(folder: Path) -> str:
    """A copy of the lab whose last cell does not close the clusters, so that its button can run the ranks again."""
    notebook = nbformat.read(folder / "06_data_parallel.ipynb", 4)
    assert "cluster.close()" in notebook.cells.pop().source
    nbformat.write(notebook, folder / "06_open.ipynb")
    return "06_open.ipynb"


def widget(page: Page, words: str) -> Locator:
    """The live widget that says these words, in view."""
    found = page.locator(".jp-OutputArea-output", has_text=words).filter(has=page.locator(".noUi-handle")).first
    found.scroll_into_view_if_needed()
    return found


def typed(field: Locator, words: str) -> None:
    """Type words into a field, and press Enter."""
    field.fill(words)
    field.press("Enter")


def test_lab_06_runs_and_every_widget_does_what_it_says(page, address, tmp_path):
    """Would catch a slider without a picture, a prediction that is lost, and a run that cannot be asked for again."""
    open_lab(page, address, without_its_end(address[2].parent / "notebooks"))
    clear(page)
    run_all(page)
    wait_for_the_end(page, "5 1% on more than 100 ranks")
    no_errors(page)

    for question, said in (
        ("each rank sends in one DDP step?", "you predict 204,800 B = 200 KiB"),
        ("Which bucket size ends the step first?", "you predict 204,800 B = 200 KiB"),
    ):
        guess = page.locator(".jp-OutputArea-output", has_text=question).filter(has=page.locator("input")).first
        guess.scroll_into_view_if_needed()
        guess.locator("input").first.fill("200 KiB")
        guess.get_by_role("button", name="commit").click()
        expect(guess).to_contain_text(said, timeout=PATIENCE)

    buckets = widget(page, "begin of backward to end of the last bucket")
    handles, field = buckets.locator(".noUi-handle"), buckets.locator("input[type=text]").first
    handles.nth(0).focus()
    page.keyboard.press("Home")
    expect(buckets).to_contain_text("buckets of 64 KiB: 12 buckets", timeout=PATIENCE)
    page.keyboard.press("End")
    expect(buckets).to_contain_text("buckets of 768 KiB: 1 bucket; ", timeout=PATIENCE)
    expect(buckets).to_contain_text("0% of the wire hidden")
    typed(field, "huge")
    expect(buckets).to_contain_text("the picture is the last one that made sense", timeout=PATIENCE)
    expect(buckets).to_contain_text("buckets of 768 KiB: 1 bucket; ")
    typed(field, "200 KiB")
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
    typed(field, "steep")
    expect(stale).to_contain_text("the picture is the last one that made sense", timeout=PATIENCE)
    expect(stale).to_contain_text("lr × curvature 0.01: creeps")
    typed(field, "20")
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
    typed(field, "2.5")
    expect(sparse).to_contain_text("no whole number of ranks", timeout=PATIENCE)
    typed(field, "1000")
    expect(sparse).to_contain_text("21,768 gradients, 1,000 ranks", timeout=PATIENCE)
    assert len(sparse.screenshot(path=tmp_path / "sparse.png")) > 10_000
    no_errors(page)
