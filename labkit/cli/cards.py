"""The commands of the interview room: `labkit cards`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer
from rich.console import Console
from rich.table import Table

from labkit.cli.words import under_way
from labkit.course.cards.review_words import NEW_A_DAY
from labkit.course.numbers import number_of
from labkit.view.terminal_table import TerminalTable
from labkit.view.units import plural

if TYPE_CHECKING:
    from labkit.course.cards.box import Box


def add_to(app: typer.Typer) -> None:
    """Give the command line these commands."""
    app.command()(cards)


def cards(
    tags: Annotated[list[str] | None, typer.Option("--tag", help="Only cards with this tag; may stand twice.")] = None,
    lab: Annotated[str, typer.Option(help="Only cards that this lab shows, 07.")] = "",
    new: Annotated[int, typer.Option(help="At most so many new cards a day.")] = NEW_A_DAY,
    listed: Annotated[bool, typer.Option("--list", help="List the cards, and ask none.")] = False,
    covers: Annotated[bool, typer.Option("--covers", help="Which card answers which question of the sources.")] = False,
    anki: Annotated[Path | None, typer.Option(help="Write the deck for Anki there, deck.apkg.")] = None,
    to: Annotated[
        Path | None, typer.Option("--export", help="Write your reviews there, also for the page of cards.")
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--import", help="Take reviews from such a file, also from the page's.")
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure this machine, and make cards of it.")] = False,
) -> None:
    """Review cards: space shows the answer, 1 to 5 say how it went, q ends."""
    from labkit.course.cards.own_cards import cards as mine
    from labkit.course.machine.doctor import doctor

    console = Console()
    box = mine(doctor(quick=True) if measure else None)
    if box.note:
        console.print(box.note, style="yellow", markup=False)
    if anki is not None:
        from labkit.course.cards.anki import export

        with under_way("drawing the cards"):
            count = export(box.deck.of(tags or (), lab), anki)
        console.print(f"{plural(count, 'card')} written to {anki}", markup=False)
    if to is not None:
        to.write_text(json.dumps(box.export(), indent=1), encoding="utf-8")
        console.print(f"{plural(len(box.reviews()), 'review')} written to {to}", markup=False)
    if source is not None:
        console.print(f"{plural(box.load(_json(source)), 'review')} taken from {source}", markup=False)
    if listed:
        console.print(_list(box, tags or [], lab))
    if covers:
        console.print(_covers(box))
    if not (anki or to or source or listed or covers or measure):
        _review(console, box, tags or [], lab, new)


def _review(console: Console, box: Box, tags: list[str], lab: str, new: int) -> None:
    done = 0
    while due := box.due(tags, lab, new):
        card, since = due[0], time.monotonic()
        console.rule(f"{len(due)} to go")
        console.print(card.as_sentence(card.front), style="bold", markup=False)
        if _key(console, "space shows the answer, q ends ", " ") == "q":
            break
        console.print(_back(card))
        rating = _key(
            console, "1 nothing came · 2 only when I saw it · 3 with effort · 4 well · 5 at once · q ends ", "12345"
        )
        if rating == "q":
            break
        standing = box.rate(card.id, int(rating), time.monotonic() - since)
        done += 1
        console.print(f"again {standing.due.astimezone():%a %d %b, %H:%M}", style="dim")
    else:
        console.print("Nothing is due.")
    streak = box.streak()
    console.print(f"{done} done, {plural(streak, 'day')} in a row, "
                  f"{sum(box.forecast(7))} due within a week")  # fmt: skip
    if box.note:
        console.print(box.note, style="yellow", markup=False)


def _key(console: Console, words: str, keys: str) -> str:
    """One of the keys, or q, which also stands for the end of the input."""
    console.print(words, style="dim", end="", markup=False)
    while True:
        try:
            key = click.getchar() if sys.stdin.isatty() else sys.stdin.read(1)
        except (EOFError, KeyboardInterrupt):
            key = "q"
        key = "q" if key in ("", "q", "Q", "\x03", "\x04", "\x1b") else key
        if key in f"{keys}q":
            console.print()
            return key


def _back(card: Any) -> Table:
    from labkit.course.cards.card_faces import TITLES
    from labkit.course.claims.claims_picture import brief

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for part, text in card.parts().items():
        table.add_row(TITLES[part], _plain(text))
    for name, cells in card.rows.items():
        pairs = zip(card.axes, cells, strict=True)
        text = "; ".join(f"{card.as_sentence(axis)}: {card.as_sentence(cell)}" for axis, cell in pairs)
        table.add_row(_plain(card.as_sentence(name)), _plain(text))
    if card.wrong:
        myth, but = (card.as_sentence(words) for words in (card.wrong.myth, card.wrong.but))
        table.add_row("often heard", _plain(f"{myth} But: {but}"))
    for claim in card.audited():
        table.add_row("tested", brief(claim).replace("[", "\\["))
    if card.lab:
        table.add_row("shown by", ", ".join(f"lab {number_of(cell)}, cell {cell}" for cell in card.lab))
    return table


def _plain(text: str) -> str:
    return text.replace("`", "").replace("[", "\\[")


def _list(box: Box, tags: list[str], lab: str) -> Table:
    table = TerminalTable("card", "question", "tags", "lab", "difficulty")
    for card in box.deck.of(tags, lab):
        table.add_row(card.id, _plain(card.as_sentence(card.front)), ", ".join(card.tags), ", ".join(card.lab),
                      "●" * card.difficulty)  # fmt: skip
    return table


def _covers(box: Box) -> Table:
    from labkit.course.cards.deck import sources

    table = TerminalTable("source", "asks", "answered by")
    for item, asks in sources().items():
        table.add_row(item, asks, ", ".join(card.id for card in box.deck if item in card.covers))
    return table


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}") from None
