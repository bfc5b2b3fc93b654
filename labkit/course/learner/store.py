"""A file of the learner's own: SQLite in the user's data folder, safe against crashes, damage and a second notebook.

    store = Store("scores.sqlite3", STEPS, name="board")
    with store.writing() as database: ...       one transaction: all of it is stored, or nothing
    with store.reading() as database: ...       one state of the file, also while another notebook writes

STEPS are the statements that made version 1 of the file, then those that make version 2 of it, and so on; an older
file takes those that it lacks. `.note` tells what happened to a file:

    damaged, or no database    it is renamed, never overwritten, and a new one is begun
    cannot be written          what can be read of it is kept in memory, until this notebook ends
    of a later labkit          ValueError, and the file is left alone
    deleted meanwhile          it is created again
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import platformdirs

WAIT_S = 20.0
"""How long one notebook waits for another by default."""


def data_folder() -> Path:
    """The folder of this user's files."""
    return Path(platformdirs.user_data_dir("labkit", appauthor=False))


class Store:
    """One file. `path` is where it is, `note` tells of problems with it, "" if there are none."""

    def __init__(
        self, file: str, steps: Sequence[Sequence[str]], path: Path | str | None = None, name: str = "file",
        wait_s: float | None = None,
    ) -> None:  # fmt: skip
        """`file` in the data folder, or `path` elsewhere; `name` is what a learner calls it; `wait_s`: how long to wait
        for another notebook.

        ValueError for a file of a later version of labkit."""
        self.path, self.note = Path(path).expanduser() if path is not None else data_folder() / file, ""
        self.steps, self.name, self.wait_s = tuple(map(tuple, steps)), name, WAIT_S if wait_s is None else wait_s
        self._kept: sqlite3.Connection | None = None
        self._alone = threading.RLock()
        self._doubted = False
        try:
            self._make()
        except (OSError, sqlite3.OperationalError) as error:
            if isinstance(error, sqlite3.Error) and _ours(error):
                raise
            self.note = f"{self.path} cannot be written ({error}): the {name} is kept until this notebook ends"
            self._kept = self._copied()

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction in which nobody else can write. OSError if the file cannot be written now."""
        with self._open() as database:
            database.execute("BEGIN IMMEDIATE")
            yield database

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """The file as it is now. OSError if it cannot be read now."""
        with self._open() as database:
            database.execute("BEGIN")
            yield database

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            if self._kept is not None:
                with self._alone, self._kept:
                    yield self._kept
                return
            if self._doubted or not self._sound():
                self._make()
            with closing(_connect(self.path, self.wait_s)) as database, database:
                yield database
        except sqlite3.DatabaseError as error:
            if type(error) is sqlite3.DatabaseError:  # the file is damaged: check it when it is next opened
                self._doubted = True
            elif not isinstance(error, sqlite3.OperationalError) or _ours(error):
                raise
            raise OSError(f"{self.path} cannot be used now: {error}") from error

    def _sound(self) -> bool:
        """True if the file is still as it was: anybody may have deleted or overwritten it."""
        if not self.path.exists():
            return False
        with closing(_connect(self.path, self.wait_s)) as database:
            try:
                return _version(database) == len(self.steps)
            except sqlite3.OperationalError:
                raise
            except sqlite3.DatabaseError:
                return False

    def _make(self) -> None:
        """Create the file with its tables; a file that is no database is renamed first."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        was = _identity(self.path)
        try:
            self._check()
        except sqlite3.OperationalError:
            raise  # locked, read-only or no room: the file itself is fine
        except sqlite3.DatabaseError as error:
            if was is not None and was == _identity(self.path):  # another notebook may have renamed it already
                self.note = f"{error}: the old {self.name} is kept as {self._aside().name}, this one is new"
            self._check()
        self._doubted = False

    def _check(self) -> None:
        with closing(_connect(self.path, self.wait_s)) as database, database:
            if (fault := database.execute("PRAGMA quick_check").fetchone()[0]) != "ok":
                raise sqlite3.DatabaseError(fault)
            if _version(database) > len(self.steps):
                raise ValueError(
                    f"{self.path} was written by a later labkit (version {_version(database)}): update labkit"
                )
            database.execute("BEGIN IMMEDIATE")
            self._grow(database)
            if lost := self._tables() - _tables(database):
                raise sqlite3.DatabaseError(f"{self.path.name} has no {', '.join(sorted(lost))}")

    def _grow(self, database: sqlite3.Connection) -> None:
        """Bring a file from its version to the present one."""
        for step in self.steps[_version(database) :]:
            for statement in step:
                database.execute(statement)
        database.execute(f"PRAGMA user_version = {len(self.steps)}")

    def _tables(self) -> frozenset[str]:
        with closing(sqlite3.connect(":memory:")) as blank:
            self._grow(blank)
            return _tables(blank)

    def _copied(self) -> sqlite3.Connection:
        """A store in memory, with what can be read of the file."""
        kept = sqlite3.connect(":memory:", check_same_thread=False)
        address = f"{self.path.absolute().as_uri()}?mode=ro"
        with suppress(sqlite3.Error), closing(sqlite3.connect(address, timeout=0, uri=True)) as on_disk:
            if on_disk.execute("PRAGMA quick_check").fetchone()[0] == "ok":
                kept.deserialize(on_disk.serialize())
        with kept:
            self._grow(kept)
        return kept

    def _aside(self) -> Path:
        kept = self.path.with_name(f"{self.path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
        with suppress(FileNotFoundError):  # the journal belongs to the old file, and would damage the new one
            self.path.with_name(self.path.name + "-journal").rename(kept.with_name(kept.name + "-journal"))
        with suppress(FileNotFoundError):
            self.path.rename(kept)
        return kept


def _connect(path: Path, wait_s: float) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=wait_s)


def _ours(error: sqlite3.Error) -> bool:
    """True if a statement was invalid, and nothing is wrong with the file."""
    return getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_ERROR


def _version(database: sqlite3.Connection) -> int:
    return int(database.execute("PRAGMA user_version").fetchone()[0])


def _tables(database: sqlite3.Connection) -> frozenset[str]:
    return frozenset(name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'"))


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino
