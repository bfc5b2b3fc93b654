"""Options that several commands share. `--json FILE`, in every command: the data go to FILE, beside the words.

labkit doctor --json machine.json        words on the terminal, data in the file
labkit doctor --json - | jq .ranks       data on standard output and nothing else there; words on standard error
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

Json = Annotated[Path | None, typer.Option("--json", help="Write the data there, too; - for standard output.")]
Home = Annotated[
    Path | None, typer.Option(envvar="LABKIT_HOME", help="Where your copies of the notebooks are; my/ by default.")
]
STANDARD_OUTPUT = Path("-")


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
