"""The documentation site, built once for all tests of a run, by the same command as `make site` has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).resolve().parents[1]


def documentation(factory: pytest.TempPathFactory, config: pytest.Config) -> Path:
    """The folder of the built pages. A warning of Sphinx fails whoever asks first."""
    shared = factory.getbasetemp()
    if hasattr(config, "workerinput"):  # several workers: their folders lie in one
        shared = shared.parent
    folder = shared / "site" / "docs"
    with FileLock(shared / "documentation.lock"):
        if not folder.is_dir():
            begun, trees = shared / "begun", shared / "doctrees"
            options = ["-q", "-E", "-W", "--keep-going", "-b", "html", "-d", str(trees)]
            command = [sys.executable, "-m", "sphinx", *options, "docs", str(begun)]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-5000:]
            folder.parent.mkdir()
            begun.rename(folder)
    return folder
