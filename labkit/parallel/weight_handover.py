"""Handing weights from a trainer to a generator, whose layouts differ, on one world.

    world            0     1     2     3   |   4     5           apart: each rank is of one side
    trainer          dp = 2 x tp = 2, ZeRO |
    generator                              |   tp = 2
                     0     1     2     3                         colocated: a rank may be of both, and has two shards
    trainer          dp = 2 x tp = 2, ZeRO
    generator        tp = 4

After each step of reinforcement learning the generator needs the new weights. Both ways below put every element where
it is wanted, bit for bit as the trainer computes with it: rounded to the generator's dtype before it is sent.

    gather_and_broadcast    the trainer's first rank gathers the whole model, as for a state_dict, and broadcasts it,
                            parameter by parameter, to all ranks of the generator; each cuts out what it wants
    reshard                 each rank sends each other just those elements that this one wants and that are its part
                            to give: no rank holds or receives more than its own

W bytes of weights in the generator's dtype, t ranks of a trainer that hold W/t each, g of a generator that want W/g:

                            gather_and_broadcast                          reshard
    sent, first rank        W                                             W/t
          other trainers    W/t                                           W/t
    received, first rank    (t-1)/t W                                     0
          a generator       W                                             W/g
    buffers, first rank     W and a bucket                                W/t of a bucket
             a generator    twice the largest parameter                   W/g of a bucket

In full, also where ranks hold copies, want copies (what tp leaves whole) or keep what they have: `gathered_bytes`,
`resharded_bytes` and `buffers` of a `Handover`, which are sums over its moves (plan.pocket.resharding). A broadcast is
charged to its source, as a backend carries it out; where labkit's ring does (threads, shaped links), each rank but the
last of the chain passes W on. `meet` sends the names and places once, before the first handover.

Moves travel in buckets, each a ragged all_to_all over the world: a rank that has nothing to send still takes part.

Sources: OpenRLHF (arXiv:2405.11143) broadcasts from the trainer's first rank; resharding between the two layouts of
colocated ranks is what the 3D-HybridEngine of HybridFlow does (arXiv:2409.19256, section 5).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from labkit.comm.group import Group
from labkit.comm.mesh import Mesh, among
from labkit.parallel.checkpoints import Parts, global_shape, named_chunks, of_all_ranks
from labkit.plan.contracts import shard_dim_of
from labkit.plan.pocket.resharding import Move, Placement, Rectangle, buffer_bytes, moves, rounds, sent_bytes, wholes
from labkit.plan.words import dtype_name

BUCKET_BYTES = 25 * 2**20
Held = dict[Placement, Tensor]
"""Places of one rank, each with its elements: flat windows [numel], which share memory with what they look into."""


def offered(parts: Parts, mesh: Mesh, world: Group) -> Held:
    """What this rank of a trainer has to give: the chunks that its strategies own, whatever they are.

    `parts` is `TrainStep.parts`, `mesh` the trainer's. Windows of what the optimizer steps on: they show every step."""
    held = Held()
    for name, chunk in named_chunks(parts):
        shard = (global_shape(chunk, mesh), chunk.shard_dim, mesh.tp.rank, mesh.tp.size)
        where = (*shard, chunk.offset, chunk.value.numel())
        held[Placement(world.rank, name, *where, dtype_name(chunk.value.dtype))] = chunk.value
    return held


def wanted(model: nn.Module, mesh: Mesh, world: Group, names: Mapping[str, str] | None = None) -> Held:
    """What this rank of a generator wants: all parameters of its model, as tp has cut them.

    `mesh` is the generator's; `names` gives a parameter's name in the whole model where it is another one (a stage of
    a pipeline). ValueError for a parameter that is not contiguous."""
    held = Held()
    for own, p in model.named_parameters():
        if not p.is_contiguous():
            raise ValueError(f"{own} has strides {p.stride()}: make it contiguous, p.data = p.data.contiguous()")
        shard_dim, shape = shard_dim_of(p), list(p.shape)
        if shard_dim is not None:
            shape[shard_dim] *= mesh.tp.size
        name = own if names is None else names[own]
        where = (tuple(shape), shard_dim, mesh.tp.rank, mesh.tp.size, 0, p.numel())
        held[Placement(world.rank, name, *where, dtype_name(p.dtype))] = p.detach().view(-1)
    return held


@dataclass(frozen=True)
class Handover:
    """What travels between the two sides of a world, the same on every rank but for `offered` and `wanted`.

    offered, wanted   this rank's own; empty for a rank that is not of that side
    first             the trainer's first rank
    generators        the ranks that want something
    line              first and generators as a group, for the broadcast; others are alone in it
    direct            moves from trainers to generators
    gathers           moves from trainers to `first`
    """

    world: Group
    offered: Held
    wanted: Held
    first: int
    generators: tuple[int, ...]
    line: Group
    direct: tuple[Move, ...]
    gathers: tuple[Move, ...]

    @property
    def whole(self) -> tuple[Placement, ...]:
        """Each parameter, whole, on the first rank."""
        return tuple({move.target: None for move in self.gathers})

    @property
    def n_bytes(self) -> int:
        """W: bytes of the whole model in the generator's dtypes."""
        return sum(place.n_bytes for place in self.whole)

    def resharded_bytes(self, rank: int) -> int:
        """Bytes that a rank sends in `reshard`."""
        return sent_bytes(self.direct, rank)

    def gathered_bytes(self, rank: int) -> int:
        """Bytes that a rank sends in `gather_and_broadcast`, if a backend carries out the broadcast."""
        broadcast = self.n_bytes if rank == self.first and set(self.generators) - {rank} else 0
        return sent_bytes(self.gathers, rank) + broadcast

    def buffers(self, rank: int, way: str, bucket_bytes: int = BUCKET_BYTES) -> int:
        """The most bytes that a rank holds besides its own shards; `way` is the name of one of the two functions."""
        if way == "reshard":
            return buffer_bytes(self.direct, rank, bucket_bytes)
        gathering = buffer_bytes(self.gathers, rank, bucket_bytes)
        largest = max(place.n_bytes for place in self.whole)
        if rank == self.first:
            return self.n_bytes + max(gathering, largest)
        return max(gathering, 2 * largest if rank in self.generators else 0)


def meet(world: Group, offered: Held, wanted: Held) -> Handover:
    """Tell each other what is held and what is wanted, and work out what travels. Every rank of the world calls it.

    Once is enough, as long as the layouts stay. ValueError, on every rank, if the two sides are of different models."""
    sides = of_all_ranks([list(offered), list(wanted)], world)
    has, wants = ([_place(fields) for side in sides for fields in side[k]] for k in (0, 1))
    return between(world, has, wants, offered, wanted)


def between(
    world: Group, has: Sequence[Placement], wants: Sequence[Placement], offered: Held, wanted: Held
) -> Handover:
    """The same if all ranks' places are known already, as in a rehearsal. Every rank of the world calls it; sends
    nothing. ValueError as `meet`."""
    if not has or not wants:
        missing = "offers" if not has else "wants"
        raise ValueError(f"no rank {missing} a parameter: a handover has a trainer and a generator")
    first = min(place.rank for place in has)
    direct, gathers = moves(has, wants), moves(has, wholes(wants, first))
    generators = tuple(sorted({place.rank for place in wants}))
    line = among("handover", (first, *generators), world)
    return Handover(world, offered, wanted, first, generators, line, direct, gathers)


def reshard(handover: Handover, bucket_bytes: int = BUCKET_BYTES) -> None:
    """Put the trainer's weights where they are wanted, from rank to rank. Every rank of the world calls it.

    Sends `resharded_bytes`; holds `buffers`: of a bucket what is sent and what comes."""
    for some in rounds(handover.direct, bucket_bytes):
        travel(some, handover.offered, handover.wanted, handover.world)


def gather_and_broadcast(handover: Handover, bucket_bytes: int = BUCKET_BYTES) -> None:
    """The same by way of the trainer's first rank, which has the whole model meanwhile. Every rank calls it.

    Sends `gathered_bytes`; holds `buffers`: W on the first rank."""
    world, line, me = handover.world, handover.line, handover.world.rank
    whole = {place: _empty(place, world) for place in handover.whole} if me == handover.first else Held()
    for some in rounds(handover.gathers, bucket_bytes):
        travel(some, handover.offered, whole, world)
    if me == handover.first or me in handover.generators:
        for place in handover.whole:
            weight = whole[place] if me == handover.first else _empty(place, world)
            if line.size > 1:
                weight = line.broadcast(weight, line.ranks.index(world.ranks[handover.first]))
            for target in (target for target in handover.wanted if target.name == place.name):
                for block in target.blocks:
                    window(target, handover.wanted[target], block).copy_(window(place, weight, block))


def travel(some: Iterable[Move], held: Held, rooms: Held, world: Group) -> None:
    """Carry out moves of one dtype: what stays is copied, what travels goes in one ragged all_to_all.

    Sends the bytes of the moves from this rank to others, and holds them and those that come meanwhile."""
    me, n = world.rank, world.size
    out: list[list[Move]] = [[] for _ in range(n)]
    come: list[list[Move]] = [[] for _ in range(n)]
    dtype = torch.float32
    for move in some:
        dtype = getattr(torch, move.target.dtype)
        if move.stays and move.source.rank == me:
            room = window(move.target, rooms[move.target], move.block)
            room.copy_(window(move.source, held[move.source], move.block))
        elif move.source.rank == me:
            out[move.target.rank].append(move)
        elif move.target.rank == me:
            come[move.source.rank].append(move)
    # both sides list the moves between two ranks in the same order, so nothing has to say what is what
    send, receive = ([sum(move.block.numel for move in to) for to in side] for side in (out, come))
    x = torch.empty(sum(send), dtype=dtype, device=world.device)
    for move, part in _parts(out, x):
        part.copy_(window(move.source, held[move.source], move.block))  # rounded here, if the generator's is narrower
    y = world.all_to_all(x, send_rows=send, receive_rows=receive)
    for move, part in _parts(come, y):
        window(move.target, rooms[move.target], move.block).copy_(part)


def window(place: Placement, flat: Tensor, block: Rectangle) -> Tensor:
    """A block of a place's elements as a matrix that shares memory with them.   [numel] -> [rows, columns]"""
    begin, width = place.begin_and_stride(block)
    size = (block.bottom - block.top, block.right - block.left)
    return flat.as_strided(size, (width, 1), flat.storage_offset() + begin)


def _parts(side: Iterable[Iterable[Move]], x: Tensor) -> Iterable[tuple[Move, Tensor]]:
    begin = 0
    for move in (move for peer in side for move in peer):
        block = move.block
        yield move, x[begin : begin + block.numel].view(block.bottom - block.top, block.right - block.left)
        begin += block.numel


def _empty(place: Placement, world: Group) -> Tensor:
    return torch.empty(place.numel, dtype=getattr(torch, place.dtype), device=world.device)


def _place(fields: list[object]) -> Placement:
    """A place from plain data, which knows no tuples."""
    rank, name, shape, *rest = fields
    return Placement(rank, name, tuple(shape), *rest)  # type: ignore[arg-type]
