"""The board keeps what it is told: through crashes, damaged files, two notebooks at once, and folders of others."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from labkit.course.capstone.attempts import strategies, tasks
from labkit.course.capstone.entry import Entry, best
from labkit.course.learner import scores, store
from labkit.course.learner.scores import Scores

TASKS = tasks(2)
HOME = TASKS["home"]


def entry(seconds: float = 0.5, way: str = "pipeline", task=HOME, **more) -> Entry:
    return Entry(task.name, task.key, strategies(task)[way], (seconds,), (4_000_000, 3_000_000), **more)


def test_entries_come_back_as_they_were_the_best_first(tmp_path):
    """Would catch a field that is lost on the way, and a board in the order of arrival."""
    board = Scores(tmp_path / "deep" / "scores.sqlite3")
    slow, quick = entry(0.9, losses=(5.5, 5.1), machine={"cores": 2}), entry(0.3, "mixed", validation=4.5, alone=4.5)
    cheat, refused = entry(0.1, faults=("wire: 0 B",)), entry(0.2, refused="out of memory")
    for each in (slow, cheat, quick, refused):
        board.add(each)
    again = Scores(board.path)
    assert [each.score for each in again.entries(HOME)] == sorted(each.score for each in (slow, cheat, quick, refused))
    assert again.entries(HOME)[:2] == [quick, slow.__class__.of_json(slow.to_json())]
    assert again.entries(HOME)[1] == slow
    assert [each.counts for each in again.entries()] == [True, True, False, False]
    assert best(again.entries()) == [quick, slow]
    assert again.entries(TASKS["roomy"]) == []
    assert repr(again) == "<board: 4 attempts in scores.sqlite3>"


def test_another_cap_or_another_link_is_another_task(tmp_path):
    """Would catch a score of an easy task on the board of a hard one."""
    keys = {task.key for each in (2, 4) for task in tasks(each).values()}
    assert len(keys) == 6
    assert HOME.changed(steps=9).key != HOME.key == tasks(2)["home"].key


KILLED = """
import os, signal, sqlite3, sys
database = sqlite3.connect(sys.argv[1], isolation_level=None)
database.execute("PRAGMA cache_size = 2")
database.execute("BEGIN IMMEDIATE")
for _ in range(2000):
    database.execute("INSERT INTO entries (task, said) VALUES ('x', ?)", ("y" * 2000,))
database.execute("DELETE FROM entries WHERE task != 'x'")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_crash_in_the_middle_of_a_write_loses_nothing(tmp_path):
    """Would catch a board that is written without a transaction, or without a journal on the disk."""
    board = Scores(tmp_path / "scores.sqlite3")
    board.add(entry())
    done = subprocess.run([sys.executable, "-c", KILLED, str(board.path)], timeout=300)
    assert done.returncode == -signal.SIGKILL
    again = Scores(board.path)
    assert again.note == ""
    assert again.entries() == [entry()]
    again.add(entry(0.2))
    assert len(again) == 2


@pytest.mark.parametrize("damage", ["no database at all", "torn"])
def test_a_damaged_file_is_kept_aside_and_told(damage, tmp_path):
    """Would catch a lab that cannot start any more, and a file that is thrown away."""
    path = tmp_path / "scores.sqlite3"
    board = Scores(path)
    for _ in range(200):
        board.add(entry())
    whole = path.read_bytes()
    bad = b"scores: none" * 100 if damage != "torn" else whole[:4096] + b"\xff" * 4096 + whole[8192:]
    path.write_bytes(bad)
    (tmp_path / "scores.sqlite3-journal").write_bytes(b"half written")
    again = Scores(path)
    kept = [each for each in tmp_path.iterdir() if ".damaged-" in each.name]
    assert bad in [each.read_bytes() for each in kept]
    assert any(each.name in again.note for each in kept)
    assert again.add(entry(0.1)).counts
    assert again.entries() == [entry(0.1)]
    assert Scores(path).note == ""


def test_two_notebooks_at_once_lose_nothing(tmp_path):
    """Would catch 'database is locked', and one who makes the table while the other writes."""
    path = tmp_path / "scores.sqlite3"

    def writes(number: int) -> None:
        board = Scores(path)
        for k in range(10):
            board.add(entry(0.1 + number + k / 100))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(writes, range(4)))
    assert len(Scores(path)) == 40


def test_a_board_that_is_deleted_meanwhile_is_made_anew(tmp_path):
    """Would catch an error in the last cell of a long evening."""
    board = Scores(tmp_path / "a" / "scores.sqlite3")
    board.path.unlink()
    board.path.parent.rmdir()
    board.add(entry())
    assert board.entries() == [entry()]


def test_a_folder_that_cannot_be_written_makes_a_board_for_this_session(tmp_path):
    """Would catch a lab that ends in its second cell on a server with read-only homes."""
    (tmp_path / "file").write_text("no folder")
    board = Scores(tmp_path / "file" / "scores.sqlite3")
    assert "cannot be written" in board.note
    assert "until this notebook ends" in repr(board)
    board.add(entry())
    assert board.entries(HOME) == [entry()]


def test_a_file_of_a_later_version_is_left_alone(tmp_path):
    """Would catch an old labkit that puts a good board aside."""
    path = tmp_path / "scores.sqlite3"
    Scores(path).add(entry())
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 99")
    with pytest.raises(ValueError, match="later labkit"):
        Scores(path)
    assert [each.name for each in tmp_path.iterdir()] == ["scores.sqlite3"]


def test_rows_that_nobody_understands_are_passed_over(tmp_path):
    """Would catch one odd row that hides all others."""
    board = Scores(tmp_path / "scores.sqlite3")
    with sqlite3.connect(board.path) as database:
        database.execute("INSERT INTO entries (task, said) VALUES (?, '{\"way\": 3}')", (HOME.key,))
    board.add(entry())
    assert board.entries(HOME) == [entry()]


def test_the_file_is_in_the_data_folder_of_the_user(monkeypatch, tmp_path):
    """Would catch a board in the folder of the notebook, which is another one tomorrow."""
    monkeypatch.setattr(store.platformdirs, "user_data_dir", lambda *_, **__: str(tmp_path / "data"))
    assert Scores().path == tmp_path / "data" / scores.NAME
    assert os.path.exists(tmp_path / "data" / scores.NAME)
