"""What somebody does in JupyterLab, step by step."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, TimeoutError, expect

from labkit.view.units import parsed, value_text


def ask(address: tuple[str, str, Path], path: str, method: str = "GET") -> Any:
    """One request to the server, past any proxy."""
    request = urllib.request.Request(address[0] + path, headers={"Authorization": f"token {address[1]}"}, method=method)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def open_lab(page: Page, address: tuple[str, str, Path], name: str) -> None:
    """Open a notebook and wait for its kernel; a page that is not ready in a while is loaded again, as people do."""
    url, token, log = address
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    for patience in (30_000, 60_000, 60_000):
        try:
            page.goto(f"{url}/lab/tree/notebooks/{name}?reset&token={token}")
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


def no_errors(page: Page) -> None:
    """No cell shows an error, and every widget is drawn."""
    assert page.locator('[data-mime-type="application/vnd.jupyter.error"]').count() == 0
    assert page.locator('[data-mime-type="application/vnd.jupyter.stderr"]').count() == 0
    assert page.locator("text=Error displaying widget").count() == 0


def clear(page: Page) -> None:
    """Edit, Clear Outputs of All Cells."""
    page.locator(".lm-MenuBar-itemLabel", has_text=re.compile("^Edit$")).click()
    page.locator(".lm-Menu-itemLabel", has_text=re.compile("^Clear Outputs of All Cells$")).click()


def asked(page: Page, question: str) -> Locator:
    """The live widget that asks for a prediction with this question."""
    return page.locator(".jp-OutputArea-output", has_text=question).filter(has=page.locator("input")).first


def predict(page: Page, question: str, typed: str, unit: str) -> Locator:
    """Type a prediction, press the button, and see it taken."""
    guess = asked(page, question)
    guess.scroll_into_view_if_needed()
    guess.locator("input").first.fill(typed)
    guess.get_by_role("button", name="commit").click()
    expect(guess).to_contain_text(f"you predict {value_text(parsed(typed, unit), unit)}")
    return guess
