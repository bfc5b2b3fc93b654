"""The sizes of a GPT, and those that follow from them: what the layers' program (ops.py, layers.py) needs to know.

ModelShape (shape.py) extends these by what follows from them: parameters, flops, activations.
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.plan.checks import is_whole

POSITIONS = ("learned", "rotary", "none")
NORMS = ("layer", "rms")


@dataclass(frozen=True)
class Sizes:
    """Sizes of a GPT, frozen. None means the usual: d_ff 4 d_model, as many key heads as heads, width D / heads.

    `fused_attention=False`: the T x T scores are written to memory, as before FlashAttention (arXiv:2205.14135).

    n_expert    routed experts in the place of a block's MLP, each an MLP of its own; 0: a dense model
    top_k       experts to which the router sends a token
    expert_ff   hidden width of one expert; None: that of the MLP
    n_shared    experts of that width besides, which every token meets
    capacity    an expert takes at most so many times the mean number of tokens; None: all that come
    balance     what keeps the experts' loads alike (labkit.parallel.expert); sizes and laws do not depend on it
    n_dense     the first blocks, which keep a dense MLP of width d_ff

    Latent attention (MLA; DeepSeek-AI, arXiv:2405.04434, section 2.1) makes keys and values from one vector of
    `kv_lora` numbers, and queries from one of `q_lora`; `rope_width` dims of a head carry the position, and all heads
    share one key for these.

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
    n_expert: int = 0
    top_k: int = 2
    expert_ff: int | None = None
    n_shared: int = 0
    capacity: float | None = None
    balance: str = "loss"
    n_dense: int = 0
    q_lora: int | None = None
    kv_lora: int | None = None
    rope_width: int = 0
    name: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("n_layer", "d_model", "n_head", "vocab", "seq", "d_ff", "n_kv_head", "head_width"):
            value = getattr(self, name)
            optional = name in ("d_ff", "n_kv_head", "head_width") and value is None
            if not optional and not is_whole(value):
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if self.head_width is None and self.d_model % self.n_head:
            good = ", ".join(str(n) for n in range(1, min(self.d_model, 256) + 1) if self.d_model % n == 0)
            raise ValueError(
                f"d_model={self.d_model} cannot be cut into n_head={self.n_head} heads; n_head could be {good}"
            )
        if self.n_head % self.kv_heads:
            raise ValueError(
                f"n_head={self.n_head} heads cannot share n_kv_head={self.kv_heads} keys evenly: n_kv_head could be "
                + ", ".join(str(n) for n in range(1, self.n_head + 1) if self.n_head % n == 0)
            )
        self._check_experts()
        for name, known in (("position", POSITIONS), ("norm", NORMS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")

    def _check_experts(self) -> None:
        """ValueError for experts, or a latent attention, whose sizes do not fit together."""
        for name in ("n_expert", "n_shared", "n_dense", "rope_width"):
            value = getattr(self, name)
            if not is_whole(value, 0):
                raise ValueError(f"{name} must be a whole number of at least 0, got {value!r}")
        for name in ("top_k", "expert_ff", "q_lora", "kv_lora"):
            value = getattr(self, name)
            if value is not None and not is_whole(value):
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if self.n_expert and self.top_k > self.n_expert:
            raise ValueError(f"a token cannot go to top_k={self.top_k} of n_expert={self.n_expert} experts")
        if not self.n_expert and (self.n_shared or self.n_dense):
            raise ValueError(
                f"n_shared={self.n_shared} and n_dense={self.n_dense} are of models with experts: n_expert=8, say"
            )
        if self.n_dense > self.n_layer:
            raise ValueError(f"n_dense={self.n_dense} of n_layer={self.n_layer} blocks cannot be dense")
        if self.capacity is not None and not self.capacity > 0:
            raise ValueError(f"capacity is a multiple, above 0, of an expert's mean load, got {self.capacity}")
        if (self.q_lora is None) != (self.kv_lora is None):
            raise ValueError(f"latent attention has both ranks: q_lora={self.q_lora}, kv_lora={self.kv_lora}")
        if self.rope_width and self.kv_lora is None:
            raise ValueError(f"rope_width={self.rope_width} is a part of latent attention: set kv_lora and q_lora too")

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
    def expert_hidden(self) -> int:
        """Width inside an expert: expert_ff, or that of the MLP."""
        return self.hidden if self.expert_ff is None else self.expert_ff

    @property
    def n_mixed(self) -> int:
        """Blocks with experts: all but the first n_dense, or none."""
        return self.n_layer - self.n_dense if self.n_expert else 0

    @property
    def attention_products(self) -> tuple[tuple[int, int], ...]:
        """(in, out) of each matrix of one block's attention."""
        d, a, k = self.d_model, self.n_head * self.width, self.kv_heads * self.width
        if self.q_lora is None or self.kv_lora is None:
            return (d, a), (d, k), (d, k), (a, d)
        queries = self.n_head * (self.width + self.rope_width)
        return (
            (d, self.q_lora), (self.q_lora, queries),
            (d, self.kv_lora + self.rope_width), (self.kv_lora, 2 * a), (a, d),
        )  # fmt: skip

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
