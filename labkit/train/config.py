"""The sizes of a GPT, and what follows from them by arithmetic alone: its parameters and its flops.

One token costs 2 flops (a product and a sum) a weight of every matrix it is multiplied with, and attention adds the
two products with the T keys and values of each layer; the backward pass costs twice the forward, since each product
needs one for its input's gradient and one for its weight's:

    forward    2 N_matrices + 4 L D T         N_matrices: all linears and the head, not the embedding tables
    backward   4 N_matrices + 8 L D T         (looking a row up costs no flops)

    flops_per_token = 6 N_matrices + 12 L D T          PaLM, arXiv:2204.02311, appendix B

MFU = tokens/s * flops_per_token / peak flop/s. As there, attention counts all T x T products, though a causal kernel
may skip half of them, and what checkpointing recomputes counts as nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.plan.checks import is_whole

POSITIONS = ("learned", "rotary")
BALANCES = ("none", "loss", "bias")


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a GPT, a frozen value. `d_ff=None` means four times d_model.

    `kv_heads` is the number of key heads, and of value heads: each serves n_head / kv_heads query heads that lie side
    by side (grouped queries: Ainslie et al., arXiv:2305.13245). None means as many as query heads.

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

    def __post_init__(self) -> None:
        """Check the sizes. Raises ValueError that names the numbers and, where there are any, numbers that would do."""
        for name in ("n_layer", "d_model", "n_head", "vocab", "seq", "d_ff", "kv_heads"):
            value = getattr(self, name)
            optional = name in ("d_ff", "kv_heads") and value is None
            if not optional and not is_whole(value):
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if self.d_model % self.n_head:
            good = ", ".join(str(n) for n in range(1, min(self.d_model, 256) + 1) if self.d_model % n == 0)
            raise ValueError(
                f"d_model={self.d_model} cannot be cut into n_head={self.n_head} heads; n_head could be {good}"
            )
        if self.kv_heads is not None and self.n_head % self.kv_heads:
            good = ", ".join(str(n) for n in range(1, self.n_head + 1) if self.n_head % n == 0)
            raise ValueError(
                f"n_head={self.n_head} query heads cannot share kv_heads={self.kv_heads} key heads evenly; kv_heads "
                f"could be {good}"
            )
        if self.position not in POSITIONS:
            raise ValueError(f"position must be one of {', '.join(POSITIONS)}, got {self.position!r}")
        if self.position == "rotary" and self.head_width % 2:
            raise ValueError(
                f"rotary positions turn pairs, but a head is {self.head_width} wide (d_model={self.d_model} / "
                f"n_head={self.n_head}): make d_model a multiple of {2 * self.n_head}"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout is a probability from 0 up to, but not, 1, got {self.dropout}")
        self._check_experts()

    def _check_experts(self) -> None:
        for name, least in (("n_expert", 0), ("n_shared", 0), ("top_k", 1), ("expert_ff", 1)):
            value = getattr(self, name)
            if not (name == "expert_ff" and value is None) and (type(value) is not int or value < least):
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
        if self.n_expert and self.top_k > self.n_expert:
            raise ValueError(
                f"a token cannot meet top_k={self.top_k} of {self.n_expert} experts: at most {self.n_expert}"
            )
        if self.capacity is not None and not self.capacity > 0:
            raise ValueError(
                f"capacity is a multiple of an expert's fair share above 0, or None, got {self.capacity!r}"
            )
        if self.balance not in BALANCES:
            raise ValueError(f"balance must be one of {', '.join(BALANCES)}, got {self.balance!r}")

    @property
    def head_width(self) -> int:
        """Width of one attention head, d_model / n_head."""
        return self.d_model // self.n_head

    @property
    def n_kv_head(self) -> int | None:
        """`kv_heads` by the name that a ModelShape has for it."""
        return self.kv_heads

    @property
    def kv_width(self) -> int:
        """Width of the keys of a token, all heads together, and of its values: d_model, or less if heads share them."""
        return (self.n_head if self.kv_heads is None else self.kv_heads) * self.head_width

    @property
    def hidden(self) -> int:
        """Width of the hidden layer of the MLP: d_ff, or 4 d_model."""
        return 4 * self.d_model if self.d_ff is None else self.d_ff

    @property
    def expert_hidden(self) -> int:
        """Width of the hidden layer of one expert."""
        return self.hidden if self.expert_ff is None else self.expert_ff

    @property
    def n_matrices(self) -> int:
        """Weights that a token is multiplied with: 2DD + 2DK + 2DF a block, K the width of all its keys (D, or less if
        heads share them), and the head's VD (tied or not). With experts 2DF is that of the top_k + n_shared that it
        meets, and the router's DE comes on top."""
        met = (self.top_k + self.n_shared) * self.expert_hidden if self.n_expert else self.hidden
        attention = 2 * self.d_model**2 + 2 * self.d_model * self.kv_width
        block = attention + 2 * self.d_model * met + self.n_expert * self.d_model
        return self.n_layer * block + self.vocab * self.d_model

    def flops_per_token(self, seq: int | None = None) -> int:
        """Forward and backward of one token in a sequence of `seq` tokens (None: the longest), in flops."""
        return 6 * self.n_matrices + 12 * self.n_layer * self.d_model * (self.seq if seq is None else seq)
