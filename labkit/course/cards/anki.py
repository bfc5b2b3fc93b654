"""Cards for Anki: a deck as a package (.apkg) that Anki, AnkiDroid and AnkiMobile import.

    export(the_deck(), "labkit.apkg")                       returns how many cards it has
    export(the_deck().of(tags={"zero"}), "zero.apkg")       only some of them

A card keeps its identity: a second import replaces its words, and keeps its schedule. Each part of the answer is a
field of its own, with computed figures, so that a learner may lay out the cards in another way.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sqlite3
import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from hashlib import sha256
from html import escape
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import genanki

from labkit.course.cards.card import PARTS, Card
from labkit.course.cards.card_faces import evidence, formulas
from labkit.course.cards.deck import Deck
from labkit.course.numbers import number_of
from labkit.view.svg import Drawing

MODEL_ID, DECK_ID = 1_617_201_837, 1_293_740_659
"""These were drawn once, and must never change: Anki knows a note type and a deck by their numbers."""
FIELDS = ("Front", *(part.title() for part in PARTS), "Table", "Wrong", "Tested", "Lab", "Picture")
FRONT = '<div class="front">{{Front}}</div>'
BACK = Path(__file__).with_name("anki_back.html").read_text(encoding="utf-8").rstrip()
STYLE = Path(__file__).with_name("anki.css").read_text(encoding="utf-8")
"""Pictures keep a white background in night mode, since an SVG in an <img> cannot take the colour of the page."""


def export(deck: Deck, path: Path | str) -> int:
    """Write the cards of a deck as a package with this name, and return how many there are.

    An older file stays until the new one is complete. ValueError for a name that does not end in .apkg, an empty deck,
    and a card whose figures or picture cannot be computed; OSError for a place that cannot be written."""
    path = Path(path)
    if path.suffix != ".apkg":
        raise ValueError(f"{str(path)!r}: Anki imports files whose names end in .apkg, such as 'labkit.apkg'")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; say a file in it, such as {str(path / 'labkit.apkg')!r}")
    if not len(deck):
        raise ValueError(f"{path}: a deck of no cards; there is nothing to export")
    media: dict[str, str] = {}
    whole = genanki.Deck(DECK_ID, "labkit", "Distributed training: questions with answers that are computed.")
    kind = genanki.Model(MODEL_ID, "labkit", [{"name": name} for name in FIELDS],
                         [{"name": "answer", "qfmt": FRONT, "afmt": BACK}], STYLE)  # fmt: skip
    for card in deck:
        fields = _fields(card, media)
        whole.add_note(genanki.Note(kind, [fields.get(name, "") for name in FIELDS], tags=list(_tags(card)),
                                    guid=genanki.guid_for("labkit", card.id)))  # fmt: skip
    try:
        with TemporaryDirectory(prefix=".labkit-", dir=path.parent) as aside:
            _write(whole, media, Path(aside))
            os.replace(Path(aside) / "package", path)
    except OSError as error:
        raise OSError(error.errno, f"the package cannot be written: {error.strerror}", str(path)) from error
    except sqlite3.Error as error:  # sqlite's exception for a full disk
        raise OSError(errno.EIO, f"the package cannot be written: {error}", str(path)) from error
    return len(deck)


def _write(whole: genanki.Deck, media: Mapping[str, str], folder: Path) -> None:
    """Write the package to `folder / "package"`. genanki's own writer would leave its database behind in /tmp."""
    now, stored = time.time(), folder / "collection"
    with closing(sqlite3.connect(stored)) as base:
        genanki.Package(whole).write_to_db(base.cursor(), now, count(int(now * 1000)))
        base.commit()
    with zipfile.ZipFile(folder / "package", "w", zipfile.ZIP_DEFLATED) as package:
        package.write(stored, "collection.anki2")
        package.writestr("media", json.dumps({str(place): name for place, name in enumerate(media)}))
        for place, drawing in enumerate(media.values()):
            package.writestr(str(place), drawing)


def _fields(card: Card, media: dict[str, str]) -> dict[str, str]:
    """The fields of a card, as HTML by name; its picture goes to `media`."""
    try:
        fields = {"Front": formulas(card.as_sentence(card.front))}
        fields |= {part.title(): formulas(words) for part, words in card.parts().items()}
        drawing = card.drawn()
    except ValueError as error:
        raise ValueError(f"card {card.id!r}: {error}" if card.id not in str(error) else str(error)) from error
    fields["Lab"] = ", ".join(card.lab)
    if card.axes:
        fields["Table"] = _table(card)
    if card.wrong:
        myth, but = (formulas(card.as_sentence(words)) for words in (card.wrong.myth, card.wrong.but))
        fields["Wrong"] = f"<q>{myth}</q><br>{but}"
    fields["Tested"] = evidence(card.audited())
    if drawing:
        svg = _file(drawing)
        # a new drawing gets a new name, since Anki keeps the file that it has under an old one
        name = f"labkit-{card.id}-{sha256(svg.encode()).hexdigest()[:8]}.svg"
        media[name] = svg
        fields["Picture"] = f'<img src="{name}" alt="{escape(drawing.label)}">'
    return fields


def _table(card: Card) -> str:
    head = "".join(f"<th>{formulas(card.as_sentence(axis))}</th>" for axis in card.axes)
    rows = "".join(
        f"<tr><th>{formulas(row)}</th>{''.join(f'<td>{formulas(card.as_sentence(cell))}</td>' for cell in cells)}</tr>"
        for row, cells in card.rows.items()
    )
    return f"<table><tr><th></th>{head}</tr>{rows}</table>"


def _file(drawing: Drawing) -> str:
    """A drawing as a file of its own, with the size and colour that a page would give it."""
    size = f'width="{drawing.width:g}" height="{drawing.height:g}" style="color:#111"'
    return re.sub(r'style="[^"]*"', size, str(drawing), count=1)


def _tags(card: Card) -> Iterator[str]:
    yield from ("labkit::" + re.sub(r"\s+", "-", tag.strip()) for tag in card.tags)
    yield f"labkit::difficulty::{card.difficulty}"
    yield from dict.fromkeys(f"labkit::lab::{number_of(cell)}" for cell in card.lab)
