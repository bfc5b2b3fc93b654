"""Reviewing cards, by keyboard: space shows the answer, 1 to 5 say how it went, and the next one is there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import anywidget
import traitlets

from labkit.course.cards.card_faces import back, front, habits
from labkit.course.server.labs import addresses
from labkit.course.widgets.linked import LINKS
from labkit.course.widgets.twin import Twin
from labkit.view.svg import Picture, headline, text


class Reviews(Protocol):
    """A box of cards (box.py)."""

    deck: Any
    clock: Callable[[], datetime]

    @property
    def note(self) -> str:
        """What happened to the file, "" if nothing did."""

    def due(self, tags: Iterable[str] = (), lab: str = "", new: int = 10) -> Sequence[Any]:
        """What to ask now."""

    def rate(self, id: str, rating: int, seconds: float = 0.0) -> Any:
        """Keep a rating; where the card stands now."""

    def forecast(self, days: int = 14) -> Sequence[int]:
        """Cards due today, tomorrow, ..."""

    def asked(self) -> Sequence[Any]:
        """Reviews of known cards."""

    def days(self) -> Mapping[Any, int]:
        """Reviews of each day."""

    def streak(self) -> int:
        """Days in a row."""


class ReviewPanel(Twin, anywidget.AnyWidget):
    """Asks what is due in a box of cards, one after the other, until nothing is.

    space shows the answer; 1 nothing came, 2 only when I saw it, 3 with effort, 4 well, 5 at once. A rating is kept
    before the next card is shown, so a kernel that dies loses nothing. Menus choose a tag and a lab. A cell that a card
    names is a link: it opens the lab there. `.card` is what is asked, `.rated` are the ratings of this panel."""

    _esm = LINKS + Path(__file__).with_name("review_panel.js").read_text()
    _css = Path(__file__).with_name("review_panel.css")
    face = traitlets.Unicode().tag(sync=True)
    answer = traitlets.Unicode().tag(sync=True)
    shown = traitlets.Bool(False).tag(sync=True)
    standing = traitlets.Unicode().tag(sync=True)
    told = traitlets.Unicode().tag(sync=True)
    tags = traitlets.List(traitlets.Unicode()).tag(sync=True)
    labs = traitlets.List(traitlets.Unicode()).tag(sync=True)
    tag = traitlets.Unicode("").tag(sync=True)
    lab = traitlets.Unicode("").tag(sync=True)
    addresses = traitlets.Dict(traitlets.Unicode()).tag(sync=True)

    def __init__(self, box: Reviews, tag: str = "", lab: str = "", new: int = 10) -> None:
        """`new`: at most so many new cards a day. ValueError for a tag or a lab that no card has."""
        self.box, self.new = box, new
        self.card: Any = None
        self.rated: list[tuple[str, int]] = []
        self._since = time.monotonic()
        labs = sorted({cell[:2] for card in box.deck for cell in card.lab})
        if lab and lab not in labs:
            raise ValueError(f"no card is shown by lab {lab!r}; there are {', '.join(labs)}")
        box.due({tag} if tag else ())  # a tag that no card has is told before there is anything to see
        super().__init__(tags=sorted(box.deck.tags()), labs=labs, tag=tag, lab=lab, addresses=addresses())
        self.on_msg(lambda _, said, buffers: self.heard(said))
        self.observe(lambda _: self.ask(), ["tag", "lab"])
        self.ask()

    def heard(self, said: Any) -> None:
        """What a key or a button says: {"do": "show"}, {"do": "rate", "rating": 1 to 5}; anything else is nothing."""
        if not isinstance(said, dict) or self.card is None:
            return
        if said.get("do") == "show":
            self.shown = True
        elif said.get("do") == "rate" and self.shown and said.get("rating") in range(1, 6):
            self.rate(said["rating"])

    def rate(self, rating: int) -> None:
        """Keep a rating of the card that is asked, and ask the next."""
        id, seconds = self.card.id, time.monotonic() - self._since
        due = self.box.rate(id, rating, seconds).due
        self.rated.append((id, rating))
        away = (due - self.box.clock()).total_seconds()
        self.ask(f"{id}: again in {_span(away)}. ")

    def ask(self, said: str = "") -> None:
        """The next card that is due, or what there is to say if none is."""
        due = self.box.due({self.tag} if self.tag else (), self.lab, self.new)
        self.card = due[0] if due else None
        with self.hold_sync():
            self.shown = False
            self.face = front(self.card) if self.card else str(self.habits())
            self.answer = back(self.card) if self.card else ""
            streak = self.box.streak()
            days = f"{streak} day{'' if streak == 1 else 's'} in a row"
            self.standing = f"{len(due)} to go · {len(self.rated)} done · {days}" if due else (
                f"Nothing is due. {len(self.rated)} done · {days}")  # fmt: skip
            self.told = said + self.box.note
        self._since = time.monotonic()

    def habits(self) -> Picture:
        """The days, what is coming, and whether it stays."""
        today = self.box.clock().astimezone().date()
        return habits(self.box.days(), self.box.forecast(), self.box.asked(), today)

    def static(self) -> Picture:
        """What stands here where no widgets run."""
        words = f"{len(self.box.deck)} cards to review"
        return Picture(headline(words) + text(4, 42, "They are asked in JupyterLab, or by `labkit cards`."), 54, words)


def _span(seconds: float) -> str:
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= 0.95 * size:
            count = round(seconds / size)
            return f"{count} {unit}{'' if count == 1 else 's'}"
    return "a minute"
