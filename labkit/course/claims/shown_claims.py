"""Claims in a notebook: run their proofs, and compare what is claimed with what is found.

claims("c12", "c36")             these
claims(topic="ZeRO")             all on a topic
claims(stored=True)              all, with the results of the last audit of this checkout; nothing runs
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from labkit.course.claims import claims_picture as view
from labkit.course.claims.audit import Claim, Result, audit, choose, kept
from labkit.launch.progress import Bar
from labkit.view.svg import Picture

MANY = 4
"""From this many claims on, a progress bar is shown."""


@dataclass(frozen=True)
class Shown:
    """Results that are shown as a table; two or more also with a picture of their verdicts above it.

    `made`   for stored results: date, torch, python and machine"""

    results: tuple[Result, ...]
    made: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def __len__(self) -> int:
        return len(self.results)

    def __iter__(self) -> Iterator[Result]:
        return iter(self.results)

    def __getitem__(self, id: str) -> Result:
        """The result for a claim. ValueError if it is not among these."""
        for result in self.results:
            if result.claim.id == id:
                return result
        raise ValueError(
            f"{id!r} is not among these; there are {', '.join(result.claim.id for result in self.results)}"
        )

    @property
    def picture(self) -> Picture:
        """The verdicts, topic by topic."""
        return view.summary(self.results)

    def __repr__(self) -> str:
        return "\n".join([view.tally(self.results), *map(str, self.results)])

    def _repr_html_(self) -> str:
        above = self.picture.html() if len(self) > 1 else ""
        sources = (value if name in ("date", "machine") else f"{name} {value}" for name, value in self.made.items())
        return above + view.table(self.results, ", ".join(sources))


def claims(*ids: str, topic: str = "", stored: bool = False) -> Shown:
    """Test these claims, or those on a topic, or all; with `stored`, read the results of the last audit.

    All together take about a minute. ValueError, with the nearest, for an unknown id or topic."""
    chosen = choose(ids, topic)
    if not stored:
        return Shown(tuple(_told(chosen)))
    origin, results = kept()
    results_by_id = {result.claim.id: result for result in results}
    if lost := [claim.id for claim in chosen if claim.id not in results_by_id]:
        raise ValueError(f"no result of {lost[0]} is stored: run labkit claims --store")
    return Shown(tuple(results_by_id[claim.id] for claim in chosen), origin)


def _told(chosen: tuple[Claim, ...]) -> Iterator[Result]:
    """The results, one after the other; for many claims with a progress bar."""
    bar = Bar()
    for place, claim in enumerate(chosen):
        if len(chosen) >= MANY:
            bar.draw(place / len(chosen), f"{claim.id}: {claim.claim}")
        yield from audit([claim.id])
    bar.end(f"{len(chosen)} claims put to the test")
