"""Options that several commands share. `--json FILE`, in every command: the data go to FILE, beside the words.

labkit doctor --json machine.json        words on the terminal, data in the file
labkit doctor --json - | jq .ranks       data on standard output and nothing else there; words on standard error
labkit doctor --json                     the same, and so in no other command
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

Json = Annotated[Path | None, typer.Option("--json", help="Write the data there, too; - for standard output.")]
Home = Annotated[
    Path | None,
    typer.Option(
        envvar="LABKIT_HOME", help="Where your copies of the notebooks are; my/ in a checkout, else ~/labkit."
    ),
]
STANDARD_OUTPUT = Path("-")


class AlsoBare(TyperCommand):
    """A command whose `--json` may stand alone, which is `--json -`: little to type for those who are asked for it."""

    def parse_args(self, context: Any, words: list[str]) -> list[str]:
        """Put the "-" where it was left out."""
        for place in reversed([place for place, word in enumerate(words) if word == "--json"]):
            if place + 1 == len(words) or words[place + 1].startswith("--"):
                words.insert(place + 1, str(STANDARD_OUTPUT))
        return super().parse_args(context, words)


@contextlib.contextmanager
def words_beside(to: Path | None) -> Iterator[None]:
    """A context in which printed words go to standard error if the data go to standard output."""
    with contextlib.redirect_stdout(sys.stderr) if to == STANDARD_OUTPUT else contextlib.nullcontext():
        yield


def write(to: Path | None, data: Callable[[], Any]) -> None:
    """Write what `data()` gives as JSON, if there is a place for it. OSError where the file cannot be written."""
    if to is None:
        return
    text = json.dumps(data(), indent=2)
    if to == STANDARD_OUTPUT:
        print(text)
    else:
        to.write_text(f"{text}\n", encoding="utf-8")
