"""Style, layout and types, as tests: they run beside the others, and their complaints stand in the same list."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("words", ["ruff check .", "ruff format --check .", "mypy"])
@pytest.mark.timeout(900)  # types take 20 s of processor time where nothing is known of an earlier run
def test_every_file_is_clean(words: str) -> None:
    """Would catch an unused import, a line that is laid out by hand, and an argument of the wrong type."""
    done = subprocess.run([sys.executable, "-m", *words.split()], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
