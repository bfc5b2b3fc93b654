"""Every lab runs from top to bottom, at 2 and at 4 ranks, and its stored outputs are what a run gives.

With `--long` the labs run as they do for a person, with quick=False."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LABS = sorted(ROOT.glob("notebooks/[0-9]*.ipynb"))


def papermill(lab: Path, n_ranks: int, device: str, quick: bool) -> list[str]:
    """The command that runs a lab and leaves what it gives in out.ipynb."""
    parameters = {"n_ranks": n_ranks, "device": device, "quick": quick}
    given = [word for name, value in parameters.items() for word in ("-p", name, str(value))]
    limit = str(120 if quick else 900)  # seconds of a cell
    more = ["--kernel", "python3", "--execution-timeout", limit, "--no-progress-bar"]
    return [sys.executable, "-m", "papermill", str(lab), "out.ipynb", *given, *more]


def nbval(lab: Path) -> list[str]:
    """The command that runs a lab and compares every cell that does not opt out with what is stored."""
    plain = ["-q", "-p", "no:cacheprovider", "-p", "no:timeout", "-c", "/dev/null"]
    return [sys.executable, "-m", "pytest", "--nbval", *plain, str(lab)]


@pytest.fixture(scope="session")
def lab_runs(request, tmp_path_factory):
    """(lab, ranks, device), without ranks and device for nbval -> a run in a folder of its own, and the folder.

    All that this session asks for are begun with the first, two at a time: half of a lab's run is waiting."""
    quick, pool, begun = not request.config.getoption("--long"), ThreadPoolExecutor(2), {}
    for item in request.session.items:
        if "lab_runs" not in item.fixturenames or item.get_closest_marker("skip"):
            continue
        given = item.callspec.params
        command = papermill(**given, quick=quick) if "n_ranks" in given else nbval(**given)
        folder = tmp_path_factory.mktemp(given["lab"].stem)
        how = {"cwd": folder, "capture_output": True, "text": True, "timeout": 600 if quick else 3600}
        key = given["lab"], given.get("n_ranks"), given.get("device")
        begun[key] = pool.submit(subprocess.run, command, **how), folder
    yield begun
    pool.shutdown(cancel_futures=True)


@pytest.mark.slow
@pytest.mark.timeout(3600)  # a cell has less; labs take 15 to 60 s on a quiet machine (benchmarks/labs.py)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("n_ranks", [2, 4])
@pytest.mark.parametrize("lab", LABS, ids=lambda path: path.stem)
def test_every_lab_runs(lab, n_ranks, device, lab_runs):
    """Would catch a cell that only works with the number of ranks, or on the device, that it was written for."""
    run, folder = lab_runs[lab, n_ranks, device]
    done = run.result()
    assert done.returncode == 0, done.stderr[-3000:]
    printed = json.dumps(json.loads((folder / "out.ipynb").read_text())["cells"])
    assert "nothing is left running" in printed
    assert f"{n_ranks} ranks on" in printed


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("lab", LABS, ids=lambda path: path.stem)
def test_stored_outputs_are_what_a_run_gives(lab, lab_runs):
    """Would catch numbers in a lab that nobody can reproduce."""
    done = lab_runs[lab, None, None][0].result()
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("lab", LABS, ids=lambda path: path.stem)
def test_every_lab_has_the_ten_steps_and_its_parameters(lab):
    """Would catch a lab without a prediction, a parity row or a word about GPUs."""
    cells = json.loads(lab.read_text())["cells"]
    prose = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    assert [step for step in range(1, 11) if f"## {step} · " not in prose] == []
    parameters = next(cell for cell in cells if "parameters" in cell["metadata"].get("tags", []))
    assert all(name in "".join(parameters["source"]) for name in ("n_ranks", "device", "quick"))
    paragraphs = [text for text in prose.split("\n\n") if not text.startswith("|")]
    assert [text for text in paragraphs if len(text.split()) > 120] == []


@pytest.mark.parametrize("lab", LABS, ids=lambda path: path.stem)
def test_no_lab_needs_the_network(lab):
    """Would catch an image or a script that is loaded from somewhere."""
    for cell in json.loads(lab.read_text())["cells"]:
        assert "http://" not in "".join(cell["source"])
        assert "https://" not in "".join(cell["source"])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_html_export_has_the_static_twin_of_every_widget(tmp_path):
    """Would catch a picture that lives only while a kernel runs."""
    command = [sys.executable, "-m", "nbconvert", "--to", "html", "--output-dir", str(tmp_path), *map(str, LABS)]
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    for lab in LABS:
        stored = [
            output.get("data", {})
            for cell in json.loads(lab.read_text())["cells"]
            for output in cell.get("outputs", [])
        ]
        widgets = sum("application/vnd.jupyter.widget-view+json" in data for data in stored)
        twins = (tmp_path / f"{lab.stem}.html").read_text().split('<div class="lk-twin">')[1:]
        assert widgets > 0, f"{lab.stem} has no widget"
        assert len(twins) == widgets, f"{lab.stem}: {len(twins)} twins of {widgets} widgets"
        assert all(twin.lstrip().startswith("<svg") and "<text" in twin[: twin.index("</svg>")] for twin in twins)
    assert "ring all-reduce, before step 0 of 6" in (tmp_path / "03_collectives.html").read_text()
    assert "Hang: ranks 0, 1 and 2 wait in all_reduce #1" in (tmp_path / "00_doctor_and_first_cluster.html").read_text()
