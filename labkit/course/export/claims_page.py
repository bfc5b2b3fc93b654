"""The quiz of claims on a page without a kernel, and below it every claim with its verdict, the truth and the numbers.

    site/claims.html             the claims, folded, as the last audit found them; site/claims.js asks them

The script keeps no words of its own: it asks the claims that stand on the page, and shows their proofs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from labkit.course.claims.audit import Result, kept
from labkit.course.claims.claim_quiz import ANSWERS, DEPENDING, MEANS, OFFERED, POINTS, cells_on, condition_of, truth_of
from labkit.course.claims.claims_picture import amount, asked, how, remarks, verdict_of
from labkit.course.export.page import Page
from labkit.course.numbers import number_of
from labkit.view.svg import INK

MOST_CELLS = 4
"""So many cells are named below a claim, as in a terminal."""


class SettingRow(NamedTuple):
    """A setting of a proof, in words: what is claimed in it, what was found, and whether the claim holds there."""

    name: str
    claimed: str
    finding: str
    holds: bool


class CellLink(NamedTuple):
    """A cell of a lab in words, and its address; "" if the lab is not on the site."""

    words: str
    file: str


@dataclass(frozen=True)
class Tested:
    """A claim with its proof, as the page shows it. `answer` is "" for a claim that the audit could not decide."""

    result: Result
    places: Sequence[CellLink]

    @property
    def answer(self) -> str:
        """The right answer, one of ANSWERS."""
        return MEANS.get(self.result.claim.verdict, "")

    @property
    def condition(self) -> str:
        """The condition under which a claim that depends is true; "" for any other."""
        return condition_of(self.result)

    @property
    def truth(self) -> str:
        """The right answer in words."""
        return truth_of(self.result) if self.answer else ""

    @property
    def verdict(self) -> tuple[str, str, str]:
        """(word, sign, colour) of the verdict."""
        return verdict_of(self.result)

    @property
    def remarks(self) -> list[str]:
        """The remarks of the proof, beside its numbers."""
        return remarks(self.result)

    @property
    def rows(self) -> list[SettingRow]:
        """The numbers, setting by setting."""
        return [
            SettingRow(
                setting.name, asked(setting), f"{amount(setting.truth, setting.unit)}, {how(setting)}", setting.holds
            )
            for setting in self.result.finding.settings
        ]


class ClaimsPage(NamedTuple):
    """The page of claims; `labs` are the pages to which the names of cells lead."""

    labs: Sequence[Page]

    @property
    def topics(self) -> dict[str, list[Tested]]:
        """All claims by topic, in the order of the audit."""
        results = kept().results
        cells = cells_on(result.claim.id for result in results)
        pages = {page.number: page for page in self.labs}
        topics: dict[str, list[Tested]] = {}
        for result in results:
            places = [place_of(cell, pages) for cell in cells.get(result.claim.id, ())[:MOST_CELLS]]
            topics.setdefault(result.claim.topic, []).append(Tested(result, places))
        return topics

    @property
    def made(self) -> Mapping[str, str]:
        """When, where and with what the audit was made."""
        return kept().made

    @property
    def words(self) -> dict[str, Any]:
        """The words of the quiz, and the colour of those that stand on a verdict's colour."""
        return {"answers": ANSWERS, "depending": DEPENDING, "offered": OFFERED, "points": POINTS, "ink": INK}


def place_of(cell: str, pages: Mapping[str, Page]) -> CellLink:
    """A cell that is named as `03-12`, as `02·c25` (c25 of lab 02) or as `10` (a whole lab)."""
    number, id = number_of(cell), cell.rpartition("·")[2]
    words = f"lab {number}" if cell == number else f"lab {number}, cell {id}"
    page = pages.get(number)
    if page is None or cell == number:
        return CellLink(words, page.file if page else "")
    known = any(one.get("id") == id for one in page.cells)
    return CellLink(words, f"{page.file}#cell-id={id}" if known else "")
