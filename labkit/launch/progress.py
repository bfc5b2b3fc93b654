"""A progress bar for calls that take longer than a second, and for commands."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence, Sized
from html import escape
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
    """A bar in the output of a cell or on a terminal. Where nobody watches there is none."""

    def __init__(self) -> None:
        self.display: Any = None

    def draw(self, share: float | None, text: str) -> None:
        """Show `share`, 0 to 1, and `text` beside it; None where nobody can tell how far it is."""
        if _before_a_person():
            from IPython.display import display

            value = "" if share is None else f'value="{share:.3f}" max="1" '
            bar = f'<progress {value}aria-label="how far it is"></progress> {escape(text)}'
            bundle = {"text/html": bar, "text/plain": f"{'' if share is None else f'{share:4.0%} '}{text}"}
            if self.display is None:
                self.display = display(bundle, raw=True, display_id=True)
            else:
                self.display.update(bundle, raw=True)
        elif sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn
            from rich.table import Column

            if self.display is None:
                # a second line, which a narrow terminal would make of a long text, could not be taken away
                text_column = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True))
                columns = (BarColumn(24), text_column)
                console = Console(stderr=True)
                self.display = Progress(*columns, console=console, transient=True, auto_refresh=False)
                self.display.add_task("", total=None)
                self.display.start()
            total, done = (None, 0.0) if share is None else (1.0, share)
            task = self.display.task_ids[0]
            self.display.update(task, total=total, completed=done, description=text, refresh=True)

    @property
    def shown(self) -> bool:
        """True while it can be seen; False where nobody watches."""
        return self.display is not None

    def hide(self) -> None:
        """Take the bar of a terminal away, so that lines can be printed; the next `draw` shows it again below them."""
        if hasattr(self.display, "stop"):
            self.display.stop()
            self.display = None

    def end(self, text: str) -> None:
        """Take the bar away. A notebook cannot delete a single output, so there `text` takes its place."""
        if self.display is None:
            return
        if hasattr(self.display, "stop"):  # the bar of a terminal
            self.display.stop()
        else:
            self.display.update({"text/html": f"<small>{escape(text)}</small>", "text/plain": text}, raw=True)
        self.display = None


class WaitBar:
    """Says what is waited for, and for how long so far. Used as a context; `look` is called now and then meanwhile."""

    def __init__(self, what: str) -> None:
        """Nothing is shown before a second has passed."""
        self.what, self.bar, self.began = what, Bar(), time.monotonic()

    def __enter__(self) -> WaitBar:
        return self

    def look(self) -> None:
        """Draw the bar, once it is time."""
        seconds = time.monotonic() - self.began
        if seconds >= SHOW_AFTER_S:
            self.bar.draw(None, f"{self.what}: {seconds:.0f} s so far")

    def __exit__(self, *_: object) -> None:
        self.bar.end(f"took {time.monotonic() - self.began:.0f} s, {self.what}")


class CallBar:
    """Shows how far a call has come: the slowest rank's `track`, or how many ranks have finished."""

    def __init__(self, n_ranks: int):
        self.n_ranks, self.drawn_at, self.bar = n_ranks, 0.0, Bar()

    def update(self, box: BlackBox, ranks: Sequence[int], n_done: int, seconds: float, end: bool) -> None:
        """Draw the bar again, at most four times a second; at the end, say how long the call took."""
        if end:
            self.bar.end(f"took {seconds:.0f} s on {self.n_ranks} rank{'s' * (self.n_ranks != 1)}")
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
        words = f"{seconds:.0f} s, {steps}{n_done} of {self.n_ranks} ranks have finished, {verbs:,} verbs"
        self.bar.draw(share, words)


def _before_a_person() -> bool:
    """True if a notebook runs this, in front of a person.

    papermill, nbconvert and nbval keep what a cell shows, and compare it: the remains of a bar, which a slow machine
    shows and a fast one does not, would be a difference. They are recognised by this: no cell may ask for input."""
    if "ipykernel" not in sys.modules or not type(sys.stdout).__module__.startswith("ipykernel"):
        return False
    from IPython import get_ipython

    kernel = getattr(get_ipython(), "kernel", None)  # type: ignore[no-untyped-call]
    request = kernel.get_parent("shell") if kernel is not None else {}
    return bool(request.get("content", {}).get("allow_stdin", True))  # a click is no request to run a cell
