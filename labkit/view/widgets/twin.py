"""A static twin: what a widget leaves behind where no widgets run, such as an HTML export or a code host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from labkit.view.svg import Picture


class Twin:
    """Beside the live view a widget publishes `static()` as SVG; a page that cannot run widgets shows that.

    Stand it before the widget's class: `class Film(Twin, AnyWidget)`."""

    static: Callable[[], Picture]

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        bundle = super()._repr_mimebundle_(**kwargs)  # type: ignore[misc]
        if isinstance(bundle, tuple):
            data, metadata = bundle
            return {**data, "image/svg+xml": str(self.static())}, metadata
        return None if bundle is None else {**bundle, "image/svg+xml": str(self.static())}
