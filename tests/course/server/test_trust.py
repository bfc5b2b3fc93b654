"""Labs are trusted as long as they are what was shipped. (What is seen of one that is not: browser/test_journey.py.)"""

from __future__ import annotations

import shutil
from pathlib import Path

import nbformat
import pytest
from nbformat.sign import NotebookNotary

from labkit.course.server.trust import SUMS, as_shipped, note, trust

ROOT = Path(__file__).resolve().parents[3]
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))


def test_the_sums_are_those_of_the_notebooks_that_are_here():
    """Would catch labs that were stored anew without `make notebooks`: everybody would see them without drawings."""
    changed = sorted(path.name for path in {*NOTEBOOKS} - {*as_shipped(NOTEBOOKS, ROOT / "notebooks")})
    assert changed == [], (
        f"write {SUMS} anew: python -c 'from labkit.course.server.trust import note; note(\"notebooks\")'"
    )


def test_what_is_as_it_was_shipped_is_signed_and_what_was_changed_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Would catch a signature that nobody gave: for a lab that somebody else has put scripts into."""
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    labs = [Path(shutil.copy(path, tmp_path)) for path in NOTEBOOKS[:3]]
    note(tmp_path)
    changed = nbformat.read(labs[1], 4)
    changed.cells[-1].source += "\n# mine"
    nbformat.write(changed, labs[1])
    assert trust(labs, tmp_path) == [labs[0], labs[2]]
    assert trust(labs, tmp_path) == [labs[0], labs[2]]
    notary = NotebookNotary()
    assert [notary.check_signature(nbformat.read(lab, 4)) for lab in labs] == [True, False, True]


def test_without_sums_nothing_is_signed(tmp_path: Path):
    """Would catch a folder of somebody's own that is trusted since nothing is said of it."""
    assert as_shipped([Path(shutil.copy(NOTEBOOKS[0], tmp_path))], tmp_path) == []
