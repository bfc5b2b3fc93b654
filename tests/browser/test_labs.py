"""Every widget of every lab in a real JupyterLab does what the table (labs.py) says of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.conftest import new_window
from tests.browser.excerpt import excerpt
from tests.browser.jupyter import (
    Server,
    end_kernels,
    live_widget,
    no_errors,
    open_beside,
    open_notebook,
    outputs,
    places_of,
    run_all,
)
from tests.browser.labs import LABS
from tests.browser.shortcuts import SHORTCUTS
from tests.browser.steps import play

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.rest, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def windows() -> Iterator[list[Page]]:
    """The window in which one lab after the other is opened: to load JupyterLab takes as long as to play a lab."""
    opened: list[Page] = []
    yield opened
    for page in opened:
        page.context.close()


@pytest.fixture
def page(browser: Browser, server: Server, windows: list[Page]) -> Iterator[Page]:
    """The window of the lab before; a new one where that lab is still open, since it has failed."""
    if windows and windows[0].locator(".jp-NotebookPanel").count():
        windows.pop().context.close()
    if not windows:
        windows.append(new_window(browser))
    yield windows[0]
    end_kernels(server)


@pytest.mark.parametrize("lab", LABS, ids=str)
def test_every_widget_of_a_lab_does_what_it_says(lab, page, server):
    """Would catch a widget that is text, a control that moves nothing, a prediction that is lost, nonsense that empties
    the picture, a run that cannot be asked for again or stopped, a picture that is there twice, and a lab that works in
    papermill only."""
    cells = [*(shown.cell for shown in lab.shown), *lab.also]
    shortcuts = {cell: SHORTCUTS[cell] for cell in lab.short}
    notebook = excerpt(server.read(f"notebooks/{lab}.ipynb"), cells, shortcuts)
    places = places_of(notebook)
    path = server.keep(notebook, f"notebooks/excerpt_{lab}.ipynb")
    if page.url == "about:blank":
        open_notebook(page, server, path)
    else:
        open_beside(page, path)
    run_all(page)
    for shown in lab.shown:
        area = outputs(page, places[shown.cell])
        view = live_widget(page, places[shown.cell]) if shown.kind else area
        play(view, shown.steps, f"{lab}, cell {shown.cell}")
        expect(area.locator(".lk-twin").first).to_be_hidden()  # it is for places where no widget runs
    no_errors(page)
    page.evaluate("window.jupyterapp.shell.currentWidget.dispose()")
