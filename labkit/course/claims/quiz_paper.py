"""The quiz of claims on paper: a sheet with questions, and the key to it, with proofs, both in Markdown.

sheet(questions, "ZeRO, seed 7")      numbered claims, three boxes each, conditions a to d
key(questions, proofs, title)         for each number: the truth, the condition, what was claimed and what was found
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from labkit.course.claims.claims_picture import Shown, amount, asked, plain


class Question(Protocol):
    """A claim to judge (claim_quiz.py)."""

    @property
    def number(self) -> int:
        """The number of the question, from 1."""

    @property
    def conditions(self) -> Sequence[str]:
        """The conditions to choose from."""

    @property
    def right(self) -> int:
        """The number of the right condition, from 1; 0 for none."""

    @property
    def claim(self) -> Any:
        """The row of the claim: id, topic, claim."""

    @property
    def truth(self) -> str:
        """`true`, `false` or `depends`."""


def sheet(questions: Sequence[Question], title: str) -> str:
    """The questions, without their answers."""
    body = [f"# True, false, or depends: {plain(title)}", "",
            "Tick one box for each claim. If it depends: on what? Choose a letter."]  # fmt: skip
    for question in questions:
        offered = [f"- {letter(place)}) {plain(words)}" for place, words in enumerate(question.conditions, 1)]
        boxes = "☐ true   ☐ false   ☐ depends: it is true where"
        body += ["", f"## {question.number}. {plain(question.claim.claim)}", "", boxes, "", *offered]
    return "\n".join([*body, ""])


def key(questions: Sequence[Question], proofs: Sequence[Shown], title: str) -> str:
    """The answers, each with what the claim says and what was found, setting by setting."""
    body = [f"# Key: {plain(title)}"]
    for question, proof in zip(questions, proofs, strict=True):
        where = (
            f", {letter(question.right)}) {plain(question.conditions[question.right - 1])}" if question.right else ""
        )
        body += ["", f"## {question.number}. {question.truth}{where}", ""]
        body += [f"{question.claim.id}: {plain(question.claim.claim)}", "", f"Truth: {plain(proof.truth)}", ""]
        body += [f"- the proof raised {plain(proof.fault)}"] * bool(proof.fault)
        for setting in proof.finding.settings:
            way = "measured" if setting.measured else "computed"
            numbers = f"claimed {asked(setting)}, found {amount(setting.truth, setting.unit)} ({way})"
            body.append(f"- {'✓' if setting.holds else '✗'} {plain(f'{setting.name}: {numbers}')}")
    return "\n".join([*body, ""])


def letter(place: int) -> str:
    """The letter for a number: `a` for 1."""
    return chr(ord("a") + place - 1)
