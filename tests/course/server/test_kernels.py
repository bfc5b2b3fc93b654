"""Kernels of `labkit lab`: torch is fetched from the start for a notebook that will need it, and for no other."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path
from uuid import uuid4

import nbformat
import psutil
import pytest
from jupyter_client.asynchronous import AsyncKernelClient
from jupyter_client.kernelspec import KernelSpecManager
from traitlets.config import Config

from labkit.course.server.kernels import LabKernels, uses_labkit
from labkit.course.server.server import command
from tests.cases import cases
from tests.waiting import LONG_S

EXTENSION_AGAIN = "%load_ext labkit\nimport labkit"


def write(path: Path, *sources: str) -> Path:
    """A notebook of code cells below a heading that speaks of labkit."""
    cells = [nbformat.v4.new_markdown_cell("import labkit"), *map(nbformat.v4.new_code_cell, sources)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


@cases(
    ("sources", "uses"),
    [
        (("n_ranks = 4", "%load_ext labkit\nimport torch"), True),
        (("import labkit as lk",), True),
        (("if True:\n    from labkit.comm import ring",), True),
        (("import torch\nprint('import labkit')",), False),
        (("import labkitchen",), False),
        ((), False),
    ],
)
def test_a_notebook_uses_labkit_if_a_cell_loads_it(tmp_path, sources, uses):
    """Would catch a process of 200 MB that is started for a notebook which only speaks of labkit."""
    assert uses_labkit(write(tmp_path / "a.ipynb", *sources)) == uses


@cases("text", ["", "{}", '{"cells": 3}', "not json", '{"worksheets": []}'])
def test_a_file_that_is_no_notebook_uses_nothing(tmp_path, text):
    """Would catch a kernel that does not start because its notebook is empty, old or not there."""
    (tmp_path / "a.ipynb").write_text(text)
    assert not uses_labkit(tmp_path / "a.ipynb")
    assert not uses_labkit(tmp_path / "none.ipynb")


def test_the_server_of_the_labs_has_these_kernels():
    """Would catch a manager that nobody uses."""
    assert "--ServerApp.kernel_manager_class=labkit.course.server.kernels.LabKernels" in command(Path("a.ipynb"))


async def begun(notebook: Path, fetches: bool) -> tuple[list[int], list[int], list[str]]:
    """Zygotes below a fresh kernel of this notebook before its first cell, those after `EXTENSION_AGAIN`, and what that
    printed. The kernel is ended then. If it `fetches` torch for itself, that is waited for."""
    start = os.path.join(tempfile.gettempdir(), f"kernel-{uuid4().hex}")
    files = Config({"KernelManager": {"transport": "ipc", "ip": start}})
    kernels = LabKernels(config=files, kernel_spec_manager=KernelSpecManager())
    name = await kernels.start_kernel(env={**os.environ, "JPY_SESSION_NAME": str(notebook)})
    manager = kernels.get_kernel(name)
    client: AsyncKernelClient = manager.client()
    client.start_channels()
    printed: list[str] = []

    def hear(message: dict) -> None:
        printed.extend(str(message["content"]) for _ in "x" if message["msg_type"] in ("stream", "display_data"))

    try:
        await client.wait_for_ready(timeout=LONG_S)
        before = zygotes(manager.provisioner.pid)
        while await has_torch(client) != fetches:
            await asyncio.sleep(0.1)
        await client.execute_interactive(EXTENSION_AGAIN, timeout=LONG_S, output_hook=hear)
        after = zygotes(manager.provisioner.pid)
    finally:
        client.stop_channels()
        await kernels.shutdown_kernel(name, now=True)
    return before, after, printed


async def has_torch(client: AsyncKernelClient) -> bool:
    """True if the kernel has torch, or is about to have it. No cell has asked for it."""
    asked = client.execute("import sys", silent=True, user_expressions={"torch": "'torch' in sys.modules"})
    while True:
        reply = await client.get_shell_msg(timeout=LONG_S)
        if reply["parent_header"]["msg_id"] == asked:
            return reply["content"]["user_expressions"]["torch"]["data"]["text/plain"] == "True"


def zygotes(kernel: int) -> list[int]:
    """The processes below a kernel that import torch for ranks."""
    below = psutil.Process(kernel).children(recursive=True)
    return [process.pid for process in below if "labkit.launch.zygote" in " ".join(process.cmdline())]


@pytest.mark.slow
def test_torch_is_fetched_from_the_start_of_a_kernel_and_goes_with_it(tmp_path):
    """Would catch a zygote that only begins with the first cell, a kernel that begins its own import there, a second
    zygote, words of an extension in the cell's output (which nbval compares), and one that outlives the kernel."""
    before, after, printed = asyncio.run(begun(write(tmp_path / "lab.ipynb", EXTENSION_AGAIN), True))
    assert len(before) == 1
    assert after == before
    assert printed == []
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in after if psutil.pid_exists(pid)], timeout=LONG_S)
    assert alive == []
    before, after, _ = asyncio.run(begun(write(tmp_path / "other.ipynb", "import torch"), False))
    assert (before, len(after)) == ([], 1)
