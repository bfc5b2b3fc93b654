"""Every lab runs from top to bottom, at 2 and at 4 ranks, and its stored outputs are what a run gives.

With `--long` the labs run as they do for a person, with quick=False."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import papermill
import pytest

ROOT = Path(__file__).resolve().parents[1]
LABS = sorted(ROOT.glob("notebooks/[0-9]*.ipynb"))


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a cell has less; some labs take 20 s on a quiet machine (benchmarks/labs.py)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("n_ranks", [2, 4])
@pytest.mark.parametrize("lab", LABS, ids=lambda path: path.stem)
def test_every_lab_runs(lab, n_ranks, device, tmp_path, request):
    """Would catch a cell that only works with the number of ranks, or on the device, that it was written for."""
    quick = not request.config.getoption("--long")
    done = papermill.execute_notebook(
        lab,
        tmp_path / "out.ipynb",
        {"n_ranks": n_ranks, "quick": quick, "device": device},
        kernel_name="python3",
        cwd=tmp_path,
        progress_bar=False,
        execution_timeout=120 if quick else 900,
    )
    printed = json.dumps(done.cells)
    assert "nothing is left running" in printed
    assert f"{n_ranks} ranks on" in printed


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_stored_outputs_are_what_a_run_gives():
    """Would catch numbers in a lab that nobody can reproduce (nbval compares every cell that does not opt out)."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--nbval",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:timeout",
        "-c",
        "/dev/null",
    ]
    done = subprocess.run([*command, *map(str, LABS)], cwd=ROOT, capture_output=True, text=True, timeout=550)
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
