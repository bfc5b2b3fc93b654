"""A run's folder belongs to one process at a time, and its files to one run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from labkit.course.training.run_lock import run_lock


def test_a_folder_has_one_run_at_a_time_and_the_second_is_told_who_holds_it(tmp_path: Path) -> None:
    """Would catch two runs whose checkpoints mix, a resumed run with a new id, and a lock that outlives its owner. That
    it also ends with a process that is killed is in test_cli_train."""
    folder = tmp_path / "runs" / "first"
    with pytest.raises(ValueError, match="leave --resume out"), run_lock(folder, resume=True):
        pass
    assert not folder.exists(), "a folder that was mistyped is not made"
    with run_lock(folder, resume=False) as run:
        note = json.loads((folder / "run.lock").read_text())
        assert (note["run"], note["pid"]) == (run, os.getpid())
        words = f"in use by a run that process {os.getpid()} on {note['host']} began at {note['since']}: wait"
        for resume in (False, True):
            with pytest.raises(ValueError, match=words), run_lock(folder, resume):
                pass
    with run_lock(folder, resume=True) as again:
        assert again == run
    with run_lock(folder, resume=False) as another:
        assert another != run
    (folder / "step-000002").mkdir()
    with pytest.raises(ValueError, match="checkpoints of an earlier run"), run_lock(folder, resume=False):
        pass
    with run_lock(folder, resume=True) as again:
        assert again == another, "who was refused has changed nothing"
    (folder / "run.lock").write_text("[")
    with run_lock(folder, resume=True) as again:
        assert again == ""


@pytest.mark.parametrize("make", [Path.symlink_to, Path.hardlink_to])
def test_a_lock_that_is_a_link_is_refused_and_what_it_leads_to_is_left_alone(make: Any, tmp_path: Path) -> None:
    """Would catch a run that writes its id into any file of its owner's that somebody has put a link to there."""
    other, folder = tmp_path / "other", tmp_path / "runs"
    other.write_text("a thesis")
    folder.mkdir()
    make(folder / "run.lock", other)
    for resume in (False, True):
        with pytest.raises(ValueError, match=r"run\.lock is a link.* remove it"), run_lock(folder, resume):
            pass
    assert other.read_text() == "a thesis"
    (folder / "run.lock").unlink()
    (folder / "run.lock").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="is a link"), run_lock(folder, resume=False):
        pass
    assert not (tmp_path / "nowhere").exists()
