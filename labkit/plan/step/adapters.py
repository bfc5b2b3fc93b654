"""LoRA by arithmetic: what an adapter has in numbers, what a step with it holds, by kind, and how long it takes.

    y = W x + (alpha / r) B A x         W [O, I] frozen, A [r, I] and B [O, r] train: r (I + O) numbers instead of I O

    kind          full fine-tuning      LoRA, a adapter numbers                      fp32, N parameters
    parameters    4 N                   w N + 4 a        w, bytes of a frozen weight: 4 or 2 (bf16)
                                        0.52 M + 2 (N - M) + 4 a       in 4 bits, for M numbers in the blocks' linears
    gradients     4 N                   4 a
    optimizer     8 N + 4 a tensor      8 a + 4 a tensor                             AdamW: two moments, a step count
    activations   every layer's         nearly the same: see below

Four bits are for the linears of the blocks; embeddings, norms and the head stay in bf16, as QLoRA has them.
Whatever trains is kept in fp32 in any precision; activations take 4 bytes an element in fp32 and 2 in the others.

Autograd keeps the input x of a linear only for the gradient of a weight that multiplies it. A frozen linear does not
need its x; one with an adapter does, for A, and keeps A x as well. All linears: as much as full fine-tuning, to a per
cent or so. Query and value only: what the MLP's linears would have kept is saved. Nothing is kept before the first.

Elements that are held for one token in a block of width D, hidden F, H heads, and what needs them (fp32, fused
attention, a GPT of labkit):

    x of norm1, norm2        D + 2 each         the norm, if a gradient goes on below it
    out of norm1, norm2      D each             query, key, value; up: if one of them trains
    query, key, value, out   4 D + H            attention, if one of its inputs has a gradient
    up, gelu of up           F each             gelu; down: if it trains

A step on a GPU (`adapter_memory`, `adapter_step`), with adapters on all linears as QLoRA has them:

    holds     the rows above, in bf16; with checkpointing the input of each block, and all of one block or of the loss
              QLoRA: one linear besides, which is in bf16 while it multiplies
    computes  2 flops a weight forward, 2 backward for the gradient of its input, none for its own: 4 a weight where
              full fine-tuning has 6. A and B: 6 a number, at the rate of very narrow products
    QLoRA     each linear is read in 4 bits and written in 16 before each use: forward, again, backward

Several devices have whole copies of the frozen weights, or each 1/n of them (zero3, as FSDP shards them):

    holds     1/n of the frozen weights, of adapters, their gradients and state; embedding, last norm and head, which
              stay gathered; and two blocks, the one at work and the next one. QLoRA gathers in 4 bits
    sends     each block to all ranks twice a micro-batch, for forward and for backward, beside the computing

Assumed: dequantisation runs at the device's rate of streaming and nothing hides it; nothing hides the sum of the
adapters' gradients either; state that is paged out is not there.

Sources: Hu et al., arXiv:2106.09685, section 4; Dettmers et al. (QLoRA), arXiv:2305.14314, section 3 (4 bits and a
scale of 0.127 bits a weight).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from labkit.plan.breakdown import Breakdown, Item
from labkit.plan.checks import is_whole
from labkit.plan.laws.optimizers import STATE_BYTES
from labkit.plan.laws.strategy import beside
from labkit.plan.machine.hardware import Hardware
from labkit.plan.model.layers import layer as table
from labkit.plan.model.setting import Setting
from labkit.plan.model.shape import ModelShape
from labkit.plan.step.compute_time import OpSeconds

LINEARS = ("query", "key", "value", "out", "up", "down")
TARGETS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "query, value": ("query", "value"),
        "attention": ("query", "key", "value", "out"),
        "mlp": ("up", "down"),
        "all linears": LINEARS,
    }
)
"""Usual choices, by name: which linears of each block get an adapter."""
FROZEN_BYTES: Mapping[str, float] = MappingProxyType({"fp32": 4.0, "bf16": 2.0, "4 bits": (4 + 0.127) / 8})
"""Bytes of a frozen weight; with 4 bits, of one in a linear of a block."""
KINDS: Mapping[str, str] = MappingProxyType({"lora": "bf16", "qlora": "4 bits"})
"""Kinds of adapters, and how the frozen weights below them are kept."""
LORA, QLORA = "arXiv:2106.09685, 4.1", "arXiv:2305.14314, 3"


def adapter_numel(in_features: int, out_features: int, rank: int) -> int:
    """r (I + O): what A [r, I] and B [O, r] have. ValueError for a rank that the weight cannot have."""
    most = min(in_features, out_features)
    if not is_whole(rank) or rank > most:
        raise ValueError(f"a {out_features} x {in_features} weight takes a rank of 1 to {most}, got {rank!r}")
    return rank * (in_features + out_features)


def linears(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Name -> (inputs, outputs) of the linears of one block; a gated MLP has its gate as well.

    ValueError for experts and latent attention, whose linears the laws of adapters do not know."""
    if shape.n_expert or shape.kv_lora is not None:
        raise ValueError(
            "adapters are planned for dense models with ordinary attention, and this one has "
            f"n_expert={shape.n_expert}, kv_lora={shape.kv_lora}: plan full training"
        )
    d, f, a, k = shape.d_model, shape.hidden, shape.n_head * shape.width, shape.kv_heads * shape.width
    sizes = {"query": (d, a), "key": (d, k), "value": (d, k), "out": (a, d), "up": (d, f), "down": (f, d)}
    return sizes | ({"gate": (d, f)} if shape.gated else {})


def adapters(shape: ModelShape, targets: Iterable[str], rank: int) -> Breakdown:
    """Trainable numbers of LoRA of this rank, linear by linear, over all blocks.

    `targets` are names of LINEARS; "up" brings the gate of a gated MLP. ValueError for no target or an unknown one."""
    chosen, sizes = _checked(targets), linears(shape)
    if shape.gated and "up" in chosen:
        chosen.append("gate")
    return Breakdown(
        Item(name, shape.n_layer * adapter_numel(*sizes[name], rank), "parameters", "L r (I + O)", LORA)
        for name in chosen
    )


def trainable_share(shape: ModelShape, targets: Iterable[str], rank: int) -> float:
    """Adapter numbers over the parameters of the frozen model, 0.001 for a thousandth."""
    return adapters(shape, targets, rank).total / shape.n_params


def lora_memory(
    shape: ModelShape, targets: Iterable[str] | None, rank: int = 8, rows: int = 1, precision: str = "fp32"
) -> Breakdown:
    """Bytes by kind of a step with AdamW, each kind at its own highest moment; `targets` None: full fine-tuning.

    Activations are those that autograd holds when backward begins. ValueError for an unknown precision."""
    if precision not in FROZEN_BYTES:
        raise ValueError(f"precision is one of {', '.join(FROZEN_BYTES)}, got {precision!r}")
    n, word = shape.n_params, FROZEN_BYTES[precision]
    held = held_elements(shape, targets, rank, rows) * (4 if precision == "fp32" else 2)
    if targets is None:
        formulas = ("4 N", "4 N", "8 N", "what all layers keep for backward")
        values: tuple[float, ...] = (4 * n, 4 * n, 8 * n, held)
    else:
        a = adapters(shape, targets, rank).total
        frozen, formula = word * n, f"{word:.3g} N"
        if precision == "4 bits":
            inside = shape.n_layer * sum(inputs * outputs for inputs, outputs in linears(shape).values())
            frozen, formula = word * inside + 2 * (n - inside), f"{word:.3g} M + 2 (N - M)"
        formulas = (f"{formula} + 4 a", "4 a", "8 a", "what A, B and frozen layers need for backward")
        values = (frozen + 4 * a, 4 * a, 8 * a, held)
    kinds = ("parameters", "gradients", "optimizer", "activations")
    source = QLORA if precision == "4 bits" else LORA
    return Breakdown(
        Item(kind, value, "B", formula, source) for kind, value, formula in zip(kinds, values, formulas, strict=True)
    )


def held_elements(shape: ModelShape, targets: Iterable[str] | None, rank: int, rows: int) -> int:
    """Elements that autograd holds of `rows` sequences when backward begins, as counted in the table above.

    Norms are counted as LayerNorms, a gated MLP with its gate and product."""
    linears(shape)
    chosen = set(LINEARS) if targets is None else set(_checked(targets))
    r = 0 if targets is None else rank
    blocks = _block(shape, chosen, r, targets is None) + (shape.n_layer - 1) * _block(shape, chosen, r, True)
    d, v = shape.d_model, shape.vocab
    head = d + 2 + v + (d if targets is None else 0)  # log-softmax; the frozen head needs no input
    return rows * shape.seq * (blocks + head)


def _block(shape: ModelShape, chosen: set[str], r: int, below: bool) -> int:
    """Elements a token in one block; `below`: a gradient goes on to what is under the block."""
    d, f, mats = shape.d_model, shape.hidden, 2 if shape.gated else 1
    a, k = shape.n_head * shape.width, shape.kv_heads * shape.width
    into, attends = bool(chosen & {"query", "key", "value"}), bool(chosen & {"query", "key", "value"}) or below
    total = r * sum(mats if name == "up" else 1 for name in chosen)
    total += below * (d + 2) + into * d
    total += attends * (2 * a + 2 * k + shape.n_head) or ("out" in chosen) * a
    after = attends or "out" in chosen
    total += after * (d + 2) + ("up" in chosen) * d
    through = after or "up" in chosen
    total += through * (mats * f + (shape.gated * f))
    return total + (("down" in chosen) * f)


def _checked(targets: Iterable[str]) -> list[str]:
    chosen = [targets] if isinstance(targets, str) else list(dict.fromkeys(targets))
    odd = [name for name in chosen if name not in LINEARS]
    if odd or not chosen:
        raise ValueError(f"targets are some of {', '.join(LINEARS)}; got {', '.join(map(str, odd)) or 'none'}")
    return chosen


# -- a step on a GPU ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Adapter:
    """LoRA ("lora", on weights in bf16) or QLoRA ("qlora", on linears in 4 bits) of this rank, on all linears of the
    blocks. ValueError for another kind; a rank that a weight cannot have is refused where the model is known."""

    kind: str = "lora"
    rank: int = 16

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"an adapter is one of {', '.join(KINDS)}, got {self.kind!r}")

    def __str__(self) -> str:
        """`qlora of rank 16`"""
        return f"{self.kind} of rank {self.rank}"

    def numel(self, shape: ModelShape) -> int:
        """Numbers that train."""
        return int(adapters(shape, LINEARS, self.rank).total)

    def flops_per_token(self, shape: ModelShape) -> float:
        """Flops that a token needs: 4 a frozen weight, all of attention, 6 a number of the adapters."""
        flops = shape.flops()
        weights = sum(flops[name] for name in ("attention projections", "mlp", "head"))
        return weights * 4 / 6 + flops["attention"] + 6 * self.numel(shape)


def block_bytes(shape: ModelShape, adapter: Adapter) -> float:
    """Bytes of one block's frozen weights."""
    inside = sum(inputs * outputs for inputs, outputs in linears(shape).values())
    rest = shape.rest_of_block - inside
    return FROZEN_BYTES[KINDS[adapter.kind]] * inside + 2 * rest


def gathered_bytes(shape: ModelShape, adapter: Adapter, shared: int) -> float:
    """Bytes of frozen weights that a rank has gathered, beside its own 1/shared; 0 where each has all."""
    if shared == 1:
        return 0.0
    ends = shape.n_params - shape.n_layer * shape.rest_of_block
    return (2 * ends + min(2, shape.n_layer) * block_bytes(shape, adapter)) * (1 - 1 / shared)


def adapter_memory(
    shape: ModelShape, adapter: Adapter, rows: int = 1, checkpointing: bool = False, shared: int = 1
) -> Breakdown:
    """Bytes at the highest moment of a step with `rows` rows of a micro-batch, by kind, in bf16 with AdamW; `shared`
    devices have the frozen weights between them.

    That moment is the loss, or the backward of the last block. ValueError for a rank that a weight cannot have."""
    state = lora_memory(shape, LINEARS, adapter.rank, 1, KINDS[adapter.kind])
    setting = Setting(rows, shape.seq, way="half", recompute="full" if checkpointing else "none")
    block, head, loss = (table(shape, name, setting) for name in ("block", "head", "loss"))
    tokens = setting.rows * setting.seq
    inner = 2 * adapter.rank * len(linears(shape)) * tokens  # A x of each linear
    twice = 2 * shape.hidden * tokens  # the gradient of an input comes in two parts, from the linear and from A
    waiting = block.held + (0 if checkpointing else inner)
    unpacked = 2 * max(i * o for i, o in linears(shape).values()) if adapter.kind == "qlora" else 0
    (of_loss, by_loss), (of_head, by_head), (of_block, by_block) = loss.frozen, head.frozen, block.frozen
    moments = {
        "the loss": (shape.n_layer * waiting + head.held + of_loss, by_loss),
        "backward of the head": (shape.n_layer * waiting + of_head, by_head),
        "backward of the last block": ((shape.n_layer - 1) * waiting + of_block + inner, by_block + twice + unpacked),
    }
    when = max(moments, key=lambda moment: sum(moments[moment]))
    kept = "the input of each block, and of one all" if checkpointing else "what all layers keep for backward"
    names = ("parameters", "gradients", "optimizer")
    gathered = {"parameters": gathered_bytes(shape, adapter, shared)}
    words = f", over {shared}" * (shared > 1)
    held = [
        replace(item, value=item.value / shared + gathered.get(item.name, 0.0), formula=item.formula + words
                + " + gathered units" * (shared > 1 and item.name in gathered))
        for item in map(state.item, names)
    ]  # fmt: skip
    rest = (("activations", kept), ("other", "gradients of activations" + ", one linear in bf16" * (unpacked > 0)))
    return Breakdown([
        *held,
        *(
            Item(name, n_bytes, "B", f"{formula}; at the peak: {when}", "labkit.plan.model.layers")
            for (name, formula), n_bytes in zip(rest, moments[when], strict=True)
        ),
    ])  # fmt: skip


def adapter_step(
    shape: ModelShape,
    adapter: Adapter,
    hardware: Hardware,
    rows: int = 1,
    n_micro: int = 1,
    checkpointing: bool = False,
    n_ranks: int = 1,
    shared: int = 1,
) -> Breakdown:
    """Seconds of a step of `n_micro` micro-batches of `rows` rows on each of `n_ranks` devices, of which `shared` have
    the frozen weights between them.

    The names are those of `predict_step`, and "dequantise". ValueError for a rank that a weight cannot have."""
    setting = Setting(rows, shape.seq, way="half", recompute="full" if checkpointing else "none")
    a, times = adapter.numel(shape), 1 + checkpointing
    compute = host = unpacking = 0.0
    for layer, count in (("embedding", 1), ("block", shape.n_layer), ("head", 1)):
        bench = FrozenBench(shape, setting, adapter, hardware)
        cost = bench.time(layer)
        forwards = count * n_micro * (times if layer == "block" else 1)
        backwards = count * n_micro * (layer != "embedding")
        compute += forwards * cost.forward + backwards * cost.backward
        unpacking += (forwards + backwards) * bench.unpacking
        host += forwards * max(0.0, cost.host - cost.forward) + backwards * max(0.0, cost.host - cost.backward)
    dp, hidden, sums = (
        hardware.collective_s("all_reduce", n_ranks, 1, 4 * a),
        0.0,
        f"all_reduce of 4 a = {4 * a:,} bytes",
    )
    if shared > 1:
        block = hardware.collective_s("all_gather", shared, 1, block_bytes(shape, adapter))
        talk = 2 * n_micro * shape.n_layer * block
        dp, hidden = dp + talk, talk - beside(hardware, talk, compute)
        sums += f", and each block's weights gathered {2 * n_micro} times"
    needs = f"{adapter.flops_per_token(shape):,.0f} flops a token, 4 a frozen weight, {rows} rows x {n_micro}"
    parts = [
        ("compute", compute, f"{needs}{', blocks twice forward' * checkpointing}", "labkit.plan.step.compute_time"),
        ("dequantise", unpacking, "linears from 4 bits to 16, once a use", QLORA),
        (
            "host",
            host + hardware.practice.step_s,
            "Python's seconds an op, where they are longer",
            "labkit.plan.step.compute_time",
        ),
        ("tp", 0.0, "one rank has all of a layer", LORA),
        ("pp", 0.0, "one rank has all layers", LORA),
        ("dp", dp, f"{sums} over {n_ranks}", LORA),
        ("overlap", -hidden, "gathered while computing" if hidden else "nothing is assumed to hide it", LORA),
        ("bubble", 0.0, "no pipeline", LORA),
        ("optimizer", a * STATE_BYTES / hardware.reachable_bytes_per_s, f"AdamW of a = {a:,} numbers", LORA),
    ]
    return Breakdown(Item(name, value, "s", formula, source) for name, value, formula, source in parts)


class FrozenBench(OpSeconds):
    """Seconds of a layer whose weights are frozen, with an adapter beside each linear of a block.

    `unpacking` are those of making 16 bits of 4, once for each linear of the layer."""

    def __init__(self, shape: ModelShape, setting: Setting, adapter: Adapter, hardware: Hardware) -> None:
        super().__init__(shape, setting, "bf16", hardware)
        self.adapter, self.adapted, self.unpacking = adapter, False, 0.0

    def block(self) -> None:
        """Attention and MLP, with their adapters."""
        self.adapted = True
        super().block()

    def product(self, inside: int, out: int, rows: float | None = None, experts: int = 1) -> None:
        """[tokens, inside] x [inside, out]; backward makes one of it, for the gradient of the input."""
        self.one(inside, out, 1)
        if self.adapted:
            r = self.adapter.rank
            self.one(inside, r, 2)
            self.one(r, out, 2)
            self.moves(3 * self.narrow * self.tokens * out, 1)  # the adapter's result is added to the linear's
        if self.adapted and self.adapter.kind == "qlora":
            n_bytes = (FROZEN_BYTES["4 bits"] + self.narrow) * inside * out
            self.unpacking += self.hardware.op_s(0, n_bytes, self.precision)

    def one(self, inside: int, out: int, backward: int) -> None:
        """A product forward, and so many of its size backward."""
        flops = 2.0 * self.tokens * inside * out / self.practice.share(inside, out)
        seconds = self.hardware.op_s(flops, self.narrow * (self.tokens * (inside + out) + inside * out), self.precision)
        self.forward, self.backward = self.forward + seconds, self.backward + backward * seconds
        self.host += self.practice.host_s
