"""What somebody does in JupyterLab: open a notebook, run its cells, wait for them, look at what they show.

A busy machine is ten times as slow, so every wait is long; and each ends as soon as what it waits for is there."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import pytest
from playwright.sync_api import Locator, Page, TimeoutError, expect

PATIENCE_MS = 300_000  # of a click, or until a widget shows what it should
END_MS = 600_000  # of cells that run
TAB = ".jp-mod-current[role=tab]"
NOTEBOOK = ".jp-NotebookPanel:not(.lm-mod-hidden)"
TROUBLE = '[data-mime-type="application/vnd.jupyter.error"], [data-mime-type="application/vnd.jupyter.stderr"]'
LIVE = ".jupyter-widgets, .lk-film"  # what only a widget puts into the page; its twin has none of it


@dataclass(frozen=True)
class Server:
    """A JupyterLab that `labkit lab` has started in `folder`; `first` is the address that it opens by itself."""

    first: str
    token: str
    folder: Path
    log: Path

    @property
    def url(self) -> str:
        """Where all addresses of it begin."""
        return self.first.partition("/lab")[0]

    def ask(self, path: str, method: str = "GET") -> Any:
        """One request, past any proxy."""
        request = urllib.request.Request(
            self.url + path, headers={"Authorization": f"token {self.token}"}, method=method
        )
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=300) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def read(self, path: str | Path) -> nbformat.NotebookNode:
        """A notebook of the course."""
        return nbformat.read(self.folder / path, 4)

    def keep(self, notebook: nbformat.NotebookNode, path: str) -> str:
        """Write a notebook into the course. Returns its path there."""
        nbformat.write(notebook, self.folder / path)
        return path


def end_kernels(server: Server) -> None:
    """The next notebook should not share the machine with the kernels of this one."""
    for session in server.ask("/api/sessions"):
        server.ask(f"/api/sessions/{session['id']}", "DELETE")


def new_notebook(*sources: str) -> nbformat.NotebookNode:
    """A notebook of these code cells."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return notebook


def places_of(notebook: nbformat.NotebookNode) -> dict[str, int]:
    """Where each cell stands: id -> place, counted from 0."""
    return {cell.id: place for place, cell in enumerate(notebook.cells)}


def open_notebook(page: Page, server: Server, path: str = "") -> None:
    """Open a notebook of the course, or what opens by itself, and wait for its kernel; a page that is not ready in a
    while is loaded again, as people do."""
    address = f"{server.url}/lab/tree/{path}?reset&token={server.token}" if path else server.first
    messages: list[str] = []
    page.on("console", lambda message: messages.append(message.text))
    for patience in (60_000, 180_000, 300_000):
        try:
            page.goto(address, timeout=patience)
            page.wait_for_selector(f"{NOTEBOOK} .jp-Cell", timeout=patience)
            wait_until_idle(page, patience)  # sooner, "run all" is lost
            return
        except TimeoutError:
            page.goto("about:blank")
    pytest.fail(
        f"{address} did not open.\nserver: {server.ask('/api/status')}\nkernels: {server.ask('/api/kernels')}\n"
        f"console: {messages[-20:]}\nlog: {server.log.read_text()[-3000:]}"
    )


def open_beside(page: Page, path: str) -> None:
    """Open another notebook in the same window, as a double click on its name does, and wait for its kernel."""
    page.evaluate("async path => { await window.jupyterapp.commands.execute('docmanager:open', {path}); }", path)
    expect(page.locator(TAB, has_text=path.rpartition("/")[2])).to_be_visible()
    page.wait_for_selector(f"{NOTEBOOK} .jp-Cell", timeout=END_MS)
    wait_until_idle(page)


def wait_until_idle(page: Page, patience_ms: int = END_MS) -> None:
    """Until the kernel of the notebook in front has nothing to do."""
    page.wait_for_selector("text=Python 3 (ipykernel) | Idle", timeout=patience_ms)


def menu(page: Page, name: str, entry: str) -> None:
    """Choose an entry of a menu of the menu bar."""
    page.locator(".lm-MenuBar-itemLabel", has_text=re.compile(f"^{name}$")).click()
    page.locator(".lm-Menu-itemLabel", has_text=re.compile(f"^{re.escape(entry)}$")).click()


def code_cell(page: Page, place: int) -> Locator:
    """The cell at a place of the notebook in front, counted from 0."""
    return page.locator(f'{NOTEBOOK} .jp-Cell[data-windowed-list-index="{place}"]')


def outputs(page: Page, place: int) -> Locator:
    """All that the cell at a place shows."""
    return code_cell(page, place).locator(".jp-OutputArea").first


def live_widget(page: Page, place: int) -> Locator:
    """The widget that the cell at a place shows, without its twin."""
    return outputs(page, place).locator(".jp-OutputArea-output").filter(has=page.locator(LIVE)).first


def prompt(page: Page, place: int) -> Locator:
    """What stands before the cell at a place: its number, a star while it runs or waits, nothing before."""
    return code_cell(page, place).locator(".jp-InputPrompt")


def run_all(page: Page) -> None:
    """Run, Run All Cells; until each has come to its end, without an error."""
    menu(page, "Run", "Run All Cells")
    wait_for_numbers(page, range(page.locator(f"{NOTEBOOK} .jp-Cell").count()))


def run_cells(page: Page, first: int, last: int | None = None) -> None:
    """Run a cell, or those from one place to another, by keys, until each has come to its end, without an error."""
    places = range(first, (first if last is None else last) + 1)
    for place in places:  # the number of a run before would pass for one of this run
        prompt(page, place).evaluate("prompt => { prompt.textContent = ''; }")
    prompt(page, first).click()
    expect(code_cell(page, first)).to_have_class(re.compile("jp-mod-active"))
    for _ in places[:-1]:
        page.keyboard.press("Shift+Enter")
    page.keyboard.press("Control+Enter")
    wait_for_numbers(page, places)


def wait_for_numbers(page: Page, places: Iterable[int]) -> None:
    """Until the code cells at these places have numbers, which cells get when they end, or one of them shows an error;
    then there is none. A folded cell shows no number: its model is asked."""
    page.wait_for_function(
        """([notebook, trouble, places]) => {
            const at = place => document.querySelector(`${notebook} .jp-Cell[data-windowed-list-index="${place}"]`);
            const model = place => window.jupyterapp.shell.currentWidget.content.widgets[place].model;
            const number = place => at(place).querySelector('.jp-InputPlaceholder')
                ? model(place).executionCount : at(place).querySelector('.jp-InputPrompt')?.textContent;
            const ended = place => at(place) && (!at(place).matches('.jp-CodeCell') || /\\d/.test(number(place) ?? ''));
            return places.some(place => at(place)?.querySelector(trouble)) || places.every(ended);
        }""",
        arg=[NOTEBOOK, TROUBLE, list(places)],
        timeout=END_MS,
    )
    no_errors(page, places)


def wait_until_nothing_runs(page: Page) -> None:
    """Until no cell runs or waits. What is sent while a cell ends in an error, the kernel drops with its queue."""
    expect(page.locator(f"{NOTEBOOK} .jp-InputPrompt", has_text="*")).to_have_count(0, timeout=END_MS)
    wait_until_idle(page)


def no_errors(page: Page, places: Iterable[int] = ()) -> None:
    """No cell, or none of these, shows an error; every widget is drawn."""
    shown = [code_cell(page, place) for place in places] or [page.locator(NOTEBOOK)]
    for trouble in (TROUBLE, "text=Error displaying widget"):
        assert [text for area in shown for text in area.locator(trouble).all_text_contents()] == []
