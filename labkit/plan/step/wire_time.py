"""How long the wires take for one training step: for each axis, bytes divided by the speed of the links it crosses.

    Layout(dp=2, tp=2) on two nodes          tp pairs       dp pairs
      placed [[0, 1], [2, 3]]                inside         between, two at a time through each card
      placed [[0, 2], [1, 3]]                between        inside

    tp    calls x ring all_reduce of A       A = bytes of one micro-batch's activations      law of one ring step:
    dp    1 ring all_reduce of N             N = bytes of the rank's parameters                 alpha + chunk / rate
    pp    m round trips of A through all stages

All groups of an axis talk at the same time (each rank does the same in a step), so `rate` is the fair share of what
they have in common: the network card of a node, above all. This is traffic alone: nothing is computed meanwhile, and
nothing hides. Sources: Narayanan et al., arXiv:2104.04473, section 3; Thakur et al. 2005, section 3 (alpha-beta).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from labkit.plan.breakdown import Breakdown, Item
from labkit.plan.job.recipe import Recipe
from labkit.plan.job.stages import blocks_of, check_plan, state_params
from labkit.plan.machine.fair_share import rates
from labkit.plan.machine.topology import Links
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import AXES, Layout
from labkit.plan.words import multiples

Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Demand:
    """The traffic of one step along each axis: how often, and how many bytes each time (fp32, DDP).

    tp, dp   all_reduces;   pp   round trips through all stages. A count of 0 where the axis has one rank."""

    tp: tuple[int, float]
    pp: tuple[int, float]
    dp: tuple[int, float]

    @classmethod
    def of(cls, shape: Any, layout: Layout, recipe: Recipe) -> Demand:
        """The demand of the rank with most to send. `shape` is a ModelShape or a GPTConfig. ValueError for what cannot
        be cut or run."""
        shape = ModelShape.of(shape)
        if layout.cp > 1 or recipe.copies > 1:
            what, mend = (f"cp={layout.cp}", "cp=1") if layout.cp > 1 else (recipe.schedule, "'1f1b'")
            raise ValueError(f"the demand of {what} is not known here: labkit.plan.step.time prices it, or take {mend}")
        check_plan(shape, recipe, layout)
        m, p = recipe.n_micro, layout.pp
        word = recipe.weight_bytes
        part = recipe.batch_size / layout.dp / m * shape.seq * shape.d_model * word
        sums = max(4 * blocks + (s == 0) + (s == p - 1) for s, blocks in enumerate(blocks_of(shape, p)))
        n_bytes = recipe.sent_gradient_bytes * max(state_params(shape, layout.tp, p, 1))
        return cls((sums * m * (layout.tp > 1), part), (m * (p > 1), part), (int(layout.dp > 1), n_bytes))

    def __getitem__(self, axis: str) -> tuple[int, float]:
        """(how often, bytes each time) of an axis."""
        return {"tp": self.tp, "pp": self.pp, "dp": self.dp}[axis]


def hops(layout: Layout, axis: str) -> tuple[Pairs, ...]:
    """The edges that are in use together, one hop after the other.

    A ring has one hop, on which every rank sends to the next of its group; a pipeline one for each pair of stages."""
    if axis != "pp":
        groups = sorted({layout.ranks(axis, rank) for rank in range(layout.size)})
        ring = (tuple(zip(group, group[1:] + group[:1], strict=True)) for group in groups if len(group) > 1)
        return (tuple(edge for edges in ring for edge in edges),)
    lanes = [layout.ranks("pp", rank) for rank in range(layout.size) if layout.coords(rank)["pp"] == 0]
    return tuple(tuple((lane[s], lane[s + 1]) for lane in lanes) for s in range(layout.pp - 1))


def crosses(layout: Layout, axis: str, links: Links) -> int:
    """The number of edges of an axis that join two nodes (0: it lies inside). ValueError for links of another size."""
    links.check(layout.size)
    return sum(links.home[a] != links.home[b] for pairs in hops(layout, axis) for a, b in pairs)


def call_s(layout: Layout, axis: str, n_bytes: float, links: Links) -> float:
    """Seconds of one all_reduce of `n_bytes` along dp or tp, or of one round trip through the stages."""
    n = getattr(layout, axis)
    if n == 1:
        return 0.0
    if axis == "pp":
        return 2 * sum(slowest(pairs, n_bytes, links) for pairs in hops(layout, axis))
    return 2 * (n - 1) * slowest(hops(layout, axis)[0], n_bytes / n, links)


def slowest(pairs: Iterable[tuple[int, int]], n_bytes: float, links: Links) -> float:
    """Seconds until `n_bytes` have crossed each of these edges, all at the same time."""
    speeds = rates(links, pairs)
    return max((links.link(*edge).alpha_s + n_bytes / rate for edge, rate in speeds.items()), default=0.0)


def on_wires(layout: Layout, demand: Demand, links: Links) -> Breakdown:
    """Seconds on the wires in one step: tp, pp, dp. ValueError for links of another number of ranks."""
    links.check(layout.size)
    items = []
    for axis in reversed(AXES):
        count, n_bytes = demand[axis]
        formula = f"{count} x {'round trip' if axis == 'pp' else 'all_reduce'} of {n_bytes:,.0f} B"
        seconds = count * call_s(layout, axis, n_bytes, links)
        items.append(Item(axis, seconds, "s", formula, "arXiv:2104.04473, 3"))
    return Breakdown(items)


def together(n_ranks: int, n_nodes: int = 2) -> list[list[int]]:
    """Neighbours in rank on the same node: [[0, 1], [2, 3]]. ValueError if nodes would differ in size."""
    return _dealt(n_ranks, n_nodes, lambda rank, per: rank // per)


def apart(n_ranks: int, n_nodes: int = 2) -> list[list[int]]:
    """Neighbours in rank on different nodes: [[0, 2], [1, 3]]. ValueError if nodes would differ in size."""
    return _dealt(n_ranks, n_nodes, lambda rank, _: rank % n_nodes)


def _dealt(n_ranks: int, n_nodes: int, home: Callable[[int, int], int]) -> list[list[int]]:
    if n_nodes < 1 or n_ranks < n_nodes or n_ranks % n_nodes:
        mend = multiples("n_ranks", n_ranks, n_nodes) if n_nodes > 0 else "n_nodes=1 or more would do"
        raise ValueError(f"{n_ranks} ranks do not lie evenly on {n_nodes} nodes: {mend}")
    nodes: list[list[int]] = [[] for _ in range(n_nodes)]
    for rank in range(n_ranks):
        nodes[home(rank, n_ranks // n_nodes)].append(rank)
    return nodes


def layouts_of(n_ranks: int) -> list[Layout]:
    """Every layout of `n_ranks` ranks, sorted by tp and then by pp."""
    whole = range(1, n_ranks + 1)
    return [Layout(n_ranks // (tp * pp), pp, tp) for tp in whole for pp in whole if n_ranks % (tp * pp) == 0]
