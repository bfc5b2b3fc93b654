"""Grades, and the seed of a class, are the teacher's alone: who may read them, who may write beside them."""

from __future__ import annotations

import io
import json
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from labkit.course.classroom.grade import grade
from labkit.course.classroom.private_files import is_private, open_to_others
from labkit.course.classroom.table import ExerciseResult, Table, files_of
from tests.course.classroom.submissions import hand_in, notebook
from tests.typed import typed

TABLE = Table((ExerciseResult("ana", "03.2", False, "values", "rows", 1.0, False, 0, 3),), 1, 1.0)


@pytest.fixture(autouse=True)
def _umask() -> Iterator[None]:
    """The usual umask, with which others may read what is written."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_grades_are_written_for_their_owner_alone_also_where_others_had_read_some(tmp_path: Path) -> None:
    """Marks that every user of the machine can read: at once, by a mode that an earlier table has left, or by a file
    that somebody has had open since then."""
    to = tmp_path / "grades.csv"
    for file in files_of(to):
        file.write_text("earlier")
    with to.open() as opened:
        TABLE.write(to)
        assert opened.read() == "earlier"
    assert {oct(stat.S_IMODE(file.stat().st_mode)) for file in files_of(to)} == {"0o600"}
    assert all("ana" in file.read_text() for file in files_of(to))
    assert {file.name for file in tmp_path.iterdir()} == {file.name for file in files_of(to)}


def test_a_link_that_is_put_there_meanwhile_is_replaced(tmp_path: Path) -> None:
    """A link between the look at a place and the writing, and grades in a file of somebody's choice."""
    (tmp_path / "other").write_text("a thesis")
    (tmp_path / "grades.csv").symlink_to(tmp_path / "other")
    TABLE.write(tmp_path / "grades.csv")
    assert (tmp_path / "other").read_text() == "a thesis"
    assert is_private(tmp_path / "grades.csv")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no wall confines an attempt, and none is graded")
def test_a_place_where_others_may_write_is_told_and_a_link_refused(tmp_path: Path) -> None:
    """Grades that a student replaces; a link for any of the three files, through which another file is lost."""
    hand_in(tmp_path / "in" / "ana", notebook("x = 1"))
    place = tmp_path / "out"
    place.mkdir()
    for mode, remark in ((0o755, False), (0o777, True), (0o1777, True)):
        place.chmod(mode)
        table = grade(tmp_path / "in", place / "grades.csv", seed=5, progress=False)
        assert ("others may write in" in str(table)) == remark
    for name in ("linked.csv", "linked_students.csv", "linked.json"):
        (place / name).symlink_to(tmp_path / "nowhere")
        with pytest.raises(ValueError, match=f"{name} is a symbolic link.* remove it"):
            grade(tmp_path / "in", place / "linked.csv", progress=False)
        (place / name).unlink()


def test_a_group_of_ones_own_is_nobody_else(tmp_path: Path) -> None:
    """A warning at each table of a teacher on a system that makes a group for each user and lets it write."""
    if os.geteuid():
        pytest.skip("only root may give a folder to any group")
    tmp_path.chmod(0o770)
    os.chown(tmp_path, 0, 0)
    assert not open_to_others(tmp_path, stat.S_IWGRP)
    os.chown(tmp_path, 0, 54321)
    assert open_to_others(tmp_path, stat.S_IWGRP)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no wall confines an attempt, and none is graded")
def test_a_seed_comes_from_a_file_or_from_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed that students can only be kept from by leaving it out; a file of which a part is taken for the seed, or
    whose text, a password for instance, is repeated in a message."""
    hand_in(tmp_path / "in" / "ana", notebook("x = 1"))
    file, to = tmp_path / "seed.txt", tmp_path / "grades.csv"
    file.write_text("12345\n")
    assert typed("grade", tmp_path / "in", "--to", to, "--seed-file", file).returncode == 0
    assert json.loads(to.with_suffix(".json").read_text())["seed"] == 12345
    monkeypatch.setattr("sys.stdin", io.StringIO("678"))
    assert typed("grade", tmp_path / "in", "--to", to, "--seed-file", "-").returncode == 0
    assert json.loads(to.with_suffix(".json").read_text())["seed"] == 678
    for text in ("", "12 of hunter2", "-5", "12.0", f"{2**61}"):
        file.write_text(text)
        refused = typed("grade", tmp_path / "in", "--to", to, "--seed-file", file)
        assert refused.returncode == 1
        assert "whole number" in refused.stderr
        assert "hunter2" not in refused.stdout + refused.stderr
    both = typed("grade", tmp_path / "in", "--to", to, "--seed-file", file, "--seed", 5)
    assert both.returncode == 2
    assert "leave one of them out" in " ".join(both.stderr.replace("│", " ").split())
