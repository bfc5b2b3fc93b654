"""All cards on one page that reviews them without a kernel: the panel of a notebook, FSRS in the page.

    site/cards.html              the cards as data, their faces made by Python, and the scripts of the page
         ts-fsrs/                FSRS for browsers, from npm

One script holds the panel's own (labkit/course/cards/review_panel.js), the schedule (site/schedule.js) and what stands
in the kernel's place (site/cards.js): a page that is opened as a file may not load a module. Reviews are kept in the
browser, in the form that `labkit cards --import` reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from labkit.course.cards.box import scheduler
from labkit.course.cards.card_faces import back, front
from labkit.course.cards.deck import the_deck
from labkit.course.cards.review_panel import SCRIPT
from labkit.course.cards.review_words import NEW_A_DAY, SENTENCES, SPANS
from labkit.course.export.cells import TEMPLATES
from labkit.course.export.npm import Package
from labkit.course.export.page import Page
from labkit.course.learner.reviews import FORMAT, VERSION
from labkit.course.numbers import number_of

TS_FSRS = Package(
    "ts-fsrs",
    "5.4.2",
    "z4qop4pzTcyTzuJ566d9EaX/4bZZzhYfeaPImfVr+xcYT65c5oBgFDijUhCE/D+C78eaolHIhKRZ04/RwF+v2g==",
    ("dist/index.umd.js", "LICENSE"),
)


class CardsPage(NamedTuple):
    """The page of cards; `labs` are the pages to which the names of cells lead."""

    labs: Sequence[Page]

    @property
    def n_cards(self) -> int:
        """The number of cards."""
        return len(the_deck())

    @property
    def data(self) -> dict[str, Any]:
        """What the scripts read: every card with both faces, the scheduler, the sentences, where labs are."""
        deck = the_deck()
        cards = [
            {
                "id": card.id,
                "front": front(card),
                "back": back(card),
                "tags": card.tags,
                "labs": sorted({number_of(cell) for cell in card.lab}),
                "difficulty": card.difficulty,
            }
            for card in deck
        ]
        return {
            "cards": cards,
            "tags": sorted(deck.tags()),
            "labs": deck.labs(),
            "addresses": {page.number: page.file for page in self.labs},
            "scheduler": scheduler().to_dict(),
            "sentences": dict(SENTENCES),
            "spans": SPANS,
            "new": NEW_A_DAY,
            "format": FORMAT,
            "version": VERSION,
        }

    @property
    def script(self) -> Markup:
        """The panel, the schedule and what stands behind them, as one module."""
        scripts = ((TEMPLATES / name).read_text(encoding="utf-8") for name in ("schedule.js", "cards.js"))
        return Markup("\n".join([SCRIPT, *scripts]))
