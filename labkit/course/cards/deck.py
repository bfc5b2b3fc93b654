"""Decks: cards in YAML files; an error is reported with its line and field.

deck = read_deck("mine.yaml")            a Deck; ValueError "mine.yaml, line 12, field front: ..."
deck = the_deck()                        labkit's own: every file of labkit/course/cards/decks
deck["ring-bytes"], deck.of(tags={"zero"}, lab="07")
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from pydantic import ValidationError

from labkit.course.cards.card import Card


@dataclass(frozen=True)
class Deck:
    """Cards in order. `deck[id]`, `len(deck)`, `for card in deck`."""

    cards: tuple[Card, ...]

    def __post_init__(self) -> None:
        for id, count in Counter(card.id for card in self.cards).items():
            if count > 1:
                raise ValueError(f"{count} cards are called {id!r}: an id belongs to one card")

    def __iter__(self) -> Iterator[Card]:
        return iter(self.cards)

    def __len__(self) -> int:
        return len(self.cards)

    def __getitem__(self, id: str) -> Card:
        """The card with this id. ValueError, with the nearest id, if there is none."""
        for card in self.cards:
            if card.id == id:
                return card
        near = difflib.get_close_matches(id, [card.id for card in self.cards], 1)
        raise ValueError(f"no card is called {id!r}" + (f"; did you mean {near[0]!r}?" if near else ""))

    def tags(self) -> dict[str, int]:
        """How many cards have each tag, most first."""
        return dict(Counter(tag for card in self.cards for tag in card.tags).most_common())

    def of(self, tags: Iterable[str] = (), lab: str = "", hardest: int = 5) -> Deck:
        """The cards that have all of these tags, are shown by this lab ("07"), and are not harder than `hardest`.

        ValueError for a tag that no card has."""
        wanted = {tags} if isinstance(tags, str) else set(tags)
        if lost := sorted(wanted - set(self.tags())):
            near = difflib.get_close_matches(lost[0], self.tags(), 1)
            raise ValueError(f"no card has the tag {lost[0]!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        return Deck(
            tuple(
                card
                for card in self.cards
                if wanted <= set(card.tags)
                and (not lab or any(cell.startswith(lab) for cell in card.lab))
                and card.difficulty <= hardest
            )
        )


def read_deck(path: Path | str) -> Deck:
    """The cards of a YAML file, a list of mappings. ValueError with file, line and field; OSError if unreadable."""
    return Deck(tuple(_cards(Path(path).read_text(), Path(path).name)))


@cache
def the_deck() -> Deck:
    """labkit's own cards, file by file in the order of their names."""
    decks = sorted((file for file in (files("labkit.course.cards") / "decks").iterdir() if file.name.endswith(".yaml")),
                   key=lambda file: file.name)  # fmt: skip
    return Deck(tuple(card for file in decks for card in _cards(file.read_text(), file.name)))


@cache
def sources() -> Mapping[str, str]:
    """The questions of the documents that the course began with, in a few words: "003/12" -> text. `Card.covers` names
    those that a card answers."""
    text = (files("labkit.course.cards") / "sources.yaml").read_text()
    return MappingProxyType(dict(yaml.safe_load(text)))


def _cards(text: str, name: str) -> Iterator[Card]:
    try:
        root = yaml.compose(text, Loader=yaml.CSafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        raise ValueError(f"{name}, line {mark.line + 1 if mark else 1}: no YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{name}, line 1: no YAML: {error}") from error
    if not isinstance(root, yaml.SequenceNode):
        raise ValueError(f"{name}, line 1: a deck is a list of cards, `- id: ...`")
    for node in root.value:
        values = _plain(node, name)
        if not isinstance(values, dict):
            raise ValueError(f"{name}, line {_line(node)}: a card is a mapping, `- id: ...`, got {values!r}")
        try:
            yield Card.model_validate(values)
        except ValidationError as error:
            # an unknown field is probably a misspelling of one that is missing, so the other errors matter less
            first = min(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
            field, message = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
            if not field:  # a rule over the whole card puts the field's name into its message
                field, _, message = message.partition(": ")
            raise ValueError(f"{name}, line {_where(node, field)}, field {field}: {message}") from error


def _plain(node: yaml.Node, name: str) -> Any:
    """The node as Python data: all scalars are strings, and a key that stands twice is an error."""
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, Any] = {}
        for key, value in node.value:
            if key.value in seen:
                raise ValueError(f"{name}, line {_line(key)}, field {key.value}: stands twice")
            seen[key.value] = _plain(value, name)
        return seen
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, name) for item in node.value]
    return "" if node.tag.endswith(":null") else node.value


def _where(node: yaml.Node, field: str) -> int:
    """The line of a field, or of the nearest thing above it that stands in the file."""
    for part in field.split("."):
        if isinstance(node, yaml.MappingNode):
            node = next((key if not isinstance(value, (yaml.MappingNode, yaml.SequenceNode)) else value
                         for key, value in node.value if key.value == part), node)  # fmt: skip
        elif isinstance(node, yaml.SequenceNode) and part.isdigit() and int(part) < len(node.value):
            node = node.value[int(part)]
    return _line(node)


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
