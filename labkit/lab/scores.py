"""The board: every attempt of this learner, kept between notebooks in one SQLite file of the learner's own.

    board = Scores()                     in the user's data folder; Scores(path) elsewhere
    board.add(entry)                     one transaction: a crash in the middle leaves what was there before
    board.entries(task)                  best first

Two notebooks may write at once: each waits for the other, up to `WAIT_S`. A file that is no database, or is torn, is
put aside under another name and told in `.note`; a folder that cannot be written to makes a board that lasts as long
as this object, which is told as well.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import platformdirs

from labkit.plan.attempt import Entry
from labkit.plan.capstone import Task

NAME = "scores.sqlite3"
VERSION = 1
WAIT_S = 20.0
SCHEMA = "CREATE TABLE IF NOT EXISTS entries (id INTEGER PRIMARY KEY, task TEXT NOT NULL, said TEXT NOT NULL)"


def default_path() -> Path:
    """The file in this user's data folder."""
    return Path(platformdirs.user_data_dir("labkit", appauthor=False)) / NAME


class Scores:
    """The entries in one file. `path` says where, `note` what happened to it, "" if nothing did."""

    def __init__(self, path: Path | str | None = None) -> None:
        """Open the board, make it where there is none. ValueError for a file of a later version of labkit."""
        self.path, self.note = Path(path).expanduser() if path is not None else default_path(), ""
        self._kept: sqlite3.Connection | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._made()
        except (OSError, sqlite3.OperationalError) as error:
            self.note = f"{self.path} cannot be written ({error}): scores are kept until this notebook ends"
            self._kept = sqlite3.connect(":memory:")
            self._kept.execute(SCHEMA)

    def add(self, entry: Entry) -> Entry:
        """Keep an entry, also one that does not count. Returns it."""
        with self._open() as database:
            database.execute("INSERT INTO entries (task, said) VALUES (?, ?)", (entry.task_key, entry.to_json()))
        return entry

    def entries(self, task: Task | None = None) -> list[Entry]:
        """Those of a task (all of them without one): what counts first, the best score in front."""
        with self._open() as database:
            rows = database.execute("SELECT task, said FROM entries ORDER BY id").fetchall()
        found = []
        for key, said in rows:
            if task is None or key == task.key:
                with suppress(ValueError):  # written by another version: it stays in the file
                    found.append(Entry.of_json(said))
        return sorted(found, key=lambda entry: entry.score)

    def __len__(self) -> int:
        with self._open() as database:
            return int(database.execute("SELECT count(*) FROM entries").fetchone()[0])

    def __repr__(self) -> str:
        return f"<board: {len(self)} attempts in {self.path.name}{'; ' + self.note if self.note else ''}>"

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """One transaction: all of it is kept, or nothing."""
        if self._kept is not None:
            with self._kept:
                yield self._kept
            return
        if not self.path.exists():  # somebody has cleared the folder
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._made()
        with closing(_connect(self.path)) as database, database:
            yield database

    def _made(self) -> None:
        """The file with its table; one that is no database is put aside first."""
        was = _identity(self.path)
        try:
            self._check()
        except sqlite3.OperationalError:
            raise  # locked, read-only, no room: nothing is wrong with the file
        except sqlite3.DatabaseError as error:
            if was is not None and was == _identity(self.path):  # another notebook may have put it aside already
                self.note = f"{error}: the old board is kept as {self._aside().name}, this one is new"
            self._check()

    def _check(self) -> None:
        with closing(_connect(self.path)) as database, database:
            if (fault := database.execute("PRAGMA quick_check").fetchone()[0]) != "ok":
                raise sqlite3.DatabaseError(fault)
            version = database.execute("PRAGMA user_version").fetchone()[0]
            if version > VERSION:
                raise ValueError(f"{self.path} was written by a later labkit (version {version}): update labkit")
            database.execute("BEGIN IMMEDIATE")
            database.execute(SCHEMA)
            database.execute(f"PRAGMA user_version = {VERSION}")

    def _aside(self) -> Path:
        kept = self.path.with_name(f"{self.path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
        with suppress(FileNotFoundError):  # what was half written belongs to the old file, and would damage the new
            self.path.with_name(self.path.name + "-journal").rename(kept.with_name(kept.name + "-journal"))
        with suppress(FileNotFoundError):
            self.path.rename(kept)
        return kept


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=WAIT_S)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
