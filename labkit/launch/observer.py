"""What may look at a script from inside its ranks, chosen by code above the launcher: memory and overlap, for example.

command    watch_script(..., observe="labkit.probe.sampled.Sampled")    the name of its class, which is not imported
rank       observer = Sampled()          before the script's first line; then observer.begin()
           observer.failed(error)        when the script ends with an exception
           observer.news()               now and then, in the control thread: so a rank that hangs or dies has told it
           observer.result()             at its end: values that can be pickled, which travel to the command
"""

from __future__ import annotations

from typing import Any, Protocol


class Observer(Protocol):
    """Looks at the process that it is in while a script runs there."""

    def begin(self) -> None:
        """The script is about to start."""
        ...

    def failed(self, error: BaseException) -> None:
        """The script has ended with this exception."""
        ...

    def news(self) -> dict[str, Any]:
        """The measurements since the last call, by name. Called in another thread than the rest."""
        ...

    def result(self) -> dict[str, Any]:
        """The measurements, as dicts, lists and numbers, which can be sent to the process that asked."""
        ...
