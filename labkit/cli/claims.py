"""The command of the audit: `labkit claims c12 c36`, `labkit claims --topic ZeRO`, `labkit claims --store`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from labkit.cli.data import Json, words_beside, write
from labkit.cli.words import under_way

if TYPE_CHECKING:
    from labkit.course.claims.audit import Claim, Result

STYLES = (
    ("holds", "green"),
    ("holds with conditions", "cyan"),
    ("wrong", "red"),
    ("depends", "yellow"),
    ("not shown", "dim"),
    ("proof raised", "bold magenta"),
)


def add_to(app: typer.Typer) -> None:
    """Give the command line this command."""
    app.command()(claims)


def claims(
    ids: Annotated[list[str] | None, typer.Argument(help="Claims, such as c12; all if none is named.")] = None,
    topic: Annotated[str, typer.Option(help="Only those on this topic, such as ZeRO or precision.")] = "",
    stored: Annotated[bool, typer.Option("--stored", help="Run nothing: what the last audit has found.")] = False,
    to: Json = None,
    markdown: Annotated[Path | None, typer.Option(help="Write a table in Markdown there.")] = None,
    keep: Annotated[bool, typer.Option("--store", help="Keep the results; cards quote their numbers.")] = False,
) -> None:
    """Put claims about distributed training to the test. Fails if a proof disagrees with what is written of it."""
    from labkit.course.claims import claims_picture as view
    from labkit.course.claims.audit import RESULTS, choose, document, store

    if keep and (ids or topic or stored):
        raise typer.BadParameter("--store keeps an audit of all claims, run now: name no claim, topic or --stored")
    try:
        chosen = choose(ids or (), topic)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    results = []
    with words_beside(to):
        console = Console()
        for result in _stored(chosen) if stored else _run(chosen):
            results.append(result)
            console.print(_text(result), soft_wrap=True)
        console.print(f"\n{view.tally(results)}", markup=False, highlight=False, soft_wrap=True)
    apart = [result.claim.id for result in results if not result.agrees]
    write(to, lambda: document(results))
    if markdown is not None:
        markdown.write_text(view.markdown(results), encoding="utf-8")
    if keep and apart:
        raise ValueError(f"nothing is stored: mend {', '.join(apart)} first, the row or the proof")
    if keep:
        print(f"stored in {store(results, RESULTS)}")
    raise typer.Exit(1 if apart else 0)


def _run(chosen: Iterable[Claim]) -> Iterator[Result]:
    """The proofs, with a line at the foot of the terminal that says which one is running."""
    from labkit.course.claims.audit import audit

    listed = list(chosen)
    for place, claim in enumerate(listed):
        with under_way("putting claims to the test") as bar:
            bar.draw(place / len(listed), f"{place + 1} of {len(listed)}, {claim.id}: {claim.claim}")
            (result,) = audit([claim.id])
        yield result


def _stored(chosen: Iterable[Claim]) -> Iterable[Result]:
    from labkit.course.claims.shown_claims import claims as shown

    return shown(*(claim.id for claim in chosen), stored=True)


def _text(result: Result) -> Text:
    """The words of a result, its first line in the colour of its verdict."""
    from labkit.course.claims.claims_picture import lines, verdict_of

    first, *rest = lines(result)
    text = Text(first, style=dict(STYLES)[verdict_of(result)[0]])
    return text.append("".join(f"\n{line}" for line in rest), style="default")
