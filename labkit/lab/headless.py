"""`labkit lab --check`: the main job without a browser. The real server, the real kernel, every cell of a lab."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request
import uuid
from pathlib import Path
from typing import Any

import nbformat
import websocket
from rich.console import Console

START_S, CELL_S = 90.0, 120.0


def check(notebook: Path, console: Console | None = None) -> bool:
    """Start JupyterLab's server on a free port of this machine, run `notebook` in it, say what worked, end it all.

    The file on disk is not changed. Returns whether every cell ran without an error."""
    console = console or Console()
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1"]
    command += ["--ServerApp.port=0", f"--ServerApp.root_dir={notebook.parent}"]
    started = time.monotonic()
    server = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, start_new_session=True
    )
    try:
        url, token = _address(server)
        console.print(f"server up in {time.monotonic() - started:.1f} s")
        return _run(notebook, url, token, console)
    finally:
        server.terminate()  # the server ends its kernels, and each kernel's end is the end of its ranks
        try:
            server.wait(15)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _address(server: subprocess.Popen[str]) -> tuple[str, str]:
    assert server.stderr is not None
    seen = []
    deadline = time.monotonic() + START_S
    for line in server.stderr:
        seen.append(line)
        found = re.search(r"(http://127\.0\.0\.1:\d+)/\S*token=(\w+)", line)
        if found:
            return found[1], found[2]
        if time.monotonic() > deadline:
            break
    raise RuntimeError("JupyterLab's server did not start:\n" + "".join(seen[-8:]))


def _run(notebook: Path, url: str, token: str, console: Console) -> bool:
    body = {"path": notebook.name, "name": notebook.name, "type": "notebook", "kernel": {"name": "python3"}}
    session = _ask(f"{url}/api/sessions", token, body)
    kernel = session["kernel"]["id"]
    address = f"{url.replace('http', 'ws', 1)}/api/kernels/{kernel}/channels?token={token}"
    channel = websocket.create_connection(address, timeout=CELL_S)
    cells = [cell for cell in nbformat.read(notebook, as_version=4).cells if cell.cell_type == "code"]
    failed, started = 0, time.monotonic()
    try:
        for number, cell in enumerate(cells, 1):
            error = _execute(channel, cell.source)
            expected = "raises-exception" in cell.metadata.get("tags", [])
            if error and not expected:
                failed += 1
                first = cell.source.strip().splitlines()[0]
                console.print(f"cell {number} failed: {first}\n  {error}", highlight=False, markup=False)
    finally:
        channel.close()
        _ask(f"{url}/api/sessions/{session['id']}", token, method="DELETE")
    seconds = time.monotonic() - started
    console.print(f"{len(cells) - failed} of {len(cells)} code cells of {notebook.name} ran well in {seconds:.1f} s")
    return failed == 0


def _execute(channel: websocket.WebSocket, code: str) -> str | None:
    """Run one cell; the error's name and message, or None."""
    ident = uuid.uuid4().hex
    header = {"msg_id": ident, "msg_type": "execute_request", "username": "", "session": ident, "version": "5.3"}
    content = {"code": code, "silent": False, "store_history": True, "allow_stdin": False, "stop_on_error": False}
    message = {
        "header": header,
        "parent_header": {},
        "metadata": {},
        "content": content,
        "channel": "shell",
        "buffers": [],
    }
    channel.send(json.dumps(message))
    error, idle, replied = None, False, False
    while not (idle and replied):
        raw = channel.recv()
        if isinstance(raw, bytes):
            continue  # a widget's binary buffers
        got = json.loads(raw)
        if got["parent_header"].get("msg_id") != ident:
            continue
        if got["msg_type"] == "status":
            idle = got["content"]["execution_state"] == "idle"
        elif got["msg_type"] == "execute_reply":
            replied = True
            if got["content"]["status"] == "error":
                error = f"{got['content']['ename']}: {got['content']['evalue']}"
    return error


def _ask(url: str, token: str, body: Any = None, method: str | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"token {token}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers, method=method), timeout=START_S) as answer:
        text = answer.read()
    return json.loads(text) if text else None
