"""One layer's attention over the ranks of cp: what each way saves, and its blocks of keys and values (b bytes).

              saved                                  while it runs, besides (cut_attention.py has the law of the blocks)
    ring      q, k, v, y, a number a query and head  two blocks of keys and values, four of their gradients
    gather    the same                               1 + n blocks, 2n + 1 of gradients
    ulysses   q, k, v in one piece, y, the numbers   what leaves, what comes, what is put together
    halo      as ring, and the halo    one block, and in backward its gradients and those of halos, there and back
    tiles     (all but ulysses) scores of TILE x TILE tokens, three times forward and four times backward (halo: three)

All but ulysses compute queries' numbers in fp32 at least (labkit.parallel.context). With a halo ranks hold different
bytes: these are those of the last rank, which keeps no less than another.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import NamedTuple

from labkit.plan.model.cut_attention import CutAttention, window_of
from labkit.plan.model.layer_rows import Terms
from labkit.plan.model.layer_table import Row, Tensors

TILE = 1024
"""Scores are computed for at most so many queries and keys at once (labkit.parallel.blockwise_attention)."""


def attend(t: Terms, saved: Tensors, heads: int, keys: int) -> Row:
    """Attention to the tokens of all ranks of cp; `saved`: query, key and value."""
    setting, word, wide = t.setting, t.narrow, t.exact
    layer = CutAttention(
        setting.seq * setting.cp, setting.cp, heads, keys, t.shape.width, setting.rows, word, t.shape.rope_width,
        window_of(t.shape),
    )  # fmt: skip
    block, grads = layer.block, layer.gradients
    queries = heads * layer.tokens * layer.width  # numbers of y
    asked = queries + heads * layer.tokens * layer.rope_width  # of q
    y, logs = queries * word, heads * layer.tokens * wide
    if setting.context == "ulysses":
        whole = asked * word + block
        kept: Tensors = (
            ("query, key and value of whole rows", whole), ("mixed values of whole rows", y),
            ("log-sums of attention", logs),
        )  # fmt: skip
        # what leaves, what comes and what is put together: first of q, k and v, before y and its numbers are there;
        # last of their gradients, when nothing is saved any more
        forward, backward = max(3 * whole - y - logs, whole + 2 * y), max(3 * y, y + whole, 2 * whole - y - logs)
        return Row("attend", kept, (), forward, t.residual + backward)
    half = word < wide
    runs, scores, way = TRAVELLING[setting.context]
    travelling = way(layer, tiles(layer, scores, wide, runs=runs))
    blocks = travelling.forward + tiles(layer, 3, wide, 2, runs)
    exact = queries * wide * half  # y, before it is rounded, and in rows
    forward = max(blocks + exact - y * half, exact, y * (t.shape.position == "rotary"))
    numbers = (asked + queries * (1 + half)) * wide + logs  # of each query: the mean of forward, gradients of y and q
    ends = grads + (block + asked * word) * half  # gradients of keys, values and queries as products take them
    kept = (*saved, ("mixed values [B,T,A]", y), ("log-sums of attention", logs), *travelling.kept)
    return Row("attend", kept, (), forward, t.residual + y + numbers + max(*travelling.backward, ends))


class Travelling(NamedTuple):
    """Bytes of keys, values and their gradients that a way holds: while forward runs, at each moment of backward that
    may be the highest, and what it keeps from one to the other."""

    forward: int
    backward: tuple[int, ...]
    kept: Tensors = ()


def ring(layer: CutAttention, tile: int) -> Travelling:
    """Two blocks, and in backward up to four of gradients; `tile`: bytes of a tile in backward."""
    block, grads = layer.block, layer.gradients
    moments = [2 * block + grads + tile, block + 2 * grads + tile, block + 4 * grads]
    moments += [(2 if layer.n > 3 else 1) * block + 4 * grads + tile] * (layer.n > 2)
    return Travelling(2 * block, tuple(moments))


def gather(layer: CutAttention, tile: int) -> Travelling:
    """Its own block and those of all ranks, and in backward twice their gradients."""
    n, block, grads = layer.n, layer.block, layer.gradients
    moments = n * grads + tile + (1 + n) * block, (2 * n + 1) * grads + (1 + n) * block
    return Travelling((1 + n) * block, moments)


def halo(layer: CutAttention, tile: int) -> Travelling:
    """Its own block, the halo that came, and in backward the gradients of both; the halo leaves as it came."""
    block, grads, came = layer.block, layer.gradients, layer.halo
    wide = came * layer.gradients // layer.block
    moments = block + wide + tile, block + came + grads + tile
    return Travelling(block, moments, (("halo of keys and values", came),) * (came > 0))


TRAVELLING: MappingProxyType[str, tuple[int, int, Callable[[CutAttention, int], Travelling]]] = MappingProxyType(
    {"ring": (2, 4, ring), "gather": (2, 4, gather), "halo": (1, 3, halo)}
)
"""Of the ways that bring keys and values to the queries: the runs of tokens that a rank has, the scores of a tile that
backward holds at its highest moment, and what they hold of keys and values."""


def tiles(layer: CutAttention, scores: int, wide: int, sums: int = 0, runs: int = 2) -> int:
    """Bytes at the highest moment of one tile: so many times its scores, and the sums of its weights; the mask twice,
    and wide copies of keys and values. A rank's tokens lie in `runs` runs, which come one by one."""
    side = min(TILE, -(-layer.seq // (runs * layer.n)))
    keys = layer.key_heads * layer.pair * (layer.word < wide)
    return layer.rows * side * (layer.heads * (scores * side + sums) + keys) * wide + 2 * side * side
