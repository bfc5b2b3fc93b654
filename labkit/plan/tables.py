"""Tables of data that lie beside the code, as TOML: they are read when somebody first looks, and checked row by row.

Whoever adds a row writes no Python, so what is wrong with one is said by file, row and key, with what would be right.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Key(NamedTuple):
    """What a row may hold under one key: a `kind` (int, float, str, bool, list or dict), and for numbers the least and
    the most that make sense. With `among` one of these words. A row without a `needed` key is refused."""

    kind: type
    low: float = 0
    high: float = math.inf
    needed: bool = False
    among: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """`a whole number from 1 to 1,000`."""
        if self.among:
            return f"one of {', '.join(map(repr, self.among))}"
        if self.kind in (int, float):
            return f"a {'whole ' * (self.kind is int)}number from {self.low:,g} to {self.high:,g}"
        return {str: "words between quotes", bool: "true or false", list: "a list"}.get(self.kind, "a table of keys")

    def takes(self, value: object) -> bool:
        """True if the value is of that kind, and within these bounds."""
        if self.kind in (int, float):
            numbers = (int,) if self.kind is int else (int, float)
            return type(value) in numbers and self.low <= value <= self.high  # type: ignore[operator]
        if self.kind is str:
            return isinstance(value, str) and bool(value.strip()) and (not self.among or value in self.among)
        return isinstance(value, self.kind)


class Table(Mapping[str, T]):
    """Rows by name, which `read` reads as soon as one is asked for: importing a table reads no file."""

    def __init__(self, read: Callable[[], Mapping[str, T]]) -> None:
        self._read = read

    def __getitem__(self, name: str) -> T:
        return self._read()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())


def toml(file: Path) -> dict[str, Any]:
    """What a TOML file holds. ValueError that names the file and the line, for one that is no TOML."""
    import tomllib  # with its patterns it takes longer than all else that a plan imports from the standard library

    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{file.name}: {error}") from None


def checked(place: str, row: object, keys: Mapping[str, Key]) -> dict[str, Any]:
    """The row, if it has all needed keys, no unknown one, and under each what it may hold.

    Otherwise ValueError with `place`, which names the file and the row, and with the mend."""
    if not isinstance(row, dict):
        raise ValueError(f"{place} is {row!r}, and must be a table of keys: {', '.join(keys)}")
    for name, value in row.items():
        if name not in keys:
            near = difflib.get_close_matches(name, keys, 1)
            mend = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(keys)}"
            raise ValueError(f"{place}: no key is called {name!r}; {mend}")
        if not keys[name].takes(value):
            raise ValueError(f"{place}: {name} = {value!r} must be {keys[name].words}")
    for name, key in keys.items():
        if key.needed and name not in row:
            raise ValueError(f"{place} lacks {name}, {key.words}: write {name} = ...")
    return row


def built(place: str, make: Callable[..., T], *values: Any, **fields: Any) -> T:
    """`make(*values, **fields)`, whose ValueError then says `place` too."""
    try:
        return make(*values, **fields)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
