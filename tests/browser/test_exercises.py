"""The exercises in a real JupyterLab: an attempt that is nearly right, one that is right, hints, and how far one is."""

from __future__ import annotations

import nbformat
import pytest
from playwright.sync_api import expect

from labkit.lab.exercises import problem
from tests.browser.steps import no_errors, open_lab, run_all, wait_for_every_cell, widget

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(600)]


def test_an_exercise_is_tried_explained_and_kept(page, address, tmp_path):
    """Would catch a report that does not show, a hint that cannot be had, a solution for nothing, lost progress."""
    folder = address[2].parent / "exercises"
    notebook = nbformat.read(folder / "03_collectives.ipynb", 4)
    nearly, right = problem("03.2"), problem("03.3")
    for cell in notebook.cells:
        if cell.id == "03-2-attempt":
            cell.source = nearly.mutants[0].source(nearly.solution)
        if cell.id == "03-3-attempt":
            cell.source = right.solution
    nbformat.write(notebook, folder / "tried.ipynb")

    open_lab(page, address, "exercises/tried.ipynb")
    run_all(page)
    wait_for_every_cell(page)
    no_errors(page)

    said = page.locator(".jp-OutputArea-output", has_text="03.2 A reduce-scatter on a ring: values are broken").first
    said.scroll_into_view_if_needed()
    expect(said).to_contain_text(nearly.mutants[0].cause)
    expect(said).to_contain_text("look next")
    assert said.locator("svg").count() >= 1
    assert len(said.screenshot(path=tmp_path / "report.png")) > 8_000
    assert page.locator("text=03.3 An all-gather on a ring: all five verdicts hold").count() >= 1
    assert page.locator("text=tree_broadcast is not written yet").count() >= 1

    hints = widget(page, "", "button[title='after an attempt of your own']")  # those of the first exercise
    hints.get_by_role("button", name="solution").click()
    expect(hints).to_contain_text("03.1")
    expect(hints).not_to_contain_text("def tree_broadcast")
    hints.get_by_role("button", name="hint 1").click()
    expect(hints).to_contain_text(problem("03.1").hints[0][:40])
    expect(hints.get_by_role("button", name="hint 2")).to_be_enabled()

    panel = widget(page, "lab", "button[title='read again what was done']")
    panel.get_by_role("button", name="refresh").click()
    expect(panel).to_contain_text("03.3")
    expect(panel).to_contain_text("1 of 8")
    assert len(panel.screenshot(path=tmp_path / "panel.png")) > 8_000
