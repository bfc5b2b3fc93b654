"""What a redistribution of a DTensor sends: one placement becomes another one along one dim of a device mesh.

A DTensor is a global tensor whose ranks hold it in one of three ways. Placements are written as torch prints them:

    S(d)       rank r holds the r-th chunk along dim d; chunks are ceil(size / n) long, and the last ones may be shorter
               or empty
    R          every rank holds all of it
    P(sum)     every rank holds an addend of the same shape; the sum of all is the tensor

Nobody writes the collective: an operator that needs another placement than its input has asks for it. With n ranks, N
for the bytes of the tensor, and C for the bytes of the longest chunk (dims that n does not divide are padded to it):

    from      to        collective        a rank sends
    R         S(d)      none              0: every rank cuts its chunk out of what it has
    S(d)      R         all_gather        (n-1) C
    P(sum)    S(d)      reduce_scatter    (n-1) C
    P(sum)    R         all_reduce        2(n-1)/n N
    S(d)      S(e)      all_to_all        (n-1) T, where T is the bytes of a chunk of a chunk: about N/n2
    S(d)      S(e)      all_gather        (n-1) n T on a mesh of CPUs, where torch 2.13 gathers everything and cuts

Source: torch 2.13, torch/distributed/tensor/placement_types.py (the methods of Shard and Partial) and
_collective_utils.py (shard_dim_alltoall). Bytes are those of a ring, as everywhere in labkit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from labkit.plan.machine.collectives import sent_bytes

REPLICATED, SUMMED = "R", "P(sum)"
_SHARDED = re.compile(r"S\((\d+)\)")


class Redistribution(NamedTuple):
    """The collective that a redistribution needs, "" for none, and the bytes that a rank sends in it."""

    verb: str
    sent_bytes: int


def redistribution(
    before: str, after: str, shape: Sequence[int], n_ranks: int, word: int, rank: int = 0, on_cpu: bool = False
) -> Redistribution:
    """What `rank` sends when a tensor of `shape` goes from one placement to another. `word`: bytes of an element.

    `shape` is the global shape; on a mesh of several dims it is what the other dims have left of it. `on_cpu`: torch
    gathers and cuts where GPUs exchange chunks. ValueError for a placement that is none of the three, a dim that the
    tensor does not have, and a target of P(sum), which `redistribute` refuses."""
    before_dim, after_dim = _dim_of(before, shape), _dim_of(after, shape)
    if n_ranks < 1:
        raise ValueError(f"a mesh has at least 1 rank, got {n_ranks}")
    if after == SUMMED and before != SUMMED:
        raise ValueError(
            f"{before} cannot become {after}: a DTensor gets addends from an operator, not by redistribute"
        )
    if before in (after, REPLICATED) or n_ranks == 1:
        return Redistribution("", 0)
    if before == SUMMED and after == REPLICATED:
        n_bytes = math.prod(shape) * word
        return Redistribution("all_reduce", sent_bytes("ring", "all_reduce", n_ranks, n_bytes, rank, word))
    if after == REPLICATED:
        return Redistribution("all_gather", (n_ranks - 1) * _piece(shape, n_ranks, before_dim) * word)
    if before == SUMMED:
        return Redistribution("reduce_scatter", (n_ranks - 1) * _piece(shape, n_ranks, after_dim) * word)
    tile = _piece(shape, n_ranks, before_dim, after_dim) * word
    if on_cpu:
        return Redistribution("all_gather", (n_ranks - 1) * n_ranks * tile)
    return Redistribution("all_to_all", (n_ranks - 1) * tile)


def chunk(size: int, n_ranks: int, rank: int) -> tuple[int, int]:
    """Where rank r's chunk of a dim begins, and how long it is: S(d) cuts as `torch.chunk` does.

    Ranks behind the last chunk hold nothing: 5 rows on 4 ranks are 2, 2, 1 and 0."""
    if not 0 <= rank < n_ranks:
        raise ValueError(f"{n_ranks} ranks are numbered 0 to {n_ranks - 1}, got rank {rank}")
    longest = math.ceil(size / n_ranks)
    first = min(rank * longest, size)
    return first, min(longest, size - first)


def _piece(shape: Sequence[int], n_ranks: int, *dims: int | None) -> int:
    """Elements of a piece that is cut along some dims, each padded to n equal chunks."""
    return math.prod(math.ceil(size / n_ranks) if dim in dims else size for dim, size in enumerate(shape))


def _dim_of(placement: str, shape: Sequence[int]) -> int | None:
    """The dim along which a placement cuts; None for the two that do not."""
    if placement in (REPLICATED, SUMMED):
        return None
    sharded = _SHARDED.fullmatch(placement)
    if sharded is None:
        raise ValueError(f"a placement is S(dim), {REPLICATED} or {SUMMED}, got {placement!r}")
    if int(sharded[1]) >= len(shape):
        raise ValueError(f"{placement} needs a dim {sharded[1]}, and a tensor of shape {tuple(shape)} has {len(shape)}")
    return int(sharded[1])
