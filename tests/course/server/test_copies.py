"""Learners work in copies of their own, and none of their work is ever written over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from labkit.course.server.copies import FOLDERS, KEPT, bring, sum_of


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A course of two notebooks."""
    for folder in FOLDERS:
        (tmp_path / "course" / folder).mkdir(parents=True)
    (tmp_path / "course/notebooks/01_a.ipynb").write_text("first")
    (tmp_path / "course/exercises/01_a.ipynb").write_text("stub")
    return tmp_path / "course"


def test_a_copy_that_nobody_has_worked_in_follows_the_shipped_one(root: Path, tmp_path: Path) -> None:
    """A learner who stays with the version of the day they came."""
    home = tmp_path / "my"
    assert bring(root, home) == []
    (root / "notebooks/01_a.ipynb").write_text("second")
    assert bring(root, home) == []
    assert (home / "notebooks/01_a.ipynb").read_text() == "second"
    assert (root / "notebooks/01_a.ipynb").read_text() == "second"


def test_work_is_kept_and_the_new_version_lies_beside_it_once(root: Path, tmp_path: Path) -> None:
    """An evening's work that an update takes, and an update that nobody hears of."""
    home = tmp_path / "my"
    bring(root, home)
    (home / "exercises/01_a.ipynb").write_text("an evening's work")
    assert bring(root, home) == []
    (root / "exercises/01_a.ipynb").write_text("better stub")
    (said,) = bring(root, home)
    assert "exercises/01_a.ipynb has a new version" in said
    assert (home / "exercises/01_a.ipynb").read_text() == "an evening's work"
    assert (home / "exercises/01_a.new.ipynb").read_text() == "better stub"
    assert bring(root, home) == []


def test_a_new_version_with_work_in_it_is_not_written_over_either(root: Path, tmp_path: Path) -> None:
    """Somebody who went on in the new version, and loses that at the next update."""
    home = tmp_path / "my"
    bring(root, home)
    for text in ("mine", "better", "best"):
        place = home if text == "mine" else root
        (place / "exercises/01_a.ipynb").write_text(text)
        bring(root, home)
    assert (home / "exercises/01_a.new.ipynb").read_text() == "better"
    assert (home / "exercises/01_a.new2.ipynb").read_text() == "best"


def test_a_torn_record_costs_nobody_their_work(root: Path, tmp_path: Path) -> None:
    """A crash while the record was written, and then a labkit that does not start, or writes over everything."""
    home = tmp_path / "my"
    bring(root, home)
    (home / "exercises/01_a.ipynb").write_text("mine")
    (home / ".copied.json").write_text('{"exer')
    assert len(bring(root, home)) == 1
    assert (home / "exercises/01_a.ipynb").read_text() == "mine"


def test_who_deletes_a_copy_gets_a_fresh_one(root: Path, tmp_path: Path) -> None:
    """Somebody who cannot begin anew."""
    home = tmp_path / "my"
    bring(root, home)
    (home / "exercises/01_a.ipynb").unlink()
    bring(root, home)
    assert (home / "exercises/01_a.ipynb").read_text() == "stub"


def test_a_learners_folder_holds_only_what_a_learner_opens(root: Path, tmp_path: Path) -> None:
    """Checksums and tables among the labs, also those that an earlier version has copied; work that goes with them."""
    home = tmp_path / "my"
    for name in ("SHA256SUMS", "topics.csv", "README.md"):
        (root / "notebooks" / name).write_text(name)
    bring(root, home)
    assert sorted(path.name for path in (home / "notebooks").iterdir()) == ["01_a.ipynb", "README.md"]
    record = json.loads((home / KEPT).read_text())
    for name in ("SHA256SUMS", "topics.csv"):
        record[f"notebooks/{name}"] = sum_of(root / "notebooks" / name)
        (home / "notebooks" / name).write_text(name)
    (home / "notebooks/topics.csv").write_text("mine")
    (home / KEPT).write_text(json.dumps(record))
    bring(root, home)
    assert sorted(path.name for path in (home / "notebooks").iterdir()) == ["01_a.ipynb", "README.md", "topics.csv"]
