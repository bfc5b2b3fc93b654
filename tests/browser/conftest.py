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

import pytest
from playwright.sync_api import Browser, Page, ViewportSize, expect, sync_playwright

from tests.browser.jupyter import PATIENCE_MS, Server, end_kernels

ROOT = Path(__file__).resolve().parents[2]
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WINDOW: ViewportSize = {"width": 1300, "height": 1000}
expect.set_options(timeout=PATIENCE_MS)  # a busy machine redraws late


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Debian's Chromium, or whichever is there; never one that is downloaded."""
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.fail("no Chromium: apt-get install chromium (Debian), brew install chromium (macOS)")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=list(FLAGS), timeout=PATIENCE_MS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`labkit lab` on a checkout of the notebooks and exercises, in a home that has never seen labkit."""
    folder = tmp_path_factory.mktemp("course")
    for name in ("notebooks", "exercises"):
        shutil.copytree(ROOT / name, folder / name)
    command = [sys.executable, "-m", "labkit", "lab", "--no-browser", "--port", "0"]
    log = folder / "server.log"  # a file: a pipe that nobody reads fills up, and then the server stands still
    with log.open("w") as written:
        apart = {**os.environ, "XDG_DATA_HOME": str(folder)}  # whoever tests has a board of scores, too
        process = subprocess.Popen(command, cwd=folder, env=apart, stderr=written, stdout=written)
    deadline = time.monotonic() + 300
    while not (address := re.search(r"(http://127\.0\.0\.1:\d+/\S*token=(\w+))", log.read_text())):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"labkit lab did not say where it listens:\n{log.read_text()[-2000:]}")
        time.sleep(0.1)
    yield Server(address[1], address[2], folder / "my", log)
    process.terminate()
    try:
        process.wait(120)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def new_window(browser: Browser) -> Page:
    """An empty window."""
    opened = browser.new_context(viewport=WINDOW).new_page()
    opened.set_default_timeout(PATIENCE_MS)
    return opened


@pytest.fixture
def page(browser: Browser, server: Server) -> Iterator[Page]:
    """A new window; the kernels that were started in it end with it."""
    opened = new_window(browser)
    yield opened
    opened.context.close()
    end_kernels(server)
