"""Which axis should cross between nodes? Change layout, placing and links; see the law, and measure on real ranks."""

from __future__ import annotations

from collections import defaultdict
from html import escape
from typing import Any

import ipywidgets as widgets

from labkit.capped import Cluster
from labkit.course.topics.interconnect_picture import wires
from labkit.course.widgets.explorer import Explorer, in_two_columns
from labkit.course.widgets.real_run import Pieces, RealRun
from labkit.plan.breakdown import Breakdown, Item
from labkit.plan.job.recipe import Recipe
from labkit.plan.machine.link import Link
from labkit.plan.machine.topology import Links
from labkit.plan.partition.layout import Layout
from labkit.plan.step.wire_time import Demand, apart, layouts_of, on_wires, together
from labkit.probe.crossing import pieces
from labkit.view.svg import Picture
from labkit.view.units import metric_text, parsed, seconds_text

LONGEST_S = 30.0
"""A measurement that would take longer by law is refused."""
FIELDS = (
    ("inside", "latency inside a node, such as 200 us"),
    ("speed", "bytes a second inside a node, such as 45 MB/s"),
    ("between", "latency between nodes"),
    ("speed", "bytes a second of the card of a node"),
)
Setting = tuple[Layout, Links]


class InterconnectExplorer(Explorer):
    """Controls over the law of `plan.step.wire_time` for one step of `shape` under `recipe`; Tab goes from one to the
    next, arrow keys move layout and ranks, Enter takes what is typed (`200 us`, `45 MB/s`).

    It starts at `layout`, the links `intra` and `inter`, and two nodes with neighbours together, or `apart_` (of two
    ranks that are together, both lie on one node). The button measures the same traffic on real ranks over such links,
    and can be stopped; `measure()` does it at once. `.picture` is the last valid picture; invalid input keeps it and
    shows the reason."""

    recorded_over = ("way", "place")

    def __init__(self, shape: Any, recipe: Recipe, layout: Layout, intra: Link, inter: Link, apart_: bool = False):
        self.shape, self.recipe, self.names = shape, recipe, (intra.name, inter.name)
        self.measured: dict[Setting, Breakdown] = {}
        ways = [(f"dp {way.dp}, pp {way.pp}, tp {way.tp}", way) for way in layouts_of(layout.size)]
        self.way = widgets.SelectionSlider(options=ways, value=layout, description="layout")
        places = [("neighbours together", False), ("neighbours apart", True)]
        self.place = widgets.SelectionSlider(options=places, value=apart_, description="ranks")
        first = [
            words
            for link in (intra, inter)
            for words in (seconds_text(link.alpha_s), metric_text(link.bytes_per_s, "B/s"))
        ]
        self.typed = [
            widgets.Text(value, description=name, tooltip=tip, continuous_update=False)
            for value, (name, tip) in zip(first, FIELDS, strict=True)
        ]
        self.real = RealRun(
            self._pieces, self._ended, "measure on real ranks", "the same traffic over such links", "measured"
        )
        controls = [self.way, self.place, *self.typed]
        super().__init__([in_two_columns(controls), self.real], controls)

    @property
    def setting(self) -> Setting:
        """The layout and links that the controls describe. ValueError for invalid input."""
        texts, layout = [field.value for field in self.typed], self.way.value
        intra, inter = (
            Link(name, parsed(alpha, "s"), parsed(speed.strip().removesuffix("/s"), "B"))
            for name, alpha, speed in zip(self.names, texts[::2], texts[1::2], strict=True)
        )
        n = layout.size
        nodes = apart(n, min(2, n)) if self.place.value else together(n, max(1, min(2, n // 2)))
        return layout, Links.placed(nodes, intra, inter)

    def drawn(self) -> Picture:
        """The picture for the present controls."""
        layout, links = self.setting
        return wires(layout, Demand.of(self.shape, layout, self.recipe), links, self.measured.get((layout, links)))

    def measure(self) -> InterconnectExplorer:
        """Measure the present setting now, and wait until it is done. Returns the explorer."""
        self.real.run()
        return self

    def _pieces(self) -> Pieces:
        """Send the traffic of one axis after the other on a cluster with these links; yields the share that is done."""
        layout, links = self.setting
        demand = Demand.of(self.shape, layout, self.recipe)
        if (law := on_wires(layout, demand, links).total) > LONGEST_S:
            raise ValueError(f"the law says {seconds_text(law)} for this step, more than {LONGEST_S:g} s to wait")
        seconds_by_axis, done = defaultdict[str, float](float), 0.0
        with Cluster(layout.size, device="cpu", links=links, quiet=True) as cluster:
            for axis, seconds, share in pieces(cluster.run, layout, demand, links):
                seconds_by_axis[axis] += seconds
                done += share
                yield done
        items = (Item(axis, seconds, "s", "", "measured") for axis, seconds in seconds_by_axis.items())
        self.measured[layout, links] = Breakdown(items)

    def _ended(self, why: str) -> None:
        self.draw()
        if why:
            self.message.value = escape(why)
