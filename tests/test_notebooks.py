"""Every lab is executed with four ranks and with another number of them; all that is asked of a run reads those two.

With four ranks, which is how labs are stored, each lab has a kernel of its own. With other numbers labs share one: to
start a kernel and its zygote takes as long as half a lab. Those are watched for tensors that do not say where they are.

With `--long` the labs run as they do for a person, with quick=False."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote

import nbformat
import papermill
import pytest
import torch
from jupyter_client.manager import AsyncKernelManager
from jupyter_core.utils import run_sync
from nbval.plugin import IPyNbCell, coalesce_streams

from labkit.course.export.export import export
from labkit.course.reading.glossary import plain
from tests.kernels import KernelOnFiles

ROOT = Path(__file__).resolve().parents[1]
LABS = sorted(ROOT.glob("notebooks/[0-9]*.ipynb"))
STEMS = [lab.stem for lab in LABS]
FIRST = ("00", "03")
"""`make test` runs these labs, which are short; `make rest` runs the others."""
FOUR = [pytest.param(stem, 4, marks=[pytest.mark.rest] * (stem[:2] not in FIRST)) for stem in STEMS]
OTHER = {stem: 3 if stem[:2] in ("08", "10", "11", "14") else 2 for stem in STEMS}
"""The number of ranks with which a lab runs, too: three where that has failed, for sizes that only 2 and 4 divide."""
ELSE = [pytest.param(stem, OTHER[stem], marks=pytest.mark.rest) for stem in STEMS]
TWIN = r'<div class="lk-twin"><div class="lk-drawing"><svg.*?</svg>'
WIDGET = "application/vnd.jupyter.widget-view+json"
NOT_COMPARED = ("metadata", "traceback", "output_type", "name", "execution_count", WIDGET, "image/png", "image/jpeg")
"""What nbval leaves out by itself: widgets have new ids in each run."""
NOTICE = re.compile(r"^ranks? .* waiting in .* Nothing is stopped\.\n", re.MULTILINE)
"""What the launcher says on a slow machine, when one rank keeps the others waiting for seconds."""

FORGET = """%reset -f
import os
os.chdir({folder!r})
os.environ["XDG_DATA_HOME"] = {folder!r}"""
"""What stands below the title of a lab in a kernel that has run another one."""

WATCH = """import sys
sys.path.append({root!r})
from tests.unplaced import watched
device = watched({log!r})"""
"""What stands below the parameters of a lab that is watched for tensors which do not say where they are."""
OVER_NCCL = """import sys
sys.path.append({root!r})
from tests.gpu.ranks import over_nccl
over_nccl()"""
"""What stands there if its ranks share a GPU: with four of them gloo is between them, with another number NCCL."""

Execute = Callable[..., Path]


@pytest.fixture(scope="session")
def idle_kernels() -> Iterator[list[AsyncKernelManager]]:
    """Kernels in which a lab has run well, and in which the next one may run: one, or none before the first."""
    idle: list[AsyncKernelManager] = []
    yield idle
    for kernel in idle:
        end(kernel)


def end(kernel: AsyncKernelManager) -> None:
    """After this the manager is of no use: its sockets are closed for good."""
    if kernel.has_kernel:
        run_sync(kernel.shutdown_kernel)(now=True)


@pytest.fixture(scope="session")
def execute(request, tmp_path_factory, idle_kernels) -> Execute:
    """Runs a lab as papermill does and gives the notebook that comes out; the second call gives the same file."""
    long, finished = request.config.getoption("--long"), {}

    def run(stem: str, n_ranks: int, device: str = "cpu") -> Path:
        if (stem, n_ranks, device) not in finished:
            if stem not in next(iter(finished), ()):  # tests come lab by lab (tests/conftest.py)
                finished.clear()
            folder = tmp_path_factory.mktemp(f"{stem}-{n_ranks}")
            finished[stem, n_ranks, device] = folder / f"{stem}.ipynb"
            notebook, kernel = ROOT / "notebooks" / f"{stem}.ipynb", {}
            if n_ranks != 4:
                lab = nbformat.read(notebook, 4)
                lab.cells.insert(1, nbformat.v4.new_code_cell(FORGET.format(folder=str(folder))))
                top = next(i for i, cell in enumerate(lab.cells) if "parameters" in cell.metadata.get("tags", []))
                below = {"cpu": WATCH, "cuda:0": OVER_NCCL}.get(device, "")
                text = below.format(root=str(ROOT), log=str(folder / "unplaced.txt"))
                lab.cells.insert(top + 1, nbformat.v4.new_code_cell(text))
                notebook = folder / "lab.ipynb"
                kernel = {"km": idle_kernels.pop() if idle_kernels else KernelOnFiles(kernel_name="python3")}
                nbformat.write(lab, notebook)
            with pytest.MonkeyPatch.context() as environment, contextlib.ExitStack() as if_it_fails:
                environment.setenv("XDG_DATA_HOME", str(folder))  # whoever runs the tests has a board of scores, too
                for shared in kernel.values():
                    if_it_fails.callback(end, shared)
                papermill.execute_notebook(
                    notebook,
                    folder / f"{stem}.ipynb",
                    {"n_ranks": n_ranks, "device": device, "quick": not long},
                    kernel_name="python3",
                    cwd=folder,
                    progress_bar=False,
                    start_timeout=600,
                    execution_timeout=3600 if long else 900,
                    kernel_manager_class=KernelOnFiles,
                    **kernel,
                )
                if_it_fails.pop_all()
            idle_kernels.extend(kernel.values())
        return finished[stem, n_ranks, device]

    return run


def differences(stored: Path, run: Path) -> list[str]:
    """What nbval's own comparison finds between two runs of a notebook, cell by cell, but for cells that opt out."""
    comparison = SimpleNamespace(
        sanitize=lambda text: NOTICE.sub("", text),
        parent=SimpleNamespace(skip_compare=NOT_COMPARED),
        colors=SimpleNamespace(OKBLUE="", FAIL="", ENDC=""),
        comparison_traceback=[],
        format_output_compare=lambda key, left, right: comparison.comparison_traceback.extend([key, left, right]),
    )
    outputs = {cell.id: cell.get("outputs", []) for cell in nbformat.read(run, 4).cells}
    complaints = []
    for cell in nbformat.read(stored, 4).cells:
        if cell.cell_type == "code" and "nbval-ignore-output" not in cell.metadata.get("tags", []):
            pair = (coalesce_streams(side) for side in (outputs.get(cell.id, []), cell.outputs))
            if not IPyNbCell.compare_outputs(comparison, *pair):
                complaints.append(f"cell {cell.id}: " + "\n".join(map(str, comparison.comparison_traceback)))
    return complaints


@pytest.mark.slow
@pytest.mark.timeout(3600)  # the longest lab takes a minute on a quiet machine
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("stem", "n_ranks"), [*FOUR, *ELSE])
def test_a_lab_runs_through_and_leaves_nothing_behind(stem, n_ranks, device, execute):
    """Would catch a cell that only works with the number of ranks, or on the device, that it was written for."""
    if device == "cuda":
        n_ranks, device = ranks_for(stem, n_ranks, torch.cuda.device_count())
    printed = json.dumps(json.loads(execute(stem, n_ranks, device).read_text())["cells"])
    assert "nothing is left running" in printed
    assert re.search(f"{n_ranks} ranks (on|share)", printed)  # lab 05b is on the CPU wherever it runs


def ranks_for(stem: str, n_ranks: int, n_gpus: int) -> tuple[int, str]:
    """With how many ranks a lab runs where there are so many GPUs, and on which: with the other number if that is what
    they suffice for; else all share the first."""
    fitting = next((n for n in (n_ranks, OTHER[stem]) if n <= n_gpus), None)
    return (n_ranks, "cuda:0") if fitting is None else (fitting, "cuda")


def test_a_lab_takes_as_many_gpus_as_there_are():
    """Would catch labs that are tried on boxes with four GPUs only, and one that gets a number with which it fails."""
    assert [ranks_for(STEMS[0], 4, n) for n in (1, 2, 3, 4, 8)] == [
        (4, "cuda:0"), (2, "cuda"), (2, "cuda"), (4, "cuda"), (4, "cuda"),
    ]  # fmt: skip
    assert [ranks_for("08_zero_3_fsdp", 4, n) for n in (2, 3, 4)] == [(4, "cuda:0"), (3, "cuda"), (4, "cuda")]


@pytest.mark.slow
@pytest.mark.rest
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("stem", "n_ranks"), [*ELSE, ("ten_minutes", 3)])
def test_every_tensor_of_a_lab_says_where_it_is(stem, n_ranks, execute):
    """Would catch a cell that makes a tensor on the host of a rank that has a GPU (tests/unplaced.py)."""
    log = execute(stem, n_ranks).with_name("unplaced.txt")
    assert not log.exists(), log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("n_ranks", [4, pytest.param(3, marks=pytest.mark.rest)])
def test_the_tour_runs_through_and_leaves_nothing_behind(n_ranks, execute):
    """Would catch a first notebook that fails."""
    printed = json.dumps(json.loads(execute("ten_minutes", n_ranks).read_text())["cells"])
    assert "nothing is left running" in printed
    assert f"{n_ranks} ranks on" in printed


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("stem", "n_ranks"), FOUR)
def test_what_is_stored_is_what_a_run_gives(stem, n_ranks, execute, request):
    """Would catch a stored number that nobody can reproduce. Labs are stored as they run with four ranks on a CPU."""
    if request.config.getoption("--long"):
        pytest.skip("labs are stored as they run with quick=True")
    complaints = differences(ROOT / "notebooks" / f"{stem}.ipynb", execute(stem, n_ranks))
    assert complaints == [], "\n".join(complaints)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("stem", "n_ranks"), [(STEMS[3], 4), *ELSE])  # those that run anyhow
def test_the_page_of_a_run_is_whole_without_a_network_or_a_kernel(stem, n_ranks, execute, tmp_path):
    """Would catch a hole where a widget was, a dollar sign where a formula should be, and a script from somewhere."""
    run = execute(stem, n_ranks)
    (page,) = export([run], tmp_path)
    text = (tmp_path / page.file).read_text()
    cells = nbformat.read(run, 4).cells
    outputs = [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]
    twins = re.findall(TWIN, text, re.DOTALL)
    assert len(twins) + page.n_questions == page.n_widgets == sum(WIDGET in data for data in outputs) > 0
    assert text.count('<form class="question"') == text.count('<table class="bars"') == page.n_questions > 0
    assert all("<text" in twin for twin in twins)
    prose = [cell.source for cell in cells if cell.cell_type == "markdown"]
    formulas = sum(len(re.findall(r"\$\$.+?\$\$|\$[^$\n]+\$", source, re.DOTALL)) for source in prose)
    assert text.count("<math") == formulas
    assert re.findall(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=[\"']?(?:https?:)?//", text) == []
    assert re.findall(r"(?:import |from |@import |url\()\s*[\"']?https?:", text) == []
    assert "cdnjs" not in text
    words = (tmp_path / "glossary.html").read_text()
    places = re.findall(r'href="glossary.html#([^"]+)"', text)
    assert places
    assert all(f'id="{unquote(place)}"' in words for place in places)


def test_a_stored_number_that_differs_is_found(tmp_path):
    """Would catch a comparison that compares nothing: the two tests above hang on it."""
    stored = nbformat.read(LABS[0], 4)
    cell = next(
        cell
        for cell in stored.cells
        if cell.cell_type == "code" and cell.outputs and "nbval-ignore-output" not in cell.metadata.get("tags", [])
    )
    assert differences(LABS[0], LABS[0]) == []
    for output in cell.outputs:
        if output.output_type == "stream":
            output.text += "1"
        else:
            output.data["text/plain"] = output.data.get("text/plain", "") + "1"
    nbformat.write(stored, tmp_path / "other.ipynb")
    assert [complaint.split(":")[0] for complaint in differences(LABS[0], tmp_path / "other.ipynb")] == [
        f"cell {cell.id}"
    ]


@pytest.mark.slow
@pytest.mark.rest
@pytest.mark.timeout(3600)
def test_nbval_itself_passes_a_lab(tmp_path, monkeypatch):
    """Would catch settings of the checkout with which `pytest --nbval` is refused or collects nothing, as the tour says
    it: the comparison above is nbval's, the run is not."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    command = [sys.executable, "-m", "pytest", "--nbval", "notebooks/02_point_to_point.ipynb"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout


@pytest.mark.slow
@pytest.mark.rest
@pytest.mark.timeout(900)
def test_nbconvert_itself_shows_the_picture_of_every_widget(tmp_path):
    """Would catch a picture that lives only while a kernel runs, and one that only our own export knows."""
    labs = [lab for lab in LABS if lab.stem.startswith(("00_", "03_"))]
    command = [sys.executable, "-m", "nbconvert", "--to", "html", "--output-dir", str(tmp_path), *map(str, labs)]
    subprocess.run(command, check=True, capture_output=True)
    for lab in labs:
        stored = [
            output.get("data", {})
            for cell in json.loads(lab.read_text())["cells"]
            for output in cell.get("outputs", [])
        ]
        twins = (tmp_path / f"{lab.stem}.html").read_text().split('<div class="lk-twin">')[1:]
        assert len(twins) == sum(WIDGET in data for data in stored) > 0
        assert all("<text" in twin[twin.index("<svg") : twin.index("</svg>")] for twin in twins)
    assert "ring all-reduce, before step 0 of 6" in (tmp_path / "03_collectives.html").read_text()
    assert "Hang: ranks 0, 1 and 2 wait in all_reduce #1" in (tmp_path / "00_doctor_and_first_cluster.html").read_text()


def test_every_lab_has_the_ten_steps_and_its_parameters():
    """Would catch a lab without a prediction, a parity row or a word about GPUs."""
    for lab in LABS:
        cells = json.loads(lab.read_text())["cells"]
        prose = plain("\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"))
        assert [step for step in range(1, 11) if f"## {step} · " not in prose] == [], lab.stem
        parameters = next(cell for cell in cells if "parameters" in cell["metadata"].get("tags", []))
        assert all(name in "".join(parameters["source"]) for name in ("n_ranks", "device", "quick")), lab.stem
        paragraphs = [text for text in prose.split("\n\n") if not text.startswith("|")]
        assert [text for text in paragraphs if len(text.split()) > 120] == [], lab.stem


def test_no_lab_needs_the_network():
    """Would catch an image or a script that is loaded from somewhere. Links to Colab, Kaggle and Binder wait for a
    click, and are read in tests/test_elsewhere.py."""
    for lab in LABS:
        for cell in json.loads(lab.read_text())["cells"]:
            for line in "".join(cell["source"]).splitlines():
                assert line.startswith("**Elsewhere** ") or not re.search("https?://", line), lab.stem
