"""A progress bar for calls that take longer than a second."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from labkit.comm.group import Group
    from labkit.launch.blackbox import BlackBox

T = TypeVar("T")
SHOW_AFTER_S, REDRAW_S = 1.0, 0.25


def track(items: Iterable[T], group: Group, total: int | None = None) -> Iterator[T]:
    """Iterate over `items` on a rank; the notebook's progress bar follows the slowest rank."""
    n = total if total is not None else len(items) if isinstance(items, Sized) else 0
    page: Any = group.ledger.witness
    for i, item in enumerate(items):
        if page is not None:
            page.track(i, n)
        yield item
    if page is not None:
        page.track(n, n)


class Bar:
    """Shows how far a call has come: the slowest rank's `track`, or how many ranks have finished."""

    def __init__(self, n_ranks: int):
        self.n_ranks, self.drawn_at = n_ranks, 0.0
        self.display: Any = None

    def update(self, box: BlackBox, ranks: Sequence[int], n_done: int, seconds: float, end: bool) -> None:
        """Draw the bar again, at most four times a second; take it away at the end."""
        if end:
            self._clear()
            return
        if seconds < SHOW_AFTER_S or seconds - self.drawn_at < REDRAW_S:
            return
        self.drawn_at = seconds
        states = [box.read(rank) for rank in ranks]
        tracked = [state.progress / state.total for state in states if state.total > 0]
        share = min(tracked) if tracked else n_done / self.n_ranks
        slowest = min((s for s in states if s.total > 0), key=lambda s: s.progress / s.total, default=None)
        steps = f"{slowest.progress:.0f} of {slowest.total:.0f} steps, " if slowest is not None else ""
        verbs = sum(state.done for state in states)
        self._draw(share, f"{seconds:.0f} s, {steps}{n_done} of {self.n_ranks} ranks have finished, {verbs:,} verbs")

    def _draw(self, share: float, text: str) -> None:
        if "ipykernel" in sys.modules and type(sys.stdout).__module__.startswith("ipykernel"):
            from IPython.display import display

            bar = f'<progress value="{share:.3f}" max="1" aria-label="progress of the call"></progress> {text}'
            bundle = {"text/html": bar, "text/plain": f"{share:4.0%} {text}"}
            if self.display is None:
                self.display = display(bundle, raw=True, display_id=True)
            else:
                self.display.update(bundle, raw=True)
        elif sys.stderr.isatty():
            self.display = True
            sys.stderr.write(f"\r\x1b[K{'#' * int(24 * share):24s}| {text}")
            sys.stderr.flush()

    def _clear(self) -> None:
        if self.display is None:
            return
        if self.display is True:
            sys.stderr.write("\r\x1b[K")
        else:
            self.display.update({"text/html": "", "text/plain": ""}, raw=True)
        self.display = None
