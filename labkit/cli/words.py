"""What every command does alike: sentences that break between words, and a line that says what takes so long."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from labkit.launch.progress import Bar


def say(text: str) -> None:
    """Print a text. On a terminal its lines break between words; in a pipe they are as long as they are."""
    console = Console()
    console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=not console.is_terminal)


def announce(text: str) -> None:
    """Print a line on standard error for a person who waits, before ranks print theirs; none where nobody watches."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr)


@contextmanager
def under_way(words: str) -> Iterator[Bar]:
    """A context in which the foot of the terminal says what is being done. Where nobody watches it says nothing.

    The bar is drawn on standard error, and is gone afterwards. Print nothing in between."""
    bar = Bar()
    bar.draw(None, words)
    try:
        yield bar
    finally:
        bar.end(words)
