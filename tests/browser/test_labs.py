"""Every widget of every lab in a real JupyterLab does what the table (labs.py) says of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, ViewportSize, expect

from tests.browser.conftest import WINDOW, new_window
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

NARROW: ViewportSize = {"width": 800, "height": 1000}
CUT_OFF = """view => {
    const edge = view.closest(".jp-OutputArea").getBoundingClientRect().right + 1;
    const controls = [...view.querySelectorAll(".widget-inline-hbox, .widget-button")];
    return controls.filter(control => control.getBoundingClientRect().right > edge).map(control => control.innerText);
}"""
"""The words of the controls that reach beyond the right edge of what a cell shows."""

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
    the picture, a run that cannot be asked for again or stopped, a picture that is there twice, a control that a narrow
    window cuts off, and a lab that works in papermill only."""
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
    page.set_viewport_size(NARROW)
    for shown in lab.shown:
        if shown.kind:
            view = live_widget(page, places[shown.cell])
            view.scroll_into_view_if_needed()
            assert view.evaluate(CUT_OFF) == [], f"{lab}, cell {shown.cell}"
    page.set_viewport_size(WINDOW)
    page.evaluate("window.jupyterapp.shell.currentWidget.dispose()")
