"""What labkit's own widgets are made of: anywidget's widget, and a still picture where anywidget is not installed.

A notebook that is there already, such as Colab's, may have no anywidget, and installing labkit there installs none. The
widget is then its picture, with a sentence that says how it comes to life.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import traitlets

ASLEEP = "This is a picture. <code>pip install anywidget</code>, and a restart of the kernel, make it move."


class Silent(traitlets.HasTraits):
    """Stands in for a widget where there are none at all: it has the same values, and no page hears of them."""

    def on_msg(self, callback: Callable[..., None]) -> None:
        """No page sends a message; the callback is kept, as a widget keeps it."""
        self.callback = callback

    def hold_sync(self) -> Any:
        """Values that are set together are told together; here nobody is told."""
        return self.hold_trait_notifications()


def still() -> type:
    """What stands in for anywidget's widget: where ipywidgets are there, one that can also be a part of a box."""
    try:
        from ipywidgets import HTML as base
    except ModuleNotFoundError:
        base = Silent
    return type("Still", (base,), {"asleep": ASLEEP})


if TYPE_CHECKING:
    from anywidget import AnyWidget as Live
else:
    try:
        from anywidget import AnyWidget as Live
    except ModuleNotFoundError:
        Live = still()
