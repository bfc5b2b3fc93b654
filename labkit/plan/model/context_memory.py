"""One layer's attention over the ranks of cp: what the three ways save, and their blocks of keys and values (b bytes).

              saved                                  while it runs, besides (cut_attention.py has the law of the blocks)
    ring      q, k, v, y, a number a query and head  two blocks of keys and values, four of their gradients
    gather    the same                               1 + n blocks, 2n + 1 of gradients
    ulysses   q, k, v in one piece, y, the numbers   what leaves, what comes, what is put together
    tiles     (ring and gather) scores of TILE x TILE tokens, three times forward and four times backward

Ring and gather compute queries' numbers in fp32 at least (labkit.parallel.context).
"""

from __future__ import annotations

from labkit.plan.model.cut_attention import CutAttention
from labkit.plan.model.layer_rows import Terms
from labkit.plan.model.layer_table import Row, Tensors

TILE = 1024
"""Scores are computed for at most so many queries and keys at once (labkit.parallel.blockwise_attention)."""


def attend(t: Terms, saved: Tensors, heads: int, keys: int) -> Row:
    """Attention to the tokens of all ranks of cp; `saved`: query, key and value."""
    setting, word, wide = t.setting, t.narrow, t.exact
    layer = CutAttention(
        setting.seq * setting.cp, setting.cp, heads, keys, t.shape.width, setting.rows, word, t.shape.rope_width
    )
    n, block, grads = layer.n, layer.block, layer.gradients
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
    blocks = (2 if setting.context == "ring" else 1 + n) * block + tiles(layer, 3, wide, 2)
    exact = queries * wide * half  # y, before it is rounded, and in rows
    forward = max(blocks + exact - y * half, exact, y * (t.shape.position == "rotary"))
    numbers = (asked + queries * (1 + half)) * wide + logs  # of each query: the mean of forward, gradients of y and q
    made = tiles(layer, 4, wide)
    if setting.context == "gather":
        moments = [n * grads + made + (1 + n) * block, (2 * n + 1) * grads + (1 + n) * block]
    else:
        moments = [2 * block + grads + made, block + 2 * grads + made, block + 4 * grads]
        moments += [(2 if n > 3 else 1) * block + 4 * grads + made] * (n > 2)
    ends = grads + (block + asked * word) * half  # gradients of keys, values and queries as products take them
    kept = (*saved, ("mixed values [B,T,A]", y), ("log-sums of attention", logs))
    return Row("attend", kept, (), forward, t.residual + y + numbers + max(*moments, ends))


def tiles(layer: CutAttention, scores: int, wide: int, sums: int = 0) -> int:
    """Bytes at the highest moment of one tile: so many times its scores, and the sums of its weights; the mask twice,
    and wide copies of keys and values."""
    side = min(TILE, -(-layer.seq // (2 * layer.n)))  # a rank has two chunks of 2n, which come one by one
    keys = layer.key_heads * layer.pair * (layer.word < wide)
    return layer.rows * side * (layer.heads * (scores * side + sums) + keys) * wide + 2 * side * side
