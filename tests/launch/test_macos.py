"""labkit on a macOS that is simulated (simulated_macos/sitecustomize.py): the library as it is, in processes without
what macOS lacks, and its own tests, run again there.

A real Mac has more to show; docs/macos.md lists it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
SIMULATED = Path(__file__).parent / "simulated_macos"
TMPDIR_BYTES = 49
"""The length of the path of the folder for temporary files on a Mac: /var/folders/ and 36 more."""
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="a simulation of macOS needs Linux under it")
# A test or two of each kind that macOS does otherwise: each rank imports torch, and all of them take ten minutes.
TOPICS = (
    pytest.param(["tests/launch/test_cluster.py", "-k", "replies or state_persists or on_the_ranks"], 3, id="calls"),
    pytest.param(["tests/launch/test_working_folders.py", "-k", "socket or of_its_own"], 3, id="places"),
    pytest.param(["tests/faults/test_hangs.py", "-k", "f01_a_skipped_collective_names or f07"], 2, id="hangs"),
    pytest.param(["tests/faults/test_deaths.py", "-k", "f12 or f15 or warden"], 3, id="deaths"),
    pytest.param(["tests/faults/test_kernels.py", "-k", "f20 or f22"], 2, id="kernels"),
    pytest.param(["tests/launch/test_join.py", "-k", "compute_print"], 1, id="joined ranks"),
    pytest.param(["tests/test_scripted.py", "-k", "good_ddp"], 1, id="scripts"),
    pytest.param(["tests/course/exercises/test_check.py", "-k", "warm"], 1, id="checks"),
)


@pytest.fixture
def mac() -> Iterator[dict[str, str]]:
    """The environment of a process on the simulated Mac, whose folder for temporary files has a path as long as a Mac's
    and is empty at the end."""
    with tempfile.TemporaryDirectory(prefix="var-folders-".ljust(TMPDIR_BYTES - 13, "z"), dir="/tmp") as folder:
        assert len(folder) == TMPDIR_BYTES
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        yield {**kept, "PYTHONPATH": f"{SIMULATED}{os.pathsep}{ROOT}", "TMPDIR": folder}


@LINUX
@pytest.mark.slow
def test_the_first_cluster_of_a_mac_works_and_leaves_nothing(mac: dict[str, str]) -> None:
    """Would catch a call of what macOS has not, a fork of a process that has torch, a socket whose path is too long, an
    environment that everybody can read in the list of processes, and a file or a process that is left."""
    done = subprocess.run([sys.executable, SIMULATED / "first.py"], env=mac, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    family = [int(word) for word in done.stdout.splitlines()[-1].split()]
    assert until(lambda: not any(psutil.pid_exists(pid) for pid in family))
    assert not [name for name in os.listdir(mac["TMPDIR"]) if name.startswith("labkit-")]


@LINUX
@pytest.mark.rest
@pytest.mark.timeout(1800)  # each cluster imports torch in each of its ranks
@pytest.mark.parametrize(("tests", "least"), TOPICS)
def test_labkits_own_tests_pass_on_a_mac(tests: list[str], least: int, mac: dict[str, str]) -> None:
    """Would catch whatever works on Linux only: what macOS has not is there in no process of these tests. Those that
    are about Linux are skipped here as they are on a Mac."""
    options = ["-q", "-p", "no:anyio", "-p", "no:cacheprovider", "-m", "not rest"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    done = subprocess.run(command, env=mac, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= least, "hardly any test was run"
