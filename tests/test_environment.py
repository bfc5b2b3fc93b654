"""What a newcomer installs and runs: lists of packages agree, make targets hold their word, the README works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import warnings
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from labkit.comm import private
from labkit.course.server.copies import FOLDERS

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()


def ranges(requirements: list[str]) -> dict[str, SpecifierSet]:
    """`["torch>=2.11"]` -> name -> range; ValueError for a name that stands there twice."""
    parsed = [found for each in requirements if (found := Requirement(each)).name != "labkit"]  # an extra of another
    found = {canonicalize_name(each.name): each.specifier for each in parsed}
    if len(found) != len(parsed):
        raise ValueError(f"a package is named twice: {requirements}")
    return found


DEPENDENCIES = ranges(PROJECT["dependencies"])
EVERYTHING = DEPENDENCIES | {name: found for extra in EXTRAS.values() for name, found in ranges(extra).items()}
PINS = ranges([line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")])


# The lists of packages


def test_conda_users_get_the_same_packages_in_the_same_ranges():
    """Would catch a dependency that was added to pyproject.toml and not to environment.yml, or with another range."""
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    by_pip = next(each["pip"] for each in environment if isinstance(each, dict))
    extras = [ranges(EXTRAS[extra]) for extra in ("lab", "class", "test", "docs")]  # labkit[test] brings labkit[docs]
    assert ranges(by_pip) == DEPENDENCIES | {name: found for extra in extras for name, found in extra.items()}
    python = next(each for each in environment if isinstance(each, str) and each.startswith("python"))
    assert Requirement(python).specifier == SpecifierSet(PROJECT["requires-python"])


def test_make_lab_installs_what_the_tour_runs_labs_with():
    """Would catch `pytest --nbval`, named by the tour, that is not there after `make lab`, or is refused in a checkout
    since a plug-in that pytest's settings name is missing."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert "strict-config" in settings["addopts"]
    assert "timeout" in settings
    assert {"nbval", "pytest-timeout", "papermill", "jupyterlab", "ipywidgets"} <= set(ranges(EXTRAS["lab"]))
    assert re.search(r"^\$\(VENV\)/\.has-run:.*\n\t\$\(call install,.*,\.\[lab\]\)$", MAKEFILE, re.MULTILINE)


def test_the_core_has_no_upper_bound_and_nothing_that_belongs_to_a_jupyter():
    """Would catch `ipykernel<7` among what everybody must install: a Jupyter that is there already would be moved."""
    bounds = {name: found for name, found in DEPENDENCIES.items() if any(each.operator != ">=" for each in found)}
    assert not bounds
    assert not set(DEPENDENCIES) & {"anywidget", "ipykernel", "ipython", "ipywidgets", "jupyterlab", "notebook"}


COLAB = ranges([line for line in (ROOT / "tests/colab.txt").read_text().splitlines() if not line.startswith("#")])


@pytest.mark.parametrize("name", sorted(set(DEPENDENCIES) & set(COLAB)))
def test_an_environment_as_colabs_is_left_as_it_is(name):
    """Would catch a core that wants a newer package than Colab has, whose Jupyter then crashes. make test-colab asks
    pip itself."""
    (only,) = COLAB[name]
    assert DEPENDENCIES[name].contains(only.version), f"pip would move {name} {only.version} to {DEPENDENCIES[name]}"


def test_the_environment_as_colabs_has_all_that_the_core_needs_but_one_small_package():
    """Would catch a new dependency of the core of which nobody knows whether Colab has it."""
    assert set(DEPENDENCIES) - set(COLAB) == {"junitparser"}


CORE = """
import sys

class Lean:
    "Finds no package that only an extra brings."

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1].split():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Lean())
"""


def in_the_core(code: str, tmp_path: Path) -> str:
    """What a program prints where only the core of labkit is installed, with IPython."""
    extras = {name for extra in EXTRAS.values() for name in ranges(extra)} - set(DEPENDENCIES)
    modules = " ".join({"websocket", *(name.replace("-", "_") for name in extras - {"sympy"})})  # torch needs sympy
    program = tmp_path / "program.py"
    program.write_text(CORE + code)
    command = [sys.executable, str(program), modules]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_core_alone_has_every_public_name_but_the_cards(tmp_path):
    """Would catch a mechanism, a probe or a law that imports a widget, and a name that is lost without a word."""
    told = in_the_core(
        """
import labkit
for name in labkit.__all__:
    try:
        getattr(labkit, name)
    except ModuleNotFoundError as error:
        print(name, error)
import labkit.cli
""",
        tmp_path,
    )
    assert told.splitlines() == [
        "cards fsrs is not installed. It is part of labkit[cards]: pip install 'labkit[cards]'"
    ]


def test_a_film_without_anywidget_is_its_picture_and_says_what_makes_it_move(tmp_path):
    """Would catch a first ring film that ends with an error in a notebook that was there before labkit."""
    told = in_the_core(
        """
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.display_pub = CapturingDisplayPublisher()
import torch
from labkit import Film, RingFilm, ring, run_threads
from labkit.probe import film
records = run_threads(lambda group: film.record(ring.all_reduce, torch.ones(4), group)[1], 2)
RingFilm(Film.of(records, "ring all-reduce"))._ipython_display_()
print(*(output["data"].get("text/html", "") for output in shell.display_pub.outputs))
""",
        tmp_path,
    )
    assert "pip install anywidget" in told
    assert "<svg" in told


@pytest.mark.parametrize("name", sorted(EVERYTHING))
def test_each_dependency_is_pinned_inside_its_range(name):
    """Would catch a dependency without a pin, and a pin that pyproject.toml refuses."""
    pin = exact(name)
    assert EVERYTHING[name].contains(pin), f"{name}=={pin} is outside {EVERYTHING[name]}"


def test_each_pin_is_exact_and_holds_for_every_build_of_a_package():
    """Would catch `>=` among the pins, and `torch==2.13.0+cpu`, which no GPU box could install."""
    for name in PINS:
        assert re.fullmatch(r"[\w.]+", exact(name)), f"{name}{PINS[name]}"


def test_each_pin_can_be_installed_on_the_first_python_that_labkit_takes_and_on_the_last():
    """Would catch a package that wants Python 3.11.5, where Debian 12 has 3.11.2 and README says 3.11."""
    pinned = {name: exact(name) for name in PINS}  # with today's newest packages others may be here (make test-newest)
    installed = [p for p in metadata.distributions() if pinned.get(canonicalize_name(p.name)) == p.version]
    wanted = {package.name: package.metadata.get("Requires-Python") or "" for package in installed}
    assert len(wanted) > 80, "the packages of the constraints are not installed here"
    first, last = "3.11.0", "3.13.0"
    refused = {
        name: text
        for name, text in wanted.items()
        if not (SpecifierSet(text).contains(first) and SpecifierSet(text).contains(last))
    }
    assert not refused


def exact(name: str) -> str:
    """The version that a package is pinned to."""
    assert name in PINS, f"{name} is not pinned in constraints.txt"
    (only,) = PINS[name]
    assert only.operator == "==", f"{name} is not pinned exactly: {only}"
    return only.version


def test_the_pinned_torch_is_one_that_labkit_says_it_was_tried_with():
    """Would catch a new pin whose users are warned of a version that nobody has tried."""
    assert private.was_tried(exact("torch"))


def test_what_the_dependencies_depend_on_is_pinned_too():
    """Would catch a package that arrives by itself, in whatever version is new on the day of the installation."""
    waiting, seen = [(name, frozenset()) for name in EVERYTHING if name not in ranges(EXTRAS["bench"])], set()
    while waiting:
        name, extras = waiting.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        if name in PINS and metadata.version(name).partition("+")[0] != exact(name):
            continue  # another version, of which the pins say nothing
        for text in metadata.requires(name) or []:
            needed = Requirement(text)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras or {""}):
                waiting.append((canonicalize_name(needed.name), frozenset(needed.extras)))
    found = {
        name for name, _ in seen if not name.startswith(("nvidia-", "cuda-", "triton"))
    }  # what a GPU's torch brings
    assert len(found) > 40, "the walk over the dependencies ended too early"
    assert found <= set(PINS), f"not pinned: {sorted(found - set(PINS))}"


def test_every_installation_by_make_applies_the_constraints_but_that_of_the_newest_packages():
    """Would catch a bare `pip install torch`: gigabytes of CUDA on a laptop, and another version each month."""
    assert "--constraint constraints.txt" in MAKEFILE
    installs = [line for line in MAKEFILE.splitlines() if "pip install" in line and not line.startswith("#")]
    constrained, *others = installs
    assert constrained.startswith("PIP := ")
    versions = [MAKEFILE[MAKEFILE.index(f"\ntest-{each}:\n") :].split("\n\n")[0] for each in ("oldest", "colab")]
    (newest,) = [line for line in others if not any(line in recipe for recipe in versions)]
    recipe = MAKEFILE[MAKEFILE.index("\ntest-newest:\n") :].split("\n\n")[0].splitlines()
    assert newest in recipe
    assert "constraint" not in newest
    assert f"{newest.split()[0]} -m pip check" in map(str.strip, recipe)


@pytest.mark.slow
def test_the_installed_packages_fit_each_other():
    """Would catch a pin that another package refuses: pip says so once, at the end of 150 lines."""
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built once."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_holds_every_file_of_the_package(wheel):
    """Would catch the film's JavaScript, or py.typed, left out of what is published."""
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    code = {p.relative_to(ROOT).as_posix() for p in (ROOT / "labkit").rglob("*") if p.is_file() and p.suffix != ".pyc"}
    course = [p for name in FOLDERS for p in (ROOT / name).iterdir() if p.is_file()]
    course += [ROOT / "benchmarks" / name for name in ("launch.py", "machine.py")]
    assert packed == code | {f"labkit/shipped/{p.relative_to(ROOT).as_posix()}" for p in course}
    assert {"labkit/py.typed", "labkit/shipped/notebooks/SHA256SUMS"} <= packed


@pytest.fixture(scope="module")
def installed(wheel):
    """The wheel, unpacked where no checkout is, and the variables with which Python finds it there."""
    folder = wheel.parent
    zipfile.ZipFile(wheel).extractall(folder / "site")
    (folder / "home").mkdir()
    return folder, {**os.environ, "PYTHONPATH": str(folder / "site"), "HOME": str(folder / "home")}


def labkit_of(installed, *words):
    """What `labkit WORDS` prints there, in an empty folder."""
    folder, environment = installed
    done = subprocess.run(
        [sys.executable, "-m", "labkit", *words], cwd=folder / "home", env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_brings_the_course_to_any_folder(installed):
    """Would catch notebooks that only a checkout has, and a learner's copy that an update overwrites."""
    folder, _ = installed
    theirs = folder / "home" / "here"
    assert labkit_of(installed, "lab", "--copy", str(theirs)).startswith(f"Your copies are in {theirs}.")
    for name in FOLDERS:
        assert {p.name for p in (theirs / name).iterdir()} == {
            p.name for p in (ROOT / name).iterdir() if p.suffix in (".ipynb", ".md")
        }
    lab = theirs / "notebooks" / "03_collectives.ipynb"
    lab.write_text("mine")
    shipped = folder / "site/labkit/shipped/notebooks/03_collectives.ipynb"
    before = shipped.read_text()
    shipped.write_text("{}")
    assert "03_collectives.new.ipynb lies beside yours" in labkit_of(installed, "lab", "--copy", str(theirs))
    shipped.write_text(before)  # other tests of this module use it
    assert lab.read_text() == "mine"


@pytest.mark.slow
@pytest.mark.rest
def test_commands_of_an_installed_labkit_find_the_course(installed):
    """Would catch a command that looks for a checkout: each is run in an empty folder, with an empty home."""
    folder, _ = installed
    solved = folder / "site/labkit/shipped/solutions/01_one_step_all_its_bytes.ipynb"
    assert "✓ liveness" in labkit_of(installed, "check", "01.1", "--in", str(solved))
    labkit_of(installed, "lab", "02", "--check")
    labkit_of(installed, "export", "site")
    assert "03_collectives.html" in {path.name for path in (folder / "home" / "site").iterdir()}


# The make targets, in a folder of their own with a Python that only pretends


@pytest.fixture
def copy(tmp_path):
    """The Makefile and the lists of packages in an empty folder."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    return tmp_path


def pretend(path: Path, script: str) -> Path:
    """An executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def make(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`make WORDS...` there."""
    return subprocess.run(["make", *words], cwd=folder, capture_output=True, text=True, timeout=300)


def test_make_names_the_pythons_that_it_can_use(copy):
    """Would catch pages of pip errors on a machine with an old Python."""
    old = pretend(copy / "old", '[ "$1" = --version ] && echo Python 3.9.1; exit 1')
    done = make(copy, "lab", f"PYTHON={old}")
    assert done.returncode != 0
    assert "labkit needs Python 3.11, 3.12 or 3.13" in done.stdout
    assert "Python 3.9.1" in done.stdout
    assert not (copy / ".venv").exists()


def test_make_installs_once_and_again_only_when_the_lists_change(copy):
    """Would catch an installation at each `make check`, none after a new dependency, and minutes without a word."""
    pretend(copy / ".venv/bin/python", f'echo "$@" >>{copy}/log')
    stamp = ".venv/.has-test"
    first, second = (make(copy, stamp) for _ in range(2))
    assert (first.returncode, second.returncode) == (0, 0)
    assert "one to three minutes as a rule" in first.stdout
    assert "Installing" not in second.stdout
    installs = [line for line in (copy / "log").read_text().splitlines() if "--editable" in line]
    assert len(installs) == 1
    assert installs[0].endswith("--constraint constraints.txt --editable .[all,test,dev]")
    assert "--quiet" not in installs[0], "pip is to say what it does"
    assert "up to date" in make(copy, ".venv/.has-run").stdout
    (copy / "constraints.txt").write_text("# another list\n")
    assert make(copy, stamp).returncode == 0
    assert (copy / "log").read_text().count("--editable") == 2


def test_make_lab_says_how_labkit_is_called_from_a_shell(copy):
    """Would catch a newcomer who types what README says and reads "labkit: command not found"."""
    pretend(copy / ".venv/bin/python", "exit 0")
    pretend(copy / ".venv/bin/labkit", 'echo "labkit $@"')
    done = make(copy, "lab")
    assert done.returncode == 0
    assert [line for line in done.stdout.splitlines() if "ing directory" not in line][-2:] == [
        "    source .venv/bin/activate",
        "labkit lab",
    ]
    assert "source .venv/bin/activate" in README


def test_make_clean_removes_what_make_made_and_nothing_else(copy):
    """Would catch an environment of the user's own, or a file beside it, that is swept away."""
    pretend(copy / ".venv/bin/python", "exit 0")
    (copy / "labkit/__pycache__").mkdir(parents=True)
    (copy / "mine.txt").write_text("mine")
    make(copy, ".venv/.has-pip")
    assert make(copy, "clean").returncode == 0
    assert (copy / ".venv/bin/python").exists(), "this environment was there before make"
    assert (copy / "mine.txt").exists()
    assert not (copy / "labkit/__pycache__").exists()
    (copy / ".venv/.has-pip").write_text("made by make\n")
    make(copy, "clean")
    assert not (copy / ".venv").exists()


def test_ci_runs_the_command_that_the_readme_names_and_then_the_rest():
    """Would catch a CI that proves something else than what a newcomer is told to run, or that leaves out a test."""
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    commands = [line.split(" MORE=")[0] for line in script.read_text().splitlines() if line.startswith("make ")]
    assert commands == ["make test", "make rest"]
    assert "set -euo pipefail" in script.read_text()
    for command in ("make lab", "make test"):
        assert re.search(rf"^{command}\b", README, re.MULTILINE)
        assert re.search(rf"^{command.split()[1]}:", MAKEFILE, re.MULTILINE)
    marks = dict(re.findall(r'^(test|rest): .*\n\t\$\(PYTEST\) -m "?([^"$]*?)"? \$', MAKEFILE, re.MULTILINE))
    assert marks == {"test": "not rest", "rest": "rest"}, "together they are everything"


@pytest.mark.parametrize(("name", "code"), [("\u00dcbung #1 [x] 50%", 0), ("labkit", 0), ("checkout", 3)])
def test_ci_runs_in_a_folder_named_labkit_and_ends_as_the_tests_end(name, code, tmp_path):
    """Would catch a CI that tests in a folder of another name than a newcomer's, that leaves its clone behind, that
    ends well though a test has failed, or that is cut off in the middle since it begins tests for ever."""
    checkout, programs, log = tmp_path / name, tmp_path / "bin", tmp_path / "log"
    (checkout / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", checkout / ".ci" / "run")
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    for words in (("init", "-q"), ("add", "."), (*who, "commit", "-q", "-m", "all")):
        subprocess.run(["git", *words], cwd=checkout, check=True, capture_output=True)
    (checkout / "draft").touch()
    programs.mkdir()
    (programs / "make").write_text(f'#!/bin/sh\necho "$PWD|$(ls -A)|$*" >>"$LOG"\nexit {code}\n')
    (programs / "make").chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "LOG": str(log), "TMPDIR": str(tmp_path)}
    began = int(time.time())
    done = subprocess.run([".ci/run"], cwd=checkout, env=environment | {"MORE": "-k some"}, stdin=subprocess.DEVNULL)
    assert done.returncode == code
    written = log.read_text().rstrip()
    ends = [int(end) for end in re.findall(r"--until (\d+) ", written)]
    assert all(began + 4200 <= end <= time.time() + 4200 for end in ends)
    runs = [line.split("|") for line in re.split(r"\n(?=/)", re.sub(r"--until \d+", "--until ITS_END", written))]
    assert [words for _, _, words in runs] == [
        "test MORE=--minutes .venv/minutes.json -k some",
        "rest MORE=--until ITS_END --minutes .venv/minutes.json -k some",
    ][: 2 if code == 0 else 1]
    for folder, content, _ in runs:
        assert Path(folder).name == "labkit"
        assert ("draft" in content) == (folder == str(checkout)) == (name == "labkit")
        assert Path(folder).exists() == (name == "labkit")


@pytest.mark.rest
@pytest.mark.slow
def test_a_run_tells_its_minutes_by_folder_and_adds_those_of_the_run_before(tmp_path):
    """Would catch a table that forgets the first half of CI, or counts a test for each worker that knows of it."""
    minutes = tmp_path / "minutes.json"
    words = ["tests/plan/test_layout.py", "tests/test_readme.py", "-n", "2", "-q", "--minutes", str(minutes)]
    command = [sys.executable, "-m", "pytest", *words]
    tables = []
    for _ in range(2):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert re.match(r"\d+ passed", done.stdout.splitlines()[-1]), done.stdout
        tables.append(
            {row[0]: int(row[1]) for row in re.findall(r"^(tests\S*) +(\d+) +[\d.]+ +[\d.]+$", done.stdout, re.M)}
        )
    assert set(tables[0]) == {"tests/plan", "tests"}
    assert sum(tables[0].values()) == int(done.stdout.splitlines()[-1].split()[0])
    assert tables[1] == {folder: 2 * count for folder, count in tables[0].items()}


# The tests' own set-up


def test_a_warning_from_labkit_is_an_error_and_one_from_elsewhere_is_not():
    """Would catch a filter that matches nothing."""
    with pytest.raises(DeprecationWarning):
        warnings.warn_explicit("old", DeprecationWarning, "ring.py", 1, module="labkit.comm.ring")
    with warnings.catch_warnings(record=True) as heard:
        warnings.warn_explicit("old", DeprecationWarning, "other.py", 1, module="elsewhere")
    assert len(heard) == 1


@pytest.mark.slow
def test_a_test_that_hangs_is_failed_and_the_next_one_runs(tmp_path):
    """Would catch a time-out that ends the whole run, so that nothing is known about the other tests."""
    (tmp_path / "test_it.py").write_text("import time\ndef test_a():\n    time.sleep(30)\ndef test_b():\n    pass\n")
    options = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), "-o", "timeout=1", "-q"]
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "1 failed, 1 passed" in done.stdout
    assert "Timeout" in done.stdout


# The README


def left_behind(text: str) -> set[str]:
    """The files and folders that the commands in a text write where they are typed."""
    option = r"labkit [^`\n]*?(?:--(?:out|to|report|trace|svg|anki|key|json|nbgrader)|>) ([\w.][\w./]*)"
    words = re.findall(option, text) + re.findall(r"labkit (?:export|grade) ([\w./]+)", text)
    words += re.findall(r"papermill \S+ (\S+)", text)
    return {word for word in words if not word.isupper()}  # FOLDER and DIR are for the reader to replace


def test_what_the_documented_commands_leave_is_ignored_by_git(tmp_path):
    """Would catch a fresh clone whose `git status` shows runs/ and site/ after an hour of what README says."""
    folders = (".", "docs", "docs/how_to", "notebooks", "exercises")
    texts = [path.read_text() for folder in folders for path in (ROOT / folder).glob("*.md")]
    texts += [path.read_text() for path in (ROOT / "labkit/cli").glob("*.py")]
    names = left_behind("\n".join(texts)) | {"lab08_train.py", "lab08_train.sbatch", "my", "grades.json"}
    assert {"runs/first", "site", "grades.csv", "page.html", "course", "out.ipynb", "key.md"} <= names
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / ".gitignore").write_text((ROOT / ".gitignore").read_text())
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("left") if "." in name else (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name).is_file() or (tmp_path / name / "file").write_text("left")
    status = ["git", "status", "--porcelain", "--untracked-files=all"]
    done = subprocess.run(status, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["?? .gitignore"]


def block(language: str, number: int = 0) -> str:
    """A fenced block of the README."""
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)[number]


@pytest.mark.slow
def test_the_first_taste_prints_what_the_readme_says(tmp_path):
    """Would catch a first example that does not run, and an output that is made up."""
    program = tmp_path / "taste.py"
    program.write_text(block("python"))
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    mine, theirs = (text.splitlines() for text in (done.stdout, block("text")))
    assert mine[1:] == theirs[1:]
    assert mine[0].startswith("4 ranks on ")  # and then what this machine has
    assert theirs[0].startswith("4 ranks on ")


def test_every_file_that_the_documents_link_to_is_there():
    """Would catch a table of labs with a dead link."""
    for document in ("README.md", "CONTRIBUTING.md", "exercises/README.md", "solutions/README.md"):
        text = (ROOT / document).read_text()
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)\)", text):
            assert ((ROOT / document).parent / link).exists(), f"{document} links to {link}"
