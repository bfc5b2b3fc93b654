"""LoRA by arithmetic: what an adapter has in numbers, and what a step with it holds, by kind.

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

Sources: Hu et al., arXiv:2106.09685, section 4; Dettmers et al. (QLoRA), arXiv:2305.14314, section 3 (4 bits and a
scale of 0.127 bits a weight).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from labkit.plan.breakdown import Breakdown, Item
from labkit.plan.shape import ModelShape

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
LORA, QLORA = "arXiv:2106.09685, 4.1", "arXiv:2305.14314, 3"


def adapter_numel(in_features: int, out_features: int, rank: int) -> int:
    """r (I + O): what A [r, I] and B [O, r] have. ValueError for a rank that the weight cannot have."""
    most = min(in_features, out_features)
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= most:
        raise ValueError(f"a {out_features} x {in_features} weight takes a rank of 1 to {most}, got {rank!r}")
    return rank * (in_features + out_features)


def linears(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Name -> (inputs, outputs) of the linears of one block; a gated MLP has its gate as well."""
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
