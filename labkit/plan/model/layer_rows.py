"""The rows that layers share: a product, a norm, what products read of it, the end of a branch, a hidden layer.

Under tensor parallelism (labkit.parallel.tensor, .sequence) A, K, F and V are a rank's share. Sequence parallelism cuts
the residual path, R bytes, and gathers what products read, `whole`. Widths of numbers: labkit.plan.model.setting.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

from labkit.plan.model.layer_table import Row, Tensors
from labkit.plan.model.low_precision_products import needs
from labkit.plan.model.setting import HEAD, Setting
from labkit.plan.model.sizes import Sizes

COPIES = "half copies of weights"
"""The name of what autocast makes of the matrix of each product, which the product saves."""


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
        return max(4, self.narrow)

    @property
    def autocast(self) -> bool:
        """True if products cast what they read."""
        return self.setting.way == "autocast"

    @property
    def selective(self) -> bool:
        """True if backward makes norms and activations again."""
        return self.setting.recompute == "selective"

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
    def whole(self) -> int:
        """Bytes of all tokens' vectors, in the residual path's width."""
        return self.tokens * self.shape.d_model * self.wide

    @cached_property
    def residual(self) -> int:
        """R: bytes of the residual path."""
        return self.whole // self.cut

    @cached_property
    def products(self) -> int:
        """Bytes of all tokens' vectors as products read and make them."""
        return self.tokens * self.shape.d_model * self.narrow

    def another(self, x: Tensors) -> Tensors:
        """What one more product saves of an x that the first one saves: under autocast a half copy of its own."""
        return x if self.autocast else ()


def product(
    t: Terms, name: str, x: Tensors, inside: int, out: int, *, beside: int, forward: int = 0,
    arrives: int | None = None, repeated: int = 0, bias: bool | None = None, rows: int | None = None, experts: int = 1,
) -> Row:  # fmt: skip
    """x W^T + b: [rows, inside] -> [rows, out]. `x`: what it saves of x, () where an earlier row has saved it.

    beside    gradients that are alive around its backward; `arrives`: bytes of its result's, if they are not among them
    repeated  what backward makes again for it"""
    rows, h = t.tokens if rows is None else rows, t.narrow
    has_bias = t.shape.has_bias(name) if bias is None else bias
    weights = ((name, experts * inside * out), (f"{name}.bias", experts * out))[: 1 + has_bias]
    numel = sum(size for _, size in weights)
    arrives = rows * out * h if arrives is None else arrives
    y, gx, fresh, narrow = rows * out * h, rows * inside * h, numel * t.wide, numel * h * t.autocast
    gradients = gx + (narrow or fresh)
    copies: Tensors = ((COPIES, weights[0][1] * h),) if t.autocast else ()
    if t.setting.units and name != HEAD:
        per_expert, need = rows // experts, partial(needs, t.setting.units, width=h, experts=experts)
        y = need((per_expert, inside, out))
        of_weights = need((out, per_expert, inside), drawn=True, turned=True) + fresh - weights[0][1] * h
        gradients = max(need((per_expert, out, inside), drawn=True), gx + of_weights)
    backward = beside + repeated + arrives + gradients
    return Row(name, (*x, *copies), weights, forward + y, backward, beside + repeated + gx + narrow, fresh)


def norm(t: Terms, name: str, x: str, backward: int, after: int, width: int | None = None) -> Row:
    """Saves x, and two numbers a row (one for RMSNorm); in sequence its weights go through f as one tensor.

    `width` of a row if it is not d_model: a norm between two products, in their numbers."""
    d, count = width or t.shape.d_model, t.shape.norm_size // t.shape.d_model
    numel, word = (t.tokens // t.cut * d, t.wide) if width is None else (t.tokens * d, t.narrow)
    saves = ((x, numel * word), *[("numbers of the norms", numel // d * word)] * (1 + (t.shape.norm != "rms")))
    if t.cut > 1 and count > 1:
        saves += (("weights of the norms, through f", count * d * t.wide),)
    weights, fresh = tuple((f"{name}.{k}", d) for k in range(count)), count * d * t.wide
    gathers = t.whole * t.gathering if width is None else 0
    return Row(name, saves, weights, numel * word + gathers, backward + fresh, after, fresh)


def entering(t: Terms, name: str, x: str) -> Row:
    """The norm that a parallel region is entered from. Its backward has the sum over ranks beside its terms, then the
    norm's own gradient beside that of the residual path."""
    gradients = max(2 * t.whole * (t.setting.tp > 1), 2 * t.residual)
    if name == "norm":  # the last one: nothing goes round it
        return norm(t, name, x, gradients, t.residual)
    return norm(t, name, x, t.residual + gradients, 2 * t.residual)


def second_entering(t: Terms) -> Row:
    """The norm before the second half of a block; without weights where that reads what the first half has read."""
    row = entering(t, "norm2", "x + attention [B,T,D]")
    if t.shape.norms > 1:
        return row
    return row._replace(saves=(), weights=(), backward=row.backward - row.fresh, fresh=0)


def within(t: Terms, name: str, x: str, heads: int, alive: int) -> Row:
    """A norm of so many heads' queries or keys, between two products: one scale for a head's dims, or for all."""
    width, n_bytes = t.shape.width, t.tokens * heads * t.shape.width * t.narrow
    weights = width * (heads if t.shape.qk_norm == "all" else 1)
    numbers = t.tokens * (1 if t.shape.qk_norm == "all" else heads) * t.exact
    saves, fresh = ((x, n_bytes), ("numbers of the norms", numbers)), weights * t.wide
    return Row(name, saves, ((name, weights),), alive + n_bytes, alive + 2 * n_bytes + fresh, alive, fresh)


def after_branch(t: Terms, name: str) -> list[Row]:
    """The norm of what a branch adds, in blocks that have one there."""
    if t.shape.norms < 4:
        return []
    row = norm(t, f"{name}.norm", f"{name} [B,T,D]", 3 * t.residual, 2 * t.residual)
    return [row._replace(forward=2 * t.residual)]


def read(t: Terms, name: str) -> tuple[Tensors, int]:
    """Of what a norm hands to products: what the first of them saves, and bytes that backward makes again."""
    normed = f"{name} [B,T,D]"
    seen = f"{normed}, whole" if t.cut > 1 else normed
    if t.autocast:
        return ((seen, t.products),), 0
    if t.selective:
        return (), t.whole + t.residual * (t.cut > 1)
    if t.cut > 1 and t.setting.recompute == "gathers":
        return ((normed, t.residual),), t.whole
    return ((seen, t.whole),), 0


def last_of_branch(t: Terms, name: str, x: Tensors, inside: int, repeated: int = 0) -> list[Row]:
    """The product that ends a branch, and its bias, which tp adds after the sum.

    Its result's gradient is that of the residual path, or a narrower copy of it, or what sequence parallelism has
    gathered of it in the moment before."""
    r, d, tp, own_bias = t.residual, t.shape.d_model, t.setting.tp, t.shape.has_bias(name)
    copy = t.products // t.cut * t.autocast
    arrives, gathered = (t.products, r + copy + t.gathering * t.products) if t.cut > 1 else (copy, 0)
    row = product(
        t, name, x, inside, d, beside=r, arrives=arrives, repeated=repeated, bias=own_bias and tp == 1, forward=r
    )
    row = row._replace(backward=max(row.backward, gathered))
    size = d * t.wide
    later = Row(f"{name}.bias", (), ((f"{name}.bias", d),), r, r + size, r, size)
    return [row, *[later] * (own_bias and tp > 1), *after_branch(t, name)]


def hidden_rows(
    t: Terms, prefix: str, x: Tensors, others: Tensors, hidden: int, beside: int, *, rows: int | None = None,
    experts: int = 1, repeated: int = 0,
) -> tuple[list[Row], Tensors, int]:  # fmt: skip
    """up, gelu; or gate, silu, up, gate x up; then what the product "down" saves, and what backward makes again for it.

    `x`: what the first product saves of what all read, `others` what each other saves."""
    n, d = t.tokens if rows is None else rows, t.shape.d_model
    f, gx = n * hidden * t.narrow, n * d * t.narrow
    into = partial(product, t, inside=d, out=hidden, rows=rows, experts=experts, repeated=repeated)
    if not t.shape.gated:
        made = [
            into(f"{prefix}up", x, beside=beside),
            Row("gelu", ((f"{prefix}up", f),), (), f, beside + 2 * f),
        ]
        return (made, (), f) if t.selective else (made, (("gelu of up", f),), 0)
    factors: Tensors = ((f"{prefix}up", f),) if t.selective else (("silu of gate", f), (f"{prefix}up", f))
    made = [
        into(f"{prefix}gate", x, beside=beside + gx),
        Row("silu", ((f"{prefix}gate", f),), (), f, beside + gx + 2 * f),
        into(f"{prefix}up", others, beside=beside + f, forward=f),
        Row("gate x up", factors, (), f, beside + 3 * f + f * t.selective),
    ]
    return (made, (), 2 * f) if t.selective else (made, (("gate x up", f),), 0)
