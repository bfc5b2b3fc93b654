"""A box of cards: what this learner has reviewed, in a file of theirs, and what is due. Scheduled by FSRS.

    box = Box(the_deck())                         in the user's data folder; Box(deck, path) elsewhere
    box.due(tags={"zero"}, lab="07")              what to ask now, most forgotten first, then new cards
    box.rate("ring-bytes", 3)                     1 nothing came ... 5 at once; it is stored before it returns
    box.recall("ring-bytes")                      how likely it is that the learner still knows it
    other.load(box.export())                      on another machine: nothing is lost, and nothing comes twice

Only the ratings are stored; the schedule is computed from them, so two kernels may review at the same time. A clock
that jumps does no harm: a rating never counts as older than the one before it, nor as later than now. For files that
are damaged, locked or of a later labkit see labkit/course/learner/store.py.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from functools import cache
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import fsrs

from labkit.course.cards.card import Card
from labkit.course.cards.card_faces import habits
from labkit.course.cards.deck import Deck
from labkit.course.cards.review_words import NEW_A_DAY
from labkit.course.interview.interview import Interview
from labkit.course.learner.log import Log
from labkit.course.learner.reviews import Review, export_of, reviews_of
from labkit.course.learner.store import Store

NAME = "cards.sqlite3"
STEPS = (
    (
        "CREATE TABLE reviews (id INTEGER PRIMARY KEY AUTOINCREMENT, uid TEXT NOT NULL UNIQUE, said TEXT NOT NULL)",
        "CREATE TABLE measured (name TEXT PRIMARY KEY, said TEXT NOT NULL)",
    ),
)
RATINGS = (fsrs.Rating.Again, fsrs.Rating.Again, fsrs.Rating.Hard, fsrs.Rating.Good, fsrs.Rating.Easy)
WAIT_S = 2.0
"""How long to wait for another kernel; a rating that cannot be written in time is kept, and written with the next."""
WORDS = ("nothing came", "only when I saw it", "with effort", "well", "at once")
"""What 1 to 5 mean; to the scheduler 1 and 2 are both "forgotten", but the learner sees a difference."""
A_DAY = timedelta(days=1)


class Standing(NamedTuple):
    """The schedule of a card: when it is due, its last rating, how often it was reviewed, and how often forgotten."""

    due: datetime
    last: Review
    times: int
    lapses: int
    memory: fsrs.Card


class Asked(NamedTuple):
    """A review of a card that was seen before: the recall that FSRS expected, and whether the learner knew it."""

    at: datetime
    expected: float
    came: bool


class Box:
    """The reviews of a deck's cards, stored in one file; `clock` tells the time."""

    def __init__(
        self, deck: Deck, path: Path | str | None = None, clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        """Open the file, or create it. ValueError for a file of a later version of labkit."""
        self.deck, self.clock, self.store = deck, clock, Store(NAME, STEPS, path, "box of cards", WAIT_S)
        self.warnings: tuple[str, ...] = ()
        self.log = Log(self.store, "reviews", "rating", Review.model_validate_json)
        self._unkept = ""
        self._state: object = None
        self._replayed: tuple[dict[str, Standing], list[Asked]] = {}, []

    @property
    def note(self) -> str:
        """Problems with the file or the clock; "" if there are none."""
        late = [review.at for review in self.reviews() if review.at > self.clock() + A_DAY]
        count = f"{len(late)} review{'s lie' if len(late) > 1 else ' lies'}"
        jumped = f"{count} after now, up to {max(late):%Y-%m-%d}: they count as made now" if late else ""
        return "; ".join(filter(None, (self.store.note, self.log.note, self._unkept, jumped, *self.warnings)))

    def rate(self, id: str, rating: int, seconds: float = 0.0) -> Standing:
        """Store a rating, and return the card's schedule. ValueError for an unknown card, or a rating not in 1 to 5."""
        self.deck[id]
        if rating not in range(1, len(RATINGS) + 1):
            raise ValueError(f"a rating is 1 to {len(RATINGS)} ({', '.join(WORDS)}), got {rating!r}")
        review = Review(uid=uuid.uuid4().hex, card=id, rating=int(rating), at=self.clock(), seconds=max(0.0, seconds))
        self.log.keep([review])
        return self.standings()[id]

    def reviews(self) -> list[Review]:
        """All ratings, in the order in which they were stored."""
        return list(self._read()[0])

    def standings(self) -> dict[str, Standing]:
        """The schedule of each card that was reviewed."""
        return self._read()[1]

    def asked(self) -> list[Asked]:
        """Every review of a card a day or more after the one before it: the expected recall, and the result."""
        return self._read()[2]

    def recall(self, id: str) -> float:
        """The probability that the learner knows a card now, by FSRS; 0 if it was never reviewed."""
        return _recall(self.standings().get(id), self.clock())

    def weakness(self) -> dict[str, float]:
        """For each card of the deck, the probability that the learner does not know it."""
        standings, now = self.standings(), self.clock()
        return {card.id: 1 - _recall(standings.get(card.id), now) for card in self.deck}

    def due(self, tags: Iterable[str] = (), lab: str = "", new: int = NEW_A_DAY) -> list[Card]:
        """The cards to ask now: those that are due, most forgotten first, then up to `new` new ones per day.

        New cards come in the order of the deck, the easier first. ValueError for a tag that no card has."""
        standings, now = self.standings(), self.clock()
        chosen = self.deck.of(tags, lab)
        old = [card for card in chosen if card.id in standings and standings[card.id].due <= now]
        begun = sum(first.astimezone().date() == now.astimezone().date() for first in self._firsts())
        fresh = sorted((card for card in chosen if card.id not in standings), key=lambda card: card.difficulty)
        return sorted(old, key=lambda card: _recall(standings[card.id], now)) + fresh[: max(0, new - begun)]

    def foreseen(self, id: str) -> tuple[datetime, ...]:
        """When a card would be due after each rating from 1 to 5, given now. ValueError for an unknown card."""
        self.deck[id]
        standing, now = self.standings().get(id), self.clock().astimezone(UTC)
        memory = standing.memory if standing else fsrs.Card(card_id=0)
        at = max(now, memory.last_review or now)
        return tuple(scheduler().review_card(memory, rating, at)[0].due for rating in RATINGS)

    def interview(self, minutes: float = 30, level: int = 3, topics: Iterable[str] = ()) -> Interview:
        """A mock interview over this deck, whose questions are drawn by weakness; it begins now."""
        return Interview(self.deck, minutes, level, self.weakness(), topics=topics)

    def forecast(self, days: int = 14) -> list[int]:
        """The numbers of cards that are due today (or overdue), tomorrow, ..., if no further ratings come."""
        today, counts = self.clock().astimezone().date(), [0] * days
        for id, standing in self.standings().items():
            days_ahead = (standing.due.astimezone().date() - today).days
            if days_ahead < days and any(card.id == id for card in self.deck):
                counts[max(0, days_ahead)] += 1
        return counts

    def days(self) -> Counter[date]:
        """The number of reviews on each day, by this machine's calendar; none lies after today."""
        now = self.clock()
        return Counter(min(review.at, now).astimezone().date() for review in self.reviews())

    def streak(self) -> int:
        """The number of days in a row with a review, up to today, or to yesterday if today has none yet."""
        days, day, length = self.days(), self.clock().astimezone().date(), 0
        day = day if day in days else day - A_DAY
        while day in days:
            day, length = day - A_DAY, length + 1
        return length

    def remember(self, name: str, text: str) -> None:
        """Store a text under a name, and replace an older one."""
        try:
            with self.store.writing() as database:
                database.execute("INSERT OR REPLACE INTO measured (name, said) VALUES (?, ?)", (name, text))
        except OSError as error:
            self._unkept = f"{error}: what was measured is not kept"

    def recalled(self, name: str) -> str:
        """The text stored under a name; "" if there is none."""
        row = None
        with suppress(OSError), self.store.reading() as database:
            row = database.execute("SELECT said FROM measured WHERE name = ?", (name,)).fetchone()
        return str(row[0]) if row else ""

    def _repr_html_(self) -> str:
        shown = habits(self.days(), self.forecast(), self.asked(), self.clock().astimezone().date())
        return f"{shown}<p>{escape(self.note)}</p>"

    def export(self) -> dict[str, Any]:
        """All ratings as plain data, for json."""
        return export_of(self.reviews())

    def load(self, plain: Mapping[str, Any]) -> int:
        """Add the ratings that `export` gave, unless they are here already. Stores all new ones, or none; returns their
        number.

        ValueError names the field that is wrong; OSError if the file cannot be written now."""
        return self.log.add(reviews_of(plain))

    def _firsts(self) -> list[datetime]:
        first: dict[str, datetime] = {}
        for review in self.reviews():
            first.setdefault(review.card, review.at)
        return list(first.values())

    def _read(self) -> tuple[tuple[Review, ...], dict[str, Standing], list[Asked]]:
        """The reviews and what follows from them; rows that another version wrote in its own way are skipped."""
        reviews = self.log.late
        with suppress(OSError, ValueError):  # locked for long, or of a later labkit: then only unwritten ones are known
            reviews = self.log.items()
        now = self.clock()
        # years of reviews are replayed only when they change, or while some lie in the future and time moves on
        state = tuple(review.uid for review in reviews), now if any(review.at > now for review in reviews) else None
        if state != self._state:
            self._state, self._replayed = state, replayed(reviews, now)
        return tuple(reviews), *self._replayed


def replayed(reviews: Sequence[Review], now: datetime) -> tuple[dict[str, Standing], list[Asked]]:
    """The schedules after these ratings, and the recall that FSRS expected at each; times never go back."""
    standings: dict[str, Standing] = {}
    asked: list[Asked] = []
    for review in reviews:
        was = standings.get(review.card)
        at = min(review.at, now).astimezone(UTC)
        if was is not None and was.memory.last_review is not None:
            at = max(at, was.memory.last_review)
            if at - was.memory.last_review >= A_DAY:
                asked.append(Asked(at, _recall(was, at), RATINGS[review.rating - 1] != fsrs.Rating.Again))
        memory, _ = scheduler().review_card(was.memory if was else fsrs.Card(card_id=0), RATINGS[review.rating - 1], at)
        lapsed = RATINGS[review.rating - 1] == fsrs.Rating.Again
        standings[review.card] = Standing(memory.due, review, (was.times if was else 0) + 1,
                                        (was.lapses if was else 0) + lapsed, memory)  # fmt: skip
    return standings, asked


@cache
def scheduler() -> fsrs.Scheduler:
    """FSRS with its default parameters, for a recall of 90%, without randomness: same ratings, same dates."""
    return fsrs.Scheduler(enable_fuzzing=False)


def _recall(standing: Standing | None, now: datetime) -> float:
    if standing is None:
        return 0.0
    last = standing.memory.last_review
    return float(scheduler().get_card_retrievability(standing.memory, max(now, last) if last else now))
