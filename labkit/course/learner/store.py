"""A file of the learner's own: SQLite in the user's data folder, safe against crashes, damage and a second notebook.

    store = Store("scores.sqlite3", STEPS, name="board")
    with store.writing() as database: ...       one transaction: all of it is stored, or nothing
    with store.reading() as database: ...       one state of the file, also while another notebook writes

STEPS are the statements that made version 1 of the file, then those that make version 2 of it, and so on; an older
file takes those that it lacks. `.note` tells what happened to a file:

    damaged, or no database    it is renamed, never overwritten, and a new one is begun
    empty, deleted meanwhile   a new one is begun
    cannot be written          what can be read of it is kept in memory, until this notebook ends
    of a later labkit          ValueError, and the file is left alone

A file that others write in turn is waited for; one that somebody holds for two seconds and does nothing with is not,
and the error names who it is. Damage is what SQLite can see: it has no checksums, and a flipped bit in a text stays
unseen.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import platformdirs

from labkit.course.learner.holders import holders

WAIT_S, TURNS_S = 2.0, 20.0
"""How long one notebook waits for another that holds the file and writes nothing, and for its turn among several."""
FORMAT = "unsupported file format"
"""SQLite's words for a damaged number in the head of a file; the code of this error is that of an invalid statement."""
LATEST = 1000
"""No labkit will ever write so high a version: who reads one reads damage."""

Found = TypeVar("Found")


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
        self._doubted = self._known = False
        try:
            self._make()
        except (OSError, sqlite3.OperationalError) as error:
            if isinstance(error, sqlite3.Error) and _ours(error):
                raise
            self.note = f"{self._held(error)} cannot be written ({error}): the {name} is kept until this notebook ends"
            self._kept = self._copied()

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction in which nobody else can write. OSError if the file cannot be written now."""
        with self._open() as database:
            self._in_turn(lambda: database.execute("BEGIN IMMEDIATE"))
            yield database

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """The file as it is now. OSError if it cannot be read now."""
        with self._open() as database:
            database.execute("BEGIN")
            self._in_turn(lambda: _version(database))  # takes the lock for reading
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
            if type(error) not in (sqlite3.DatabaseError, sqlite3.OperationalError) or _ours(error):
                raise
            self._doubted = not _busy(error)  # the file may be damaged: check it when it is next opened
            raise OSError(f"{self._held(error)} cannot be used now: {error}") from error

    def _in_turn(self, look: Callable[[], Found]) -> Found:
        """What `look` finds: wait while others write in turn, but not for one who holds the file and writes nothing."""
        until = time.monotonic() + max(TURNS_S, self.wait_s)
        while True:
            before = self._written()
            try:
                return look()
            except sqlite3.OperationalError as error:
                if not _busy(error) or self._written() == before or time.monotonic() > until:
                    raise

    def _written(self) -> tuple[int, int] | None:
        try:
            status = self.path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size

    def _held(self, error: Exception) -> str:
        return f"{self.path} is held by {holders(self.path)} and" if _busy(error) else str(self.path)

    def _sound(self) -> bool:
        """True if the file is still as it was: anybody may have deleted or overwritten it."""
        if not self.path.exists():
            return False
        with closing(_connect(self.path, self.wait_s)) as database:
            try:
                return self._in_turn(lambda: _version(database)) == len(self.steps)
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError) and str(error) != FORMAT:
                    raise
                return False

    def _make(self) -> None:
        """Create the file with its tables; a file that is no database is renamed first."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        was = _identity(self.path)
        try:
            blank = self._check()
            if blank and (was or self._known):
                self.note = f"{self.path} was {'empty' if was else 'deleted'}: a new {self.name} is begun"
        except sqlite3.DatabaseError as error:
            # if it is locked or must not be written, or the disk is full, the file itself is fine
            tells = str(error) == FORMAT or (_ours(error) and self._valid()) or self._only_says_read_only(error)
            if isinstance(error, sqlite3.OperationalError) and not tells:
                raise
            if was is not None and was == _identity(self.path):  # another notebook may have renamed it already
                fault = "; ".join(line for line in str(error).splitlines() if "***" not in line)
                self.note = f"{fault}: the old {self.name} is kept as {self._aside().name}, this one is new"
            self._check()
        self._doubted, self._known = False, True

    def _valid(self) -> bool:
        """True if the steps themselves are valid, so that a statement that fails tells of the file."""
        self._tables()
        return True

    def _only_says_read_only(self, error: sqlite3.Error) -> bool:
        """True if it is the head of the file that says that it must not be written."""
        if getattr(error, "sqlite_errorcode", 0) != sqlite3.SQLITE_READONLY:
            return False
        # SQLite reads it: if we opened and closed the file, all locks that this process has on it would be lost
        with closing(_connect(self.path, self.wait_s)) as database:
            return max(database.serialize()[18:20]) > 2

    def _begin(self) -> None:
        """Make a file that is not there under another name first, so that no other notebook finds it empty."""
        new = self.path.with_name(f"{self.path.name}.new-{os.getpid()}-{threading.get_ident()}")
        try:
            with closing(_connect(new, self.wait_s)) as database, database:
                self._grow(database)
            with suppress(OSError):  # another notebook was quicker, or this file system has no links
                os.link(new, self.path)
        finally:
            new.unlink(missing_ok=True)

    def _check(self) -> bool:
        """Look whether the file is sound, and give it the tables that it lacks. Returns True if it had none."""
        if begun := not self.path.exists():
            self._begin()
        with closing(_connect(self.path, self.wait_s)) as database, database:
            if (fault := self._in_turn(lambda: database.execute("PRAGMA quick_check").fetchone()[0])) != "ok":
                raise sqlite3.DatabaseError(fault)
            if (version := _version(database)) > LATEST:
                raise sqlite3.DatabaseError(f"the file says that it is of version {version:,}")
            if version > len(self.steps):
                raise ValueError(f"{self.path} was written by a later labkit (version {version}): update labkit")
            self._in_turn(lambda: database.execute("BEGIN IMMEDIATE"))
            blank = begun or not (_version(database) or _tables(database))
            self._grow(database)
            if lost := self._tables() - _tables(database):
                raise sqlite3.DatabaseError(f"{self.path.name} has no {', '.join(sorted(lost))}")
        return blank

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
    database = sqlite3.connect(path, timeout=wait_s)
    database.text_factory = lambda text: text.decode(errors="replace")  # one flipped bit must not hide all rows
    return database


def _ours(error: sqlite3.Error) -> bool:
    """True if a statement was invalid, and nothing is wrong with the file."""
    return getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_ERROR and str(error) != FORMAT


def _busy(error: Exception) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


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
