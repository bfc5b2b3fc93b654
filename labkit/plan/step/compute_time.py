"""Seconds of computing one layer, op by op: products at the rate of products, the rest at the rate of memory.

    op                forward flops              bytes read and written (w: bytes of a number)
    a product         2 tokens x I x O           w (in + weights + out); short sides fill the device badly
    attention         2 tokens x T x A           in and out; of 4 a causal kernel computes half, at a rate of its own
    norm              few                        2 w B T D
    residual sum      few                        3 w B T D
    plain attention   4 tokens x T x A           6 w B h T T on top: the scores are in memory
    gelu              few                        2 w B T F      (gated: 5)
    loss              few                        3 x 4 B T V

Backward makes two products of each and moves twice the bytes. With autocast every weight is read in 4 bytes and written
in 2 before it is used, and its gradient the other way round. Products of 8-bit copies run at the rate of 8-bit units,
and what is cast is read twice, for its largest number and for the copy. Python issues the ops one after the other;
`host` is the time it takes for that, which a fast device waits for (labkit.plan.step.time). The losses are those of
of labkit.plan.machine.efficiency.

Experts (balanced, or `imbalance` times as many rows where the slowest is): a rank's n_expert/ep experts each multiply
k tokens ep / n_expert rows, all in one grouped call for Python. Rows are a side of a product as well: few of them fill
the device badly, by the same law as short sides. k copies of each token are made and put in order, there and back.
Source: Williams et al. 2009; arXiv:2104.04473, appendix.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from labkit.plan.machine.hardware import EIGHT_BITS, Hardware
from labkit.plan.model.setting import Setting
from labkit.plan.model.shape import ModelShape

CAST_BYTES = 2 + 2 + 1
"""Bytes moved for an element that is cast to 8 bits: read for the largest, read again, written; in a kernel of its own,
once for all linears that share it, as compilers make them (labkit casts op by op, for each linear)."""


class Seconds(NamedTuple):
    """Forward and backward of one layer and one micro-batch, on one rank, without communication.

    `host` is how long Python needs to issue the ops of one direction."""

    forward: float
    backward: float
    host: float = 0.0


@lru_cache(maxsize=4096)
def seconds_of(
    shape: ModelShape, layer: str, setting: Setting, precision: str, hardware: Hardware, imbalance: float = 1.0
) -> Seconds:
    """Time of "embedding", "block", "dense" (a block without experts in a model that has them) or "head" (with the
    loss)."""
    return OpSeconds(shape, setting, precision, hardware, imbalance).time(layer)


class OpSeconds:
    """Adds up the seconds of a layer's ops: `forward`, `backward`, and `host`."""

    def __init__(
        self, shape: ModelShape, setting: Setting, precision: str, hardware: Hardware, imbalance: float = 1.0
    ) -> None:
        self.shape, self.setting, self.precision, self.hardware = shape, setting, precision, hardware
        self.imbalance, self.mixed = imbalance, False
        self.practice = hardware.practice
        self.tokens, self.tp = setting.rows * setting.seq, setting.tp
        self.outside = self.tokens // setting.tp if setting.in_sequence else self.tokens
        self.wide = {"fp64": 8, "half": 2}.get(setting.way, 4)
        self.narrow = 2 if setting.way == "autocast" else self.wide
        self.forward = self.backward = self.host = 0.0

    def time(self, layer: str) -> Seconds:
        """Seconds of one layer in both directions."""
        self.mixed = layer == "block" and self.shape.n_expert > 0
        {"embedding": self.embedding, "block": self.block, "dense": self.block, "head": self.head}[layer]()
        return Seconds(self.forward, self.backward, self.host)

    def op(self, flops: float, n_bytes: float, back: float) -> None:
        """An op whose backward takes `back` times its flops and bytes."""
        self.forward += self.hardware.op_s(flops, n_bytes, self.precision)
        self.backward += self.hardware.op_s(back * flops, back * n_bytes, self.precision)
        self.host += self.practice.host_s

    def product(self, inside: int, out: int, rows: float | None = None, experts: int = 1) -> None:
        """[rows, inside] x [inside, out]; backward makes two of it. `rows` are those of all `experts` together, whose
        matrices are all read; None: the tokens, of which a step has enough."""
        many, w = self.tokens if rows is None else rows, self.narrow
        share = self.practice.share(inside, out) * (1 if rows is None else self.filled(rows / experts))
        flops, weights = 2.0 * many * inside * out / share, experts * inside * out
        n_bytes = w * (many * (inside + out) + weights)
        self.forward += self.hardware.op_s(flops, n_bytes, self.precision)
        self.backward += 2 * self.hardware.op_s(flops, n_bytes, self.precision)
        self.host += self.practice.host_s
        if self.narrow < self.wide:
            self.op(0, (self.wide + self.narrow) * weights, 1)

    def filled(self, rows: float) -> float:
        """Share of the rate, 0 to 1, that a product of so few rows reaches: `Practice.share` for this side."""
        return rows / (rows + self.practice.half_side)

    def products_in_8_bits(self, inside: int, outs: Sequence[int], rows: float | None = None, experts: int = 1) -> None:
        """The same for linears that share their input: each product reads 1 byte an element and writes bf16.

        What is cast: the input once for all, and once more in backward, transposed; so is each weight. A gradient is
        cast both ways in backward."""
        many, full = (self.tokens, 1.0) if rows is None else (rows, self.filled(rows / experts))
        x, rate = many * inside, self.hardware.op_s
        self.op(0, CAST_BYTES * x, 1)
        for out in outs:
            flops = 2.0 * many * inside * out / (self.practice.share(inside, out) * full)
            y, weight = many * out, experts * inside * out
            self.op(0, CAST_BYTES * weight, 1)
            self.forward += rate(flops, x + weight + 2 * y, EIGHT_BITS)
            self.backward += 2 * rate(0, CAST_BYTES * y, EIGHT_BITS)
            self.backward += rate(flops, y + weight + 2 * x, EIGHT_BITS) + rate(flops, y + x + 2 * weight, EIGHT_BITS)
            self.host += self.practice.host_s

    def moves(self, n_bytes: float, back: float = 2, rerun: bool = False) -> None:
        """An op that only moves bytes; its backward moves `back` times as many, and once more what selective
        recomputation runs `rerun`."""
        self.op(0, self.practice.traffic * n_bytes, back + (rerun and self.setting.recompute == "selective"))

    def embedding(self) -> None:
        """Rows are read and written, and the gradient of the table is written whole."""
        d, table = self.shape.d_model, self.shape.vocab // self.tp * self.shape.d_model
        self.moves(2 * self.wide * self.outside * d, 1)
        self.backward += self.hardware.op_s(0, self.wide * table, self.precision)

    def linears(self, inside: int, outs: Sequence[int], rows: float | None = None, experts: int = 1) -> None:
        """Products that share their input, in 8 bits or not."""
        if self.setting.units:
            self.products_in_8_bits(inside, outs, rows, experts)
            return
        for out in outs:
            self.product(inside, out, rows, experts)

    def experts(self) -> None:
        """The router, the copies of tokens, this rank's experts, and the shared ones."""
        s, ep, t = self.shape, self.setting.ep, self.tokens
        d, f, n_local = s.d_model, s.expert_hidden // self.tp, s.n_expert // ep
        ups = (f,) * (2 if s.gated else 1)
        self.product(d, s.n_expert)
        rows = self.imbalance * t * s.top_k  # as many come from other ranks as go there, where routing is balanced
        self.linears(d, ups, rows, n_local)
        self.linears(f, (d,), rows, n_local)
        self.moves((5 if s.gated else 2) * self.narrow * rows * f, rerun=True)
        # copies are made and summed up, at home and, if they travel, where the experts are
        for _ in range(2 if ep == 1 else 4):
            self.moves(2 * self.narrow * rows * d, 1)
        if s.n_shared:
            self.linears(d, [s.n_shared * up for up in ups])
            self.linears(s.n_shared * f, (d,))
            self.moves((5 if s.gated else 2) * self.narrow * t * s.n_shared * f, rerun=True)

    def block(self) -> None:
        """Attention and MLP, or experts in its place; two norms, two sums."""
        s, tp, t = self.shape, self.tp, self.tokens
        d, f = s.d_model, s.hidden // tp
        a, k = s.n_head // tp * s.width, max(1, s.kv_heads // tp) * s.width
        if s.kv_lora is None:
            self.linears(d, (a, k, k))
            self.linears(a, (d,))
        else:
            for inside, out in s.attention_products:
                self.linears(inside, (out,))
        if self.mixed:
            self.experts()
        else:
            self.linears(d, (f,) * (2 if s.gated else 1))
            self.linears(f, (d,))
        wide = a + s.n_head // tp * s.rope_width // 2  # the mean of queries' and values' widths
        moved = self.narrow * t * (2 * wide + 2 * k)
        seen = s.looked_at(self.setting.seq * self.setting.cp)  # of the whole row, also where a rank has a part of it
        self.op(2.0 * t * seen * wide / (self.practice.attention if s.fused_attention else 0.5), moved, 2)
        if not s.fused_attention:  # scores written, masked, their softmax taken, and read again
            self.moves(6 * self.narrow * t * seen * (s.n_head // tp), 1.5)
        if s.position == "rotary":
            self.moves(4 * max(4, self.narrow) * t * (a + k))
        if s.qk_norm:
            self.moves(2 * self.narrow * t * (a + k), rerun=True)
        for _ in range(s.norms - 2):
            self.moves(2 * self.wide * self.outside * d, rerun=True)
        for number in range(2):
            if number < s.norms:
                self.moves(2 * self.wide * self.outside * d, rerun=True)
            self.moves(3 * self.wide * self.outside * d, 0.5)
        if not self.mixed:
            self.moves((5 if s.gated else 2) * self.narrow * t * f, rerun=True)

    def head(self) -> None:
        """The last norm, the product with the vocabulary, and the loss."""
        d, v = self.shape.d_model, self.shape.vocab // self.tp
        self.moves(2 * self.wide * self.outside * d)
        self.product(d, v)
        self.moves(3 * max(4, self.narrow) * self.tokens * v, 1)
