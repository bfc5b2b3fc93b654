"""What a learner did, in a Store: item by item, in order, each once. Progress and the box of cards are such logs.

log = Log(store, "events", "event", event_of)
log.keep([event])        now, or with the next write that succeeds: nobody is stopped by a file that is locked
log.items()              all of it, in the order in which it was kept
log.add(others)          what came from elsewhere, but what is here already: all of it or nothing
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from labkit.course.learner.store import Store


class Entry(Protocol):
    """Something that was done; `uid` is its own, on every machine."""

    @property
    def uid(self) -> str:
        """Told apart by this."""

    def model_dump_json(self) -> str:
        """As text that `read` understands."""


Item = TypeVar("Item", bound=Entry)


class Log(Generic[Item]):
    """The rows (id, uid, said) of a table. `late` is what is to be written yet, `told` why, "" if nothing is."""

    def __init__(self, store: Store, table: str, word: str, read: Callable[[str], Item]) -> None:
        """`word` is what a learner calls an item; `read` makes one of its text, or raises ValueError."""
        self.store, self.table, self.word, self.read = store, table, word, read
        self.late: list[Item] = []
        self.told = ""

    def items(self) -> list[Item]:
        """All; what another version has written in a way of its own is passed over. OSError if it cannot be read."""
        with self.store.reading() as database:
            rows = database.execute(f"SELECT said FROM {self.table} ORDER BY id").fetchall()
        found = list[Item]()
        for (said,) in rows:
            with suppress(ValueError):
                found.append(self.read(said))
        return [*found, *self.late]

    def keep(self, items: Sequence[Item]) -> None:
        """Now, or with the next write that succeeds."""
        self.late += items
        try:
            self.add(())
        except (OSError, ValueError) as error:  # ValueError: a later labkit has had the file since it was opened
            count = f"{len(self.late)} {self.word}{'' if len(self.late) == 1 else 's'}"
            self.told = f"{error}: {count} kept until that is mended"

    def add(self, items: Iterable[Item]) -> int:
        """Write what is late, and these; how many of these were new. OSError if it cannot be written now."""
        insert = f"INSERT OR IGNORE INTO {self.table} (uid, said) VALUES (?, ?)"
        with self.store.writing() as database:
            for each in self.late:
                database.execute(insert, (each.uid, each.model_dump_json()))
            new = sum(database.execute(insert, (item.uid, item.model_dump_json())).rowcount for item in items)
        self.late, self.told = [], ""
        return new
