r"""Links: the wires of a machine that you do not have, as one frozen value.

    Links.two_nodes(2, intra="nvlink", inter="infiniband", scale=1e-3)

        rank 0 ======= rank 1        ====  nvlink; each rank has one port out and one in
             \         /
              node 0  up, down       one network card a node: what its ranks send to other nodes shares `up`,
                 |    |              what they take shares `down`; the two directions do not meet
              node 1  down, up
             /         \
        rank 2 ======= rank 3

A message has the latency and the bandwidth of its edge; edges that share a trunk share its bytes a second, as `rates`
in plan/machine/fair_share.py says. `scale` is slow motion: see plan/machine/link.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from labkit.plan.checks import is_whole
from labkit.plan.machine.collectives import Line
from labkit.plan.machine.link import PRESETS, Edge, Link, link_of, preset

__all__ = ("PRESETS", "Edge", "Line", "Link", "Links", "Trunk", "preset")


@dataclass(frozen=True)
class Trunk:
    """A port or a card that several edges share: together they move `bytes_per_s`."""

    name: str
    edges: frozenset[tuple[int, int]]
    bytes_per_s: float


@dataclass(frozen=True)
class Links:
    """The wires between `n_ranks` ranks. Make one with `uniform`, `two_nodes`, `nodes`, `placed` or `of`.

    home     the number of the node on which each rank lies
    wires    ((a, b), Link) for each directed edge, in order
    trunks   what several edges share: the port of a rank, the network card of a node; one for each direction
    words    one line that says all this
    """

    home: tuple[int, ...]
    wires: tuple[tuple[tuple[int, int], Link], ...]
    trunks: tuple[Trunk, ...] = ()
    words: str = "shaped links"

    @classmethod
    def uniform(
        cls,
        n_ranks: int,
        link: Link | str | None = None,
        *,
        alpha_s: float = 0.0,
        bytes_per_s: float | None = None,
        scale: float = 1.0,
        latency_scale: float | None = None,
        ports: bool = True,
    ) -> Links:
        """The same link between any two ranks, as on one switch: `uniform(4, "ethernet", scale=1e-2)` or
        `uniform(4, alpha_s=2e-3, bytes_per_s=50e6)`. With `ports` all that a rank sends at a time shares its port.

        Raises ValueError for no bandwidth, an unknown preset, fewer than 1 rank."""
        if (link is None) == (bytes_per_s is None):
            raise ValueError("say either a link (a preset's name or a Link), or alpha_s= and bytes_per_s=")
        wire = Link("a link", alpha_s, bytes_per_s) if bytes_per_s is not None else link_of(link)
        wire = wire.slower(scale, latency_scale)
        ranks = range(_whole(n_ranks, "n_ranks"))
        wires = {(a, b): wire for a in ranks for b in ranks if a != b}
        return cls._made((0,) * n_ranks, wires, ports, (), f"{wire.words} between any two ranks")

    @classmethod
    def two_nodes(
        cls,
        ranks_per_node: int,
        intra: Link | str = "nvlink",
        inter: Link | str = "infiniband",
        scale: float = 1.0,
        **options: Any,
    ) -> Links:
        """Two nodes of `ranks_per_node` ranks each, ranks 0 to k-1 on the first. Options and errors as of `placed`."""
        return cls.nodes(2, ranks_per_node, intra, inter, scale, **options)

    @classmethod
    def nodes(
        cls,
        n_nodes: int,
        ranks_per_node: int,
        intra: Link | str = "nvlink",
        inter: Link | str = "infiniband",
        scale: float = 1.0,
        **options: Any,
    ) -> Links:
        """`n_nodes` nodes of `ranks_per_node` ranks each, filled one after the other. As `placed` otherwise."""
        n, k = _whole(n_nodes, "n_nodes"), _whole(ranks_per_node, "ranks_per_node")
        return cls.placed([range(node * k, (node + 1) * k) for node in range(n)], intra, inter, scale, **options)

    @classmethod
    def placed(
        cls,
        nodes: Sequence[Sequence[int]],
        intra: Link | str = "nvlink",
        inter: Link | str = "infiniband",
        scale: float = 1.0,
        *,
        latency_scale: float | None = None,
        rails: int = 1,
        ports: bool = True,
    ) -> Links:
        """Nodes with the ranks that you say: `placed([[0, 2], [1, 3]])`; `intra` inside a node, `inter` between two.

        A node has `rails` network cards of the speed of `inter`, shared by its ranks. ValueError for a rank that is on
        no node or on two, a node without ranks, an unknown preset."""
        ranks = sorted(rank for node in nodes for rank in node)
        if not ranks or ranks != list(range(len(ranks))) or not all(nodes):
            raise ValueError(f"each rank from 0 on lies on one node, and no node is empty; got {[*map(list, nodes)]}")
        inside, across = (link_of(link).slower(scale, latency_scale) for link in (intra, inter))
        home = tuple(next(i for i, node in enumerate(nodes) if rank in node) for rank in ranks)
        wires = {(a, b): inside if home[a] == home[b] else across for a in ranks for b in ranks if a != b}
        trunks, width = [], _whole(rails, "rails") * across.bytes_per_s
        for node in range(len(nodes)):
            out = frozenset((a, b) for a, b in wires if home[a] == node != home[b])
            trunks += [Trunk(f"node {node} up", out, width)]
            trunks += [Trunk(f"node {node} down", frozenset((b, a) for a, b in out), width)]
        sizes = " or ".join(map(str, sorted({len(node) for node in nodes})))
        words = f"{len(nodes)} nodes of {sizes}, {inside.words} inside, {across.words} between"
        return cls._made(home, wires, ports, [trunk for trunk in trunks if trunk.edges], words)

    @classmethod
    def of(
        cls,
        edges: Mapping[tuple[int, int], Link | str | tuple[float, float]],
        *,
        home: Sequence[int] | None = None,
        trunks: Sequence[Trunk] = (),
        scale: float = 1.0,
        latency_scale: float | None = None,
        ports: bool = False,
    ) -> Links:
        """Edge by edge: {(0, 1): "infiniband", (1, 2): (alpha_s, bytes_per_s), ...}. The way back, where it is not
        said, is as the way there. `home` is the node of each rank; trunks are taken as they are.

        Raises ValueError for a pair of ranks that has no link, a rank that talks to itself, a trunk of unknown edges.
        """
        wires = {edge: link_of(link).slower(scale, latency_scale) for edge, link in edges.items()}
        wires = {**{(b, a): link for (a, b), link in wires.items()}, **wires}
        ranks = sorted({rank for edge in wires for rank in edge})
        wanted = {(a, b) for a in range(len(ranks)) for b in range(len(ranks)) if a != b}
        if not ranks or set(wires) != wanted:
            wrong = sorted(set(wires) - wanted) or sorted(wanted - set(wires))
            raise ValueError(
                f"links of {len(ranks)} ranks join any two of 0 to {len(ranks) - 1}: look at {wrong[:4]}, "
                "an edge that is missing, or joins a rank to itself or to one that nobody else knows"
            )
        home = tuple(home) if home is not None else (0,) * len(ranks)
        if len(home) != len(ranks):
            raise ValueError(f"home= says the node of each of the {len(ranks)} ranks, got {len(home)}: {home}")
        for trunk in trunks:
            if not trunk.edges <= set(wires) or not 0 < trunk.bytes_per_s < math.inf:
                raise ValueError(f"{trunk.name}: bandwidth must be above 0, and edges among those given: {trunk}")
        return cls._made(home, wires, ports, trunks, f"{len(wires)} edges one by one")

    @classmethod
    def _made(
        cls,
        home: tuple[int, ...],
        wires: Mapping[tuple[int, int], Link],
        ports: bool,
        trunks: Sequence[Trunk],
        words: str,
    ) -> Links:
        shared = []
        for rank in range(len(home)) if ports and len(home) > 2 else ():  # with one peer a port is the edge itself
            for name, end in (("out", 0), ("in", 1)):
                edges = frozenset(edge for edge in wires if edge[end] == rank)
                shared.append(Trunk(f"rank {rank} {name}", edges, max(wires[edge].bytes_per_s for edge in edges)))
        return cls(home, tuple(sorted(wires.items(), key=lambda wire: wire[0])), (*shared, *trunks), words)

    @property
    def n_ranks(self) -> int:
        """The number of ranks that these links join."""
        return len(self.home)

    @property
    def by_node(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node."""
        return tuple(tuple(rank for rank, at in enumerate(self.home) if at == node) for node in sorted(set(self.home)))

    @cached_property
    def _edges(self) -> dict[tuple[int, int], Link]:
        return dict(self.wires)

    def link(self, a: int, b: int) -> Link:
        """The link from rank a to rank b. ValueError if one is unknown, or both are the same."""
        if (a, b) not in self._edges:
            raise ValueError(f"there is no edge from rank {a} to rank {b}: ranks are 0 to {self.n_ranks - 1}")
        return self._edges[a, b]

    def edge(self, a: int, b: int) -> Edge:
        """(seconds of latency, seconds a byte) from rank a to rank b, when nobody else uses what it shares."""
        link = self.link(a, b)
        return Edge(link.alpha_s, 1 / link.bytes_per_s)

    def line(self, a: int, b: int) -> Line:
        """The same for the laws of plan/machine/collectives.py."""
        return Line(*self.edge(a, b))

    def check(self, n_ranks: int) -> Links:
        """These links. ValueError if they join another number of ranks."""
        if n_ranks != self.n_ranks:
            raise ValueError(
                f"these links join {self.n_ranks} ranks ({self.words}), the cluster has {n_ranks}: "
                f"use Cluster({self.n_ranks}, links=...) or other links"
            )
        return self


def _whole(value: int, name: str) -> int:
    if not is_whole(value):
        raise ValueError(f"{name} must be a whole number, at least 1, got {value!r}")
    return value
