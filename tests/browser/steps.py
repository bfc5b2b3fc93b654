"""What somebody does in JupyterLab, step by step."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import nbformat
import pytest
from playwright.sync_api import Locator, Page, TimeoutError, expect


def ask(address: tuple[str, str, Path], path: str, method: str = "GET") -> Any:
    """One request to the server, past any proxy."""
    request = urllib.request.Request(address[0] + path, headers={"Authorization": f"token {address[1]}"}, method=method)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def open_lab(page: Page, address: tuple[str, str, Path], name: str) -> None:
    """Open a notebook (of a lab, unless a folder is said) and wait for its kernel; a page that is not ready in a while
    is loaded again, as people do."""
    url, token, log = address
    name = name if "/" in name else f"notebooks/{name}"
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    for patience in (30_000, 60_000, 60_000):
        try:
            page.goto(f"{url}/lab/tree/{name}?reset&token={token}")
            page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=patience)
            page.wait_for_selector("text=Python 3 (ipykernel) | Idle", timeout=patience)  # sooner, "run all" is lost
            return
        except TimeoutError:
            page.goto("about:blank")
    pytest.fail(
        f"{name} did not open.\nserver: {ask(address, '/api/status')}\nkernels: {ask(address, '/api/kernels')}\n"
        f"console: {said[-20:]}\nlog: {log.read_text()[-3000:]}"
    )


def run_all(page: Page) -> None:
    """Run, Run All Cells."""
    page.locator(".lm-MenuBar-itemLabel", has_text=re.compile("^Run$")).click()
    page.locator(".lm-Menu-itemLabel", has_text=re.compile("^Run All Cells$")).click()


def wait_for_the_end(page: Page, words: str) -> None:
    """Until a cell has printed these words."""
    page.wait_for_function(
        "words => [...document.querySelectorAll('.jp-OutputArea')].some(each => each.textContent.includes(words))",
        arg=words,
        timeout=240_000,
    )


def wait_for_every_cell(page: Page) -> None:
    """Until no cell runs or waits. What is sent while a cell ends in an error, the kernel drops with its queue."""
    page.wait_for_function(
        "() => ![...document.querySelectorAll('.jp-InputPrompt')].some(each => each.textContent.includes('*'))",
        timeout=240_000,
    )


def no_errors(page: Page) -> None:
    """No cell shows an error, and every widget is drawn."""
    assert page.locator('[data-mime-type="application/vnd.jupyter.error"]').count() == 0
    assert page.locator('[data-mime-type="application/vnd.jupyter.stderr"]').count() == 0
    assert page.locator("text=Error displaying widget").count() == 0


def clear(page: Page) -> None:
    """Edit, Clear Outputs of All Cells."""
    page.locator(".lm-MenuBar-itemLabel", has_text=re.compile("^Edit$")).click()
    page.locator(".lm-Menu-itemLabel", has_text=re.compile("^Clear Outputs of All Cells$")).click()


def run_through(page: Page, address: tuple[str, str, Path], name: str, *ends: str) -> None:
    """Open a lab, clear it, run all cells, and wait until each of `ends` is printed; there is no error."""
    open_lab(page, address, name)
    clear(page)
    run_all(page)
    for words in ends:
        wait_for_the_end(page, words)
    no_errors(page)


def without_its_end(address: tuple[str, str, Path], stem: str) -> str:
    """A copy of a lab whose last cell closes no cluster, so that its widgets can run the ranks again: its name."""
    folder = address[2].parent / "notebooks"
    notebook = nbformat.read(folder / f"{stem}.ipynb", 4)
    assert "cluster.close()" in notebook.cells.pop().source
    nbformat.write(notebook, folder / f"{stem}_open.ipynb")
    return f"{stem}_open.ipynb"


def widget(page: Page, words: str, part: str = ".noUi-handle") -> Locator:
    """The live widget with these words and such a part (a slider's handle, unless said), in view."""
    found = page.locator(".jp-OutputArea-output", has_text=words).filter(has=page.locator(part)).first
    found.scroll_into_view_if_needed()
    return found


def enter(field: Locator, words: str) -> None:
    """Type words into a field, and press Enter."""
    field.fill(words)
    field.press("Enter")


def predict(page: Page, question: str, typed: str, said: str) -> Locator:
    """Type a prediction, press the button, and see what the widget says then."""
    guess = widget(page, question, "input")
    guess.locator("input").first.fill(typed)
    guess.get_by_role("button", name="commit").click()
    expect(guess).to_contain_text(said)
    return guess
