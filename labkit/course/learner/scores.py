"""The board: every attempt of this learner at the capstone, in one SQLite file of the learner's own.

    board = Scores()                     in the user's data folder; Scores(path) elsewhere
    board.add(entry)                     one transaction: a crash in the middle changes nothing
    board.entries(task)                  best first

For files that are damaged, locked or of a later labkit see store.py; `.note` tells of them.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from labkit.course.capstone.entry import Entry
from labkit.course.capstone.forecast import Task
from labkit.course.learner.store import Store

NAME = "scores.sqlite3"
STEPS = (("CREATE TABLE IF NOT EXISTS entries (id INTEGER PRIMARY KEY, task TEXT NOT NULL, said TEXT NOT NULL)",),)


class Scores:
    """The entries in one file. `path` is where it is, `note` tells of problems with it, "" if there are none."""

    def __init__(self, path: Path | str | None = None) -> None:
        """Open the board, or create it. ValueError for a file of a later version of labkit."""
        self.store = Store(NAME, STEPS, path, "board")

    @property
    def path(self) -> Path:
        """The path of the file."""
        return self.store.path

    @property
    def note(self) -> str:
        """Problems with the file; "" if there are none."""
        return self.store.note

    def add(self, entry: Entry) -> Entry:
        """Store an entry, also one that does not count. Returns it. OSError if the file cannot be written now."""
        with self.store.writing() as database:
            database.execute("INSERT INTO entries (task, said) VALUES (?, ?)", (entry.task_key, entry.to_json()))
        return entry

    def entries(self, task: Task | None = None) -> list[Entry]:
        """The entries of a task, or of all without one: those that count first, the best score in front."""
        with self.store.reading() as database:
            rows = database.execute("SELECT task, said FROM entries ORDER BY id").fetchall()
        entries = []
        for key, text in rows:
            if task is None or key == task.key:
                with suppress(ValueError):  # another version wrote it: it stays in the file
                    entries.append(Entry.of_json(text))
        return sorted(entries, key=lambda entry: entry.score)

    def __len__(self) -> int:
        with self.store.reading() as database:
            return int(database.execute("SELECT count(*) FROM entries").fetchone()[0])

    def __repr__(self) -> str:
        return f"<board: {len(self)} attempts in {self.path.name}{'; ' + self.note if self.note else ''}>"
