"""Every widget of every lab in a real JupyterLab does what the table (labs.py) says of it."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.excerpt import excerpt
from tests.browser.jupyter import live_widget, no_errors, open_notebook, outputs, places_of, run_all
from tests.browser.labs import LABS
from tests.browser.shortcuts import SHORTCUTS
from tests.browser.steps import play

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.rest, pytest.mark.timeout(900)]


@pytest.mark.parametrize("lab", LABS, ids=str)
def test_every_widget_of_a_lab_does_what_it_says(lab, page, server):
    """Would catch a widget that is text, a control that moves nothing, a prediction that is lost, nonsense that empties
    the picture, a run that cannot be asked for again or stopped, a picture that is there twice, and a lab that works in
    papermill only."""
    cells = [*(shown.cell for shown in lab.shown), *lab.also]
    shortcuts = {cell: SHORTCUTS[cell] for cell in lab.short}
    notebook = excerpt(server.read(f"notebooks/{lab}.ipynb"), cells, shortcuts)
    places = places_of(notebook)
    open_notebook(page, server, server.keep(notebook, f"notebooks/excerpt_{lab}.ipynb"))
    run_all(page)
    for shown in lab.shown:
        area = outputs(page, places[shown.cell])
        view = live_widget(page, places[shown.cell]) if shown.kind else area
        play(view, shown.steps, f"{lab}, cell {shown.cell}")
        expect(area.locator(".lk-twin").first).to_be_hidden()  # it is for places where no widget runs
    no_errors(page)
