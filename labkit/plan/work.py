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
`host` is the time it takes for that, which a fast device waits for (labkit.plan.time). The losses are those of
labkit.plan.practice.
Source: Williams et al. 2009; arXiv:2104.04473, appendix.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from labkit.plan.hardware import EIGHT_BITS, Hardware
from labkit.plan.ops import Setting
from labkit.plan.shape import ModelShape

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
def seconds_of(shape: ModelShape, layer: str, setting: Setting, precision: str, hardware: Hardware) -> Seconds:
    """Time of "embedding", "block" or "head" (with the loss)."""
    return Bench(shape, setting, precision, hardware).time(layer)


class Bench:
    """Adds up the seconds of a layer's ops: `forward`, `backward`, and `host`."""

    def __init__(self, shape: ModelShape, setting: Setting, precision: str, hardware: Hardware) -> None:
        self.shape, self.setting, self.precision, self.hardware = shape, setting, precision, hardware
        self.practice = hardware.practice
        self.tokens, self.tp = setting.rows * setting.seq, setting.tp
        self.outside = self.tokens // setting.tp if setting.in_sequence else self.tokens
        self.wide = {"fp64": 8, "half": 2}.get(setting.way, 4)
        self.narrow = 2 if setting.way == "autocast" else self.wide
        self.forward = self.backward = self.host = 0.0

    def time(self, layer: str) -> Seconds:
        """Seconds of one layer in both directions."""
        {"embedding": self.embedding, "block": self.block, "head": self.head}[layer]()
        return Seconds(self.forward, self.backward, self.host)

    def op(self, flops: float, n_bytes: float, back: float) -> None:
        """An op whose backward takes `back` times its flops and bytes."""
        self.forward += self.hardware.op_s(flops, n_bytes, self.precision)
        self.backward += self.hardware.op_s(back * flops, back * n_bytes, self.precision)
        self.host += self.practice.host_s

    def product(self, inside: int, out: int) -> None:
        """[tokens, inside] x [inside, out]; backward makes two of it."""
        flops, w = 2.0 * self.tokens * inside * out / self.practice.share(inside, out), self.narrow
        n_bytes = w * (self.tokens * (inside + out) + inside * out)
        self.forward += self.hardware.op_s(flops, n_bytes, self.precision)
        self.backward += 2 * self.hardware.op_s(flops, n_bytes, self.precision)
        self.host += self.practice.host_s
        if self.narrow < self.wide:
            self.op(0, (self.wide + self.narrow) * inside * out, 1)

    def products_in_8_bits(self, inside: int, outs: Sequence[int]) -> None:
        """The same for linears that share their input: each product reads 1 byte an element and writes bf16.

        What is cast: the input once for all, and once more in backward, transposed; so is each weight. A gradient is
        cast both ways in backward."""
        x, rate = self.tokens * inside, self.hardware.op_s
        self.op(0, CAST_BYTES * x, 1)
        for out in outs:
            flops = 2.0 * self.tokens * inside * out / self.practice.share(inside, out)
            y, weight = self.tokens * out, inside * out
            self.op(0, CAST_BYTES * weight, 1)
            self.forward += rate(flops, x + weight + 2 * y, EIGHT_BITS)
            self.backward += 2 * rate(0, CAST_BYTES * y, EIGHT_BITS)
            self.backward += rate(flops, y + weight + 2 * x, EIGHT_BITS) + rate(flops, y + x + 2 * weight, EIGHT_BITS)
            self.host += self.practice.host_s

    def moves(self, n_bytes: float, back: float = 2, again: bool = False) -> None:
        """An op that only moves bytes; its backward moves `back` times as many, and once more what selective
        recomputation runs `again`."""
        self.op(0, self.practice.traffic * n_bytes, back + (again and self.setting.recompute == "selective"))

    def embedding(self) -> None:
        """Rows are read and written, and the gradient of the table is written whole."""
        d, table = self.shape.d_model, self.shape.vocab // self.tp * self.shape.d_model
        self.moves(2 * self.wide * self.outside * d, 1)
        self.backward += self.hardware.op_s(0, self.wide * table, self.precision)

    def block(self) -> None:
        """Attention and MLP, two norms, two sums."""
        s, tp, t = self.shape, self.tp, self.tokens
        d, f = s.d_model, s.hidden // tp
        a, k = s.n_head // tp * s.width, max(1, s.kv_heads // tp) * s.width
        for inside, *outs in ((d, a, k, k), (a, d), (d, *(f,) * (2 if s.gated else 1)), (f, d)):
            if self.setting.units:
                self.products_in_8_bits(inside, outs)
            else:
                for out in outs:
                    self.product(inside, out)
        mixed = self.narrow * t * (2 * a + 2 * k)
        self.op(2.0 * t * self.setting.seq * a / (self.practice.attention if s.fused_attention else 0.5), mixed, 2)
        if not s.fused_attention:  # scores written, masked, their softmax taken, and read again
            self.moves(6 * self.narrow * t * self.setting.seq * (s.n_head // tp), 1.5)
        if s.position == "rotary":
            self.moves(4 * max(4, self.narrow) * t * (a + k))
        for _ in range(2):
            self.moves(2 * self.wide * self.outside * d, again=True)
            self.moves(3 * self.wide * self.outside * d, 0.5)
        self.moves((5 if s.gated else 2) * self.narrow * t * f, again=True)

    def head(self) -> None:
        """The last norm, the product with the vocabulary, and the loss."""
        d, v = self.shape.d_model, self.shape.vocab // self.tp
        self.moves(2 * self.wide * self.outside * d)
        self.product(d, v)
        self.moves(3 * max(4, self.narrow) * self.tokens * v, 1)
