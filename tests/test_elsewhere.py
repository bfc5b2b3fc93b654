"""The files that bring labkit to other machines agree with the package, and name only what exists."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import subprocess
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
PAGES = [ROOT / "docs" / f"{name}.md" for name in ("teachers_hub", "vscode", "windows", "containers", "open_elsewhere")]


def named(paths: list[Path]) -> list:
    """One case for each file, called by its name."""
    return [pytest.param(path, id=path.name) for path in paths]


def text(name: str) -> str:
    """A file of the checkout."""
    return (ROOT / name).read_text()


def test_the_version_of_the_citation_is_the_package_s():
    """Would catch a release whose citation names the version before."""
    version = re.search(r'^__version__ = "(.+)"$', text("labkit/__init__.py"), re.MULTILINE)
    assert version is not None
    assert yaml.safe_load(text("CITATION.cff"))["version"] == version[1]


@pytest.mark.parametrize("path", named(WORKFLOWS))
def test_a_workflow_may_only_read_and_comes_to_an_end(path: Path):
    """Would catch a workflow that may write to the repository, one without a time limit, and an action that floats."""
    flow = yaml.safe_load(path.read_text())
    assert flow["permissions"] == {"contents": "read"}
    assert "group" in flow["concurrency"]
    for name, job in flow["jobs"].items():
        assert job["timeout-minutes"] <= 60, name
        assert set(job.get("permissions", {})) <= {"pages", "id-token"}, name
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step), step
            assert re.search(r"@(v\d+|release/v\d+)$", step.get("uses", "x@v1")), step


def test_what_a_workflow_makes_is_in_the_makefile():
    """Would catch a workflow that calls `make` with a target that was renamed."""
    targets = set(re.findall(r"^([a-z-]+):", text("Makefile"), re.MULTILINE))
    steps = [step.get("run", "") for path in WORKFLOWS for step in all_steps(path)]
    called = {name for run in steps for name in re.findall(r"^make ([a-z-]+)", run)}
    assert called, "no workflow calls make"
    assert called <= targets


def all_steps(path: Path) -> list[dict]:
    """The steps of all jobs."""
    return [step for job in yaml.safe_load(path.read_text())["jobs"].values() for step in job["steps"]]


def test_each_python_that_pyproject_allows_is_tested_and_no_other_is_used():
    """Would catch a Python that was added to or taken from pyproject.toml alone."""
    least, below = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["requires-python"]).groups()
    allowed = [f"3.{minor}" for minor in range(int(least), int(below))]
    matrix = yaml.safe_load(text(".github/workflows/test.yml"))["jobs"]["linux"]["strategy"]["matrix"]
    assert matrix["python"] == allowed
    single = [str(step["with"]["python-version"]) for path in WORKFLOWS for step in all_steps(path)
              if "setup-python" in step.get("uses", "")]  # fmt: skip
    image = json.loads(text(".devcontainer/devcontainer.json"))["image"]
    used = {version for version in single if "matrix" not in version} | {image.rpartition(":")[2]}
    used.add(text(".binder/runtime.txt").strip().removeprefix("python-"))
    used.add(re.search(r"^ARG PYTHON=(.+)$", text("Dockerfile"), re.MULTILINE)[1])
    assert used <= set(allowed)


def test_what_the_image_copies_exists_and_reaches_the_builder():
    """Would catch a folder that the wheel needs and .dockerignore keeps out."""
    copied = [
        word for line in re.findall(r"^COPY (.+)$", text("Dockerfile"), re.MULTILINE) for word in line.split()[:-1]
    ]
    let_in = {line[1:] for line in text(".dockerignore").splitlines() if line.startswith("!")}
    assert set(copied) == let_in
    assert all((ROOT / name).exists() for name in copied)
    wheel = tomllib.loads(text("pyproject.toml"))["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
    assert set(wheel) <= let_in


def test_the_image_runs_without_rights_and_the_small_one_is_the_default():
    """Would catch an image that runs as root, and a plain `docker build` that fetches CUDA."""
    stages = re.split(r"^FROM ", text("Dockerfile"), flags=re.MULTILINE)[1:]
    assert [stage.split()[2] for stage in stages[:1]] + [stage.split()[2] for stage in stages[1:]] == [
        "base",
        "gpu",
        "cpu",
    ]
    for stage in stages[1:]:
        assert re.search(r"^USER 1000\n(?:.*\n)*?CMD ", stage, re.MULTILINE)
    assert "whl/cpu" in stages[-1]
    assert "HEALTHCHECK" in stages[0]


@pytest.mark.parametrize("path", named([ROOT / ".devcontainer/devcontainer.json", ROOT / ".vscode/extensions.json"]))
def test_a_json_file_is_one(path: Path):
    """Would catch a comma too many, which VS Code forgives and others do not."""
    assert json.loads(path.read_text())


def test_binder_gets_files_that_exist_and_scripts_that_can_be_started():
    """Would catch a constraints file that was moved, and a script that lost its right to be executed."""
    pins = re.findall(r"^-c (.+)$", text(".binder/requirements.txt"), re.MULTILINE)
    assert pins
    assert all((ROOT / ".binder" / name).is_file() for name in pins)
    for name in ("postBuild", "start"):
        script = ROOT / ".binder" / name
        assert script.stat().st_mode & 0o111, name
        assert subprocess.run(["bash", "-n", script]).returncode == 0, name


@pytest.mark.parametrize("path", named(FORMS))
def test_a_form_has_questions_with_names_of_their_own(path: Path):
    """Would catch a form that GitHub would not show."""
    form = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= set(form)
    ids = [question["id"] for question in form["body"]]
    assert len(ids) == len(set(ids)) > 0
    assert all(question["attributes"]["label"] for question in form["body"])


def test_the_forms_ask_for_what_we_need():
    """Would catch a bug report without the facts of the machine."""
    assert "labkit doctor" in text(".github/ISSUE_TEMPLATE/bug.yml")
    assert "make gpu" in text(".github/ISSUE_TEMPLATE/gpu_numbers.yml")


@pytest.fixture(scope="module")
def badges() -> dict:
    """The names of docs/badges.py."""
    return runpy.run_path(str(ROOT / "docs" / "badges.py"))


def test_the_table_of_links_is_up_to_date(badges: dict):
    """Would catch a lab that was added or renamed, and a repository that has moved."""
    made = badges["page"]()
    assert text("docs/open_elsewhere.md") == made, "run python docs/badges.py"
    labs = re.findall(r"blob/main/(\S+?\.ipynb)\)", made)
    assert len(labs) == 2 * len(re.findall(r"^\| \[\d", made, re.MULTILINE)) > 0
    assert all((ROOT / lab).is_file() for lab in labs)


def test_each_lab_has_its_links_and_installs_labkit_only_where_there_is_none(badges: dict, monkeypatch):
    """Would catch a lab without its links, and a cell that installs over what a machine already has."""
    for lab in badges["notebooks"]():
        assert json.loads(lab.read_text()) == badges["with_links"](lab), f"{lab.name}: run python docs/badges.py"
    asked: list[str] = []
    shell = SimpleNamespace(run_line_magic=lambda *words: asked.append(" ".join(words)))
    for there, wanted in ((True, []), (False, ["pip install --quiet labkit"])):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, there=there: there or None)
        exec(badges["INSTALL"], {"get_ipython": lambda: shell})
        assert asked == wanted


def test_the_repository_s_address_is_copied_from_one_place(badges: dict):
    """Would catch an address that stays behind when the repository moves."""
    name = PROJECT["urls"]["Repository"].removeprefix("https://github.com/")
    files = subprocess.run(["git", "grep", "-lF", name], cwd=ROOT, capture_output=True, text=True).stdout.split()
    labs = {f"notebooks/{lab.name}" for lab in badges["notebooks"]()}
    assert set(files) <= {"pyproject.toml", "docs/open_elsewhere.md", *labs}


@pytest.mark.parametrize("path", named([*PAGES, ROOT / "RELEASING.md"]))
def test_a_page_links_to_what_exists_and_keeps_its_lines_short(path: Path):
    """Would catch a link to a file that was renamed."""
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
        assert (path.parent / link).exists(), link
    if path.name != "open_elsewhere.md":
        assert max(map(len, path.read_text().splitlines())) <= 120
