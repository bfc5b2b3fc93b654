"""Claims as a table, a picture, Markdown and lines of a terminal."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest

from labkit.course.claims import claims_picture as view
from labkit.view.svg import INK
from tests.view import page

WORDS = ("holds", "holds with conditions", "wrong", "depends", "not shown")


def setting(name: str = "K = 8", claimed: object = 9.0, truth: object = 5.5, **more: object) -> SimpleNamespace:
    """A setting as labkit/course/claims/finding.py has it."""
    plain = {"unit": "B a parameter", "within": 0.05, "rule": "equal", "measured": False, "holds": False}
    return SimpleNamespace(name=name, claimed=claimed, truth=truth, **{**plain, **more})


@dataclass
class Shown:
    """A result, of this verdict."""

    word: str = "wrong"
    topic: str = "ZeRO"
    said: str = "ZeRO-1 keeps 9 bytes"
    settings: tuple[SimpleNamespace, ...] = field(default_factory=lambda: (setting(),))
    fault: str = ""
    agrees: bool = True
    seconds: float = 0.25
    premise: str = ""
    id: str = "c27"

    @property
    def claim(self) -> SimpleNamespace:
        return SimpleNamespace(id=self.id, address="", topic=self.topic, claim=self.said, verdict="wrong")

    @property
    def truth(self) -> str:
        return "5.5 bytes"

    @property
    def finding(self) -> SimpleNamespace:
        return SimpleNamespace(verdict=self.word, settings=self.settings, premise=self.premise, reason="")


class Words(HTMLParser):
    """The text of HTML; an end tag that ends nothing is an error."""

    def __init__(self, html: str):
        super().__init__()
        self.said, self.open = "", []
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        """Open."""
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag):
        """Close."""
        assert self.open.pop() == tag

    def handle_data(self, data):
        """Text."""
        self.said += data + " "


def luminance(colour: str) -> float:
    """By WCAG 2, of #rgb or #rrggbb."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * each for each in colour[1:])
    parts = [int(digits[k : k + 2], 16) / 255 for k in (0, 2, 4)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(a * b for a, b in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_a_table_escapes_what_it_is_given_and_closes_what_it_opens():
    """A claim that writes into the page."""
    bad = "<img src=x onerror=alert(1)> & 'so'"
    odd = Shown(said=bad, topic=bad, settings=(setting(bad, bad, bad),), premise=bad)
    for each in (odd, Shown(fault=bad, agrees=False, settings=())):
        html = view.table([each], made=bad)
        assert "<img" not in html
        assert bad in Words(html).said


def test_every_verdict_is_a_word_and_a_sign_of_its_own():
    """A meaning that rests on colour alone, or two that look alike."""
    said = Words(view.table([Shown(word) for word in WORDS])).said
    for word in WORDS:
        assert f"{view.VERDICTS[word][0]} {word}" in said
    looks = [*view.VERDICTS.values(), view.RAISED]
    assert len({sign for sign, _ in looks}) == len({colour for _, colour in looks}) == len(looks)


def test_the_words_on_a_colour_can_be_read():
    """Dark on dark: WCAG asks for 4.5 to 1."""
    for _, colour in (*view.VERDICTS.values(), view.RAISED):
        light, dark = luminance(colour), luminance(INK)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, colour


def test_a_table_takes_the_colours_of_the_page():
    """Black on a dark page: only a badge, which has a ground of its own, may have an ink of its own."""
    html = view.table([Shown(word) for word in WORDS])
    for style in re.findall(r"style='([^']*)'", html):
        assert ("background:#" in style) == (f"color:{INK}" in style.replace("background-color", "")), style


def test_claimed_stands_beside_found_with_units_and_how():
    """A verdict without its numbers."""
    one = setting(measured=True)
    two = setting("words", "fits", "does not fit", unit="")
    said = Words(view.table([Shown(settings=(one, two))])).said
    for words in ("9 B a parameter ± 5%", "5.5 B a parameter, measured", "fits", "does not fit, computed", "✗ fails"):
        assert words in said
    assert "2 settings, measured and computed" in said
    assert view.table([Shown()]).count("<details>") == 1


@pytest.mark.parametrize(
    ("each", "words"),
    [
        (setting(rule="above"), "> 9 B a parameter"),
        (setting(rule="at least"), "≥ 9 B a parameter ± 5%"),
        (setting(rule="at most", within=0), "≤ 9 B a parameter"),
        (setting(within=0.125), "9 B a parameter ± 12.5%"),
        (setting(within=1e-9), "9 B a parameter ± 1e-09"),
        (setting(claimed=0, unit=""), "0"),
        (setting(claimed=math.inf, unit="B", within=0), "∞ B"),
        (setting(claimed=20_480, unit="B", within=0), "20,480 B = 20 KiB"),
    ],
)
def test_what_is_claimed_is_said_with_its_rule_and_its_room(each, words):
    """`at least 9` shown as 9; room that decides a verdict and is not shown; infinity, which is no whole number."""
    assert view.asked(each) == words


def test_a_proof_that_raised_or_disagrees_stands_out():
    """A fault that looks like a claim that cannot be shown."""
    raised = Shown("not shown", fault="RuntimeError: no port", agrees=False, settings=())
    apart = Shown("holds", agrees=False, id="c28")
    for text in (Words(view.table([raised, apart])).said, view.markdown([raised, apart]), str(view.lines(raised))):
        assert "! proof raised" in text
        assert "RuntimeError: no port" in text
    assert "the row says: wrong" in view.table([apart])
    assert "the row says: wrong" in str(view.lines(apart))
    assert "disagree: c27, c28" in view.tally([raised, apart])
    assert "disagree: c27, c28" in page.words(view.summary([raised, apart]))


def test_the_summary_counts_every_topic_by_verdict():
    """A claim that is in no bar; a picture that cannot be heard."""
    results = [Shown(word, topic, id=f"c{k}{j}") for k, topic in enumerate(("ZeRO", "pipeline", "a long topic"))
               for j, word in enumerate((*WORDS, *WORDS[: 2 * k]))]  # fmt: skip
    picture = view.summary(results)
    page.check(picture)
    drawn = page.texts(picture)
    assert [each for each in drawn if each in ("ZeRO", "pipeline", "a long topic")] == [
        "a long topic",
        "pipeline",
        "ZeRO",
    ]
    assert {"5", "7", "9", "2 ✓", "1 ?"} <= set(drawn)
    assert "a long topic, holds: c20, c25" in page.told(picture)
    assert "pipeline: 2 holds, 2 holds with conditions, 1 wrong" in picture.label


@pytest.mark.parametrize("results", [[], [Shown()], [Shown(id=f"c{k}") for k in range(60)]])
def test_a_summary_fits_its_page_whatever_there_is(results):
    """A bar that leaves the page, a division by no claims."""
    page.check(view.summary(results))
    Words(view.table(results))


def test_markdown_has_a_row_a_claim_whatever_the_words_are():
    """A bar or a star in a claim that breaks the table."""
    text = view.markdown([Shown(said="a | b *c* <d>\ne"), Shown("holds")])
    rows = [row for row in text.splitlines() if row.startswith("| c27")]
    assert len(rows) == 2
    assert r"a \| b \*c\* \<d\> e" in rows[0]
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 8 for row in rows)
