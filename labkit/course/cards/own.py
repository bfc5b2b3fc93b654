"""The learner's own cards: on what was measured on their machine, and on what went wrong in their exercises.

    measured(labkit.doctor())            latency, bandwidth, start of a rank: "on this machine alpha was 85 us"
    failed(Progress().failed_causes())   a card for each mistake: "your all-gather broke the wire law: what was wrong?"
    Deck((*the_deck(), *measured(...), *failed(...)))

They are scheduled like all other cards; a second measurement replaces the first.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from labkit.course.cards.card import Card
from labkit.course.learner.progress import Failed
from labkit.plan.machine.collectives import Line

OWN = "own"
"""The tag of all these cards."""


def measured(findings: Mapping[str, Any], link: Line | None) -> tuple[Card, ...]:
    """Cards from a doctor's `report.as_dict()` and `report.link`; none for what could not be measured."""
    cards = []
    if link is not None and link.beta_s_per_byte > 0:
        numbers = {
            "alpha": f"{link.alpha_s!r} -> us",
            "rate": f"{1 / link.beta_s_per_byte!r} -> GB/s",
            "half": f"{link.half_bytes!r} -> KB",
            "small": f"seconds('ring', 'all_reduce', 4, 4e3, Line({link.alpha_s!r}, {link.beta_s_per_byte!r})) -> ms",
            "large": f"seconds('ring', 'all_reduce', 4, 4e8, Line({link.alpha_s!r}, {link.beta_s_per_byte!r})) -> ms",
            "few": "4e3 -> KB",
            "many": "4e8 -> MB",
        }

        def of_link(id: str, front: str, claim: str, number: str, limits: str) -> Card:
            used = {
                name: expression for name, expression in numbers.items() if f"{{{name}}}" in claim + number + limits
            }
            return Card(id=id, front=front, claim=claim, number=number, limits=limits, numbers=used, difficulty=2,
                        lab=("00-08", "03-13"), tags=(OWN, "communication"))  # fmt: skip

        busy = "A busy machine is slower, and another one is another matter: measure again where you train."
        cards += [
            of_link("own-latency", "What did a message between two ranks cost on your machine before its first byte?",
                    "On your machine alpha was {alpha}.", "Messages below {half} wait for that more than for their "
                    "bytes.", busy),
            of_link("own-bandwidth", "How fast did bytes go between two ranks on your machine?",
                    "On your machine they went at {rate}.", "A message of {half} takes twice its latency.", busy),
            of_link("own-all-reduce", "What would a ring all-reduce over four ranks take on your machine's link, small "
                    "and large?", "{few} take {small}, {many} take {large}.",
                    "The small one is all latency, alpha of {alpha}; the large one all bytes, at {rate}.", busy),
        ]  # fmt: skip
    start = findings.get("fresh cluster", {}).get("value")
    warm = findings.get("warm call", {}).get("value")
    if start and warm:
        cards.append(
            Card(
                id="own-start",
                front="How long did four ranks take to start on your machine, and how long a call of a warm cluster?",
                claim="From nothing to the first sum it took {start}, and a warm call {warm}.",
                reason="Ranks are forked from a process that has imported torch; a warm call is a message or two.",
                numbers={"start": f"{float(start) / 1e3!r} -> ms", "warm": f"{float(warm) / 1e3!r} -> ms"},
                lab=("00-08",),
                difficulty=1,
                tags=(OWN, "basics"),
            )
        )
    return tuple(cards)


def failed(mistakes: Iterable[Failed], titles: Mapping[str, str]) -> tuple[Card, ...]:
    """A card for each different mistake whose cause is known; `titles` are those of the exercises, by key."""
    cards_by_id: dict[str, Card] = {}
    for fault in mistakes:
        if not fault.cause:
            continue
        id = f"own-{fault.key.replace('.', '-')}-{fault.verdict}-{hashlib.sha256(fault.cause.encode()).hexdigest()[:8]}"
        title = _quoted(titles.get(fault.key, "an exercise"))
        cards_by_id[id] = Card(
            id=re.sub(r"[^a-z0-9-]", "", id.lower()),
            front=f"Your attempt at `{fault.key}` ({title}) broke the verdict on {fault.verdict}. What was wrong?",
            claim=_quoted(fault.cause[0].upper() + fault.cause[1:] + "."),
            reason=f"`labkit.check` found that your program behaved like one with this mistake; open `{fault.key}` and "
            "say how you would see it without the check.",
            difficulty=3,
            tags=(OWN, "debugging"),
        )
    return tuple(cards_by_id.values())


def _quoted(words: str) -> str:
    """Words with digits put in backticks, so that they may stand in a card, and without braces."""
    plain = words.replace("{", "(").replace("}", ")").replace("`", "'")
    return re.sub(r"\S*\d\S*", lambda match: f"`{match[0]}`", plain)
