"""The roofline: what an op can reach on a device, by how many flops it does for each byte it moves.

    flop/s   |        ____________ rate of large products        intensity = flops / bytes moved
             |      /|                                           ridge     = rate / bytes a second
             |    /  |
             |  / bytes/s x intensity                            left of the ridge an op waits for memory,
             |/______|____________ flop / byte                   right of it for arithmetic
                   ridge

Both speeds are those that are reached, as in every prediction of labkit: the peak and the bandwidth of the data sheet
times the share of each that large products and long copies get (plan.machine.hardware). `sheet_ridge` is the ridge of
the data sheet itself, peak / bandwidth: 295 flops a byte for an H100 in bf16, where 279 is that of what is reached.

The ops are those of a GPT's forward, one rank, one micro-batch: the same flops and bytes as plan.step.compute_time
adds up to a step. What is no product has "few" flops there, for its bytes decide; here they are counted, to give it a
place. Source: Williams, Waterman and Patterson, Communications of the ACM 52(4), 2009, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.plan.machine.hardware import Hardware
from labkit.plan.model.setting import Setting
from labkit.plan.model.shape import ModelShape

NORM_FLOPS = (("layer", 8), ("rms", 4))
"""Flops of an element: mean 1, variance 3, shift and divide 2, scale and bias 2; RMSNorm: square, sum, divide and
scale."""
GELU, SILU_GATE, ROTARY, SOFTMAX, CROSS_ENTROPY = 8, 5, 3, 5, 5
"""Flops of an element, an exponential or a tanh counted as one: with polynomial and products 8; with the gate 5; two
products and a sum; maximum, difference, exponential, sum, quotient; the same with a logarithm for the quotient."""


@dataclass(frozen=True)
class Operation:
    """One op of a forward pass: its flops, the bytes it reads and writes, and how often the whole model runs it."""

    name: str
    flops: float
    n_bytes: float
    count: int = 1
    product: bool = False

    @property
    def intensity(self) -> float:
        """Flops for each byte that is moved."""
        return self.flops / self.n_bytes

    def seconds(self, hardware: Hardware, precision: str) -> float:
        """Seconds of running it once, the time to start it included."""
        return hardware.op_s(self.flops, self.n_bytes, precision)

    def bound(self, hardware: Hardware, precision: str) -> str:
        """The part that takes longest, "compute", "memory", or "start" if the time to start it exceeds both."""
        compute, memory = self.flops / hardware.rate(precision), self.n_bytes / hardware.reachable_bytes_per_s
        if hardware.launch_s > max(compute, memory):
            return "start"
        return "compute" if compute >= memory else "memory"


def ridge(hardware: Hardware, precision: str) -> float:
    """Flops a byte from which on an op can reach the rate of large products: rate / bytes a second, both as reached."""
    return hardware.rate(precision) / hardware.reachable_bytes_per_s


def sheet_ridge(hardware: Hardware, precision: str) -> float:
    """The ridge of the data sheet, in flops a byte: peak / memory bandwidth."""
    return hardware.peak(precision) / hardware.bytes_per_s.value


def attainable(hardware: Hardware, intensity: float, precision: str) -> float:
    """Flop/s that an op of this intensity can reach. ValueError for an intensity that is not above 0."""
    if not intensity > 0:
        raise ValueError(f"intensity is flops a byte, above 0, got {intensity!r}")
    return min(hardware.rate(precision), intensity * hardware.reachable_bytes_per_s)


def setting_in(shape: ModelShape, precision: str, rows: int = 1, tp: int = 1) -> Setting:
    """`rows` whole sequences in a precision as a Recipe means it: all in bf16; "amp" and fp16 by autocast."""
    ways = {"bf16": "half", "amp": "autocast", "fp16": "autocast"}
    return Setting(rows, shape.seq, tp, way=ways.get(precision, precision))


def operations(shape: ModelShape, setting: Setting) -> tuple[Operation, ...]:
    """The forward ops of a model in the order in which they run; alike ones once, with their `count`.

    ValueError for a `tp` that cannot cut the model."""
    shape.check_cut(setting.tp, in_sequence=setting.in_sequence)
    return tuple(operation for operation in _all(shape, setting) if operation.count and operation.n_bytes)


def _all(s: ModelShape, setting: Setting) -> list[Operation]:
    n, tp, t = s.n_layer, setting.tp, setting.rows * setting.seq
    outside = t // tp if setting.in_sequence else t
    wide = {"fp64": 8, "half": 2}.get(setting.way, 4)
    narrow = 2 if setting.way == "autocast" else wide
    d, f, v = s.d_model, s.hidden // tp, s.vocab // tp
    a, k = s.n_head // tp * s.width, max(1, s.kv_heads // tp) * s.width
    norm = dict(NORM_FLOPS)[s.norm] * outside * d
    ops: list[Operation] = []

    def product(name: str, inside: int, out: int, count: int) -> None:
        moved = narrow * (t * (inside + out) + inside * out)
        ops.append(Operation(name, 2.0 * t * inside * out, moved, count, True))
        if narrow < wide:
            ops.append(Operation(f"{name}'s weight to half", 0.0, (wide + narrow) * inside * out, count))

    def moves(name: str, flops: float, n_bytes: float, count: int) -> None:
        ops.append(Operation(name, flops, n_bytes, count))

    scores = t * setting.seq * (s.n_head // tp)
    moves("embedding", outside * d if s.position == "learned" else 0.0, 2 * wide * outside * d, 1)
    moves("norm", norm, 2 * wide * outside * d, 2 * n)
    product("query", d, a, n)
    product("key, value", d, k, 2 * n)
    if s.position == "rotary":
        moves("rotary", ROTARY * t * (a + k), 4 * max(4, narrow) * t * (a + k), n)
    ops.append(Operation("attention", 4.0 * t * setting.seq * a, narrow * t * (2 * a + 2 * k), n, True))
    if not s.fused_attention:
        moves("softmax", SOFTMAX * scores, 6 * narrow * scores, n)
    product("attention out", a, d, n)
    moves("residual sum", outside * d, 3 * wide * outside * d, 2 * n)
    product("gate, up" if s.gated else "up", d, f, (2 if s.gated else 1) * n)
    if s.gated:
        moves("silu x gate", SILU_GATE * t * f, 5 * narrow * t * f, n)
    else:
        moves("gelu", GELU * t * f, 2 * narrow * t * f, n)
    product("down", f, d, n)
    moves("last norm", norm, 2 * wide * outside * d, 1)
    product("logits", d, v, 1)
    moves("loss", CROSS_ENTROPY * t * v, 3 * max(4, narrow) * t * v, 1)
    return ops
