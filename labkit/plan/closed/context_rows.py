"""One layer's attention over the ranks of cp: what the three ways save, and their blocks of keys and values (b bytes).

              saved                                  while it runs, besides (cut_attention.py has the law of the blocks)
    ring      q, k, v, y, a number a query and head  two blocks of keys and values, four of their gradients
    gather    the same                               1 + n blocks, 2n + 1 of gradients
    ulysses   q, k, v in one piece, y, the numbers   what leaves, what comes, what is put together
    tiles     (ring and gather) scores of TILE x TILE tokens, three times forward and four times backward

Ring and gather compute queries' numbers in fp32 at least (labkit.parallel.context).
"""

from __future__ import annotations

from labkit.plan.closed.rows import Row, Tensors
from labkit.plan.model.cut_attention import CutAttention
from labkit.plan.model.ops import Setting
from labkit.plan.model.sizes import Sizes

TILE = 1024
"""Scores are computed for at most so many queries and keys at once (labkit.parallel.blockwise_attention)."""


def attend(
    shape: Sizes, setting: Setting, saved: Tensors, heads: int, keys: int, word: int, beside: int
) -> list[Row]:  # fmt: skip
    """Attention to the tokens of all ranks of cp; `saved`: query, key and value, `beside`: the residual's gradient."""
    layer = CutAttention(
        setting.seq * setting.cp, setting.cp, heads, keys, shape.width, setting.rows, word, shape.rope_width
    )
    wide, n, block, grads = max(4, word), layer.n, layer.block, layer.gradients
    queries = heads * layer.tokens * layer.width  # numbers of y
    asked = queries + heads * layer.tokens * layer.rope_width  # of q
    logs = heads * layer.tokens * wide
    copy = queries * word * (shape.position == "rotary" or setting.context == "ulysses")  # y in rows
    if setting.context == "ulysses":
        whole, mixed = asked * word + block, queries * word
        kept: Tensors = (
            ("query, key and value of whole rows", whole), ("mixed values of whole rows", mixed),
            ("log-sums of attention", logs),
        )  # fmt: skip
        forward = max(3 * whole - whole, whole + 2 * mixed)
        return [Row("attend", kept, (), forward + copy, beside + max(mixed + whole, 3 * whole))]
    half = word < wide
    forward = queries * wide * half + max(queries * word * half, (2 if setting.context == "ring" else 1 + n) * block)
    forward += tiles(layer, 3, wide, 2)
    numbers = (asked + queries * (1 + half)) * wide + logs
    made = tiles(layer, 4, wide)
    if setting.context == "gather":
        moments = [n * grads + made + (1 + n) * block, (2 * n + 1) * grads + (1 + n) * block]
    else:
        moments = [2 * block + grads + made, block + 2 * grads + made, block + 4 * grads]
        moments += [(2 if n > 3 else 1) * block + 4 * grads + made] * (n > 2)
    ends = grads + (block + asked * word) * half
    backward = beside + queries * word + numbers + max(*moments, ends)
    kept = (*saved, ("mixed values [B,T,A]", queries * word), ("log-sums of attention", logs))
    return [Row("attend", kept, (), forward + copy, backward)]


def tiles(layer: CutAttention, scores: int, wide: int, sums: int = 0) -> int:
    """Bytes at the highest moment of one tile: so many times its scores, and the sums of its weights; the mask twice,
    and wide copies of keys and values."""
    side = min(TILE, -(-layer.seq // (2 * layer.n)))  # a rank has two chunks of 2n, which come one by one
    keys = layer.key_heads * layer.pair * (layer.word < wide)
    return layer.rows * side * (layer.heads * (scores * side + sums) + keys) * wide + 2 * side * side
