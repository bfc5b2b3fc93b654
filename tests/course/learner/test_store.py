"""A file of the learner's own keeps what it is told: real processes, real damage, real locks."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing

import pytest

from labkit.course.learner import holders, store
from labkit.course.learner.store import Store

STEPS = (("CREATE TABLE notes (id INTEGER PRIMARY KEY, said TEXT NOT NULL)",),)
MORE = (*STEPS, ("ALTER TABLE notes ADD COLUMN loud INTEGER NOT NULL DEFAULT 0", "CREATE TABLE names (name TEXT)"))


def made(path, steps=STEPS) -> Store:
    return Store("notes.sqlite3", steps, path, "notebook of notes")


def write(kept: Store, *words: str) -> None:
    with kept.writing() as database:
        database.executemany("INSERT INTO notes (said) VALUES (?)", [(each,) for each in words])


def said(kept: Store) -> list[str]:
    with kept.reading() as database:
        return [each for (each,) in database.execute("SELECT said FROM notes ORDER BY id")]


def ran(program: str, *args: object) -> subprocess.Popen:
    started = "from tests.course.learner.test_store import *\n" + program
    return subprocess.Popen(
        [sys.executable, "-c", started, *map(str, args)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.fixture
def path(tmp_path):
    return tmp_path / "deep" / "notes.sqlite3"


def test_what_is_written_is_read_again_and_half_a_transaction_is_not(path):
    """Would catch two statements of which only one is kept when the cell is stopped between them."""
    kept = made(path)
    write(kept, "one")
    with pytest.raises(KeyboardInterrupt), kept.writing() as database:
        database.execute("INSERT INTO notes (said) VALUES ('half')")
        raise KeyboardInterrupt
    write(kept, "two")
    assert said(made(path)) == ["one", "two"]
    assert kept.note == ""


KILLED = """
kept = made(sys.argv[1])
with kept.writing() as database:
    database.execute("PRAGMA cache_size = 2")
    database.execute("DELETE FROM notes")
    database.executemany("INSERT INTO notes (said) VALUES (?)", [("y" * 2000,)] * 2000)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_is_killed_in_the_middle_of_a_write_loses_nothing(path):
    """Would catch a file without a journal, and a journal that is thrown away before it is played back."""
    kept = made(path)
    write(kept, *map(str, range(50)))
    child = ran(KILLED, path)
    child.communicate(timeout=300)
    assert child.returncode == -signal.SIGKILL
    assert path.with_name(path.name + "-journal").stat().st_size > 0  # the file itself has half a write in it
    assert path.stat().st_size > 100_000
    again = made(path)
    assert said(again) == [str(each) for each in range(50)]
    assert again.note == ""


COUNTS = """
store.WAIT_S = 60.0  # however slow the disk is
for number in range(25):
    kept = made(sys.argv[1]) if number % 5 == 0 else kept
    with kept.writing() as database:
        (last,) = database.execute("SELECT coalesce(max(CAST(said AS INTEGER)), 0) FROM notes").fetchone()
        database.execute("INSERT INTO notes (said) VALUES (?)", (str(last + 1),))
"""


def test_processes_that_write_at_once_wait_for_each_other(path):
    """Would catch 'database is locked', a file made twice, and one who writes what he read before the other wrote."""
    children = [ran(COUNTS, path) for _ in range(3)]
    for each in children:
        each.communicate(timeout=300)
    assert [each.returncode for each in children] == [0, 0, 0]
    assert said(made(path)) == [str(each + 1) for each in range(75)]


LOCKS = """
database = sqlite3.connect(sys.argv[1], isolation_level=None)
database.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
sys.stdin.readline()
database.execute("COMMIT")
"""


def test_a_file_that_somebody_holds_is_told_and_not_put_aside(path, monkeypatch):
    """Would catch a lock that is taken for damage, and a notebook that waits for ever, or without saying for whom."""
    monkeypatch.setattr(store, "WAIT_S", 0.2)
    kept = made(path)
    write(kept, "one")
    child = ran(LOCKS, path)
    assert child.stdout.readline() == "locked\n"
    told = rf"is held by process {child.pid} \(\S+, since \d\d:\d\d\) and cannot be used now: database is locked"
    with pytest.raises(OSError, match=told):
        write(kept, "lost")
    monkeypatch.setattr(holders, "LOCKS", path.with_name("locks"))
    with pytest.raises(OSError, match="is held by a process that cannot be seen from here and cannot be used now"):
        write(kept, "lost")
    with pytest.raises(OSError, match="locked"):
        said(kept)
    other = made(path)
    assert "cannot be written (database is locked)" in other.note
    write(other, "only here")
    assert said(other) == ["only here"]
    child.communicate("go on\n", timeout=300)
    write(kept, "two")
    assert said(made(path)) == ["one", "two"]
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def _flipped(whole: bytes, at: int, bit: int) -> bytes:
    return whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :]


def _torn(whole: bytes) -> bytes:
    return whole[:4096] + b"\xff" * 4096 + whole[8192:]


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: b"no database at all " * 99, _torn, lambda whole: whole[: len(whole) // 2],
        lambda whole: _flipped(whole, 18, 3), lambda whole: _flipped(whole, 47, 0),
        lambda whole: _flipped(whole, 60, 0), lambda whole: _flipped(whole, 63, 0),
    ],
    ids=["another file", "torn", "cut", "not to be written", "format", "version", "no version"],
)  # fmt: skip
@pytest.mark.parametrize("meanwhile", [False, True], ids=["before", "meanwhile"])
def test_a_damaged_file_is_put_aside_whole_and_told(damage, meanwhile, path):
    """Would catch a lab that cannot start any more, and a file that is thrown away or written over."""
    kept = made(path)
    write(kept, *["words " * 40] * 300)
    bad = damage(path.read_bytes())
    path.write_bytes(bad)
    path.with_name(path.name + "-journal").write_bytes(b"half written")
    if meanwhile:
        try:
            write(kept, "new")
        except OSError:  # a notebook that has it open meets the damage once, and then goes on
            write(kept, "new")
    else:
        kept = made(path)
        write(kept, "new")
    assert said(kept) == ["new"]
    aside = [each for each in path.parent.iterdir() if ".damaged-" in each.name]
    assert bad in [each.read_bytes() for each in aside]
    assert any(each.name in kept.note for each in aside)
    assert "the old notebook of notes is kept as" in kept.note
    assert made(path).note == ""


def test_two_who_find_the_damage_at_once_put_it_aside_once(path, monkeypatch):
    """Would catch a good new file, which another notebook has just begun, that is put aside as the damaged one."""
    write(made(path), "one")
    path.write_bytes(b"no database at all " * 99)
    check, quicker = Store._check, []

    def late(self):
        try:
            check(self)
        except sqlite3.DatabaseError:
            if not quicker:
                quicker.append(self)
                write(made(path), "of the other")
            raise

    monkeypatch.setattr(Store, "_check", late)
    kept = made(path)
    write(kept, "mine")
    assert said(kept) == ["of the other", "mine"]
    assert len([each for each in path.parent.iterdir() if ".damaged-" in each.name]) == 1


def test_the_journal_of_a_damaged_file_goes_with_it(path):
    """Would catch half a write to the old file that is played back into the new one, and damages it."""
    write(made(path), *["words " * 40] * 300)
    with closing(sqlite3.connect(path, isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        writer.execute("UPDATE notes SET said = 'x' WHERE id < 200")
        journal = path.with_name(path.name + "-journal")
        assert journal.exists()
        with path.open("r+b") as file:
            file.seek(4096)
            file.write(b"\xff" * 4096)
        kept = made(path)
        assert not journal.exists()
        (aside,) = [each for each in path.parent.iterdir() if each.name.endswith("-journal")]
        assert aside.name.removesuffix("-journal") in kept.note
    write(kept, "new")
    assert said(kept) == ["new"]


def test_an_empty_file_and_a_deleted_folder_are_made_again_with_a_note(path):
    """Would catch 'no such table' in the last cell of a long evening, and what was kept that is gone without a word."""
    kept = made(path)
    assert kept.note == "", "the first time, nothing was lost"
    path.write_bytes(b"")
    other = made(path)
    assert other.note == f"{path} was empty: a new notebook of notes is begun"
    path.write_bytes(b"")
    write(kept, "one")
    assert kept.note == other.note
    assert said(kept) == ["one"]
    path.unlink()
    path.parent.rmdir()
    write(kept, "two")
    assert said(kept) == ["two"]
    assert kept.note == f"{path} was deleted: a new notebook of notes is begun"
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert made(path).note == ""


def test_one_flipped_bit_in_a_text_hides_no_other_row(path):
    """Would catch 'Could not decode to UTF-8', for ever, for everything that a learner has done."""
    kept = made(path)
    write(kept, "first", "second", "third")
    whole = path.read_bytes()
    path.write_bytes(_flipped(whole, whole.index(b"second"), 7))
    assert said(kept) == ["first", "\ufffdecond", "third"]


def test_who_writes_in_turn_is_waited_for_longer_than_who_does_nothing(path, monkeypatch):
    """Would catch a busy file that is taken for one that somebody holds."""
    kept = made(path)
    kept.wait_s = 0.0
    times = iter(range(1000, 2000))
    tries = []

    def touched() -> None:
        tries.append(os.utime(path, ns=(next(times), next(times))))
        if len(tries) == 5:
            held.execute("COMMIT")

    with closing(sqlite3.connect(path, isolation_level=None)) as held:
        held.execute("BEGIN IMMEDIATE")
        written = Store._written
        monkeypatch.setattr(Store, "_written", lambda self: (touched(), written(self))[1])
        write(kept, "one")
    assert said(kept) == ["one"]
    assert len(tries) >= 5


def test_a_database_of_somebody_else_is_put_aside(path):
    """Would catch 'no such table' for ever, if the file has the right version and other tables."""
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE theirs (x)")
        database.execute("PRAGMA user_version = 1")
    kept = made(path)
    assert "has no notes" in kept.note
    write(kept, "one")
    assert said(kept) == ["one"]


def test_a_file_of_a_later_version_is_left_alone(path):
    """Would catch an old labkit that damages what a new one wrote, also if that was a minute ago."""
    kept = made(path)
    write(made(path, MORE), "one")
    whole = path.read_bytes()
    with pytest.raises(ValueError, match=r"written by a later labkit \(version 2\): update labkit"):
        made(path)
    with pytest.raises(ValueError, match="later labkit"):
        write(kept, "two")
    assert path.read_bytes() == whole
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_an_older_file_takes_the_steps_that_it_lacks(path):
    """Would catch an update of labkit that begins with an empty file, and one that takes the first steps twice."""
    write(made(path), "one")
    kept = made(path, MORE)
    write(kept, "two")
    with kept.reading() as database:
        assert database.execute("SELECT said, loud FROM notes").fetchall() == [("one", 0), ("two", 0)]
        assert database.execute("SELECT * FROM names").fetchall() == []
    assert said(made(path, MORE)) == ["one", "two"]


def test_steps_of_which_one_fails_leave_the_file_as_it_was(path):
    """Would catch a file between two versions, which neither labkit can read."""
    write(made(path), "one")
    bad = (*MORE[:1], ("ALTER TABLE notes ADD COLUMN loud INTEGER NOT NULL DEFAULT 0", "CREATE TABLE notes (x)"))
    with pytest.raises(sqlite3.OperationalError, match="already exists"):
        made(path, bad)
    assert said(made(path)) == ["one"]
    assert made(path).note == ""


def test_a_folder_that_cannot_be_written_makes_a_store_in_memory(tmp_path):
    """Would catch a lab that ends in its second cell on a server with read-only homes."""
    (tmp_path / "file").write_text("no folder")
    kept = made(tmp_path / "file" / "notes.sqlite3")
    assert "cannot be written" in kept.note
    assert "the notebook of notes is kept until this notebook ends" in kept.note
    write(kept, "one")
    with pytest.raises(KeyboardInterrupt), kept.writing() as database:
        database.execute("INSERT INTO notes (said) VALUES ('half')")
        raise KeyboardInterrupt
    assert said(kept) == ["one"]


def test_a_file_that_can_only_be_read_is_read(path, monkeypatch):
    """Would catch a learner who begins with nothing, though all that was done is there to see."""
    write(made(path), "one")
    whole = path.read_bytes()
    monkeypatch.setattr(store, "_connect", lambda path, wait_s: sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True))
    kept = made(path)
    assert "readonly" in kept.note
    write(kept, "two")
    assert said(kept) == ["one", "two"]
    assert path.read_bytes() == whole


def test_the_store_in_memory_is_one_for_all_threads(tmp_path):
    """Would catch an error in a widget whose button runs in a thread of its own."""
    (tmp_path / "file").write_text("no folder")
    kept = made(tmp_path / "file" / "notes.sqlite3")
    threads = [threading.Thread(target=lambda: [write(kept, "x") for _ in range(50)]) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(said(kept)) == 200


def test_a_statement_that_makes_no_sense_is_no_trouble_with_the_file(path):
    """Would catch our own mistake that reads like a full disk."""
    with pytest.raises(sqlite3.OperationalError, match="no such table"), made(path).reading() as database:
        database.execute("SELECT * FROM nowhere")


def test_the_file_is_in_the_data_folder_of_the_user(monkeypatch, tmp_path):
    """Would catch a file in the folder of the notebook, which is another one tomorrow."""
    monkeypatch.setattr(store.platformdirs, "user_data_dir", lambda *_, **__: str(tmp_path / "data"))
    assert made(None).path == tmp_path / "data" / "notes.sqlite3"
    assert os.path.exists(tmp_path / "data" / "notes.sqlite3")
