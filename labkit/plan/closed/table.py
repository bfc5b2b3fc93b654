"""The tables of the layers of labkit's GPT (labkit.train.gpt), row by row, from sizes and a setting.

    embedding   token, position                                                       -> x [B,T,D]
    block       norm1, query, key, value, [turn], attend, out, norm2, up, gelu, down  -> x   (8 D + 2 F) B T are saved
    head        norm, logits                                                          -> logits [B,T,V]
    loss        log-probabilities [B,T,V]                                             -> one number

    way          weights  activations
    "fp32"       4 bytes  4 bytes
    "fp64"       8        8
    "autocast"   4        products 2, norms and the residual path 4; each product saves a half copy of x and of W
    "half"       2        2

Under tensor parallelism (labkit.parallel.tensor, .sequence) A, K, F and V are a rank's share. Sequence parallelism cuts
the residual path, R bytes, and gathers what products read, `whole`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from labkit.plan.closed import context_rows, low_bits, mixture_rows
from labkit.plan.closed.rows import Layer, Row, Tensors
from labkit.plan.ops import HEAD, Setting
from labkit.plan.sizes import Sizes


@dataclass(frozen=True)
class Terms:
    """The numbers that rows are made of. `wide`: bytes of a weight and of the residual path; `narrow`: of products;
    `exact`: of sums that want fp32."""

    shape: Sizes
    setting: Setting

    @cached_property
    def wide(self) -> int:
        return {"fp64": 8, "half": 2}.get(self.setting.way, 4)

    @cached_property
    def narrow(self) -> int:
        return 2 if self.autocast else self.wide

    @property
    def exact(self) -> int:
        return max(4, self.wide)

    @property
    def autocast(self) -> bool:
        return self.setting.way == "autocast"

    @cached_property
    def tokens(self) -> int:
        return self.setting.rows * self.setting.seq

    @property
    def cut(self) -> int:
        return self.setting.tp if self.setting.in_sequence else 1

    @property
    def gathering(self) -> int:
        """Copies of what sequence parallelism gathers, as it comes and in order."""
        return (self.cut > 1) * (1 + (self.setting.rows > 1))

    @cached_property
    def residual(self) -> int:
        """R: bytes of the residual path."""
        return self.tokens // self.cut * self.shape.d_model * self.wide

    @cached_property
    def whole(self) -> int:
        """Bytes of all tokens' vectors, in the residual path's width."""
        return self.tokens * self.shape.d_model * self.wide

    @property
    def selective(self) -> bool:
        return self.setting.recompute == "selective"

    def halves(self, weights: Tensors) -> Tensors:
        """Autocast's copy of a product's matrix, which the product saves."""
        return (("half copies of weights", weights[0][1] * self.narrow),) if self.autocast else ()


def product(
    t: Terms, name: str, x: Tensors, inside: int, out: int, *, beside: int, forward: int = 0, arrives: int | None = None,
    again: int = 0, bias: bool | None = None, rows: int | None = None, experts: int = 1,
) -> Row:  # fmt: skip
    """x W^T + b: [rows, inside] -> [rows, out]. `x`: what it saves of x, () where an earlier row has saved it.

    beside    gradients that are alive around its backward; `arrives`: bytes of its result's, if they are not among them
    again     what backward makes again for it"""
    rows, h = t.tokens if rows is None else rows, t.narrow
    has_bias = t.shape.bias if bias is None else bias
    weights = ((name, experts * inside * out), (f"{name}.bias", experts * out))[: 1 + has_bias]
    numel = sum(size for _, size in weights)
    arrives = rows * out * h if arrives is None else arrives
    gx, fresh, narrow = rows * inside * h, numel * t.wide, numel * h if t.autocast else 0
    around = beside + again + arrives
    if t.setting.units and name != HEAD:
        each, units = rows // experts, t.setting.units
        made = low_bits.needs(units, (each, inside, out), h, experts)
        first = low_bits.needs(units, (each, out, inside), h, experts, drawn=True)
        second = low_bits.needs(units, (out, each, inside), h, experts, drawn=True, turned=True)
        biases = sum(size for _, size in weights[1:]) * h
        backward = around + max(first, gx + second + biases)
        return Row(name, x, weights, forward + made, backward, beside + again + gx, fresh)
    forward += rows * out * h
    backward = around + gx + (narrow or fresh)
    return Row(name, (*x, *t.halves(weights)), weights, forward, backward, beside + again + gx + narrow, fresh)


def norm(t: Terms, name: str, x: str, backward: int, after: int, width: int | None = None) -> Row:
    """Saves x, and two numbers a row (one for RMSNorm); in sequence its weights go through f as one tensor."""
    d = width or t.shape.d_model
    count = t.shape.norm_size // t.shape.d_model
    numel = t.tokens // (t.cut if width is None else 1) * d
    word = t.wide if width is None else t.narrow
    stats = (("numbers of the norms", numel // d * word),) * (2 if t.shape.norm == "layer" else 1)
    if t.cut > 1 and count > 1:
        stats += (("weights of the norms, through f", count * d * t.wide),)
    weights = tuple((f"{name}.{k}", d) for k in range(count))
    gathers = t.whole * t.gathering if width is None else 0
    fresh = count * d * t.wide
    forward = numel * word + gathers
    return Row(name, ((x, numel * word), *stats), weights, forward, backward + fresh, after, fresh)


def read(t: Terms, name: str, keeps: bool = False) -> tuple[Tensors, Tensors, int]:
    """Of what a norm hands to products: (what the first of them saves, what each later one saves, bytes that backward
    makes again). Under autocast each saves a half copy of its own."""
    normed = f"{name} [B,T,D]"
    seen = f"{normed}, whole" if t.cut > 1 else normed
    if t.autocast:
        half = ((seen, t.tokens * t.shape.d_model * t.narrow),)
        return half, half, 0
    gathers = t.setting.recompute in ("gathers", "selective") and not keeps
    if t.cut > 1 and not gathers:
        return ((seen, t.whole),), (), 0
    if t.cut > 1:
        return () if t.selective else ((normed, t.residual),), (), t.whole + t.residual * t.selective
    return (() if t.selective else ((seen, t.whole),)), (), t.whole * t.selective


def entered(t: Terms) -> int:
    """Gradients around the norm that a parallel region was entered from: the sum over ranks beside its terms, then the
    norm's own, beside that of the residual path."""
    return t.residual + max(2 * t.whole * (t.setting.tp > 1), 2 * t.residual)


def left(t: Terms) -> tuple[int, int, int]:
    """Where a branch ends: (gradients beside its last product, those of the product's result if they are others, those
    of the moment before, in which sequence parallelism gathers them)."""
    narrow = t.tokens // t.cut * t.shape.d_model * t.narrow if t.autocast else 0
    if t.cut == 1:
        return t.residual, narrow, 0
    whole = t.tokens * t.shape.d_model * t.narrow
    return t.residual, whole, t.residual + narrow + t.gathering * whole


def last_of_branch(t: Terms, name: str, x: Tensors, inside: int, again: int = 0) -> list[Row]:
    """The product that ends a branch, and its bias, which tp adds after the sum."""
    beside, arrives, gathered = left(t)
    d, tp = t.shape.d_model, t.setting.tp
    row = product(
        t, name, x, inside, d, beside=beside, arrives=arrives, again=again, bias=t.shape.bias and tp == 1,
        forward=t.residual,
    )  # fmt: skip
    row = row._replace(backward=max(row.backward, gathered))
    if tp == 1 or not t.shape.bias:
        return [row]
    size = d * t.wide
    return [row, Row(f"{name}.bias", (), ((f"{name}.bias", d),), t.residual, beside + size, beside, size)]


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
    shape, r, d, hidden = t.shape, t.residual, t.shape.d_model, t.shape.hidden // t.setting.tp
    first, later, again = read(t, "norm2")
    rows = [norm(t, "norm2", "x + attention [B,T,D]", entered(t), 2 * r)]
    return rows + hidden_rows(t, "", first, later, d, hidden, r, again=again)


def hidden_rows(
    t: Terms, prefix: str, first: Tensors, later: Tensors, d: int, hidden: int, beside: int, *, rows: int | None = None,
    experts: int = 1, again: int = 0, ends: bool = True,
) -> list[Row]:  # fmt: skip
    """up, gelu, down; or gate, silu, up, gate x up, down. `ends`: down is the end of the block's branch."""
    n = t.tokens if rows is None else rows
    f = n * hidden * t.narrow
    gx = n * d * t.narrow
    how = {"rows": rows, "experts": experts, "again": again}
    if t.shape.gated:
        made = [
            product(t, f"{prefix}gate", first, d, hidden, beside=beside + gx, **how),
            Row("silu", ((f"{prefix}gate", f),), (), f, beside + gx + 2 * f),
            product(t, f"{prefix}up", later, d, hidden, beside=beside + f, forward=f, **how),
            Row("gate x up", ((f"{prefix}up", f),), (), f, beside + 3 * f + f * t.selective),
        ]
        if not t.selective:
            made[-1] = made[-1]._replace(saves=(("silu of gate", f), *made[-1].saves))
        name = "gate x up"
    else:
        made = [
            product(t, f"{prefix}up", first, d, hidden, beside=beside, **how),
            Row("gelu", ((f"{prefix}up", f),), (), f, beside + 2 * f),
        ]
        name = "gelu of up"
    saved, remade = (((name, f),), 0) if not t.selective else ((), 2 * f if t.shape.gated else f)
    if ends:
        return made + last_of_branch(t, f"{prefix}down", saved, hidden, remade)
    last = product(
        t, f"{prefix}down", saved, hidden, d, beside=beside, arrives=gx, again=remade, rows=rows, experts=experts
    )
    return [*made, last]


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
    shape, r, d, words = t.shape, t.residual, t.shape.d_model, t.shape.vocab // t.setting.tp
    first, _, _ = read(t, "norm")
    twice = max(2 * t.whole * (t.setting.tp > 1), 2 * r)
    return [
        norm(t, "norm", "x, input of the head", twice, r),
        product(t, HEAD, first, d, words, beside=0, bias=False),
    ]


def loss(t: Terms) -> list[Row]:
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
def layer(shape: Sizes, kind: str, setting: Setting) -> Layer:
    """The table of one layer: "embedding", "block", "dense" (a block with an MLP where others have experts), "head" or
    "loss"."""
    t = Terms(shape, setting)
    if kind in ("embedding", "head", "loss"):
        if setting.recompute != "none":  # only blocks run again
            t = Terms(shape, Setting(**{**setting.__dict__, "recompute": "none"}))
        rows = {"embedding": embedding, "head": head, "loss": loss}[kind](t)
        words = t.tokens * (shape.vocab // setting.tp)
        result = {"embedding": t.residual, "head": words * t.narrow, "loss": max(4, t.narrow)}[kind]
        return Layer(kind, tuple(rows), result)
    rows = attention(t) if shape.kv_lora is None else latent_attention(t)
    if kind == "dense":  # its input has another name
        rows[0] = rows[0]._replace(saves=(("x, input of the dense", t.residual), *rows[0].saves[1:]))
    half = len(rows)
    rows += mixture_rows.mixture(t) if kind == "block" and shape.n_expert else mlp(t)
    copies = sum(row.numel for row in rows if row.name != "router") * t.narrow * t.autocast
    copies -= sum(n for row in rows if "norm" in row.name for _, n in row.weights) * t.narrow * t.autocast
    if setting.tp > 1:
        copies -= sum(row.numel for row in rows if row.name.endswith(".bias")) * t.narrow * t.autocast
    saved_copies = sum(n for row in rows for name, n in row.saves if name == "half copies of weights")
    if setting.recompute != "full":
        return Layer(kind, tuple(rows), t.residual, copies - saved_copies)
    return Layer(kind, tuple(rows), t.residual, copies, rows[0].saves[:1], alone(t, rows, half))


def alone(t: Terms, rows: list[Row], half: int) -> int:
    """The highest moment of a block's forward that saves nothing but its input: what one half of it works with."""
    seen = [row.forward + sum(n for name, n in row.saves if "half" not in name) for row in rows]
    return t.residual + t.whole + max(*seen[1:half], t.residual + max(seen[half + 1 :]))
