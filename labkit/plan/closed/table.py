"""The tables of the layers of labkit's GPT (labkit.train.gpt), row by row, from sizes and a setting.

    embedding   token, position                                                       -> x [B,T,D]
    block       norm1, query, key, value, [turn], attend, out, norm2, up, gelu, down  -> x   (8 D + 2 F) B T are saved
    head        norm, logits                                                          -> logits [B,T,V]
    loss        log-probabilities [B,T,V]                                             -> one number

A, K, F and V are a rank's share; R are the bytes of the residual path (steps.py).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from labkit.plan.closed import context_rows
from labkit.plan.closed.mixture_rows import mixture
from labkit.plan.closed.rows import LayerTable, Row, Tensors
from labkit.plan.closed.steps import Terms, entered, hidden_rows, last_of_branch, norm, product, read
from labkit.plan.model.ops import HEAD, Setting
from labkit.plan.model.sizes import Sizes


def attention(t: Terms) -> list[Row]:
    """norm1 to out, over this rank's heads."""
    shape, setting, h, r = t.shape, t.setting, t.narrow, t.residual
    heads, keys = shape.n_head // setting.tp, max(1, shape.kv_heads // setting.tp)
    d, a, k = shape.d_model, heads * shape.width, keys * shape.width
    q_bytes, k_bytes = t.tokens * a * h, t.tokens * k * h
    first, later, again = read(t, "norm1")
    rows = [
        norm(t, "norm1", "x, input of the block", entered(t), 2 * r),
        product(t, "query", first, d, a, beside=r + t.whole, again=again),
        product(t, "key", later, d, k, beside=r + q_bytes + t.whole, again=again, forward=q_bytes),
        product(t, "value", later, d, k, beside=r + q_bytes + k_bytes, again=again, forward=q_bytes + k_bytes),
    ]
    names = ["query", "key", "value"]
    if shape.position == "rotary":
        rows += [
            turn(t, "query", a, r + 2 * k_bytes, q_bytes + 2 * k_bytes),
            turn(t, "key", k, r + q_bytes + k_bytes, q_bytes + 2 * k_bytes),
        ]
        names = [f"query, turned [B,T,{a}]", f"key, turned [B,T,{k}]", "value"]
    saved = tuple(zip(names, (q_bytes, k_bytes, k_bytes), strict=True))
    rows += attend(t, saved, heads, keys)
    in_rows = shape.position == "rotary" and (shape.fused_attention or setting.cp > 1)
    in_rows |= setting.cp > 1 and setting.context == "ulysses"
    mixed = "mixed values, in rows" if in_rows else "mixed values [B,T,A]"
    plain = not shape.fused_attention and setting.cp == 1
    return rows + last_of_branch(t, "out", ((mixed, q_bytes),) if in_rows or plain else (), a)


def turn(t: Terms, name: str, width: int, beside: int, alive: int) -> Row:
    """Rotary positions, in fp32 at least: saves cosines and sines, a number each for half of a head's width."""
    table = t.setting.seq * t.shape.width // 2 * t.exact
    n_bytes, half = t.tokens * width * t.narrow, t.tokens * width // 2 * t.exact
    saves = (("cosines and sines", table),) * 2
    return Row(f"turn {name}", saves, (), alive + max(4 * half, 2 * half + n_bytes), beside + 3 * half + 2 * n_bytes)


def attend(t: Terms, saved: Tensors, heads: int, keys: int) -> list[Row]:
    """A fused attention saves query, key, value, its result and a number a query and head; a plain one T x T shares."""
    setting, h, r, width = t.setting, t.narrow, t.residual, t.shape.width
    q, k, v = (n_bytes for _, n_bytes in saved)
    y = t.tokens * heads * width * h
    if setting.cp > 1:
        return context_rows.attend(t.shape, setting, saved, heads, keys, h, r)
    if not t.shape.fused_attention:
        table = t.tokens * setting.seq * heads * h
        return [
            Row("scores", saved[:2], (), v + table, r + v + table + q + k),
            Row("shares", (("probabilities [B,h,T,T]", table),), (), v + table, r + v + 2 * table),
            Row("mix", saved[2:], (), y, r + y + table + v),
        ]
    kept = (*saved, ("mixed values [B,T,A]", y), ("log-sums of attention", t.tokens * heads * max(4, h)))
    return [Row("attend", kept, (), y * (t.shape.position == "rotary"), r + y + q + k + v)]


def latent_attention(t: Terms) -> list[Row]:
    """norm1 to out with queries, and keys and values, each made of one latent vector a token."""
    shape, n, h, r, d = t.shape, t.tokens, t.narrow, t.residual, t.shape.d_model
    q_lora, kv_lora, heads, rope = shape.q_lora or 0, shape.kv_lora or 0, shape.n_head, shape.rope_width
    wide, narrow = heads * (shape.width + rope), heads * shape.width
    first, later, again = read(t, "norm1")
    q, k, v = n * wide * h, n * wide * h, n * narrow * h

    def inner(name: str) -> Tensors:
        size = q_lora if name == "query_norm" else kv_lora
        return () if t.selective else ((f"{name} [B,T,D]", n * size * h),)

    rows = [
        norm(t, "norm1", "x, input of the block", entered(t), 2 * r),
        product(t, "query_in", first, d, q_lora, beside=r + t.whole, again=again),
        norm(t, "query_norm", "query_in", r + t.whole + 2 * n * q_lora * h, r + t.whole, q_lora),
        product(t, "query", inner("query_norm"), q_lora, wide, beside=r + t.whole),
        product(t, "latent", later, d, kv_lora + rope, beside=r + q, again=again, forward=q),
        norm(t, "latent_norm", "latent of keys and values", r + q + 2 * n * kv_lora * h, r + q, kv_lora),
        product(t, "key_value", inner("latent_norm"), kv_lora, 2 * narrow, beside=r + q, forward=q),
    ]
    rows += attend(t, (("query, turned", q), ("", k), ("", v)), heads, heads)
    in_rows = shape.position == "rotary" and (shape.fused_attention or t.setting.cp > 1)
    in_rows |= t.setting.cp > 1 and t.setting.context == "ulysses"
    mixed = "mixed values, in rows" if in_rows else "mixed values [B,T,A]"
    plain = not shape.fused_attention and t.setting.cp == 1
    return rows + last_of_branch(t, "out", ((mixed, v),) if in_rows or plain else (), narrow)


def mlp(t: Terms) -> list[Row]:
    """norm2 to down, through this rank's hidden units."""
    r, d, hidden = t.residual, t.shape.d_model, t.shape.hidden // t.setting.tp
    first, later, again = read(t, "norm2")
    rows = [norm(t, "norm2", "x + attention [B,T,D]", entered(t), 2 * r)]
    return rows + hidden_rows(t, "", first, later, d, hidden, r, again=again)


def embedding(t: Terms) -> list[Row]:
    """[B, T] -> [B, T, D]; a gradient for all rows of a table."""
    shape, tp, d, n, r = t.shape, t.setting.tp, t.shape.d_model, t.tokens, t.residual
    table = shape.vocab // tp * d
    whole = n * d * t.wide
    saves: Tensors = (("ids of this rank's rows", 8 * n), ("which ids are this rank's", n)) if tp > 1 else ()
    arrives = max(r + t.gathering * whole, 2 * whole) if tp > 1 else r
    size = table * t.wide
    after = whole if tp > 1 else r
    rows = [Row("token", saves, (("token", table),), r + whole, max(arrives, after + size), after, size)]
    if shape.position == "learned":
        size, part = shape.seq * d * t.wide, t.setting.seq // t.cut * d * t.wide
        part *= t.setting.rows > 1
        positions = (("positions", 8 * t.setting.seq),)
        rows.append(Row("position", positions, (("position", shape.seq * d),), 2 * r, r + part + size, r, size))
    return rows


def head(t: Terms) -> list[Row]:
    """[B, T, D] -> [B, T, V]"""
    r, d, words = t.residual, t.shape.d_model, t.shape.vocab // t.setting.tp
    first, _, _ = read(t, "norm")
    twice = max(2 * t.whole * (t.setting.tp > 1), 2 * r)
    return [
        norm(t, "norm", "x, input of the head", twice, r),
        product(t, HEAD, first, d, words, beside=0, bias=False),
    ]


def loss_rows(t: Terms) -> list[Row]:
    """Cross-entropy in fp32 at least; over tp ranks each has the exponentials of its words."""
    numel, width = t.tokens * (t.shape.vocab // t.setting.tp), max(4, t.narrow)
    logits, wide = numel * t.narrow, numel * width
    cast = logits != wide
    if t.setting.tp > 1:
        numbers = t.tokens * (2 * width + 8 + 1 + 1)
        saves = (("exponentials of logits", wide), ("numbers of the loss", numbers))
        return [Row("loss", saves, (), logits + t.tokens * 4 * width, t.tokens * width + wide + logits * cast)]
    return [Row("loss", (("log-probabilities", wide),), (), logits + wide * cast, 2 * wide)]


@lru_cache(maxsize=4096)
def layer(shape: Sizes, kind: str, setting: Setting) -> LayerTable:
    """The table of one layer: "embedding", "block", "dense" (a block with an MLP where others have experts), "head" or
    "loss"."""
    t = Terms(shape, setting)
    if kind in ("embedding", "head", "loss"):
        if setting.recompute != "none":  # only blocks run again
            t = Terms(shape, replace(setting, recompute="none"))
        rows = {"embedding": embedding, "head": head, "loss": loss_rows}[kind](t)
        words = t.tokens * (shape.vocab // setting.tp)
        result = {"embedding": t.residual, "head": words * t.narrow, "loss": max(4, t.narrow)}[kind]
        return LayerTable(kind, tuple(rows), result)
    rows = attention(t) if shape.kv_lora is None else latent_attention(t)
    if kind == "dense":  # its input has another name
        rows[0] = rows[0]._replace(saves=(("x, input of the dense", t.residual), *rows[0].saves[1:]))
    half = len(rows)
    rows += mixture(t) if kind == "block" and shape.n_expert else mlp(t)
    copies = sum(row.numel for row in rows if row.name != "router") * t.narrow * t.autocast
    copies -= sum(n for row in rows if "norm" in row.name for _, n in row.weights) * t.narrow * t.autocast
    if setting.tp > 1:
        copies -= sum(row.numel for row in rows if row.name.endswith(".bias")) * t.narrow * t.autocast
    saved_copies = sum(n for row in rows for name, n in row.saves if name == "half copies of weights")
    if setting.recompute != "full":
        return LayerTable(kind, tuple(rows), t.residual, copies - saved_copies)
    return LayerTable(kind, tuple(rows), t.residual, copies, rows[0].saves[:1], unsaved(t, rows, half))


def unsaved(t: Terms, rows: list[Row], half: int) -> int:
    """The highest moment of a block's forward that saves nothing but its input: what one half of it works with."""
    seen = [row.forward + sum(n for name, n in row.saves if "half" not in name) for row in rows]
    return t.residual + t.whole + max(*seen[1:half], t.residual + max(seen[half + 1 :]))
