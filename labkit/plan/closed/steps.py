"""The rows that layers share: a product, a norm, what products read of it, the end of a branch, a hidden layer.

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
from functools import cached_property

from labkit.plan.closed import low_bits
from labkit.plan.closed.rows import Row, Tensors
from labkit.plan.model.ops import HEAD, Setting
from labkit.plan.model.sizes import Sizes


@dataclass(frozen=True)
class Terms:
    """The numbers that rows are made of. `wide`: bytes of a weight and of the residual path; `narrow`: of products;
    `exact`: of sums that want fp32."""

    shape: Sizes
    setting: Setting

    @cached_property
    def wide(self) -> int:
        """Bytes of a weight, and of a number on the residual path."""
        return {"fp64": 8, "half": 2}.get(self.setting.way, 4)

    @cached_property
    def narrow(self) -> int:
        """Bytes of a number that products read and make."""
        return 2 if self.autocast else self.wide

    @property
    def exact(self) -> int:
        """Bytes of a number in sums that want fp32."""
        return max(4, self.wide)

    @property
    def autocast(self) -> bool:
        """True if products cast what they read."""
        return self.setting.way == "autocast"

    @cached_property
    def tokens(self) -> int:
        """Tokens inside of parallel regions."""
        return self.setting.rows * self.setting.seq

    @property
    def cut(self) -> int:
        """Ranks over which the residual path is cut."""
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
        """True if backward makes norms and activations again."""
        return self.setting.recompute == "selective"

    def halves(self, weights: Tensors) -> Tensors:
        """Autocast's copy of a product's matrix, which the product saves."""
        return (("half copies of weights", weights[0][1] * self.narrow),) if self.autocast else ()


def product(
    t: Terms, name: str, x: Tensors, inside: int, out: int, *, beside: int, forward: int = 0,
    arrives: int | None = None, again: int = 0, bias: bool | None = None, rows: int | None = None, experts: int = 1,
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


def hidden_rows(
    t: Terms, prefix: str, first: Tensors, later: Tensors, d: int, hidden: int, beside: int, *, rows: int | None = None,
    experts: int = 1, again: int = 0, ends: bool = True,
) -> list[Row]:  # fmt: skip
    """up, gelu, down; or gate, silu, up, gate x up, down. `ends`: down is the end of the block's branch."""
    n = t.tokens if rows is None else rows
    f = n * hidden * t.narrow
    gx = n * d * t.narrow
    if t.shape.gated:
        made = [
            product(t, f"{prefix}gate", first, d, hidden, beside=beside + gx, rows=rows, experts=experts, again=again),
            Row("silu", ((f"{prefix}gate", f),), (), f, beside + gx + 2 * f),
            product(
                t,
                f"{prefix}up",
                later,
                d,
                hidden,
                beside=beside + f,
                forward=f,
                rows=rows,
                experts=experts,
                again=again,
            ),
            Row("gate x up", ((f"{prefix}up", f),), (), f, beside + 3 * f + f * t.selective),
        ]
        if not t.selective:
            made[-1] = made[-1]._replace(saves=(("silu of gate", f), *made[-1].saves))
        name = "gate x up"
    else:
        made = [
            product(t, f"{prefix}up", first, d, hidden, beside=beside, rows=rows, experts=experts, again=again),
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
