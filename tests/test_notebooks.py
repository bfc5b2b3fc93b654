"""Every lab runs from top to bottom, at 2 and at 4 ranks, and its stored outputs are what a run gives.

With `--long` the labs run as they do for a person, with quick=False."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
import pytest
from nbval.plugin import coalesce_streams

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
        lab = given.get("lab", given.get("nbval_of"))
        command = papermill(**given, quick=quick) if "lab" in given else nbval(lab)
        folder = tmp_path_factory.mktemp(lab.stem)
        apart = {**os.environ, "XDG_DATA_HOME": str(folder)}  # whoever tests has a board of scores, too
        how = {"cwd": folder, "env": apart, "capture_output": True, "text": True, "timeout": 600 if quick else 3600}
        key = lab, given.get("n_ranks"), given.get("device")
        begun[key] = pool.submit(subprocess.run, command, **how), folder
    yield begun
    pool.shutdown(cancel_futures=True)


def plain(notebook: Path) -> dict[str, list[tuple[str, ...]]]:
    """Cell -> what nbval would compare: each stream as one, the texts of what is shown; without cells that opt out."""
    found = {}
    for cell in nbformat.read(notebook, 4).cells:
        if cell.cell_type == "code" and "nbval-ignore-output" not in cell.metadata.get("tags", []):
            outputs = coalesce_streams(cell.outputs)
            data = [each.get("data", {"text/" + each.get("name", ""): each.get("text", "")}) for each in outputs]
            found[cell.id] = [(key, text) for each in data for key, text in each.items() if key.startswith("text/")]
    return found


@pytest.mark.slow
@pytest.mark.timeout(3600)  # a cell has less; labs take 15 to 60 s on a quiet machine (benchmarks/labs.py)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("n_ranks", [2, 4])
@pytest.mark.parametrize("lab", LABS, ids=lambda path: path.stem)
def test_every_lab_runs_and_prints_what_is_stored(lab, n_ranks, device, lab_runs, request):
    """Would catch a cell that only works with the number of ranks, or on the device, that it was written for.

    Labs are stored as they run with four ranks on a CPU: there, a number that nobody can reproduce is caught."""
    run, folder = lab_runs[lab, n_ranks, device]
    done = run.result()
    assert done.returncode == 0, done.stderr[-3000:]
    printed = json.dumps(json.loads((folder / "out.ipynb").read_text())["cells"])
    assert "nothing is left running" in printed
    assert f"{n_ranks} ranks on" in printed
    if (n_ranks, device) == (4, "cpu") and not request.config.getoption("--long"):
        now, stored = plain(folder / "out.ipynb"), plain(lab)
        assert {cell: now.get(cell) for cell in stored} == stored


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_nbval_finds_the_stored_outputs(nbval_of, lab_runs):
    """Would catch a lab that `pytest --nbval` does not pass: one of them, and all with --long."""
    done = lab_runs[nbval_of, None, None][0].result()
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout


def pytest_generate_tests(metafunc):
    """The run with four ranks compares what nbval does, so that one lab is enough for nbval itself."""
    if "nbval_of" in metafunc.fixturenames:
        chosen = LABS if metafunc.config.getoption("--long") else LABS[2:3]
        metafunc.parametrize("nbval_of", chosen, ids=lambda path: path.stem)


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
