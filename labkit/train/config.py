"""The sizes of the GPT that labkit builds. What follows from them, parameters and flops, says plan.model.shape."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.plan.checks import is_whole
from labkit.plan.model.shape import ModelShape
from labkit.plan.model.sizes import Widths, check_sizes

POSITIONS = ("learned", "rotary")
BALANCES = ("none", "loss", "bias")


@dataclass(frozen=True)
class GPTConfig(Widths):
    """The sizes of a GPT, a frozen value. `d_ff=None` means four times d_model.

    `kv_heads` is the number of key heads, and of value heads: each serves n_head / kv_heads query heads that lie side
    by side (grouped queries: Ainslie et al., arXiv:2305.13245). None means as many as query heads.

    With `window` w above 0 the attention of every block sees the last w tokens, a query's own among them, and no others
    (a sliding window: Jiang et al., arXiv:2310.06825, section 2). 0: all tokens before it.

    With `n_expert` above 0 every MLP is a mixture of as many experts (moe.py), of which a token meets `top_k`:

    expert_ff   width of an expert; None: that of the MLP whose place it takes
    n_shared    experts that every token meets besides
    capacity    an expert takes this many times its fair share of a sequence, and drops the rest; None: all that come
    balance     what keeps experts equally busy, "none", "loss" or "bias"

    Raises ValueError, with the numbers, for sizes that do not fit together."""

    n_layer: int = 4
    d_model: int = 128
    n_head: int = 4
    vocab: int = 256
    seq: int = 128
    position: str = "learned"
    tied: bool = True
    dropout: float = 0.0
    d_ff: int | None = None
    bias: bool = True
    n_expert: int = 0
    top_k: int = 2
    expert_ff: int | None = None
    n_shared: int = 0
    capacity: float | None = None
    balance: str = "loss"
    kv_heads: int | None = None
    window: int = 0

    def __post_init__(self) -> None:
        """Check the sizes. Raises ValueError that names the numbers and, where there are any, numbers that would do."""
        check_sizes(self, "kv_heads", {}, ("tied", "bias"), position=POSITIONS, balance=BALANCES)
        if self.position == "rotary" and self.head_width % 2:
            raise ValueError(
                f"rotary positions turn pairs, but a head is {self.head_width} wide (d_model={self.d_model} / "
                f"n_head={self.n_head}): make d_model a multiple of {2 * self.n_head}"
            )
        if not is_whole(self.window, 0):
            raise ValueError(f"window must be a whole number of tokens, or 0 for none, got {self.window!r}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout is a probability from 0 up to, but not, 1, got {self.dropout}")

    @property
    def head_width(self) -> int:
        """Width of one attention head, d_model / n_head."""
        return self.d_model // self.n_head

    @property
    def n_kv_head(self) -> int | None:
        """`kv_heads` by the name that a ModelShape has for it."""
        return self.kv_heads

    @property
    def n_windowed(self) -> int:
        """Blocks whose attention looks at a window: all, or none."""
        return self.n_layer if self.window else 0

    @property
    def kv_width(self) -> int:
        """Width of the keys of a token, all heads together, and of its values: d_model, or less if heads share them."""
        return (self.n_head if self.kv_heads is None else self.kv_heads) * self.head_width

    @property
    def n_matrices(self) -> int:
        """Weights that a token is multiplied with: those of all linears and of the head, tied or not. Of experts it
        meets top_k + n_shared."""
        return self.flops_per_token(0) // 6

    def flops_per_token(self, seq: int | None = None) -> int:
        """Forward and backward of one token in a sequence of `seq` tokens (None: the longest), in flops."""
        return ModelShape.of(self).flops_per_token(seq)
