"""The ops of a GPT on shadows (tape.py): what each makes, what its derivative holds, and what its backward makes.

    op            holds                              backward makes
    linear        x, [W's half copy]                 gx, gW, gb; in 8 bits, copies of two operands for each product
    norm          x, two numbers a row               gx, gw, gb
    pointwise     x                                  gx
    attend        q, k, v, result, a number a row    gq, gk, gv
    add           nothing                            nothing: its gradient goes to both
    loss          log-probabilities                  a gradient of their size, twice

A fused attention never holds the T x T scores (Dao et al., arXiv:2205.14135, section 3.1). Under tensor parallelism a
region is entered through f and left through g (labkit.parallel.tensor; by position: labkit.parallel.sequence).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from labkit.plan.model.context_memory import Reach
from labkit.plan.model.cut_attention import CONTEXTS, CutAttention
from labkit.plan.model.low_precision_products import Size, multiplied
from labkit.plan.model.sizes import Sizes
from labkit.plan.model.tape import ACTIVATIONS, GRADIENTS, OTHER, Node, Rerun, Run, Shadow, Storage, Tape, Weight

WAYS = ("fp32", "fp64", "autocast", "half")
RECOMPUTE = ("none", "gathers", "selective", "full")
"""What backward may run again of a block, from least to most."""
HEAD = "logits"
"""The product with the vocabulary, which is never in 8 bits."""
LINEARS = ("query", "key", "value", "out", "gate", "up", "down", "query_in", "latent", "key_value")
"""The products of a block, which may be in 8 bits or fewer. A router's never is."""


def is_linear(name: str) -> bool:
    """True for the weight of one of LINEARS, also inside an expert: "up", "shared.up", "experts.3.down"."""
    return name.rpartition(".")[2] in LINEARS


@dataclass(frozen=True)
class Setting:
    """The setting of a layer: `rows` x `seq` tokens, `tp` ranks (`in_sequence`: also cut by position), its `way`, and
    what backward runs again, `recompute`: "none", "gathers", "selective" or "full". `ep`: ranks to which experts are
    dealt out, of which this one is number `ep_rank`. `cp`: ranks over which rows are cut, each with `seq` tokens of
    them, whose attention reaches the others' by `context` (labkit.plan.model.context_memory).

    With `units` the linears of a block multiply copies of 8 bits or fewer, which a way in half precision can: units of
    a "tensor", "delayed" (labkit.train.fp8), "tiles", "mx" or "nvfp4" (labkit.train.blocks).

    ValueError for an unknown way or recompute, 8 bits in another way, and sizes below 1."""

    rows: int
    seq: int
    tp: int = 1
    in_sequence: bool = False
    way: str = "fp32"
    recompute: str = "none"
    units: str = ""
    ep: int = 1
    ep_rank: int = 0
    cp: int = 1
    context: str = "ring"

    def __post_init__(self) -> None:
        if self.way not in WAYS:
            raise ValueError(f"a layer is run in one of {', '.join(WAYS)}, got {self.way!r}")
        if self.recompute not in RECOMPUTE:
            raise ValueError(f"recompute must be one of {', '.join(RECOMPUTE)}, got {self.recompute!r}")
        if self.units and self.way != "half":
            raise ValueError(f"8-bit copies are made of half precision, way='half', got {self.way!r}")
        if self.context not in CONTEXTS:
            raise ValueError(f"attention over ranks is one of {', '.join(CONTEXTS)}, got {self.context!r}")
        for name in ("rows", "seq", "tp", "ep", "cp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


class Ops:
    """The ops of one layer, run in one setting and noted on one tape."""

    def __init__(self, shape: Sizes, setting: Setting) -> None:
        self.shape, self.setting, self.tape = shape, setting, Tape()
        self.wide = {"fp64": 8, "half": 2}.get(setting.way, 4)  # bytes of a weight, and of the residual path
        self.narrow = 2 if setting.way == "autocast" else self.wide  # of what products are computed in
        self.rows = setting.rows * setting.seq  # of tokens, inside the parallel regions
        self.cut = setting.tp if setting.in_sequence else 1
        self.cache: list[Storage] = []  # autocast's, which lives as long as the forward
        # True while ops run whose results, or what they gather, backward makes again
        self.selective = self.gathers = False

    def op(self, x: Shadow, numel: int, width: int, saved: Sequence[Storage] = (), name: str = "") -> Shadow:
        """A new tensor made of x; backward makes one like x."""
        back = x.numel * x.width
        y = self.tape.new(numel * width, name=name)
        return Shadow(y, numel, width, self.tape.node((x.node,), self.makes(back), saved))

    def makes(self, *sizes: int) -> Run:
        """A backward that makes gradients of these sizes."""
        return lambda g: [self.tape.new(size, OTHER) for size in sizes]

    def cheap(self, y: Storage, scratch: int) -> Storage:
        """y, which a selective recomputation makes again with `scratch` bytes besides, and does not keep."""
        y.rerun = Rerun(self.tape, y.n_bytes, scratch) if self.selective else None
        return y

    def view(self, x: Shadow) -> Shadow:
        """The same memory in another shape."""
        return Shadow(x.storage, x.numel, x.width, self.tape.node((x.node,), lambda g: [g], ()))

    def cast(self, x: Shadow, width: int) -> Shadow:
        """x in another width, or x itself if it has it."""
        return x if x.width == width else self.op(x, x.numel, width, (), x.storage.name)

    def half(self, weight: Weight) -> list[Storage]:
        """Autocast's copy of a weight, [] without autocast."""
        copies = [self.tape.new(weight.numel * self.narrow, name="half copies of weights")]
        self.cache += copies
        return copies

    def linear(
        self,
        x: Shadow,
        out: int,
        name: str,
        bias: bool | None = None,
        rows: int | None = None,
        experts: int = 1,
        inside: int | None = None,
    ) -> Shadow:
        """x W^T + b. Holds x, and W's half copy. `rows` of x if they are not the tokens; with several `experts` each of
        them has a W and a b of its own, for its part of the rows. `inside`: numbers in a row, if there may be none."""
        x = self.cast(x, self.narrow)
        rows = self.rows if rows is None else rows
        count = 2 if (self.shape.bias if bias is None else bias) else 1
        width = x.numel // rows if inside is None else inside
        weights = [Weight(name, experts * width * out), Weight(f"{name}.bias", experts * out)][:count]
        copies = [self.half(weight) for weight in weights] if self.narrow < self.wide else [[]]
        # autocast copies b first and W then, so that W's gradient is the first to arrive
        givers = [self.giver(weight) for weight in reversed(weights)][::-1]
        x = self.view(x)
        back, sizes = x.numel * x.width, [weight.numel * self.narrow for weight in weights]
        kind = GRADIENTS if self.narrow == self.wide else OTHER
        if self.setting.units and name != HEAD:
            return self.linear_in_8_bits(x, weights, (rows, width, out), name, experts)
        node = self.tape.node(
            (x.node, *givers),
            lambda g: [self.tape.new(back, OTHER), *(self.tape.new(size, kind) for size in sizes)],
            (x.storage, *copies[0]),
        )
        return Shadow(self.tape.new(rows * out * self.narrow, name=name), rows * out, self.narrow, node)

    def linear_in_8_bits(self, x: Shadow, weights: Sequence[Weight], size: Size, name: str, experts: int = 1) -> Shadow:
        """x W^T + b of 8-bit copies, which live as long as the product runs, one expert's after the other's. Holds x.
        `size`: rows of x, numbers in a row of it, and in one of the result."""
        rows, inside, out = size
        per_expert, width = rows // experts, x.width
        others = experts - 1  # whose results are there, and no copies

        def product(n_bytes: int, m: int, k: int, n: int, kind: int, name: str = "", **how: bool) -> Storage:
            before = self.tape.new(n_bytes * others // experts, kind)
            one = multiplied(self.tape, self.setting.units, (m, k, n), width, kind, name, **how)
            if not others:
                return one
            del before, one
            return self.tape.new(n_bytes, kind, name)

        def run(g: Storage) -> list[Storage]:
            grads = [product(x_bytes, per_expert, out, inside, OTHER, drawn=True)]
            grads.append(product(weights[0].numel * width, out, per_expert, inside, GRADIENTS, drawn=True, turned=True))
            return [*grads, *(self.tape.new(bias.numel * width, GRADIENTS) for bias in weights[1:])]

        x_bytes = x.numel * width
        y = product(rows * out * width, per_expert, inside, out, ACTIVATIONS, name)
        return Shadow(y, rows * out, width, self.tape.node((x.node, *weights), run, (x.storage,)))

    def giver(self, weight: Weight) -> Node | Weight:
        """The node or weight that takes a product's gradient: the weight, or autocast's copy, which widens it."""
        if self.narrow == self.wide:
            return weight
        return self.tape.node((weight,), lambda g: [self.tape.new(weight.numel * self.wide, GRADIENTS)], ())

    def row(self, x: Shadow, name: str) -> Shadow:
        """A linear whose terms are summed over tp, with the bias added after the sum."""
        if self.setting.tp == 1:
            return self.linear(x, self.shape.d_model, name)
        y = self.leave(self.linear(x, self.shape.d_model, name, False))
        if not self.shape.bias:
            return y
        bias, back = Weight(f"{name}.bias", self.shape.d_model), y.numel * y.width

        def run(g: Storage) -> list[Storage]:
            theirs = g if back == g.n_bytes else self.tape.new(back, OTHER)  # autocast's sum is narrower than the bias
            return [theirs, self.tape.new(bias.numel * self.wide, GRADIENTS)]

        node = self.tape.node((y.node, bias), run, ())
        return Shadow(self.tape.new(y.numel * self.wide), y.numel, self.wide, node)

    def enter(self, x: Shadow, keeps: bool = False) -> Shadow:
        """f: the identity forward, a sum over tp backward. In sequence f': all parts are gathered forward, and backward
        each rank gets its part of the sum. `keeps`: what was gathered is kept, whatever a recipe runs again."""
        if self.setting.tp == 1:
            return x
        back = x.numel * x.width
        if self.cut == 1:
            node = self.tape.node((x.node,), lambda g: [self.tape.new(g.n_bytes, OTHER)], ())
            return Shadow(x.storage, x.numel, x.width, node)
        whole = f"{x.storage.name}, whole"
        parts = self.tape.new(back * self.cut, name=whole)  # rank by rank, as they come; then row by row

        def run(g: Storage) -> list[Storage]:
            self.tape.scratch(g.n_bytes)
            return [self.tape.new(back, OTHER)]

        y = self.tape.new(back * self.cut, name=whole) if self.setting.rows > 1 else parts
        if self.gathers and not keeps:
            y.rerun = Rerun(self.tape, y.n_bytes, y.n_bytes * (self.setting.rows > 1), x.storage)
        return Shadow(y, x.numel * self.cut, x.width, self.tape.node((x.node,), run, ()))

    def leave(self, x: Shadow) -> Shadow:
        """g: a sum over tp forward, the identity backward. In sequence g': each rank gets its part of the sum forward,
        and backward all parts are gathered."""
        numel, whole = x.numel // self.cut, x.numel * x.width
        if self.cut == 1:
            return Shadow(self.tape.new(whole), numel, x.width, self.tape.node((x.node,), lambda g: [g], ()))
        self.tape.scratch(whole)

        def run(g: Storage) -> list[Storage]:
            parts = self.tape.new(whole, OTHER)
            return [self.tape.new(whole, OTHER) if self.setting.rows > 1 else parts]

        return Shadow(self.tape.new(numel * x.width), numel, x.width, self.tape.node((x.node,), run, ()))

    def norm(self, x: Shadow, name: str, width: int | None = None) -> Shadow:
        """Holds x, and two numbers a row (one for RMSNorm). `width` of a row if it is not d_model."""
        d, back = width or self.shape.d_model, x.numel * x.width
        slots = 2 if self.shape.norm == "layer" else 1
        y = self.cheap(self.tape.new(back, name=f"{name} [B,T,D]"), x.numel // d * x.width * slots)
        stats = [self.tape.new(x.numel // d * x.width, name="numbers of the norms") for _ in range(slots)]
        weights = [Weight(f"{name}.{k}", d) for k in range(self.shape.norm_size // self.shape.d_model)]
        if self.cut > 1 and len(weights) > 1:  # they go through f as one tensor, which the derivative holds
            stats.append(self.tape.new(len(weights) * d * self.wide, name="weights of the norms, through f"))

        def run(g: Storage) -> list[Storage]:
            return [self.tape.new(back, OTHER), *(self.tape.new(d * self.wide, GRADIENTS) for _ in weights)]

        return Shadow(y, x.numel, x.width, self.tape.node((x.node, *weights), run, (x.storage, *stats)))

    def pointwise(self, x: Shadow, name: str) -> Shadow:
        """A function of each element. Holds x."""
        y = self.op(x, x.numel, x.width, (x.storage,), name)
        self.cheap(y.storage, 0)
        return y

    def product(self, x: Shadow, y: Shadow) -> Shadow:
        """Element by element. Holds both."""
        back = x.numel * x.width
        z = self.cheap(self.tape.new(back, name="gate x up"), back)
        node = self.tape.node((x.node, y.node), self.makes(back, back), (x.storage, y.storage))
        return Shadow(z, x.numel, x.width, node)

    def add(self, x: Shadow, y: Shadow) -> Shadow:
        """A residual sum: holds nothing, and hands its gradient to both; y's in y's width."""
        numel, width = max(x.numel, y.numel), max(x.width, y.width)

        def run(g: Storage) -> list[Storage]:
            theirs = y_bytes if y_bytes < g.n_bytes else 0
            return [g, self.tape.new(theirs, OTHER) if theirs else g]

        y_bytes = y.numel * y.width
        z = self.tape.new(numel * width, name="x + attention [B,T,D]")
        return Shadow(z, numel, width, self.tape.node((x.node, y.node), run, ()))

    def look_up(self, name: str, table: int, numel: int, ids: Sequence[Storage]) -> Shadow:
        """Rows of a table. Holds the ids."""
        weight = Weight(name, table)
        node = self.tape.node((weight,), lambda g: [self.tape.new(table * self.wide, GRADIENTS)], ids)
        return Shadow(self.tape.new(numel * self.wide), numel, self.wide, node)

    def rotate(self, x: Shadow, name: str) -> Shadow:
        """Rotary positions, in fp32 at least. Holds cosines and sines, a number each for half of a head's width."""
        exact = max(4, x.width)
        table = self.setting.seq * self.shape.width // 2 * exact
        half, back = x.numel // 2 * exact, x.numel * x.width
        saved = [self.tape.new(table, name="cosines and sines") for _ in range(2)]
        parts = [self.tape.new(half) for _ in range(2)]
        self.tape.scratch(2 * half)

        def run(g: Storage) -> list[Storage]:
            self.tape.scratch(3 * half)
            return [self.tape.new(back, OTHER)]

        y = self.tape.new(back, name=f"{name}, turned [B,T,{x.numel // self.rows}]")
        del parts
        return Shadow(y, x.numel, x.width, self.tape.node((x.node,), run, saved))

    def attend(self, query: Shadow, key: Shadow, value: Shadow, heads: int) -> Shadow:
        """A fused attention. Holds query, key, value, its result, and one number a row and head."""
        if self.setting.cp > 1:
            return self.attend_across(query, key, value, heads)
        sizes = [shadow.numel * shadow.width for shadow in (query, key, value)]
        if not self.shape.fused_attention:
            return self.attend_plainly(query, key, value, heads)
        numel = self.rows * heads * self.shape.width
        y = self.tape.new(numel * query.width, name="mixed values [B,T,A]")
        log = self.tape.new(self.rows * heads * max(4, query.width), name="log-sums of attention")
        saved = (query.storage, key.storage, value.storage, y, log)
        node = self.tape.node((query.node, key.node, value.node), self.makes(*sizes), saved)
        if self.shape.position == "rotary":  # the result lies as q does, head by head: its rows are a copy
            y = self.tape.new(numel * query.width, name="mixed values, in rows")
        return Shadow(y, numel, query.width, node)

    def attend_across(self, query: Shadow, key: Shadow, value: Shadow, heads: int) -> Shadow:
        """Attention to the tokens of all ranks of cp."""
        setting, width, rope = self.setting, self.shape.width, self.shape.rope_width
        keys, seq = key.numel // (self.rows * (width + rope)), setting.seq * setting.cp
        layer = CutAttention(seq, setting.cp, heads, keys, width, setting.rows, query.width, rope)
        y = Reach(self.tape, setting.context, layer).attend(query, key, value)
        if self.shape.position == "rotary" or setting.context == "ulysses":  # it lies head by head: its rows are a copy
            y = y._replace(storage=self.tape.new(y.numel * y.width, name="mixed values, in rows"))
        return y

    def attend_plainly(self, query: Shadow, key: Shadow, value: Shadow, heads: int) -> Shadow:
        """Scores, softmax, and the mean of values, one after the other. Holds the T x T probabilities, too."""
        n = self.rows * self.setting.seq * heads
        back, table = [shadow.numel * shadow.width for shadow in (query, key, value)], n * query.width
        scores = self.tape.new(table)
        first = self.tape.node((query.node, key.node), self.makes(*back[:2]), (query.storage, key.storage))
        shares = self.tape.new(table, name="probabilities [B,h,T,T]")
        second = self.tape.node((first,), self.makes(table), (shares,))
        del scores
        y = self.tape.new(back[0], name="mixed values [B,T,A]")
        mix = self.tape.node((second, value.node), self.makes(table, back[2]), (shares, value.storage))
        return Shadow(y, query.numel, query.width, mix)

    def loss(self, logits: Shadow) -> Shadow:
        """Cross-entropy in fp32 at least. Holds the log-probabilities, over tp ranks the exponentials."""
        width, back = max(4, logits.width), logits.numel * logits.width
        n_bytes = logits.numel * width

        def over_ranks(g: Storage) -> list[Storage]:
            share = self.tape.new(self.rows * width, OTHER)  # the gradient of each row's loss, freed on return
            out = self.tape.new(n_bytes, OTHER)
            assert share
            return [out if back == n_bytes else self.tape.new(back, OTHER)]

        if self.setting.tp > 1:
            kept = self.tape.new(n_bytes, name="exponentials of logits")
            # of each row: two sums, the target's place, whether it is here, whether it counts
            sums = self.tape.new(self.rows * (2 * width + 8 + 1 + 1), name="numbers of the loss")
            self.tape.scratch(self.rows * 4 * width)  # largest and target's logit, and both sums before they travel
            return Shadow(self.tape.new(width), 1, width, self.tape.node((logits.node,), over_ranks, (kept, sums)))
        exact = self.cast(logits, width)
        kept = self.tape.new(n_bytes, name="log-probabilities")
        first = self.tape.node((exact.node,), self.makes(n_bytes), (kept,))
        picked = self.tape.node((first,), self.makes(n_bytes), (kept,))
        return Shadow(self.tape.new(width), 1, width, picked)
