"""The layers of labkit's GPT (labkit.train.gpt) as tables: what autograd holds of each, row by row.

    embedding   token, position                                                       -> x [B,T,D]
    block       norm1, query, key, value, [turn], attend, out, norm2, up, gelu, down  -> x   (8 D + 2 F) B T are saved
    head        norm, logits                                                          -> logits [B,T,V]
    loss        log-probabilities [B,T,V]                                             -> one number

Each row can be checked by hand: A, K, F and V are a rank's share, R the bytes of the residual path (layer_rows.py).
Attention is a fused kernel, as torch runs it: it saves q, k, v, its result and one number a row, and never the T x T
scores (Dao et al., arXiv:2205.14135, section 3.1). Where all blocks look at a window, it does so piece by piece.

Models that labkit's GPT does not have (gated MLP, fewer key heads, RMSNorm, latent attention, norms of queries and
keys or of what a branch adds) are the plain torch program for them. Norms stand before the products, also for models
that have them behind (OLMo 2), and attention before the MLP, also where both read the same (GPT-NeoX, Phi): what is
saved differs by a few per cent of a block at most.

With experts, routing is taken as balanced (labkit.plan.model.mixture).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType

from labkit.plan.breakdown import Breakdown, Item
from labkit.plan.model import context_memory
from labkit.plan.model.cut_attention import window_of, window_piece
from labkit.plan.model.layer_rows import (
    COPIES,
    Terms,
    entering,
    hidden_rows,
    last_of_branch,
    norm,
    product,
    read,
    second_entering,
    within,
)
from labkit.plan.model.layer_table import LayerTable, Row, Tensors
from labkit.plan.model.mixture import mixture
from labkit.plan.model.setting import HEAD, Setting
from labkit.plan.model.sizes import Sizes


@lru_cache(maxsize=4096)
def layer(shape: Sizes, kind: str, setting: Setting) -> LayerTable:
    """The table of one layer: "embedding", "block", "dense" (a block with an MLP where others have experts), "head" or
    "loss". Equal questions are answered from a cache."""
    if kind in ("embedding", "head", "loss"):
        t = Terms(shape, replace(setting, recompute="none"))  # only blocks run again
        rows, words = ENDS[kind](t), t.tokens * (shape.vocab // setting.tp)
        result = {"embedding": t.residual, "head": words * t.narrow, "loss": t.exact}[kind]
        return LayerTable(kind, tuple(rows), result)
    t = Terms(shape, setting)
    first = attention(t) if shape.kv_lora is None else latent_attention(t)
    rows = [*first, *(mixture(t) if kind == "block" and shape.n_expert else mlp(t))]
    saved = sum(n_bytes for row in rows for name, n_bytes in row.saves if name == COPIES)
    copies = sum(row.numel for row in rows if COPIES in dict(row.saves)) * t.narrow
    if setting.recompute != "full":
        return LayerTable(kind, tuple(rows), t.residual, copies - saved)  # those of biases, which nothing saves
    return LayerTable(kind, tuple(rows), t.residual, copies, rows[0].saves[:1], unsaved(t, rows, len(first)))


def held(shape: Sizes, setting: Setting) -> Breakdown:
    """Bytes that autograd holds of one block, item by item; items of equal names are added up."""
    totals: dict[str, int] = {}
    for name, n_bytes in layer(shape, "block", setting).tensors:
        totals[name] = totals.get(name, 0) + n_bytes
    b, t = setting.rows, setting.seq
    return Breakdown(
        Item(name, n_bytes, "B", f"{n_bytes / (b * t):,.6g} bytes x B T = {b} x {t}", "labkit.plan.model.layers")
        for name, n_bytes in totals.items()
    )


def unsaved(t: Terms, rows: list[Row], half: int) -> int:
    """The highest moment of a block's forward that saves nothing but its input: what one half of it works with."""
    works = [row.forward + sum(n_bytes for name, n_bytes in row.saves if name != COPIES) for row in rows]
    return t.residual + t.whole + max(*works[1:half], t.residual + max(works[half + 1 :]))


# -- attention ---------------------------------------------------------------------------------------------------------


def attention(t: Terms) -> list[Row]:
    """norm1 to out, over this rank's heads."""
    shape, tp, r, d = t.shape, t.setting.tp, t.residual, t.shape.d_model
    heads, keys = shape.n_head // tp, max(1, shape.kv_heads // tp)
    a, k = heads * shape.width, keys * shape.width
    q_bytes, k_bytes = t.tokens * a * t.narrow, t.tokens * k * t.narrow
    x, repeated = read(t, "norm1")
    rows = [
        entering(t, "norm1", "x, input of the block"),
        product(t, "query", x, d, a, beside=r + t.whole, repeated=repeated),
        product(t, "key", t.another(x), d, k, beside=r + q_bytes + t.whole, repeated=repeated, forward=q_bytes),
        product(
            t, "value", t.another(x), d, k, beside=r + q_bytes + k_bytes, repeated=repeated, forward=q_bytes + k_bytes
        ),
    ]
    names = ["query", "key", "value"]
    if shape.qk_norm:
        alive = r + q_bytes + 2 * k_bytes
        rows += [within(t, "query_norm", "query", heads, alive), within(t, "key_norm", "key", keys, alive)]
        names[:2] = "query, normed", "key, normed"
    if shape.position == "rotary":
        alive = q_bytes + 2 * k_bytes
        rows += [turn(t, "query", a, r + 2 * k_bytes, alive), turn(t, "key", k, r + q_bytes + k_bytes, alive)]
        names[:2] = f"query, turned [B,T,{a}]", f"key, turned [B,T,{k}]"
    return rows + attended(t, tuple(zip(names, (q_bytes, k_bytes, k_bytes), strict=True)), heads, keys)


def latent_attention(t: Terms) -> list[Row]:
    """norm1 to out with queries, and keys and values, each made of one latent vector a token."""
    shape, n, h, r, d = t.shape, t.tokens, t.narrow, t.residual, t.shape.d_model
    q_lora, kv_lora, heads, rope = shape.q_lora or 0, shape.kv_lora or 0, shape.n_head, shape.rope_width
    wide, narrow = heads * (shape.width + rope), heads * shape.width
    q, v, c_q, c_kv = n * wide * h, n * narrow * h, n * q_lora * h, n * kv_lora * h
    x, repeated = read(t, "norm1")
    x_query: Tensors = () if t.selective else (("query_norm [B,T,D]", c_q),)
    x_key: Tensors = () if t.selective else (("latent_norm [B,T,D]", c_kv),)
    queries = [
        product(t, "query_in", x, d, q_lora, beside=r + t.whole, repeated=repeated),
        norm(t, "query_norm", "query_in", r + t.whole + 2 * c_q, r + t.whole, q_lora),
        product(t, "query", x_query, q_lora, wide, beside=r + t.whole),
    ]
    if shape.q_lora is None:
        queries = [product(t, "query", x, d, wide, beside=r + t.whole, repeated=repeated)]
    rows = [
        entering(t, "norm1", "x, input of the block"),
        *queries,
        product(t, "latent", t.another(x), d, kv_lora + rope, beside=r + q, repeated=repeated, forward=q),
        norm(t, "latent_norm", "latent of keys and values", r + q + 2 * c_kv, r + q, kv_lora),
        product(t, "key_value", x_key, kv_lora, 2 * narrow, beside=r + q, forward=q),
    ]
    return rows + attended(t, (("query, turned", q), ("key", q), ("value", v)), heads, heads)


def turn(t: Terms, name: str, width: int, beside: int, alive: int) -> Row:
    """Rotary positions, in fp32 at least: saves cosines and sines, a number each for half of a head's width."""
    table = t.setting.seq * t.shape.width // 2 * t.exact
    n_bytes, half = t.tokens * width * t.narrow, t.tokens * width // 2 * t.exact
    saves = (("cosines and sines", table),) * 2
    return Row(f"turn {name}", saves, (), alive + max(4 * half, 2 * half + n_bytes), beside + 3 * half + 2 * n_bytes)


def attended(t: Terms, saved: Tensors, heads: int, keys: int) -> list[Row]:
    """Attention with these queries, keys and values, and the product "out", which needs its result token by token.

    Where it lies head by head, "out" saves a copy; a plain attention does not save its result, so that "out" does."""
    shape, setting = t.shape, t.setting
    across, fused, inside = setting.cp > 1, shape.fused_attention, heads * shape.width
    window = 0 if across or not fused else window_of(shape)
    in_pieces = 0 < window < setting.seq and window_piece(setting.seq, window) < setting.seq
    by_head = (shape.position == "rotary" and (fused or across)) or (across and setting.context == "ulysses")
    by_head = by_head or in_pieces  # put together head by head
    y = t.tokens * inside * t.narrow
    x: Tensors = (("mixed values, in rows" if by_head else "mixed values [B,T,A]", y),)
    if across:
        rows = [context_memory.attend(t, saved, heads, keys)]
    else:
        rows = fused_attention(t, saved, heads, y) if fused else plain_attention(t, saved, heads, y)
        if 0 < window < setting.seq:
            rows = windowed_attention(t, saved, heads, y)
    if shape.sinks:
        rows[-1] = rows[-1]._replace(weights=(("sinks", heads),), fresh=heads * t.wide)
    return rows + last_of_branch(t, "out", () if not by_head and (fused or across) else x, inside)


def fused_attention(t: Terms, saved: Tensors, heads: int, y: int) -> list[Row]:
    """Saves query, key, value, its result and a number a query and head."""
    kept = (*saved, ("mixed values [B,T,A]", y), ("log-sums of attention", t.tokens * heads * t.exact))
    gradients = sum(n_bytes for _, n_bytes in saved)
    return [Row("attend", kept, (), y * (t.shape.position == "rotary"), t.residual + y + gradients)]


def windowed_attention(t: Terms, saved: Tensors, heads: int, y: int) -> list[Row]:
    """The same of queries that go in pieces through a window: a mask besides, and what comes of the pieces twice, in
    pieces and in one."""
    window, seq = window_of(t.shape), t.setting.seq
    piece = window_piece(seq, window)
    mask, pieces = piece * (piece + window - 1), piece < seq
    kept = (
        *saved, ("mixed values of pieces", y), ("log-sums of attention", t.tokens * heads * t.exact),
        ("mask of a window", mask * t.narrow),
    )  # fmt: skip
    gradients, new = sum(n_bytes for _, n_bytes in saved), sum(n_bytes for _, n_bytes in kept[-3:])
    forward = max(mask * (t.narrow + 1) - new, y * (pieces or t.shape.position == "rotary"))
    if pieces:  # those of one piece, and a whole one with zeros around them
        (_, query), *others = saved
        share = min(seq, piece + window - 1) / seq
        gradients += int(query * piece / seq + share * sum(n_bytes for _, n_bytes in others)) + query
    return [Row("attend", kept, (), forward, t.residual + y + gradients)]


def plain_attention(t: Terms, saved: Tensors, heads: int, y: int) -> list[Row]:
    """Saves query, key, value and T x T shares."""
    (_, q), (_, k), (_, v) = saved
    r, table = t.residual, t.tokens * t.setting.seq * heads * t.narrow
    return [
        Row("scores", saved[:2], (), v + table, r + v + table + q + k),
        Row("shares", (("probabilities [B,h,T,T]", table),), (), v + table, r + v + 2 * table),
        Row("mix", saved[2:], (), y, r + y + table + v),
    ]


# -- the other half of a block, and the ends of a model ----------------------------------------------------------------


def mlp(t: Terms) -> list[Row]:
    """norm2 to down, through this rank's hidden units."""
    hidden, (x, repeated) = t.shape.hidden // t.setting.tp, read(t, "norm2")
    rows, made, last = hidden_rows(t, "", x, t.another(x), hidden, t.residual, repeated=repeated)
    return [second_entering(t), *rows, *last_of_branch(t, "down", made, hidden, last)]


def embedding(t: Terms) -> list[Row]:
    """[B, T] -> [B, T, D]; a gradient for all rows of a table."""
    shape, tp, n, r, whole = t.shape, t.setting.tp, t.tokens, t.residual, t.whole
    table = shape.vocab // tp * shape.d_model
    size = table * t.wide
    saves: Tensors = (("ids of this rank's rows", 8 * n), ("which ids are this rank's", n)) if tp > 1 else ()
    arrives, after = (max(r + t.gathering * whole, 2 * whole), whole) if tp > 1 else (r, r)
    rows = [Row("token", saves, (("token", table),), r + whole, max(arrives, after + size), after, size)]
    if shape.position == "learned":
        size, part = shape.places * shape.d_model * t.wide, r // t.setting.rows * (t.setting.rows > 1)
        weights, positions = (("position", shape.places * shape.d_model),), (("positions", 8 * t.setting.seq),)
        rows.append(Row("position", positions, weights, 2 * r, r + part + size, r, size))
    return rows


def head(t: Terms) -> list[Row]:
    """[B, T, D] -> [B, T, V]"""
    d, words, (x, _) = t.shape.d_model, t.shape.vocab // t.setting.tp, read(t, "norm")
    return [entering(t, "norm", "x, input of the head"), product(t, HEAD, x, d, words, beside=0)]


def loss_rows(t: Terms) -> list[Row]:
    """Cross-entropy in fp32 at least; over tp ranks each has the exponentials of its words."""
    numel = t.tokens * (t.shape.vocab // t.setting.tp)
    logits, wide = numel * t.narrow, numel * t.exact
    cast = logits != wide
    if t.setting.tp == 1:
        return [Row("loss", (("log-probabilities", wide),), (), logits + wide * cast, 2 * wide)]
    numbers = t.tokens * (2 * t.exact + 8 + 1 + 1)  # two sums, the target's place, whether it is here and counts
    saves = (("exponentials of logits", wide), ("numbers of the loss", numbers))
    # forward: the largest and the target's logit, and both sums before they travel
    return [Row("loss", saves, (), logits + 4 * t.tokens * t.exact, t.tokens * t.exact + wide + logits * cast)]


ENDS = MappingProxyType({"embedding": embedding, "head": head, "loss": loss_rows})
