"""`labkit lab --check`: the main job without a browser, with the real server, the real kernel, every cell of a lab."""

from __future__ import annotations

import ast
import json
import subprocess
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
import psutil
import websocket
from jupyter_core.paths import jupyter_runtime_dir

from labkit.course.server import server
from labkit.course.server.proof import Proof

START_S, SILENCE_S, STOP_S = 90.0, 120.0, 15.0
PROVE = "from labkit.course.server.proof import prove as _prove; _proof = list(_prove())"


def check(notebook: Path, say: Callable[[str], None] = print) -> bool:
    """Start the same server as `labkit lab`, run `notebook` in it, report what worked, and leave nothing running.

    The notebook on disk is not changed. True if every cell ran (those tagged raises-exception may fail), if ranks that
    its kernel starts compute and send what they must, and if every process is gone afterwards.
    Raises RuntimeError, with the server's last words, if the server does not start."""
    with _server(notebook, say) as jupyter:
        good = jupyter.run(notebook, say)
    left = jupyter.left()
    say(f"left running: {', '.join(left) or 'nothing'}")
    return good and not left


class Jupyter:
    """A running server: its process, its address, its token."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, token: str):
        self.process, self.url, self.token = process, url.rstrip("/"), token
        self.family: set[psutil.Process] = set()

    def ask(self, path: str, body: Any = None, method: str | None = None) -> Any:
        """Send one request to the server's REST interface, never through a proxy."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"token {self.token}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}{path}", data, headers, method=method)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=START_S) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def run(self, notebook: Path, say: Callable[[str], None]) -> bool:
        """Run every code cell in a fresh kernel, then the proof in the same kernel."""
        started = time.monotonic()
        content = nbformat.read(notebook, as_version=4)
        kernel_name = content.metadata.get("kernelspec", {}).get("name", "python3")
        root = Path(server.root_of(notebook))
        place = notebook.resolve().relative_to(root).as_posix()
        body = {"path": place, "name": notebook.name, "type": "notebook", "kernel": {"name": kernel_name}}
        session = self.ask("/api/sessions", body)
        channel = Channel(self, session["kernel"]["id"])
        try:
            channel.execute("pass")
            say(f"kernel {kernel_name} up in {time.monotonic() - started:.1f} s")
            good = _cells(content, channel, say)
            return _prove(channel, say) and good
        finally:
            self.family |= set(psutil.Process(self.process.pid).children(recursive=True))
            channel.close()
            self.ask(f"/api/sessions/{session['id']}", method="DELETE")

    def stop(self) -> None:
        """End the server, which ends its kernels, which end their ranks."""
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def left(self) -> list[str]:
        """The names of processes of the server, its kernels and their ranks that still run; these are then killed."""
        _, alive = psutil.wait_procs(list(self.family), timeout=STOP_S)
        names = [f"{process.pid} {process.name()}" for process in alive if process.is_running()]
        for process in alive:
            process.kill()
        return names


class Channel:
    """The connection to a kernel, through the server, in Jupyter's message protocol 5.3."""

    def __init__(self, jupyter: Jupyter, kernel: str):
        address = jupyter.url.replace("http", "ws", 1)
        self.wire = websocket.create_connection(
            f"{address}/api/kernels/{kernel}/channels?token={jupyter.token}", timeout=SILENCE_S, http_no_proxy=["*"]
        )
        self.session = uuid.uuid4().hex

    def execute(self, code: str, expression: str = "") -> tuple[str | None, Any]:
        """Run one cell. Returns its error in one line, or None; and the value of `expression` as plain data."""
        ident = uuid.uuid4().hex
        header = {"msg_id": ident, "msg_type": "execute_request", "session": self.session, "username": ""}
        ask = {"value": expression} if expression else {}
        content = {"code": code, "allow_stdin": False, "stop_on_error": False, "user_expressions": ask}
        message = {"header": {**header, "version": "5.3"}, "parent_header": {}, "metadata": {}, "content": content}
        self.wire.send(json.dumps({**message, "channel": "shell"}))
        idle, reply = False, None
        while not (idle and reply):
            try:
                raw = self.wire.recv()
            except websocket.WebSocketTimeoutException:
                return f"nothing was heard for {SILENCE_S:g} s", None
            if not isinstance(raw, str) or not raw:
                continue  # a widget's binary buffers
            heard = json.loads(raw)
            state = heard["content"].get("execution_state")
            if state in ("dead", "restarting", "autorestarting"):
                return "the kernel died", None
            if heard["parent_header"].get("msg_id") == ident:
                idle = idle or state == "idle"
                reply = heard["content"] if heard["msg_type"] == "execute_reply" else reply
        if reply["status"] != "ok":
            return f"{reply.get('ename', reply['status'])}: {reply.get('evalue', '')}".splitlines()[0], None
        value = reply["user_expressions"].get("value", {}).get("data", {}).get("text/plain")
        return None, ast.literal_eval(value) if value else None

    def close(self) -> None:
        """Close the connection; the kernel goes on."""
        self.wire.close()


def _cells(content: Any, channel: Channel, say: Callable[[str], None]) -> bool:
    cells = [cell for cell in content.cells if cell.cell_type == "code" and cell.source.strip()]
    failed, started = 0, time.monotonic()
    for number, cell in enumerate(cells, 1):
        begun = time.monotonic()
        error, _ = channel.execute(cell.source)
        expected = "raises-exception" in cell.metadata.get("tags", [])
        failed += bool(error) and not expected
        first = cell.source.strip().splitlines()[0]
        word = "ok" if not error else "raises, as it should" if expected else "FAILED"
        say(f"  cell {number:2d}  {time.monotonic() - begun:5.2f} s  {word:6s}  {first[:70]}")
        if error and not expected:
            say(f"           {error}")
    say(f"{len(cells) - failed} of {len(cells)} code cells ran well, in {time.monotonic() - started:.1f} s")
    return not failed


def _prove(channel: Channel, say: Callable[[str], None]) -> bool:
    error, value = channel.execute(PROVE, "_proof")
    if error:
        say(f"the ranks could not be tried: {error}")
        return False
    proof = Proof(*value)
    for sentence in proof.sentences():
        say(sentence)
    return proof.holds


@contextmanager
def _server(notebook: Path, say: Callable[[str], None]) -> Iterator[Jupyter]:
    started = time.monotonic()
    with tempfile.TemporaryFile() as log:  # not a pipe, which would fill up while nobody reads it
        say(f"starting JupyterLab's server for {notebook.name}")
        command = server.command(notebook, port=0, browser=False)
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=server.environment(),
        )
        jupyter = Jupyter(process, "", "")
        try:
            jupyter.url, jupyter.token = _address(jupyter, log)
            say(f"server up in {time.monotonic() - started:.1f} s, on this machine only: {jupyter.url}")
            yield jupyter
        finally:
            jupyter.stop()


def _address(jupyter: Jupyter, log: Any) -> tuple[str, str]:
    """The server's address and token, from the file that it writes for its own user only."""
    note = Path(jupyter_runtime_dir()) / f"jpserver-{jupyter.process.pid}.json"
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and jupyter.process.poll() is None:
        try:
            settings = json.loads(note.read_text())
            jupyter.url, jupyter.token = settings["url"].rstrip("/"), settings["token"]
            jupyter.ask("/api/status")
            return jupyter.url, jupyter.token
        except (OSError, ValueError):  # not written yet, half written, not listening yet
            time.sleep(0.05)
    log.seek(0)
    words = log.read().decode(errors="replace").splitlines()[-8:]
    raise RuntimeError("JupyterLab's server did not start:\n" + "\n".join(words))
