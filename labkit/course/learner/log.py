"""What a learner did, in a Store: item by item, in order, each once. Progress and the box of cards are such logs.

log = Log(store, "events", "event", event_of)
log.keep([event])        stored now, or with the next write that succeeds: a locked file stops nobody
log.items()              all items, in the order in which they were stored
log.add(others)          adds items from elsewhere, except those that are here already: all of them or none
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from labkit.course.learner.store import Store


class LogItem(Protocol):
    """Something that a learner did; its `uid` is unique on all machines."""

    @property
    def uid(self) -> str:
        """The unique id."""

    def model_dump_json(self) -> str:
        """The entry as a text that `read` understands."""


Item = TypeVar("Item", bound=LogItem)


class Log(Generic[Item]):
    """The rows (id, uid, said) of a table. `late` are items not written yet; `note` says why, "" if there are none."""

    def __init__(self, store: Store, table: str, word: str, read: Callable[[str], Item]) -> None:
        """`word` is what a learner calls an item; `read` makes an item from its text, or raises ValueError."""
        self.store, self.table, self.word, self.read = store, table, word, read
        self.late: list[Item] = []
        self.note = ""

    def items(self) -> list[Item]:
        """All items; those that another version wrote in its own way are skipped. OSError if they cannot be read."""
        with self.store.reading() as database:
            rows = database.execute(f"SELECT said FROM {self.table} ORDER BY id").fetchall()
        parsed = list[Item]()
        for (text,) in rows:
            with suppress(ValueError):
                parsed.append(self.read(text))
        return [*parsed, *self.late]

    def keep(self, items: Sequence[Item]) -> None:
        """Store items now, or with the next write that succeeds."""
        self.late += items
        try:
            self.add(())
        except (OSError, ValueError) as error:  # ValueError: a later labkit has changed the file since it was opened
            count = f"{len(self.late)} {self.word}{'' if len(self.late) == 1 else 's'}"
            self.note = f"{error}: {count} kept until that is mended"

    def add(self, items: Iterable[Item]) -> int:
        """Write the late items and these. Returns how many of these were new. OSError if it cannot be written now."""
        insert = f"INSERT OR IGNORE INTO {self.table} (uid, said) VALUES (?, ?)"
        with self.store.writing() as database:
            for item in self.late:
                database.execute(insert, (item.uid, item.model_dump_json()))
            new = sum(database.execute(insert, (item.uid, item.model_dump_json())).rowcount for item in items)
        self.late, self.note = [], ""
        return new
