"""`labkit cards` in a terminal: the same box, the same cards."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # each of them starts a Python that imports torch


def labkit(*words: str, typed: str = "", home: Path) -> subprocess.CompletedProcess[str]:
    """The command line, with keys typed and a data folder of its own."""
    return subprocess.run(
        [sys.executable, "-m", "labkit", "cards", *words], input=typed, capture_output=True, text=True, timeout=120,
        env={**os.environ, "XDG_DATA_HOME": str(home), "COLUMNS": "160"})  # fmt: skip


@pytest.mark.rest
def test_keys_review_and_what_they_say_is_kept(tmp_path: Path) -> None:
    """Keys that are taken for answers before there is one, ratings that are gone with the terminal."""
    done = labkit("--tag", "ring", typed="x 47 q", home=tmp_path)  # x and 7 are no keys here
    assert done.returncode == 0, done.stderr
    assert "1 done, 1 day in a row" in done.stdout
    assert "shown by" in done.stdout
    assert re.search(r"tested +c\d+ . (holds|wrong|depends|not shown)", done.stdout), "what the audit found"
    assert "`" not in done.stdout
    again = labkit("--export", str(tmp_path / "kept.json"), home=tmp_path)
    assert "1 review written" in again.stdout
    kept = json.loads((tmp_path / "kept.json").read_text())
    assert [each["rating"] for each in kept["reviews"]] == [4]
    other = tmp_path / "other"
    assert "1 review taken" in labkit("--import", str(tmp_path / "kept.json"), home=other).stdout
    assert "0 reviews taken" in labkit("--import", str(tmp_path / "kept.json"), home=other).stdout


@pytest.mark.rest
def test_the_end_of_what_is_typed_ends_the_review(tmp_path: Path) -> None:
    """A loop that asks for ever where nobody types."""
    done = labkit(typed=" ", home=tmp_path)
    assert done.returncode == 0
    assert "0 done" in done.stdout


@pytest.mark.rest
def test_what_makes_no_sense_is_told_in_a_sentence(tmp_path: Path) -> None:
    """A traceback."""
    wrong = labkit("--tag", "zeros", home=tmp_path)
    assert wrong.returncode == 1
    assert "did you mean 'zero'" in wrong.stderr
    (tmp_path / "torn.json").write_text("{")
    assert "is no JSON" in labkit("--import", str(tmp_path / "torn.json"), home=tmp_path).stderr
    (tmp_path / "other.json").write_text("{}")
    assert "format" in labkit("--import", str(tmp_path / "other.json"), home=tmp_path).stderr


@pytest.mark.rest
def test_the_deck_and_its_sources_are_listed(tmp_path: Path) -> None:
    """A list without the cards, a source without its answer."""
    listed = labkit("--list", "--lab", "07", home=tmp_path)
    assert "zero-memory-by-stage" in listed.stdout
    covers = labkit("--covers", home=tmp_path)
    rows = [line for line in covers.stdout.splitlines() if line.startswith("│ 003/")]
    assert len(rows) == 89
    assert all(row.rstrip(" │").split("│")[-1].strip() for row in rows)
