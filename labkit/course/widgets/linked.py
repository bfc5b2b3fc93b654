"""HTML in which the name of a cell is a link that opens its lab."""

from __future__ import annotations

from pathlib import Path

import traitlets

from labkit.course.server.labs import addresses
from labkit.course.widgets.live import Live

LINKS = Path(__file__).with_name("cells.js").read_text()
"""JavaScript that makes links of `<a data-cell="03-12">`, to be put before a widget's own module."""


class Linked(Live):
    """Shows `value`, which must be labkit's own HTML."""

    _esm = LINKS + Path(__file__).with_name("linked.js").read_text()
    value = traitlets.Unicode().tag(sync=True)
    addresses = traitlets.Dict(traitlets.Unicode()).tag(sync=True)

    def __init__(self) -> None:
        super().__init__(addresses=addresses())
