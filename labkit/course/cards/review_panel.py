"""Reviewing cards by keyboard: space shows the answer, 1 to 5 rate it, and the next card appears."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import traitlets

from labkit.course.cards.card_faces import back, front, habits
from labkit.course.cards.review_words import NEW_A_DAY, counted, sentence, span
from labkit.course.server.labs import addresses
from labkit.course.widgets.linked import LINKS
from labkit.course.widgets.live import Live
from labkit.course.widgets.twin import Twin
from labkit.view.svg import Picture, headline, text

SCRIPT = LINKS + Path(__file__).with_name("review_panel.js").read_text(encoding="utf-8")
"""The panel in a browser, a module; a page without a kernel uses the same (labkit/course/export/cards_page.py)."""
STYLE = Path(__file__).with_name("review_panel.css")


class Reviews(Protocol):
    """A box of cards (box.py)."""

    deck: Any
    clock: Callable[[], datetime]

    @property
    def note(self) -> str:
        """Problems with the file; "" if there are none."""

    def due(self, tags: Iterable[str] = (), lab: str = "", new: int = NEW_A_DAY) -> Sequence[Any]:
        """The cards to ask now."""

    def foreseen(self, id: str) -> Sequence[datetime]:
        """When a card would be due after each rating."""

    def rate(self, id: str, rating: int, seconds: float = 0.0) -> Any:
        """Store a rating; returns the card's schedule."""

    def forecast(self, days: int = 14) -> Sequence[int]:
        """The numbers of cards due today, tomorrow, ..."""

    def asked(self) -> Sequence[Any]:
        """Reviews of cards that were seen before."""

    def days(self) -> Mapping[Any, int]:
        """The number of reviews on each day."""

    def streak(self) -> int:
        """The number of days in a row with a review."""


class ReviewPanel(Twin, Live):
    """Asks what is due in a box of cards, one after the other, until nothing is.

    space shows the answer; 1 nothing came, 2 only when I saw it, 3 with effort, 4 well, 5 at once. A rating is stored
    before the next card is shown, so a kernel that dies loses nothing. Below each rating stands when the card would
    come again. Menus choose a tag and a lab. A cell named by a card is a link that opens the lab there. `.card` is
    the present card, `.rated` are the ratings of this panel."""

    _esm = SCRIPT
    _css = STYLE
    face = traitlets.Unicode().tag(sync=True)
    answer = traitlets.Unicode().tag(sync=True)
    shown = traitlets.Bool(False).tag(sync=True)
    standing = traitlets.Unicode().tag(sync=True)
    note = traitlets.Unicode().tag(sync=True)
    spans = traitlets.List(traitlets.Unicode()).tag(sync=True)
    tags = traitlets.List(traitlets.Unicode()).tag(sync=True)
    labs = traitlets.List(traitlets.Unicode()).tag(sync=True)
    tag = traitlets.Unicode("").tag(sync=True)
    lab = traitlets.Unicode("").tag(sync=True)
    addresses = traitlets.Dict(traitlets.Unicode()).tag(sync=True)

    def __init__(self, box: Reviews, tag: str = "", lab: str = "", new: int = NEW_A_DAY) -> None:
        """`new`: the most new cards per day. ValueError for a tag or a lab that no card has."""
        self.box, self.new = box, new
        self.card: Any = None
        self.rated: list[tuple[str, int]] = []
        self._since = time.monotonic()
        labs = box.deck.labs()
        if lab and lab not in labs:
            raise ValueError(f"no card is shown by lab {lab!r}; there are {', '.join(labs)}")
        box.due({tag} if tag else ())  # raises for an unknown tag before anything is shown
        super().__init__(tags=sorted(box.deck.tags()), labs=labs, tag=tag, lab=lab, addresses=addresses())
        self.on_msg(lambda _, message, buffers: self.heard(message))
        self.observe(lambda _: self.ask(), ["tag", "lab"])
        self.ask()

    def heard(self, message: Any) -> None:
        """Handle a key or a button: {"do": "show"}, {"do": "rate", "rating": 1 to 5}; anything else is ignored."""
        if not isinstance(message, dict) or self.card is None:
            return
        if message.get("do") == "show":
            self.shown = True
        elif message.get("do") == "rate" and self.shown and message.get("rating") in range(1, 6):
            self.rate(message["rating"])

    def rate(self, rating: int) -> None:
        """Store a rating of the present card, and ask the next."""
        id, seconds = self.card.id, time.monotonic() - self._since
        due = self.box.rate(id, rating, seconds).due
        self.rated.append((id, rating))
        self.ask(sentence("rated", card=id, span=self._until(due)))

    def ask(self, prefix: str = "") -> None:
        """Show the next card that is due, or how things stand if none is; `prefix` is put in front of the note."""
        due = self.box.due({self.tag} if self.tag else (), self.lab, self.new)
        self.card = due[0] if due else None
        with self.hold_sync():
            self.shown = False
            self.face = front(self.card) if self.card else str(self.habits())
            self.answer = back(self.card) if self.card else ""
            self.spans = [self._until(due) for due in self.box.foreseen(self.card.id)] if self.card else []
            days = counted(self.box.streak(), "day")
            self.standing = sentence("to_go" if due else "none", due=len(due), done=len(self.rated), days=days)
            self.note = prefix + self.box.note
        self._since = time.monotonic()

    def habits(self) -> Picture:
        """A picture of past reviews, the coming ones, and the recall."""
        today = self.box.clock().astimezone().date()
        return habits(self.box.days(), self.box.forecast(), self.box.asked(), today)

    def static(self) -> Picture:
        """A picture for places where no widgets run."""
        words = f"{len(self.box.deck)} cards to review"
        return Picture(headline(words) + text(4, 42, "They are asked in JupyterLab, or by `labkit cards`."), 54, words)

    def _until(self, due: datetime) -> str:
        return span((due - self.box.clock()).total_seconds())
