"""A real Chromium in a real JupyterLab: what somebody who opens the labs for the first time sees and does."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from playwright.sync_api import Browser, Page, TimeoutError, expect, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's Chromium, or whichever is there; never one that is downloaded."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.fail("no Chromium: apt-get install chromium (Debian), brew install chromium (macOS)")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> Iterator[tuple[str, str, Path]]:
    """`labkit lab` on a copy of the notebooks, and a small one to be stopped in; its address, token and log."""
    folder = tmp_path_factory.mktemp("course")
    shutil.copytree(ROOT / "notebooks", folder / "notebooks")
    waits = (
        "def waits(group):\n    if group.rank == 0:\n        time.sleep(600)\n    group.barrier()\n\ncluster.run(waits)"
    )
    cells = [
        "import time, torch, labkit\ncluster = labkit.Cluster(3)\ncluster.state['k'] = 5\nbefore = cluster.pids",
        waits,
        "total = cluster.run(lambda g: g.all_reduce(torch.ones(1)).item())[0].value\n"
        "print('after the stop:', total, cluster.state['k'], cluster.pids == before)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, folder / "notebooks" / "stop.ipynb")
    command = [sys.executable, "-m", "labkit", "lab", "--no-browser", "--port", "0"]
    log = folder / "server.log"  # a file: a pipe that nobody reads fills up, and then the server stands still
    with log.open("w") as written:
        server = subprocess.Popen(command, cwd=folder, stderr=written, stdout=written)
    deadline = time.monotonic() + 60
    while not (found := re.search(r"(http://127\.0\.0\.1:\d+)/\S*token=(\w+)", log.read_text())):
        if server.poll() is not None or time.monotonic() > deadline:
            server.kill()
            pytest.fail(f"labkit lab did not say where it listens:\n{log.read_text()[-2000:]}")
        time.sleep(0.1)
    yield found[1], found[2], log
    server.terminate()
    server.wait(20)


@pytest.fixture
def page(browser: Browser, address: tuple[str, str, Path]) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1300, "height": 1000})
    opened = context.new_page()
    opened.set_default_timeout(60_000)
    yield opened
    context.close()
    for session in ask(address, "/api/sessions"):  # the next lab should not share the machine with this one's kernel
        ask(address, f"/api/sessions/{session['id']}", "DELETE")


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
    page.locator(".lm-MenuBar-itemLabel", has_text=re.compile("^Run$")).click()
    page.locator(".lm-Menu-itemLabel", has_text=re.compile("^Run All Cells$")).click()


def wait_for_the_end(page: Page, words: str) -> None:
    page.wait_for_function(
        "words => [...document.querySelectorAll('.jp-OutputArea')].some(each => each.textContent.includes(words))",
        arg=words,
        timeout=120_000,
    )


def no_errors(page: Page) -> None:
    assert page.locator('[data-mime-type="application/vnd.jupyter.error"]').count() == 0
    assert page.locator('[data-mime-type="application/vnd.jupyter.stderr"]').count() == 0
    assert page.locator("text=Error displaying widget").count() == 0


def clear(page: Page) -> None:
    page.locator(".lm-MenuBar-itemLabel", has_text=re.compile("^Edit$")).click()
    page.locator(".lm-Menu-itemLabel", has_text=re.compile("^Clear Outputs of All Cells$")).click()


def test_lab_00_runs_and_its_slider_moves_the_picture(page, address, tmp_path):
    """Would catch a lab that works in papermill only, and a widget that is text."""
    open_lab(page, address, "00_doctor_and_first_cluster.ipynb")
    clear(page)
    run_all(page)
    wait_for_the_end(page, "nothing is left running")
    no_errors(page)
    handle = page.locator(".noUi-handle").first
    handle.scroll_into_view_if_needed()
    output = page.locator(".jp-OutputArea-output", has=handle).first
    before = output.inner_html()
    handle.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function("([node, before]) => node.innerHTML !== before", arg=[output.element_handle(), before])
    expect(output).to_contain_text("2,097,152 bytes")
    picture = page.screenshot(path=tmp_path / "lab00.png")
    assert len(picture) > 20_000


def test_lab_03_runs_and_its_film_steps_by_button_and_by_key(page, address):
    """Would catch an anywidget that needs the network, and arrow keys that leave the cell."""
    open_lab(page, address, "03_collectives.ipynb")
    clear(page)
    run_all(page)
    wait_for_the_end(page, "nothing is left running")
    no_errors(page)
    film = page.locator(".lk-film").first
    film.scroll_into_view_if_needed()
    expect(film).to_contain_text("step 0 of 6")
    film.get_by_label("next step").click()
    expect(film).to_contain_text("step 1 of 6")
    expect(film).to_contain_text("before step 1 of 6")
    film.focus()
    page.keyboard.press("ArrowRight")
    expect(film).to_contain_text("step 2 of 6")
    page.keyboard.press("End")
    expect(film).to_contain_text("the end")
    explorer = page.locator(".jp-OutputArea-output", has_text="alpha, us").last
    explorer.scroll_into_view_if_needed()
    explorer.locator(".noUi-handle").first.focus()
    page.keyboard.press("ArrowRight")
    expect(explorer).to_contain_text("all_reduce on 5 ranks")


def test_lab_02_runs_and_takes_a_prediction(page, address):
    """Would catch a prediction that cannot be typed."""
    open_lab(page, address, "02_point_to_point.ipynb")
    clear(page)
    run_all(page)
    wait_for_the_end(page, "nothing is left running")
    no_errors(page)
    guess = page.locator(".jp-OutputArea-output", has_text="Bytes that each rank sends?").first
    guess.scroll_into_view_if_needed()
    guess.locator("input").first.fill("4000")
    guess.get_by_role("button", name="commit").click()
    expect(guess).to_contain_text("you predict 4,000 B")


def test_the_stop_button_stops_a_running_cell_and_the_next_one_works(page, address):
    """Would catch a stop that takes the ranks, or the kernel, with it."""
    open_lab(page, address, "stop.ipynb")
    run_all(page)
    wait_for_the_end(page, "3 ranks on")
    page.wait_for_timeout(2500)
    page.locator('[data-command="notebook:interrupt-kernel"]').first.click()
    wait_for_the_end(page, "KeyboardInterrupt")
    wait_for_the_end(page, "All ranks are still there")
    page.locator(".jp-CodeCell").nth(2).click()
    page.keyboard.press("Shift+Enter")
    wait_for_the_end(page, "after the stop: 3.0 [5, 5, 5] True")
