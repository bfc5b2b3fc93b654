"""`labkit lab --check`, on a real server with real kernels."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import nbformat
import psutil
import pytest

from labkit.course.server import headless
from labkit.course.server.headless import check
from labkit.course.server.server import command, root_of
from tests.waiting import LONG_S

ROOT = Path(__file__).resolve().parents[3]
LAB = ROOT / "notebooks" / "00_doctor_and_first_cluster.ipynb"


def write(path: Path, *sources: str, tags: tuple[str, ...] = ()) -> Path:
    """A notebook of code cells; `tags` go on the last one."""
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    cells[-1].metadata["tags"] = list(tags)
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


class Checked(NamedTuple):
    """A check of a good notebook; and of a bad one, which is run before it in the same server."""

    path: Path
    before: bytes
    good: bool
    said: list[str]
    bad: list[bool]
    said_of_bad: list[str]


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("notebooks")
    cells = ("import labkit\ncluster = labkit.Cluster(2, device='cpu')", "input_is = 1\nprint(input_is)", "1 / 0")
    path = write(folder / "small.ipynb", *cells, tags=("raises-exception",))
    bad = write(folder / "bad.ipynb", "undefined_name", "import os; os._exit(1)")
    seen = Checked(path, path.read_bytes(), False, [], [], [])

    def run(self, notebook, say, run=headless.Jupyter.run):
        seen.bad.append(run(self, bad, seen.said_of_bad.append))
        return run(self, notebook, say)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(headless.Jupyter, "run", run)
        good = check(path, seen.said.append)
    bad.unlink()
    return seen._replace(good=good)


@pytest.mark.slow
def test_a_notebook_is_run_proved_and_left_as_it_was(checked):
    """Would catch a check that writes into the notebook, miscounts cells, or leaves a server, kernel or rank behind."""
    assert checked.good
    text = "\n".join(checked.said)
    assert "3 of 3 code cells ran well" in text
    assert "raises, as it should" in text
    assert "server up in" in text
    assert "each rank sent 6000, the law says 6000" in text
    assert checked.said[-1] == "left running: nothing"
    path = checked.path
    assert path.read_bytes() == checked.before
    assert {left.name for left in path.parent.iterdir()} <= {path.name, ".ipynb_checkpoints"}
    assert not [each for each in psutil.Process().children(recursive=True) if "jupyterlab" in each.cmdline()]


@pytest.mark.slow
def test_a_failing_cell_and_a_dead_kernel_fail_the_check(checked):
    """Would catch a check that says yes to everything, and one that waits for ever for a kernel that is gone."""
    assert checked.bad == [False]
    text = "\n".join(checked.said_of_bad)
    assert "NameError: name 'undefined_name' is not defined" in text
    assert "the kernel died" in text
    assert "0 of 2 code cells ran well" in text


@pytest.mark.rest
@pytest.mark.slow
def test_a_check_that_is_terminated_takes_its_server_along(tmp_path):
    """Would catch a server that outlives the check because nobody told it."""
    path = write(tmp_path / "long.ipynb", "import time; time.sleep(300)")
    process = subprocess.Popen([sys.executable, "-m", "labkit", "lab", str(path), "--check"], stdout=subprocess.PIPE)
    try:
        assert any(b"kernel" in line for line in process.stdout)
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 2, "a server and a kernel are running"
        process.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(family, timeout=LONG_S)
        for left in alive:
            left.kill()
        assert not alive
        assert process.wait(LONG_S) == 143
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_server_that_cannot_start_says_why(tmp_path, monkeypatch):
    """Would catch a wait for a server that has ended (here it would be for days), and a failure without its reason."""
    path = write(tmp_path / "small.ipynb", "1")
    monkeypatch.setattr(headless, "START_S", 1e6)
    monkeypatch.setattr(headless.server, "command", lambda *_, **__: [sys.executable, "-c", "exit('no such luck')"])
    with pytest.raises(RuntimeError, match="no such luck"):
        check(path, lambda _: None)


def test_the_server_listens_on_this_machine_only_and_shows_the_folder_above_the_notebooks():
    """Would catch an option that opens the server to others, or a page without the exercises next to the labs."""
    line = command(LAB, port=1234)
    assert "--ServerApp.ip=127.0.0.1" in line
    assert "--ServerApp.port=1234" in line
    assert f"--ServerApp.root_dir={ROOT}" in line
    assert "--LabApp.default_url=/lab/tree/notebooks/00_doctor_and_first_cluster.ipynb" in line
    assert root_of(Path("somewhere/mine.ipynb")) == Path("somewhere").resolve()
