"""Claims that were put to the test, each beside its verdict and the truth.

    tally(results)      `3 claims: 1 holds, 2 wrong; all proofs agree with their rows`
    table(results)      HTML: by topic the claim, its verdict, the truth; folded below it claimed and found numbers
    summary(results)    a Picture: a bar for each topic, made of its verdicts
    markdown(results), lines(result)      the same for a file, and for a terminal
    brief(result)       one line, for a card

A verdict is shown as a word and a sign; its colour only repeats them.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from types import MappingProxyType
from typing import Any, Protocol

from labkit.view.panels import below, beside, page, phrase, space, tile
from labkit.view.svg import INK, PALETTE, WIDTH, Picture
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
"""The sign and colour of a proof that raised."""
RULES = MappingProxyType({"equal": "", "at least": "≥ ", "at most": "≤ ", "above": "> ", "below": "< "})
TOPIC, EACH = 124.0, 34.0
"""The width of a topic's name, and of the box of one claim."""
CELL = "text-align:left;vertical-align:top;padding:.25em .6em;white-space:normal"
INNER = "text-align:left;vertical-align:top;padding:.1em .7em .1em 0;white-space:normal"


class Shown(Protocol):
    """A claim that was put to the test; `labkit.course.claims.audit.Result` is one."""

    @property
    def claim(self) -> Any:
        """The claim's row: id, address, topic, claim, verdict."""

    @property
    def finding(self) -> Any:
        """The finding of its proof: verdict, settings, premise, said (finding.py)."""

    @property
    def truth(self) -> str:
        """The true statement, with the numbers that the proof has found."""

    @property
    def seconds(self) -> float:
        """Seconds that the proof took."""

    @property
    def fault(self) -> str:
        """The exception that the proof raised, in words; "" if it raised none."""

    @property
    def agrees(self) -> bool:
        """True if the proof's verdict is the row's."""


def verdict_of(result: Shown) -> tuple[str, str, str]:
    """(word, sign, colour) of the proof's verdict."""
    if result.fault:
        return ("proof raised", *RAISED)
    return (result.finding.verdict, *VERDICTS[result.finding.verdict])


def tally(results: Iterable[Shown]) -> str:
    """A line with the number of claims of each verdict, and the proofs that disagree with their rows."""
    every = list(results)
    counts = Counter(verdict_of(result)[0] for result in every)
    order = [*VERDICTS, "proof raised"]
    counted = ", ".join(f"{counts[word]} {word}" for word in order if counts[word]) or "none"
    apart = [result.claim.id for result in every if not result.agrees]
    agree = f"proof and row disagree: {', '.join(apart)}" if apart else "all proofs agree with their rows"
    return f"{len(every)} claim{'' if len(every) == 1 else 's'}: {counted}; {agree}"


def amount(value: float | str, unit: str = "") -> str:
    """A number with its unit, or a word: `18,790 B = 18.3 KiB`, `0.5 of DDP's bytes`, `hangs`."""
    if isinstance(value, str):
        return value
    return value_text(value, unit) if math.isfinite(value) else f"{'-' if value < 0 else ''}∞ {unit}".strip()


def asked(setting: Any) -> str:
    """The number or word that the claim states in a setting, with its tolerance: `> 1.8 times`, `0.5 ± 5%`, `fits`."""
    if isinstance(setting.claimed, str):
        return setting.claimed
    room = f" ± {setting.within:.2g}" if 0 < setting.within < 0.001 else f" ± {setting.within:.1%}".replace(".0%", "%")
    exact = setting.rule in ("above", "below") or not setting.within or setting.claimed in (0, math.inf, -math.inf)
    return RULES[setting.rule] + amount(setting.claimed, setting.unit) + ("" if exact else room)


def lines(result: Shown) -> list[str]:
    """A result in words: the verdict and the claim, the truth, then a line for each setting."""
    word, sign, _ = verdict_of(result)
    out = [f"{result.claim.id}  {sign} {word}: {result.claim.claim}", f"    truth: {result.truth}"]
    if not result.agrees and not result.fault:
        out.append(f"    the row says: {result.claim.verdict}")
    out += [f"    {words}" for words in remarks(result)]
    out += [f"    said or asked at {result.claim.address}"] * bool(result.claim.address)
    for setting in result.finding.settings:
        numbers = f"claimed {asked(setting)}, found {amount(setting.truth, setting.unit)} ({how(setting)})"
        out.append(f"    {'✓' if setting.holds else '✗'} {setting.name}: {numbers}")
    return out


def brief(result: Shown) -> str:
    """A result in one line, with a setting or two: measured before computed, one that holds beside one that fails."""
    word, sign, _ = verdict_of(result)
    settings = sorted(result.finding.settings, key=lambda setting: not setting.measured)
    others = sorted(settings[1:], key=lambda setting: setting.holds == settings[0].holds)
    facts = [f"{setting.name}: {amount(setting.truth, setting.unit)}, claimed {asked(setting)} ({how(setting)})"
            for setting in (*settings[:1], *others[:1])]  # fmt: skip
    return f"{result.claim.id} {sign} {word}: “{result.claim.claim}”; {'; '.join(facts) or result.finding.reason}"


def markdown(results: Sequence[Shown]) -> str:
    """A table in Markdown, one row a claim, in their order."""
    rows = ["| id | topic | claim | verdict | truth | measurement | s |", "|---|---|---|---|---|---|--:|"]
    for result in results:
        word, sign, _ = verdict_of(result)
        tests = [f"{'✓' if s.holds else '✗'} {s.name}: claimed {asked(s)}, found {amount(s.truth, s.unit)} ({how(s)})"
                 for s in result.finding.settings]  # fmt: skip
        row = result.claim
        verdict = f"{sign} {word}" + (f" (the row says: {row.verdict})" if not result.agrees else "")
        proof = "<br>".join(map(plain, (*remarks(result), *tests)))
        cells = (row.id, row.topic, row.claim, verdict, result.truth)
        rows.append(f"| {' | '.join(map(plain, cells))} | {proof} | {result.seconds:.2f} |")
    return "\n".join([plain(tally(results)), "", *rows, ""])


def table(results: Sequence[Shown], made: str = "") -> str:
    """All results as HTML; each claim's settings unfold. `made` says when, where and with what they were found."""
    names = ("", "claim", "verdict", "the truth, and how it was tested", "s")
    widths = ("5%", "28%", "13%", "", "5%")
    head = "".join(
        f"<th scope='col' style='{CELL};width:{w}'>{name}</th>" for name, w in zip(names, widths, strict=True)
    )
    body = ""
    for topic in dict.fromkeys(result.claim.topic for result in results):
        topic_results = [result for result in results if result.claim.topic == topic]
        title = f"<th scope='rowgroup' colspan='5' style='{CELL};padding-top:.9em'>{escape(topic)}</th>"
        body += f"<tbody><tr style='background:transparent'>{title}</tr>{''.join(map(_row, topic_results))}</tbody>"
    words = escape(tally(results) + (f". Found on {made}" if made else ""))
    caption = f"<caption style='text-align:left;caption-side:top;padding:.3em 0'>{words}</caption>"
    style = "border-collapse:collapse;width:100%;min-width:44em;max-width:75em;table-layout:fixed"
    return f"<table style='{style}'>{caption}<thead><tr>{head}</tr></thead>{body}</table>"


def summary(results: Sequence[Shown]) -> Picture:
    """A bar for each topic, the largest first, with a box for each verdict, as wide as its number of claims."""
    words = tally(results)
    counts: dict[str, Counter[str]] = {}
    for result in results:
        counts.setdefault(result.claim.topic, Counter())[verdict_of(result)[0]] += 1
    looks = {**VERDICTS, "proof raised": RAISED}
    keys = [
        beside(tile(26, 19, colour, sign), phrase(f"{word}: {total}", 12), gap=6)
        for word, (sign, colour) in looks.items()
        if (total := sum(count[word] for count in counts.values()))
    ]
    wide = min(EACH, (WIDTH - TOPIC - 40) / max((count.total() for count in counts.values()), default=1))
    rows = []
    for topic, count in sorted(counts.items(), key=lambda item: -item[1].total()):
        boxes = []
        for word, (sign, colour) in looks.items():
            if n := count[word]:
                ids = ", ".join(result.claim.id for result in results
                                if result.claim.topic == topic and verdict_of(result)[0] == word)  # fmt: skip
                boxes.append(tile(wide * n, 20, colour, f"{n} {sign}", f"{topic}, {word}: {ids}"))
        name = phrase(topic, 12, anchor="end", width=TOPIC - 10)
        rows.append(beside(name, space(10, 0), *boxes, space(8, 0), phrase(count.total(), 12)))
    bars = "; ".join(
        f"{topic}: {', '.join(f'{n} {word}' for word, n in count.items())}" for topic, count in counts.items()
    )
    title = words.partition("; ")[0] if all(result.agrees for result in results) else words
    return page(title, beside(*keys, gap=14), below(*rows, gap=5), label=f"{words}. {bars}")


def _row(result: Shown) -> str:
    word, sign, colour = verdict_of(result)
    badge = f"display:inline-block;background:{colour};color:{INK};border:1px solid currentColor;border-radius:3px"
    verdict = f"<span style='{badge};padding:.05em .45em'>{sign} {escape(word)}</span>"
    if not result.agrees:
        verdict += f"<br>the row says: {escape(result.claim.verdict)}"
    row = result.claim
    cells = f"<td style='{CELL}'>{escape(row.claim)}</td><td style='{CELL}'>{verdict}</td>"
    cells += f"<td style='{CELL}'>{escape(result.truth)}{_tests(result)}</td>"
    first = f"<th scope='row' style='{CELL};font-weight:normal'>{escape(row.id)}</th>"
    last = f"<td style='{CELL};text-align:right'>{result.seconds:.1f}</td>"
    edge = "background:transparent;border-top:1px solid rgba(128,128,128,.5)"
    return f"<tr style='{edge}'>{first}{cells}{last}</tr>"


def _tests(result: Shown) -> str:
    """The part that unfolds: remarks, and a table of the settings."""
    settings = result.finding.settings
    above = "".join(f"<p style='margin:.3em 0'>{escape(words)}</p>" for words in remarks(result))
    if not settings:
        return above
    ways = " and ".join(dict.fromkeys(map(how, settings)))
    head = "".join(f"<th scope='col' style='{INNER}'>{name}</th>" for name in ("setting", "claimed", "found", ""))
    rows = ""
    for setting in settings:
        numbers = (asked(setting), f"{amount(setting.truth, setting.unit)}, {how(setting)}")
        cells = "".join(f"<td style='{INNER}'>{escape(words)}</td>" for words in numbers)
        cells += f"<td style='{INNER};white-space:nowrap'>{'✓ holds' if setting.holds else '✗ fails'}</td>"
        rows += f"<tr style='background:transparent'><th scope='row' style='{INNER};font-weight:normal'>"
        rows += f"{escape(setting.name)}</th>{cells}</tr>"
    opener = f"{len(settings)} setting{'s' * (len(settings) > 1)}, {ways}"
    inner = f"<table style='border-collapse:collapse;width:100%'><thead><tr>{head}</tr></thead><tbody>{rows}</tbody>"
    return f"<details><summary style='cursor:pointer'>{opener}</summary>{above}{inner}</table></details>"


def remarks(result: Shown) -> list[str]:
    """The proof's remarks: the exception that it raised, or its condition and its words, where it has them."""
    if result.fault:
        return [f"the proof raised {result.fault}"]
    finding = result.finding
    return [f"condition: {finding.premise}"] * bool(finding.premise) + [finding.reason] * bool(finding.reason)


def how(setting: Any) -> str:
    """How the number of a setting was found: `measured`, or `computed`."""
    return "measured" if setting.measured else "computed"


def plain(words: str) -> str:
    """Words for a cell of a Markdown table, with Markdown's special signs escaped."""
    return re.sub(r"([\\`*_~<>|\[\]])", r"\\\1", words).replace("\n", " ")
