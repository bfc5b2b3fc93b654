"""One Chromium and one `labkit lab` for all tests of the browser; a page for each."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.browser.steps import ask

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
expect.set_options(timeout=60_000)  # a busy machine redraws late


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Debian's Chromium, or whichever is there; never one that is downloaded."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.fail("no Chromium: apt-get install chromium (Debian), brew install chromium (macOS)")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture(scope="package")
def address(tmp_path_factory) -> Iterator[tuple[str, str, Path]]:
    """`labkit lab` on a copy of the notebooks, and a small one to be stopped in; its address, token and log."""
    folder = tmp_path_factory.mktemp("course")
    for each in ("notebooks", "exercises"):
        shutil.copytree(ROOT / each, folder / each)
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
        apart = {**os.environ, "XDG_DATA_HOME": str(folder)}  # whoever tests has a board of scores, too
        server = subprocess.Popen(command, cwd=folder, env=apart, stderr=written, stdout=written)
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
