"""The sizes of a GPT, and those that follow from them: what the layers' program (ops.py, layers.py) needs to know.

ModelShape (shape.py) extends these by what follows from them: parameters, flops, activations.
"""

from __future__ import annotations

from dataclasses import dataclass

POSITIONS = ("learned", "rotary", "none")
NORMS = ("layer", "rms")


@dataclass(frozen=True)
class Sizes:
    """Sizes of a GPT, frozen. None means the usual: d_ff 4 d_model, as many key heads as heads, width D / heads.

    `fused_attention=False`: the T x T scores are written to memory, as before FlashAttention (arXiv:2205.14135).

    Raises ValueError, with the numbers, for sizes that are not positive or do not fit together."""

    n_layer: int
    d_model: int
    n_head: int
    vocab: int
    seq: int
    d_ff: int | None = None
    n_kv_head: int | None = None
    head_width: int | None = None
    gated: bool = False
    tied: bool = True
    position: str = "learned"
    bias: bool = True
    norm: str = "layer"
    fused_attention: bool = True
    name: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("n_layer", "d_model", "n_head", "vocab", "seq", "d_ff", "n_kv_head", "head_width"):
            value = getattr(self, name)
            optional = name in ("d_ff", "n_kv_head", "head_width") and value is None
            if not optional and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if self.head_width is None and self.d_model % self.n_head:
            good = ", ".join(str(n) for n in range(1, min(self.d_model, 256) + 1) if self.d_model % n == 0)
            raise ValueError(
                f"d_model={self.d_model} cannot be cut into n_head={self.n_head} heads; n_head could be {good}"
            )
        if self.n_head % self.kv_heads:
            raise ValueError(
                f"n_head={self.n_head} heads cannot share n_kv_head={self.kv_heads} keys evenly: make one a multiple"
            )
        for name, known in (("position", POSITIONS), ("norm", NORMS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")

    # -- sizes that follow -------------------------------------------------------------------------------------------

    @property
    def width(self) -> int:
        """Width of a head: head_width, or d_model / n_head."""
        return self.d_model // self.n_head if self.head_width is None else self.head_width

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values: n_kv_head, or n_head."""
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    @property
    def hidden(self) -> int:
        """Width inside the MLP: d_ff, or 4 d_model."""
        return 4 * self.d_model if self.d_ff is None else self.d_ff

    @property
    def norm_size(self) -> int:
        """Parameters of one norm: a scale for each dim, and a shift where a LayerNorm has biases."""
        return self.d_model * (2 if self.norm == "layer" and self.bias else 1)

    def check_cut(self, tp: int = 1, n_stages: int = 1, in_sequence: bool = False) -> None:
        """ValueError, with the numbers, if `tp` ranks or `n_stages` stages cannot share the model evenly."""
        for name, number in (("n_head", self.n_head), ("the hidden width", self.hidden), ("vocab", self.vocab)):
            if number % tp:
                mend = f": pad it to {number + -number % tp}" if name == "vocab" else ""
                raise ValueError(f"{name}={number:,} has no tp={tp} equal parts{mend}")
        if self.kv_heads % tp and tp % self.kv_heads:
            raise ValueError(f"n_kv_head={self.kv_heads} cannot be cut or copied evenly for tp={tp}")
        if in_sequence and self.seq % tp:
            raise ValueError(f"seq={self.seq} has no tp={tp} equal parts, which sequence parallelism needs")
        if n_stages > self.n_layer:
            raise ValueError(f"{self.n_layer} blocks cannot fill {n_stages} stages: n_stages={self.n_layer} at most")
