"""How an uncaught error looks in a cell: short, and a hang with its picture.

    what labkit refuses      the line of the cell and the message, without labkit's own frames above it
    a package is missing     which extra of labkit brings it
    an unknown name          the name that was probably meant: group.allreduce -> "did you mean all_reduce?"
    a failed call            root cause first, as WorkerError says it, then where every rank stood, as a picture
    everything else          as Jupyter shows it

`%tb` and `%debug` still have every frame. `load` takes the function that draws an autopsy, since pictures lie above
this floor.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from labkit.launch.advice import likely_name
from labkit.launch.extras import explain

if TYPE_CHECKING:
    from labkit.launch.hang_diagnosis import Autopsy

SHOWN = (ValueError, AttributeError, RuntimeError, ModuleNotFoundError)
"""Kinds of errors that are looked at: refusals, unknown names, failed calls, packages that are not installed."""


def load(shell: Any, draw: Callable[[Autopsy], Any]) -> None:
    """Show errors in this way from now on, unless somebody else shows them in a way of their own already."""
    if shell.custom_exceptions in ((), SHOWN):
        shell.set_custom_exc(SHOWN, lambda *args, **options: show(draw, *args, **options))


def unload(shell: Any) -> None:
    """Errors look again as Jupyter shows them."""
    if shell.custom_exceptions == SHOWN:
        shell.set_custom_exc((), None)


def show(
    draw: Callable[[Autopsy], Any],
    shell: Any,
    kind: type[BaseException],
    error: BaseException,
    frames: TracebackType | None,
    tb_offset: int | None = None,
) -> None:
    """Show one uncaught error in the cell that raised it."""
    if isinstance(error, AttributeError) and (name := likely_name(error)):
        error.args = (f"{error}; did you mean {name}?",)  # not as a note, which IPython 7 does not show
    if isinstance(error, ModuleNotFoundError):
        explain(error)
    asked = _before_labkit(frames) if isinstance(error, ValueError) else None
    if asked is not None:
        reasons = error.__cause__, error.__suppress_context__
        error.__cause__, error.__suppress_context__ = None, True  # the message has the reason, in labkit's words
        lines = shell.InteractiveTB.structured_traceback(kind, error, asked, tb_offset=tb_offset)
        error.__cause__, error.__suppress_context__ = reasons
        error._render_traceback_ = lambda: lines  # type: ignore[attr-defined]
    shell.showtraceback((kind, error, frames), tb_offset=tb_offset)
    if asked is not None:
        del error._render_traceback_  # type: ignore[attr-defined]
    autopsy = getattr(error, "autopsy", None)
    if autopsy is not None and autopsy.waits and hasattr(shell, "kernel"):
        data, metadata = shell.display_formatter.format(draw(autopsy))
        shell.display_pub.publish(data, metadata)


def _before_labkit(frames: TracebackType | None) -> TracebackType | None:
    """The frames down to the line that called labkit; None if the error was not raised by labkit, or if nobody's line
    called it."""
    asked = []
    while frames is not None:
        asked.append(frames)
        frames = frames.tb_next
    if not asked or _package(asked[-1]) != "labkit":
        return None
    while asked and _package(asked[-1]) in ("labkit", "IPython"):  # IPython: a cell with %%ranks
        asked.pop()
    cut = None
    for frame in reversed(asked):
        cut = TracebackType(cut, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return cut


def _package(frame: TracebackType) -> str:
    # by the module's name: the __init__ that dataclasses write has no file
    return str(frame.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
