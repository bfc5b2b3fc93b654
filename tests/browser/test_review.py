"""Cards in a real JupyterLab: keys only, and nothing lost when the kernel goes."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.browser.jupyter import END_MS, new_notebook, no_errors, open_notebook, outputs, run_all

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.rest, pytest.mark.timeout(900)]

CELLS = (
    "import labkit\npanel = labkit.ReviewPanel(labkit.cards(folder='box'), tag='zero')\npanel",
    "print('kept:', [review.rating for review in labkit.cards(folder='box').reviews()])",
)


def test_cards_are_reviewed_by_keys_and_survive_a_kernel(page, server):
    """Would catch keys that JupyterLab takes for its own, an answer that shows too early, ratings that are lost."""
    open_notebook(page, server, server.keep(new_notebook(*CELLS), "notebooks/review.ipynb"))
    run_all(page)
    expect(outputs(page, 1)).to_contain_text("kept: []")

    panel = page.locator(".lk-review")
    face, answer = panel.locator(".lk-review-face"), panel.locator(".lk-review-answer")
    expect(answer).to_be_empty()
    first = face.inner_text()
    panel.focus()
    page.keyboard.press("3")  # before the answer: nothing, and no heading of the cell either
    expect(panel).to_contain_text("0 done")
    page.keyboard.press("Space")
    expect(answer.locator(".lk-card-claim")).to_be_visible()
    page.keyboard.press("4")
    expect(panel).to_contain_text("1 done")
    expect(answer).to_be_empty()
    expect(face).not_to_have_text(first)
    page.keyboard.press("Space")
    expect(answer.locator(".lk-card-claim")).to_be_visible()
    page.keyboard.press("1")
    expect(panel).to_contain_text("2 done · 1 day in a row")
    expect(page.locator(".jp-MarkdownCell")).to_have_count(0)
    expect(page.locator(".jp-CodeCell")).to_have_count(len(CELLS))

    panel.locator("select").nth(1).select_option("07")
    page.keyboard.press("Space")
    link = answer.locator("a[data-cell]").first
    name, lab = link.get_attribute("data-cell"), link.inner_text()[4:6]
    assert link.get_attribute("href").endswith(f"#cell-id={name}")
    link.click()
    page.wait_for_url(re.compile(f"/lab/tree/notebooks/{lab}_[a-z0-9_]+.ipynb"))
    whole = server.read(next(server.folder.glob(f"notebooks/{lab}_*.ipynb")).relative_to(server.folder))
    source = next(cell.source for cell in whole.cells if cell.id == name)
    cell = page.locator(".jp-NotebookPanel:visible .jp-Cell", has_text=source.splitlines()[0].strip("# "))
    expect(cell.first).to_be_in_viewport()
    page.get_by_role("tab", name="review.ipynb").click()

    panel.locator("select").nth(1).select_option("")
    panel.locator("select").nth(0).select_option("pipeline")
    expect(face).not_to_have_text(first)
    panel.get_by_role("button", name="show (space)").click()
    panel.get_by_role("button", name="5 at once").click()
    expect(panel).to_contain_text("3 done")

    page.get_by_role("menuitem", name="Kernel").click()
    page.get_by_role("menuitem", name="Restart Kernel and Run All Cells").click()
    page.get_by_role("button", name="Confirm Kernel Restart").click()
    expect(outputs(page, 1)).to_contain_text("kept: [4, 1, 5]", timeout=END_MS)
    expect(page.locator(".lk-review")).to_contain_text("0 done · 1 day in a row")
    no_errors(page)
