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

import yaml

from labkit.course.cards.card import Card
from labkit.course.numbers import natural, number_of
from labkit.course.reading.authored import records


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
        """The number of cards with each tag, {tag: count}, the most frequent tag first."""
        return dict(Counter(tag for card in self.cards for tag in card.tags).most_common())

    def labs(self) -> list[str]:
        """The numbers of the labs that show at least one card, in their order."""
        return sorted({number_of(cell) for card in self.cards for cell in card.lab}, key=natural)

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
                and (not lab or any(number_of(cell) == lab for cell in card.lab))
                and card.difficulty <= hardest
            )
        )


def read_deck(path: Path | str) -> Deck:
    """The cards of a YAML file, a list of mappings. ValueError with file, line and field; OSError if unreadable."""
    return Deck(tuple(records(Path(path).read_text(), Path(path).name, Card)))


@cache
def the_deck() -> Deck:
    """labkit's own cards, file by file in the order of their names."""
    decks = sorted((file for file in (files("labkit.course.cards") / "decks").iterdir() if file.name.endswith(".yaml")),
                   key=lambda file: file.name)  # fmt: skip
    return Deck(tuple(card for file in decks for card in records(file.read_text(), file.name, Card)))


@cache
def sources() -> Mapping[str, str]:
    """The questions of the documents that the course began with, in a few words: "003/12" -> text. `Card.covers` names
    those that a card answers."""
    text = (files("labkit.course.cards") / "sources.yaml").read_text()
    return MappingProxyType(dict(yaml.safe_load(text)))
