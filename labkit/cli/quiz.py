"""The quiz of claims in a terminal, or on paper: `labkit quiz`, `labkit quiz --round --key key.md > sheet.md`."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from labkit.cli.data import Json, words_beside, write
from labkit.cli.words import under_way
from labkit.course.numbers import number_of
from labkit.view.units import plural

if TYPE_CHECKING:
    from labkit.course.claims.claim_quiz import Question, Quiz

WORDS = (("t", "true"), ("f", "false"), ("d", "depends"))


def add_to(app: typer.Typer) -> None:
    """Give the command line this command."""
    app.command()(quiz)


def quiz(
    count: Annotated[int, typer.Option("-n", help="Questions.")] = 10,
    topic: Annotated[str, typer.Option(help="Only claims on this topic, such as ZeRO or precision.")] = "",
    seed: Annotated[int | None, typer.Option(help="The same questions each time; drawn if not given.")] = None,
    prove: Annotated[bool, typer.Option("--prove", help="Run each proof now, not what the last audit found.")] = False,
    to: Json = None,
    on_paper: Annotated[bool, typer.Option("--round", help="Ask nothing: a sheet of questions for a class.")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="Write the sheet there, not to the terminal.")] = None,
    key_to: Annotated[Path | None, typer.Option("--key", help="Write the key to the sheet there, with proofs.")] = None,
) -> None:
    """Say of claims that one hears whether they are true, false, or depend, and on what; see the proof of each."""
    from labkit.course.claims.claim_quiz import Quiz

    if (out or key_to) and not on_paper:
        raise typer.BadParameter("--out and --key belong to --round")
    if on_paper and to:
        raise typer.BadParameter("--json keeps what was answered, and --round asks nothing")
    try:
        asked = Quiz(count, topic, seed, prove)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if on_paper:
        _on_paper(asked, out, key_to, prove)
        return
    with words_beside(to):
        console = Console()
        try:
            _ask(console, asked, prove)
        except (EOFError, KeyboardInterrupt):
            console.print()
        _summary(console, asked)
    write(to, asked.as_dict)


def _on_paper(asked: Quiz, out: Path | None, key_to: Path | None, prove: bool) -> None:
    from labkit.course.claims.audit import audit
    from labkit.course.claims.quiz_paper import key, sheet

    title = f"{plural(len(asked.questions), 'claim')}{f' on {asked.topic}' if asked.topic else ''}, seed {asked.seed}"
    text = sheet(asked.questions, title)
    if out is None:
        print(text, end="")
    else:
        out.write_text(text, encoding="utf-8")
    if key_to is not None:
        ids = [question.claim.id for question in asked.questions]
        with under_way(f"running {plural(len(ids), 'proof')}") if prove else nullcontext():
            proofs = [*audit(ids)] if prove else [question.stored for question in asked.questions]
        key_to.write_text(key(asked.questions, proofs, title), encoding="utf-8")


def _ask(console: Console, asked: Quiz, prove: bool) -> None:
    from labkit.course.claims.claims_picture import lines

    while (question := asked.question) is not None:
        console.rule(f"{question.number} of {len(asked.questions)} · {question.claim.topic} · {question.claim.id}")
        console.print(question.claim.claim, style="bold", markup=False, highlight=False)
        word = _choice(console, "true, false or depends? (t f d, q ends) ", dict(WORDS))
        condition = int(_condition(console, question)) if word == "depends" else 0
        with under_way(f"running the proof of {question.claim.id}") if prove else nullcontext():
            outcome = asked.answer(word, condition)
        style = {1.0: "green", 0.5: "yellow", 0.0: "red"}[outcome.points]
        console.print(outcome.sentence, style=style, markup=False, highlight=False)
        console.print("\n".join(lines(outcome.proof)[1:]), markup=False, highlight=False, soft_wrap=True)


def _condition(console: Console, question: Question) -> str:
    for place, words in enumerate(question.conditions, 1):
        console.print(f"  {place}  {words}", markup=False, highlight=False)
    numbers = {str(place): str(place) for place in range(1, len(question.conditions) + 1)}
    return _choice(console, f"it is true where? (1 to {len(numbers)}, q ends) ", numbers)


def _choice(console: Console, words: str, choices: dict[str, str]) -> str:
    """The choice that was typed, in full or by its first letter. EOFError for q and at the end of the input."""
    while True:
        typed = console.input(words, markup=False).strip().lower()
        if typed in ("q", "quit"):
            raise EOFError
        if typed in choices or typed in choices.values():
            return choices.get(typed, typed)
        console.print(f"type one of {', '.join(choices.values())}, and not {typed!r}", style="yellow", markup=False)


def _summary(console: Console, asked: Quiz) -> None:
    left = len(asked.questions) - asked.of
    result = f"{asked.score:g} of {plural(asked.of, 'point')}" + (f", {left} not answered" if left else "")
    console.print(f"{result}; seed {asked.seed}", style="bold", markup=False, highlight=False)
    labs = asked.labs()
    for outcome in asked.outcomes:
        claim = outcome.question.claim
        if outcome.points < 1:
            cells = ", ".join(f"lab {number_of(cell)}, cell {cell}" for cell in labs.get(claim.id, ())[:4])
            console.print(f"  look again: {claim.id} {claim.claim}" + f" ({cells})" * bool(cells), markup=False,
                          highlight=False, soft_wrap=True)  # fmt: skip
