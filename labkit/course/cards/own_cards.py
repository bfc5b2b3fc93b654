"""This learner's cards: labkit's deck, their own decks, and cards on their machine and their mistakes.

labkit.cards()                                    a Box: labkit.ReviewPanel(labkit.cards()) reviews it
labkit.cards(measured=labkit.doctor(quick=True))  from now on with cards on this machine's numbers
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.course.cards.box import Box
from labkit.course.cards.card import Card
from labkit.course.cards.deck import Deck, read_deck, the_deck
from labkit.course.cards.own import failed, measured as cards_of
from labkit.course.exercises.catalogue import problems
from labkit.course.learner.progress import Progress
from labkit.course.learner.store import data_folder
from labkit.plan.machine.collectives import Line

if TYPE_CHECKING:
    from labkit.course.machine.doctor import MachineReport

DECKS = "decks"
"""The folder beside the box of cards; its YAML files are decks, too."""


def cards(measured: MachineReport | None = None, folder: Path | str | None = None) -> Box:
    """All cards that this learner can review, with the box in their data folder, or in `folder`.

    `measured` is stored for the next time. An own deck that cannot be read is left out, and `.note` says why."""
    place = Path(folder) if folder is not None else data_folder()
    box = Box(the_deck(), place / "cards.sqlite3")
    if measured is not None:
        link = [measured.link.alpha_s, measured.link.beta_s_per_byte] if measured.link else None
        box.remember("doctor", json.dumps({"findings": measured.as_dict(), "link": link}))
    notes: list[str] = []
    extra_cards = [*_measured(box.recalled("doctor")), *_failed(place), *_decks(place / DECKS, notes)]
    known = {card.id for card in the_deck()}
    twice = [card.id for card in extra_cards if card.id in known]
    notes += [f"a card of your own is called {id!r}, like one of labkit's: it stays out" for id in twice]
    unique = {card.id: card for card in extra_cards if card.id not in known}
    box.deck, box.warnings = Deck((*the_deck(), *unique.values())), tuple(notes)
    return box


def _measured(text: str) -> tuple[Card, ...]:
    try:
        kept = json.loads(text) if text else {"findings": {}, "link": None}
        return cards_of(kept["findings"], Line(*kept["link"]) if kept["link"] else None)
    except (ValueError, TypeError, KeyError):  # another version stored it: a new measurement replaces it
        return ()


def _failed(place: Path) -> tuple[Card, ...]:
    titles = {problem.key: problem.title for problem in problems()}
    return failed(Progress(place / "progress.sqlite3").failed_causes(), titles)


def _decks(folder: Path, notes: list[str]) -> Iterator[Card]:
    for file in sorted(folder.glob("*.yaml")) if folder.is_dir() else ():
        try:
            yield from read_deck(file)
        except (ValueError, OSError) as error:
            notes.append(str(error))
