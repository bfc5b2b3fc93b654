"""A card: a question, its answer in the order in which one would say it, and where it is shown.

    claim      the answer itself, first                 front      the question
    reason     why it is so                             wrong      what one often hears, and what is wrong with it
    law        the formula, every symbol named          lab        cells that show it, "07-34"
    number     with what it was computed from           numbers    name: expression -> unit (figures.py)
    costs      the trade-off                            checks     expressions that must be true
    limits     where the claim stops being true         covers     the questions of the sources it answers, "003/12"
    proofs     audited claims that test it, "c12"

Texts refer to figures as {sent}. A digit in a text must belong to a name (ZeRO-3, bf16), or to a formula in backticks;
every other number has to be a figure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator

from labkit.course.cards.figures import Figure, evaluate, figure
from labkit.course.cards.pictures import picture as picture_of
from labkit.course.claims.audit import Result, claim, kept
from labkit.view.svg import Drawing

PARTS = ("claim", "reason", "law", "number", "costs", "limits")
"""The parts of the answer, in the order in which one would say them."""
NAMED = re.compile(r"\{(\w+)\}")
FORMULA = re.compile(r"`[^`]*`")
NAME = re.compile(
    r"\b(ZeRO-[1-3]|1F1B|[234]D|[bt]?fp?(8|16|32|64)|bf16|u?int[48]|b?float(16|32|64)|e[45]m[23]|[A-Z]{1,3}\d{2,4}s?"
    r"|GPT-[1-4]|Llama[- ][1-4]|DeepSeek-V\d|arXiv:\d{4}\.\d{5}|c\d{2,3}|PEP \d+|v[12]|FSDP[12]|PCIe \d|[Ll]ab \d\d"
    r"|\d\d[a-z]?-\d\d|NVFP4|L[12]|rank 0)\b"
)
"""Names with digits, which may stand in a text."""


class Wrong(BaseModel):
    """A wrong claim that is often heard: its words, why it is wrong, and which audited claims prove that."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    myth: str = Field(validation_alias=AliasChoices("myth", "said"))  # learners' decks of older versions say `said`
    but: str
    claims: tuple[str, ...] = ()


class Card(BaseModel):
    """One card of a deck."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    id: str = Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")
    front: str = Field(min_length=8)
    claim: str = Field(min_length=8)
    reason: str = ""
    law: str = ""
    number: str = ""
    costs: str = ""
    limits: str = ""
    axes: tuple[str, ...] = ()
    rows: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    numbers: dict[str, str] = Field(default_factory=dict)
    checks: tuple[str, ...] = ()
    picture: str = ""
    wrong: Wrong | None = None
    proofs: tuple[str, ...] = ()
    lab: tuple[str, ...] = ()
    derive: str = ""
    difficulty: int = Field(ge=1, le=5)
    tags: tuple[str, ...] = Field(min_length=1)
    next: tuple[str, ...] = ()
    covers: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _whole(self) -> Card:
        if sum(bool(getattr(self, part)) for part in PARTS) < 2:
            raise ValueError("claim: an answer has at least one more part: reason, law, number, costs or limits")
        for row, cells in self.rows.items():
            if len(cells) != len(self.axes):
                raise ValueError(f"rows: {row!r} has {len(cells)} cells, and there are {len(self.axes)} axes")
        if bool(self.axes) != bool(self.rows):
            raise ValueError("axes: axes and rows come together")
        for field, text in self.texts():
            if lost := sorted(set(NAMED.findall(text)) - set(self.numbers)):
                raise ValueError(
                    f"{field}: no number is called {lost[0]!r}; there are {', '.join(self.numbers) or 'none'}"
                )
            if typed := re.search(r"\S*\d\S*", NAME.sub("", NAMED.sub("", FORMULA.sub("", text)))):
                raise ValueError(f"{field}: {typed[0]!r} is typed: make it one of `numbers`, and say {{its_name}}")
        for field, ids in (("proofs", self.proofs), ("wrong.claims", self.wrong.claims if self.wrong else ())):
            for id in ids:
                try:
                    claim(id)
                except ValueError as error:
                    raise ValueError(f"{field}: {error}") from error
        if idle := [name for name in self.numbers if not self._names(name)]:
            raise ValueError(f"numbers: {idle[0]!r} is said nowhere")
        return self

    def _names(self, name: str) -> bool:
        named = any(name in NAMED.findall(text) for _, text in self.texts())
        others = (expression for key, expression in self.numbers.items() if key != name)
        return named or any(
            re.search(rf"\b{name}\b", expression) for expression in (*self.checks, self.picture, *others)
        )

    def texts(self) -> Iterator[tuple[str, str]]:
        """Every text that a learner reads, as (field, text)."""
        yield "front", self.front
        yield from ((part, getattr(self, part)) for part in PARTS)
        yield from (("axes", text) for text in self.axes)
        yield from (("rows", text) for name, cells in self.rows.items() for text in (name, *cells))
        if self.wrong:
            yield from (("wrong", text) for text in (self.wrong.myth, self.wrong.but))

    @cached_property
    def figures(self) -> dict[str, Figure]:
        """The numbers, computed; each may use those above it. ValueError for an invalid expression."""
        figures: dict[str, Figure] = {}
        for name, expression in self.numbers.items():
            figures[name] = figure(expression, {key: known.value for key, known in figures.items()})
        return figures

    def as_sentence(self, text: str) -> str:
        """A text with its figures filled in."""
        return NAMED.sub(lambda match: str(self.figures[match[1]]), text)

    def parts(self) -> dict[str, str]:
        """The answer with its figures: {"claim": ..., "law": ...}, only the parts that the card has."""
        return {part: self.as_sentence(getattr(self, part)) for part in PARTS if getattr(self, part)}

    def audited(self) -> tuple[Result, ...]:
        """Results of the audited claims behind the card, and behind its wrong claim, from the last audit."""
        wanted = dict.fromkeys((*self.proofs, *(self.wrong.claims if self.wrong else ())))
        results = {result.claim.id: result for result in kept().results} if wanted else {}
        return tuple(results[id] for id in wanted if id in results)

    def drawn(self) -> Drawing | None:
        """The card's picture; None if it has none. ValueError, with the card's id, if it cannot be drawn."""
        try:
            return picture_of(self.picture, {name: entry.value for name, entry in self.figures.items()})
        except ValueError as error:
            raise ValueError(f"card {self.id!r}, field picture: {error}") from error

    def broken(self) -> list[str]:
        """The checks that are not true."""
        values = {name: entry.value for name, entry in self.figures.items()}
        return [check for check in self.checks if evaluate(check, values) is not True]
