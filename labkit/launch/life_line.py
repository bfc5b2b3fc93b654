"""The last line of a script that runs: how long it has run, its step, the memory of its ranks, and the bars they draw.

    terminal, cell     34 s, step 120, 1.2 GB on rank 0, 1.3 GB on rank 1   [rank 0]  42%|####      | 420/1000
    file, pipe         [rank 0]  42%|####      | 420/1000                     a line of its own, every BAR_S seconds

A bar is a line that is drawn again and again (`\\r`) and ends much later: without this nobody would see it until then.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

import psutil

from labkit.launch import output
from labkit.launch.progress import REDRAW_S, SHOW_AFTER_S, Bar

BAR_S = 10.0
"""Seconds between two states of a bar in a file, which keeps all of them."""
SHOWN_RANKS = 4


class LifeLine:
    """The line of one script, from its start on."""

    def __init__(self) -> None:
        """Nothing is shown before a second has passed."""
        self.bar = Bar()
        self.drawn_at = self.logged_at = self.began = time.monotonic()
        self.logged: dict[int, str] = {}

    def print_lines(self, lines: list[tuple[int, str]]) -> None:
        """Print lines of ranks above it."""
        if lines:
            self.bar.hide()
            output.show(lines)

    def say(self, text: str) -> None:
        """Print a line of the launcher's own above it."""
        self.bar.hide()
        print(text, flush=True)

    def draw(self, facts: Sequence[str], bars: Mapping[int, str]) -> None:
        """Show it again, four times a second at most: seconds, these facts, and the bar of each rank that draws one."""
        now = time.monotonic()
        if now - self.began < SHOW_AFTER_S or now - self.drawn_at < REDRAW_S:
            return
        self.drawn_at = now
        shown = [f"{output.prefix(rank, False)} {bar}" for rank, bar in list(bars.items())[:SHOWN_RANKS]]
        self.bar.draw(None, "   ".join([", ".join([f"{now - self.began:.0f} s", *facts]), *shown]))
        if not self.bar.shown and now - self.logged_at >= BAR_S:
            self.logged_at = now
            output.show([(rank, bar) for rank, bar in bars.items() if self.logged.get(rank) != bar])
            self.logged.update(bars)

    def end(self) -> None:
        """Take it away."""
        self.bar.end(f"took {time.monotonic() - self.began:.0f} s")


def memory_words(pids: Mapping[int, int]) -> list[str]:
    """`1.2 GB on rank 0`, for the first of these ranks whose processes are there: the memory of a process, which on a
    CPU has its tensors, and on a GPU has not."""
    words = []
    for rank, pid in list(pids.items())[:SHOWN_RANKS]:
        with suppress(psutil.Error):
            words.append(f"{psutil.Process(pid).memory_info().rss / 1e9:.1f} GB on rank {rank}")
    return words
