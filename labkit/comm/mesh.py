"""A Mesh: this rank's groups along every axis of a layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

from labkit.comm import fake, local, native, shaped, shared
from labkit.comm.group import Group
from labkit.comm.process_groups import Pair, ProcessGroups
from labkit.plan.partition.layout import CUT_AXES, GRID, Layout


@dataclass(frozen=True)
class Mesh:
    """`dp`, `pp`, `tp` and `cp` are the groups that this rank belongs to; `world` holds them all. One ledger for all.

    ep                 those between whom experts are dealt out (see labkit.plan.partition.layout)
    all_tokens         dp x cp, where cp cuts rows, and both ranks of a stage where it has two (`paired`): its axis in
                       the ledger is "dp"; None where `dp` is that group
    same_experts       those who hold the same experts, where ep deals them out; None where all of `data` do
    shard, replicate   the two groups that dp x cp was cut into (`cut`), None before: neighbours who share one copy of
                       the state, and those who hold the same part of other copies"""

    layout: Layout
    world: Group
    dp: Group
    pp: Group
    tp: Group
    cp: Group
    ep: Group
    all_tokens: Group | None = None
    same_experts: Group | None = None
    shard: Group | None = None
    replicate: Group | None = None

    @classmethod
    def connect(cls, layout: Layout, world: Group) -> Mesh:
        """Form the groups of `layout` over `world`. Every rank of the world must call this.

        Raises ValueError if the layout has another number of ranks than the world."""
        if layout.size != world.size:
            sizes = [f"{axis}={getattr(layout, axis)}" for axis in GRID if axis != "cp" or layout.cp > 1]
            raise ValueError(
                f"{layout} needs {' x '.join(sizes)} = {layout.size} ranks, the world has {world.size}: "
                "change one of them"
            )
        return cls._over(layout, world, world, 0)

    @classmethod
    def within(cls, layout: Layout, world: Group, first: int, axis: str) -> Mesh | None:
        """Form the groups of `layout` over the world's ranks from `first` on, as many as it has, for a part of the
        world that does something of its own. Every rank of the world must call this; one outside gets None.

        The mesh's `world` are these ranks, `axis` its name in the ledger. ValueError for ranks that are not there."""
        if not 0 <= first <= world.size - layout.size:
            raise ValueError(
                f"{layout} wants ranks {first} to {first + layout.size - 1}, and the world has 0 to {world.size - 1}: "
                "change the layout, or start more ranks"
            )
        part = among(axis, range(first, first + layout.size), world)
        mesh = cls._over(layout, part, world, first)
        return mesh if world.rank in range(first, first + layout.size) else None

    @classmethod
    def _over(cls, layout: Layout, part: Group, world: Group, first: int) -> Mesh:
        def along(axis: str, kind: str) -> Group:
            def ranks_of(rank: int) -> tuple[int, ...]:
                if not first <= rank < first + layout.size:
                    return (rank,)
                return tuple(first + other for other in layout.ranks(kind, rank - first))

            return _connect(axis, ranks_of, world)

        groups = {axis: along(axis, axis) for axis in (*GRID, "ep")}
        tokens = None if layout.cp == 1 else along("dp", "data")
        experts = None if layout.ep == 1 else along("expert_dp", "expert_dp")
        return cls(layout, part, **groups, all_tokens=tokens, same_experts=experts)

    # Properties, so that `replace(mesh, dp=mesh.dp.using(...))` changes what adds up the gradients.

    @property
    def data(self) -> Group:
        """Those who hold the same weights and see different tokens: they add up gradients."""
        return self.dp if self.all_tokens is None else self.all_tokens

    @property
    def expert_dp(self) -> Group:
        """Those who hold the same experts: they add up the gradients of these."""
        return self.data if self.same_experts is None else self.same_experts

    def cut(self, shard: int) -> Mesh:
        """This mesh with dp cut into groups of `shard` neighbours, each with all its ranks of cp. Every rank of the
        world must call this.

        In the ledger the groups are the axes `dp_shard` and `dp_replicate`. ValueError if dp is no multiple."""

        def ranks_of(side: int, rank: int) -> tuple[int, ...]:
            cut = self.layout.cut(shard, rank)[side]
            return cut if side else tuple(member for other in cut for member in self.layout.ranks("cp", other))

        inside, across = (_connect(axis, partial(ranks_of, k), self.world) for k, axis in enumerate(CUT_AXES))
        return replace(self, shard=inside, replicate=across)

    def paired(self) -> Mesh:
        """This mesh for a pipeline in which a rank and its mirror image along pp have copies of the same stages: both
        are in `data`, and add up gradients. Every rank of the world must call this."""
        return replace(self, all_tokens=_connect("dp", self.layout.both_ends, self.world))


def among(axis: str, ranks: Iterable[int], world: Group) -> Group:
    """Some ranks of a world as a group, in their order in it. Every rank of the world must call this, with the same
    ranks; one that is not among them gets a group of itself alone."""
    members = tuple(sorted(set(ranks)))
    return _connect(axis, lambda rank: members if rank in members else (rank,), world)


def _connect(axis: str, ranks_of: Callable[[int], tuple[int, ...]], world: Group) -> Group:
    members = ranks_of(world.rank)
    index, axis_group = members.index(world.rank), _named(members, world)
    if isinstance(world.wire, local.LocalWire):
        return local.group_on(world.wire.exchange, axis, axis_group, index, world.ledger)
    if isinstance(world.wire, fake.Nobody):
        return fake.along(world, axis, axis_group, index)
    along: Callable[..., Group] | None = getattr(world.wire, "along", None)
    if along is not None:  # a wire that knows how to make its groups
        return along(world, axis, axis_group, index)
    below = world.wire.wire if isinstance(world.wire, shaped.Shaped) else world.wire
    groups: ProcessGroups | None = getattr(below, "groups", None)
    if groups is None or groups.size != world.size:
        raise ValueError(
            f"groups are formed by all ranks of a cluster's world, and {world!r} is not that world: connect a mesh "
            "over the world, and leave the part of a world that Mesh.within gives uncut"
        )
    pair = Pair(None, None)
    for ranks in sorted({_named(ranks_of(rank), world) for rank in range(world.size)}):
        if len(ranks) == 1:
            continue  # nobody to talk to
        formed = groups.of(axis, ranks)  # of the whole world: every rank helps to form every group
        pair = formed if ranks == axis_group else pair
    group = native.over(pair, axis, axis_group, index, world.device, world.ledger, groups=groups)
    if isinstance(world.wire, shaped.Shaped):
        return shaped.shape(group, world.wire.traffic)
    alone = len(axis_group) == 1  # nobody to share memory with
    return shared.share(group, world.wire.box) if isinstance(world.wire, shared.Shared) and not alone else group


def _named(members: tuple[int, ...], world: Group) -> tuple[int, ...]:
    """Members of a world, which may be a part of another, as global ranks."""
    return tuple(world.ranks[member] for member in members)
