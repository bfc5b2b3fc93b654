"""Lab 02 in a real JupyterLab: its slider sends real messages, its predictions are taken.

(The prediction of bytes is in test_jupyterlab.py.)"""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import expect

from tests.browser.steps import clear, no_errors, open_lab, predict, run_all, wait_for_the_end

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(400)]


def without_its_end(folder: Path) -> str:
    """A copy of the lab whose last cell does not close the cluster, so that its slider can run the ranks again."""
    notebook = nbformat.read(folder / "02_point_to_point.ipynb", 4)
    assert "cluster.close()" in notebook.cells.pop().source
    nbformat.write(notebook, folder / "02_open.ipynb")
    return "02_open.ipynb"


def test_lab_02_runs_and_its_slider_sends_messages(page, address, tmp_path):
    """Would catch a slider that shows an old run, ranks that do not survive the clinic, a prediction that is lost."""
    open_lab(page, address, without_its_end(address[2].parent / "notebooks"))
    clear(page)
    run_all(page)
    wait_for_the_end(page, "times the bytes")
    no_errors(page)

    longer = predict(page, "as long as one of 64 bytes?", "3", "times")
    expect(longer).to_contain_text("measured")
    stages = predict(page, "Messages for one batch, there and back", "6", "messages")
    expect(stages).to_contain_text("6 messages")

    player = page.locator(".jp-OutputArea-output", has_text="ring shift of").filter(has=page.locator(".noUi-handle"))
    player = player.first
    player.scroll_into_view_if_needed()
    expect(player).to_contain_text("ring shift of 65,536 bytes")
    player.locator(".noUi-handle").first.focus()
    page.keyboard.press("ArrowRight")
    expect(player).to_contain_text("ring shift of 131,072 bytes")
    page.keyboard.press("Home")
    expect(player).to_contain_text("ring shift of 64 bytes")
    assert len(player.screenshot(path=tmp_path / "player.png")) > 3_000

    expect(page.locator(".jp-OutputArea-output", has_text="wait in all_reduce #3").first).to_be_attached()
    expect(page.locator(".jp-OutputArea-output", has_text="timeout=1800: TypeError").first).to_be_attached()
    no_errors(page)
