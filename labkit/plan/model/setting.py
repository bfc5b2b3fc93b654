"""The setting of a layer: how many tokens it gets, over how many ranks it is cut, in which numbers it computes.

way          weights  activations
"fp32"       4 bytes  4 bytes
"fp64"       8        8
"autocast"   4        products 2, norms and the residual path 4; a half copy of each weight until its backward
"half"       2        2: a model in bf16, or what ZeRO-3 gathers for products in half precision; with 8-bit products
                      (labkit.train.fp8) the same is held, and casts come and go
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.plan.model.cut_attention import CONTEXTS

WAYS = ("fp32", "fp64", "autocast", "half")
RECOMPUTE = ("none", "gathers", "selective", "full")
"""Parts of a block whose forward may be run again in backward, from the least to the most."""
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

    def __hash__(self) -> int:
        """That of what a search tries: a look-up is quick, and other differences are for __eq__ to find."""
        return hash((self.rows, self.tp, self.recompute, self.in_sequence, self.context))

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
