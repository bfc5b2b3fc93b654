"""The report of a check: its verdicts, shown in a notebook, in a terminal, or as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from labkit.course.judge.verdicts import BROKEN, HOLDS, Verdict

UNWRITTEN = "{} is not written yet"
SIGNS = ((HOLDS, "✓", "#009E73", "green"), (BROKEN, "✗", "#D55E00", "red"), ("", "–", "#999999", "dim"))


@dataclass(frozen=True)
class Report:
    """The verdicts on one attempt at one exercise.

    n_cases, of    how many cases were run, and how many there are (a broken one is the last)
    star           the cost beside the star's target: {words, unit, cost, target, won}; None where there is none
    printed        what the attempt printed on the first rank that printed anything
    notes          further remarks
    """

    key: str
    title: str
    name: str
    verdicts: tuple[Verdict, ...]
    seconds: float
    n_cases: int = 0
    of: int = 0
    star: Mapping[str, Any] | None = None
    printed: str = ""
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """True if every verdict holds."""
        return all(verdict.state == HOLDS for verdict in self.verdicts)

    @property
    def broken(self) -> Verdict | None:
        """The first broken verdict."""
        return next((verdict for verdict in self.verdicts if verdict.broken), None)

    @property
    def starred(self) -> bool:
        """True if the attempt has earned the star."""
        return self.passed and bool(self.star and self.star["won"])

    def __getitem__(self, name: str) -> Verdict:
        return next(verdict for verdict in self.verdicts if verdict.name == name)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for files and for programs that read it."""
        plain = asdict(self)
        plain["verdicts"] = [verdict._asdict() for verdict in self.verdicts]
        return {**plain, "passed": self.passed}

    @classmethod
    def of_dict(cls, plain: Mapping[str, Any]) -> Report:
        """A report from the plain data of `as_dict`."""
        kept = {key: value for key, value in plain.items() if key != "passed"}
        kept["verdicts"] = tuple(Verdict(**{**verdict, "at": tuple(verdict["at"])}) for verdict in plain["verdicts"])
        return cls(**{**kept, "notes": tuple(plain["notes"])})

    @property
    def headline(self) -> str:
        """The result in one line."""
        broken = self.broken
        if broken and broken.seen == UNWRITTEN.format(self.name):
            return f"{self.key} {self.title}: {broken.seen} ({broken.expected})"
        cases = f"{self.n_cases} of {self.of} cases, {self.seconds:.1f} s" if self.of else f"{self.seconds:.1f} s"
        if self.passed:
            return f"{self.key} {self.title}: all five verdicts hold ({cases})" + self._star()
        name = broken.name if broken else "nothing"
        return f"{self.key} {self.title}: {name} {'are' if name in ('values', 'rules') else 'is'} broken ({cases})"

    def _star(self) -> str:
        if self.star is None:
            return ""
        cost, target = f"{self.star['cost']:,.0f} {self.star['unit']}", f"{self.star['target']:,.0f}"
        target_text = f"{self.star['words']}: {cost}, the target is {target}"
        return f"  ★ {target_text}" if self.starred else f"  (a star is to be had for {target_text})"

    def lines(self, verdict: Verdict) -> list[tuple[str, str]]:
        """The lines that explain a broken verdict: (heading, text)."""
        where = ", ".join(part for part in (
            "" if verdict.rank is None else f"rank {verdict.rank}",
            f"line {verdict.line}" if verdict.line else "",
            verdict.where,
        ) if part)  # fmt: skip
        parts = (("expected", verdict.expected), ("seen", verdict.seen), ("where", where),
                ("likely cause", verdict.cause), ("look next", verdict.probe))  # fmt: skip
        return [(heading, text) for heading, text in parts if text]

    def __str__(self) -> str:
        rows = [self.headline]
        for verdict in self.verdicts:
            rows.append(f"  {_sign(verdict.state)[1]} {verdict.name:9s} {verdict.law}")
            if verdict.broken:
                rows += [f"      {heading + ':':14s}{text}" for heading, text in self.lines(verdict)]
        if self.printed and not self.passed:
            rows.append(f"  it printed: {self.printed.strip()[:300]}")
        return "\n".join([*rows, *(f"  {note}" for note in self.notes)])

    def __repr__(self) -> str:
        return str(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for row in str(self).splitlines():
            style = next((style for _, sign, _, style in SIGNS if row.strip().startswith(sign)), "")
            yield Text(row, style=style)

    def _repr_html_(self) -> str:
        rows = "".join(self._row(verdict) for verdict in self.verdicts)
        printed = f"<div>it printed: <code>{escape(self.printed.strip()[:300])}</code></div>" if self.printed else ""
        notes = "".join(f"<div>{escape(note)}</div>" for note in self.notes)
        return (
            f'<div style="max-width:860px"><p><b>{escape(self.headline)}</b></p>'
            f'<table style="text-align:left;border-collapse:collapse">{rows}</table>{printed}{notes}</div>'
        )

    def _row(self, verdict: Verdict) -> str:
        _, sign, colour, _ = _sign(verdict.state)
        cell = 'style="text-align:left;vertical-align:top;padding:.15em .7em"'
        evidence = ""
        if verdict.broken:
            details = "".join(
                f"<tr><td {cell}>{heading}</td><td {cell}>{escape(text)}</td></tr>"
                for heading, text in self.lines(verdict)
            )
            evidence = f"<table>{details}</table>{verdict.picture}"
        return (
            f'<tr><td {cell}><b style="color:{colour}">{sign}</b></td><td {cell}><b>{verdict.name}</b></td>'
            f"<td {cell}>{escape(verdict.law)}{evidence}</td></tr>"
        )


def _sign(state: str) -> tuple[str, str, str, str]:
    return next(sign for sign in SIGNS if sign[0] in (state, ""))
