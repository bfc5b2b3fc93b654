"""Claims that were put to the test: what is said beside what is the case.

    tally(results)      `3 claims: 1 holds, 2 wrong; all proofs agree with their rows`
    table(results)      HTML: topic by topic the claim, its verdict, the truth; folded below it claimed against found
    summary(results)    a Picture: a bar for each topic, made of its verdicts
    markdown(results), lines(result)      the same for a file, and for a terminal
    brief(result)       one line, for a card

A verdict is a word and a sign; its colour only repeats them.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from types import MappingProxyType
from typing import Any, Protocol

from labkit.view.svg import INK, PALETTE, WIDTH, Picture, box, headline, line, text, width_of
from labkit.view.units import value_text

VERDICTS = MappingProxyType(
    {
        "holds": ("✓", PALETTE[2]),
        "holds with conditions": ("◐", PALETTE[0]),
        "wrong": ("✗", PALETTE[6]),
        "depends": ("±", PALETTE[1]),
        "not shown": ("?", PALETTE[7]),
    }
)
"""A verdict's sign and colour."""
RAISED = ("!", PALETTE[3])
"""Those of a proof that raised."""
RULES = MappingProxyType({"equal": "", "at least": "≥ ", "at most": "≤ ", "above": "> ", "below": "< "})
LEFT, EACH, ROW, TOP = 128.0, 34.0, 25.0, 74.0
CELL = "text-align:left;vertical-align:top;padding:.25em .6em;white-space:normal"
INNER = "text-align:left;vertical-align:top;padding:.1em .7em .1em 0;white-space:normal"


class Shown(Protocol):
    """A claim that was put to the test; `labkit.course.claims.audit.Result` is one."""

    @property
    def claim(self) -> Any:
        """Its row: id, seed, topic, claim, verdict, truth."""

    @property
    def finding(self) -> Any:
        """What its proof found: verdict, settings, premise, said (finding.py)."""

    @property
    def seconds(self) -> float:
        """What that took."""

    @property
    def fault(self) -> str:
        """What the proof raised, if it did."""

    @property
    def agrees(self) -> bool:
        """Whether the proof's verdict is the row's."""


def verdict_of(result: Shown) -> tuple[str, str, str]:
    """(word, sign, colour) of what the proof says."""
    if result.fault:
        return ("proof raised", *RAISED)
    return (result.finding.verdict, *VERDICTS[result.finding.verdict])


def tally(results: Iterable[Shown]) -> str:
    """How many claims have which verdict, and which proofs say something else than their rows."""
    every = list(results)
    counts = Counter(verdict_of(each)[0] for each in every)
    order = [*VERDICTS, "proof raised"]
    said = ", ".join(f"{counts[word]} {word}" for word in order if counts[word]) or "none"
    apart = [each.claim.id for each in every if not each.agrees]
    agree = f"proof and row disagree: {', '.join(apart)}" if apart else "all proofs agree with their rows"
    return f"{len(every)} claim{'' if len(every) == 1 else 's'}: {said}; {agree}"


def amount(value: float | str, unit: str = "") -> str:
    """A number with its unit, or a word: `18,790 B = 18.3 KiB`, `0.5 of DDP's bytes`, `hangs`."""
    if isinstance(value, str):
        return value
    return value_text(value, unit) if math.isfinite(value) else f"{'-' if value < 0 else ''}∞ {unit}".strip()


def asked(setting: Any) -> str:
    """What the claim says in a setting, with the room that it has: `> 1.8 times`, `0.5 ± 5%`, `fits`."""
    if isinstance(setting.claimed, str):
        return setting.claimed
    room = f" ± {setting.within:.2g}" if 0 < setting.within < 0.001 else f" ± {setting.within:.1%}".replace(".0%", "%")
    exact = setting.rule in ("above", "below") or not setting.within or setting.claimed in (0, math.inf, -math.inf)
    return RULES[setting.rule] + amount(setting.claimed, setting.unit) + ("" if exact else room)


def lines(result: Shown) -> list[str]:
    """A result in words: the verdict and the claim, the truth, then a line for each setting."""
    word, sign, _ = verdict_of(result)
    said = [f"{result.claim.id}  {sign} {word}: {result.claim.claim}", f"    truth: {result.claim.truth}"]
    if not result.agrees and not result.fault:
        said.append(f"    the row says: {result.claim.verdict}")
    said += [f"    {words}" for words in _remarks(result)]
    for each in result.finding.settings:
        told = f"claimed {asked(each)}, found {amount(each.found, each.unit)} ({_how(each)})"
        said.append(f"    {'✓' if each.holds else '✗'} {each.name}: {told}")
    return said


def brief(result: Shown) -> str:
    """A result in one line, with a setting or two: measured before computed, one that holds beside one that fails."""
    word, sign, _ = verdict_of(result)
    settings = sorted(result.finding.settings, key=lambda each: not each.measured)
    others = sorted(settings[1:], key=lambda each: each.holds == settings[0].holds)
    told = [f"{each.name}: {amount(each.found, each.unit)}, claimed {asked(each)} ({_how(each)})"
            for each in (*settings[:1], *others[:1])]  # fmt: skip
    return f"{result.claim.id} {sign} {word}: “{result.claim.claim}”; {'; '.join(told) or result.finding.said}"


def markdown(results: Sequence[Shown]) -> str:
    """A table in Markdown, one row a claim, in their order."""
    rows = ["| id | topic | claim | verdict | truth | measurement | s |", "|---|---|---|---|---|---|--:|"]
    for each in results:
        word, sign, _ = verdict_of(each)
        found = [f"{'✓' if s.holds else '✗'} {s.name}: claimed {asked(s)}, found {amount(s.found, s.unit)} ({_how(s)})"
                 for s in each.finding.settings]  # fmt: skip
        row = each.claim
        verdict = f"{sign} {word}" + (f" (the row says: {row.verdict})" if not each.agrees else "")
        told = "<br>".join(map(plain, (*_remarks(each), *found)))
        cells = (row.id, row.topic, row.claim, verdict, row.truth)
        rows.append(f"| {' | '.join(map(plain, cells))} | {told} | {each.seconds:.2f} |")
    return "\n".join([plain(tally(results)), "", *rows, ""])


def table(results: Sequence[Shown], made: str = "") -> str:
    """All of it as HTML; each claim's settings unfold. `made`: when and by what the results were found."""
    names = ("", "claim", "verdict", "the truth, and how it was tested", "s")
    widths = ("5%", "28%", "13%", "", "5%")
    head = "".join(
        f"<th scope='col' style='{CELL};width:{w}'>{name}</th>" for name, w in zip(names, widths, strict=True)
    )
    body = ""
    for topic in dict.fromkeys(each.claim.topic for each in results):
        mine = [each for each in results if each.claim.topic == topic]
        title = f"<th scope='rowgroup' colspan='5' style='{CELL};padding-top:.9em'>{escape(topic)}</th>"
        body += f"<tbody><tr style='background:transparent'>{title}</tr>{''.join(map(_row, mine))}</tbody>"
    said = escape(tally(results) + (f". Found on {made}" if made else ""))
    caption = f"<caption style='text-align:left;caption-side:top;padding:.3em 0'>{said}</caption>"
    style = "border-collapse:collapse;width:100%;max-width:75em;table-layout:fixed"
    return f"<table style='{style}'>{caption}<thead><tr>{head}</tr></thead>{body}</table>"


def summary(results: Sequence[Shown]) -> Picture:
    """Topics from above, the largest first; in each bar a box for every verdict, as wide as it has claims."""
    said = tally(results)
    counts: dict[str, Counter[str]] = {}
    for each in results:
        counts.setdefault(each.claim.topic, Counter())[verdict_of(each)[0]] += 1
    looks = {**VERDICTS, "proof raised": RAISED}
    body, x = [headline(said.partition("; ")[0] if all(r.agrees for r in results) else said)], 4.0
    for word, (sign, colour) in looks.items():
        if total := sum(count[word] for count in counts.values()):
            body += [box(x, 36, 26, 19, colour, sign), text(x + 32, 50, f"{word}: {total}", size=12)]
            x += 46 + width_of(f"{word}: {total}", 12)
    wide = min(EACH, (WIDTH - LEFT - 40) / max((count.total() for count in counts.values()), default=1))
    for place, (topic, count) in enumerate(sorted(counts.items(), key=lambda item: -item[1].total())):
        x, y = LEFT, TOP + place * ROW
        body.append(text(LEFT - 10, y + 15, topic, "end", 12))
        for word, (sign, colour) in looks.items():
            if n := count[word]:
                ids = ", ".join(each.claim.id for each in results
                                if each.claim.topic == topic and verdict_of(each)[0] == word)  # fmt: skip
                body.append(box(x, y, wide * n, 20, colour, f"{n} {sign}", f"{topic}, {word}: {ids}"))
                x += wide * n
        body.append(text(x + 8, y + 15, count.total(), size=12))
    bottom = TOP + len(counts) * ROW
    body.append(line(LEFT, TOP - 5, LEFT, bottom, width=0.5))
    told = "; ".join(
        f"{topic}: {', '.join(f'{n} {word}' for word, n in count.items())}" for topic, count in counts.items()
    )
    return Picture("".join(body), bottom + 6, f"{said}. {told}")


def _row(result: Shown) -> str:
    word, sign, colour = verdict_of(result)
    badge = f"display:inline-block;background:{colour};color:{INK};border:1px solid currentColor;border-radius:3px"
    verdict = f"<span style='{badge};padding:.05em .45em'>{sign} {escape(word)}</span>"
    if not result.agrees:
        verdict += f"<br>the row says: {escape(result.claim.verdict)}"
    row = result.claim
    cells = f"<td style='{CELL}'>{escape(row.claim)}</td><td style='{CELL}'>{verdict}</td>"
    cells += f"<td style='{CELL}'>{escape(row.truth)}{_tests(result)}</td>"
    first = f"<th scope='row' style='{CELL};font-weight:normal'>{escape(row.id)}</th>"
    last = f"<td style='{CELL};text-align:right'>{result.seconds:.1f}</td>"
    edge = "background:transparent;border-top:1px solid rgba(128,128,128,.5)"
    return f"<tr style='{edge}'>{first}{cells}{last}</tr>"


def _tests(result: Shown) -> str:
    """What unfolds: remarks, and a table of the settings."""
    settings = result.finding.settings
    remarks = "".join(f"<p style='margin:.3em 0'>{escape(words)}</p>" for words in _remarks(result))
    if not settings:
        return remarks
    ways = " and ".join(dict.fromkeys(map(_how, settings)))
    head = "".join(f"<th scope='col' style='{INNER}'>{name}</th>" for name in ("setting", "claimed", "found", ""))
    rows = ""
    for each in settings:
        told = (asked(each), f"{amount(each.found, each.unit)}, {_how(each)}")
        cells = "".join(f"<td style='{INNER}'>{escape(words)}</td>" for words in told)
        cells += f"<td style='{INNER};white-space:nowrap'>{'✓ holds' if each.holds else '✗ fails'}</td>"
        rows += f"<tr style='background:transparent'><th scope='row' style='{INNER};font-weight:normal'>"
        rows += f"{escape(each.name)}</th>{cells}</tr>"
    what = f"{len(settings)} setting{'s' * (len(settings) > 1)}, {ways}"
    inner = f"<table style='border-collapse:collapse;width:100%'><thead><tr>{head}</tr></thead><tbody>{rows}</tbody>"
    return f"<details><summary style='cursor:pointer'>{what}</summary>{remarks}{inner}</table></details>"


def _remarks(result: Shown) -> list[str]:
    """What the proof says in words: that it raised, the condition, or why nothing can be shown."""
    if result.fault:
        return [f"the proof raised {result.fault}"]
    found = result.finding
    return [f"condition: {found.premise}"] * bool(found.premise) + [found.said] * bool(found.said)


def _how(setting: Any) -> str:
    return "measured" if setting.measured else "computed"


def plain(words: str) -> str:
    """Words for a cell of Markdown, in which no sign means more than itself."""
    return re.sub(r"([\\`*_~<>|\[\]])", r"\\\1", words).replace("\n", " ")
