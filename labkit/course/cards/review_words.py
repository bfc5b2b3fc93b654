"""The sentences of a review, which are the same in a notebook and on a page without a kernel.

Python fills them in for review_panel.py, and a script of the page for itself (labkit/course/export/site/cards.js).

sentence("to_go", due=3, done=1, days=counted(2, "day"))      3 to go · 1 done · 2 days in a row
span(600)                                                    10 minutes
"""

from __future__ import annotations

from types import MappingProxyType

NEW_A_DAY = 10
"""The most new cards a day, where nobody says otherwise."""
SENTENCES = MappingProxyType(
    {
        "to_go": "{due} to go · {done} done · {days} in a row",
        "none": "Nothing is due. {done} done · {days} in a row",
        "rated": "{card}: again in {span}. ",
        "next": "The next card comes in {span}.",
        "progress": "{all}: {new} new, {begun} begun, {learned} learned; {due} due now",
        "short": "a minute",
    }
)
"""The sentence for each occasion; names in braces are filled in."""
SPANS = (("day", 86400), ("hour", 3600), ("minute", 60))
"""The units of a span, the largest first, and their seconds."""


def sentence(occasion: str, **words: object) -> str:
    """The sentence for an occasion, filled in."""
    return SENTENCES[occasion].format(**words)


def counted(count: int, noun: str) -> str:
    """A number with its noun: `1 day`, `2 days`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def span(seconds: float) -> str:
    """A span of time in its largest unit, rounded: `8 days`. A minute is the shortest."""
    for noun, size in SPANS:
        if seconds >= 0.95 * size:
            return counted(int(seconds / size + 0.5), noun)  # a half goes up, as in a script
    return SENTENCES["short"]
