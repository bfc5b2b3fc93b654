"""`labkit lab --check`, on a real server with real kernels."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest

from labkit.lab.headless import check
from labkit.lab.server import command, root_of

ROOT = Path(__file__).resolve().parents[2]
LAB = ROOT / "notebooks" / "00_doctor_and_first_cluster.ipynb"


def write(path: Path, *sources: str, tags: tuple[str, ...] = ()) -> Path:
    """A notebook of code cells; `tags` go on the last one."""
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    cells[-1].metadata["tags"] = list(tags)
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


@pytest.mark.slow
def test_a_notebook_is_run_proved_and_left_as_it_was(tmp_path):
    """Would catch a check that writes into the notebook, miscounts cells, or leaves a server, kernel or rank behind."""
    cells = ("import labkit\ncluster = labkit.Cluster(2)", "input_is = 1\nprint(input_is)", "1 / 0")
    path = write(tmp_path / "small.ipynb", *cells, tags=("raises-exception",))
    before, said = path.read_bytes(), list[str]()
    assert check(path, said.append)
    text = "\n".join(said)
    assert "3 of 3 code cells ran well" in text
    assert "raises, as it should" in text
    assert "server up in" in text
    assert "each rank sent 6000, the law says 6000" in text
    assert said[-1] == "left running: nothing"
    assert path.read_bytes() == before
    assert [each for each in tmp_path.iterdir() if each != path and each.name != ".ipynb_checkpoints"] == []
    assert not [each for each in psutil.Process().children(recursive=True) if "jupyterlab" in each.cmdline()]


@pytest.mark.slow
def test_a_failing_cell_and_a_dead_kernel_fail_the_check(tmp_path):
    """Would catch a check that says yes to everything, and one that waits for ever for a kernel that is gone."""
    path = write(tmp_path / "bad.ipynb", "undefined_name", "import os; os._exit(1)")
    said = list[str]()
    assert not check(path, said.append)
    text = "\n".join(said)
    assert "NameError: name 'undefined_name' is not defined" in text
    assert "the kernel died" in text
    assert "0 of 2 code cells ran well" in text


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
        _, alive = psutil.wait_procs(family, timeout=20)
        for left in alive:
            left.kill()
        assert not alive
        assert process.wait(20) == 143
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_server_that_cannot_start_says_why(tmp_path, monkeypatch):
    """Would catch a wait of 90 seconds for a server that has ended, and a failure without its reason."""
    path = write(tmp_path / "small.ipynb", "1")
    import labkit.lab.headless as headless

    monkeypatch.setattr(headless.server, "command", lambda *_, **__: [sys.executable, "-c", "exit('no such luck')"])
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="no such luck"):
        check(path, lambda _: None)
    assert time.monotonic() - started < 20


def test_the_server_listens_on_this_machine_only_and_shows_the_folder_above_the_notebooks():
    """Would catch an option that opens the server to others, or a page without the exercises next to the labs."""
    line = command(LAB, port=1234)
    assert "--ServerApp.ip=127.0.0.1" in line
    assert "--ServerApp.port=1234" in line
    assert f"--ServerApp.root_dir={ROOT}" in line
    assert "--LabApp.default_url=/lab/tree/notebooks/00_doctor_and_first_cluster.ipynb" in line
    assert root_of(Path("somewhere/mine.ipynb")) == Path("somewhere").resolve()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_lab_00_works_in_the_server_that_make_lab_starts():
    """Would catch whatever breaks the first thing that a new user does."""
    done = subprocess.run([sys.executable, "-m", "labkit", "lab", "--check"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "left running: nothing" in done.stdout
