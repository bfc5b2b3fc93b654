"""The sizes of a GPT, and those that follow from them: what the layers' program (layers.py) needs to know.

ModelShape (shape.py) extends these by what follows from them: parameters, flops, activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from labkit.plan.checks import is_number, is_whole

POSITIONS = ("learned", "rotary", "none")
NORMS = ("layer", "rms", "bare")
"""LayerNorm, RMSNorm, and a LayerNorm without weights (OLMo 1)."""
QK_NORMS = ("", "head", "all")
"""Norms of queries and keys: none, one of each head's dims that all heads share, or one of all heads' dims at once."""
PRODUCTS = (
    "query", "key", "value", "out", "query_in", "latent", "key_value", "gate", "up", "down", "router", "logits",
)  # fmt: skip
"""The products of a model: of attention, of latent attention, of an MLP or an expert, and those at the sides."""


def check_sizes(
    sizes: Any, key_heads: str, whole: dict[str, int], flags: Sequence[str], **choices: Sequence[str]
) -> None:
    """ValueError, with the numbers and the mend, for sizes of a GPT that do not fit together: Sizes or a GPTConfig.

    `key_heads` is the name of the field with the number of key heads. `whole` names the fields that only these sizes
    have and that hold whole numbers, each with the least that it may be; a field whose default is None may be None.
    `flags` are the names of fields that hold True or False.
    `choices` are the words that a field may hold."""
    positive = ("n_layer", "d_model", "n_head", "vocab", "seq", "d_ff", "top_k", "expert_ff", key_heads)
    for name, least in {**dict.fromkeys(positive, 1), "n_expert": 0, "n_shared": 0, **whole}.items():
        value = getattr(sizes, name)
        optional = getattr(type(sizes), name, 0) is None  # the default of a dataclass's field is the class's attribute
        if not (optional and value is None or is_whole(value, least)):
            raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
    for name in flags:
        if not isinstance(getattr(sizes, name), bool):
            raise ValueError(f"{name} must be True or False, got {getattr(sizes, name)!r}")
    for name, known in choices.items():
        if getattr(sizes, name) not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(sizes, name)!r}")
    d_model, n_head, top_k = sizes.d_model, sizes.n_head, sizes.top_k
    keys = getattr(sizes, key_heads) or n_head
    if d_model % n_head and ("head_width" not in whole or sizes.head_width is None):
        raise ValueError(
            f"d_model={d_model} cannot be cut into n_head={n_head} heads; n_head could be {_divisors(d_model)}"
        )
    if n_head % keys:
        raise ValueError(
            f"n_head={n_head} query heads cannot share {key_heads}={keys} key heads evenly; {key_heads} could be "
            f"{_divisors(n_head)}"
        )
    if not sizes.n_expert and sizes.n_shared:
        raise ValueError(f"n_shared={sizes.n_shared} is of models with experts: n_expert=8, say")
    if 0 < sizes.n_expert < top_k:
        raise ValueError(f"a token cannot go to top_k={top_k} of n_expert={sizes.n_expert} experts: lower top_k")
    if sizes.capacity is not None and not is_number(sizes.capacity, above=True):
        raise ValueError(f"capacity is a multiple, above 0, of an expert's mean load, or None, got {sizes.capacity!r}")


def _divisors(number: int) -> str:
    return ", ".join(f"{n}" for n in range(1, min(number, 256) + 1) if number % n == 0)


class Widths:
    """The widths that follow from the sizes of any GPT. It has no fields: Sizes and GPTConfig list their own."""

    d_model: int
    d_ff: int | None
    expert_ff: int | None

    @property
    def hidden(self) -> int:
        """Width inside the MLP: d_ff, or 4 d_model."""
        return 4 * self.d_model if self.d_ff is None else self.d_ff

    @property
    def expert_hidden(self) -> int:
        """Width inside an expert: expert_ff, or that of the MLP."""
        return self.hidden if self.expert_ff is None else self.expert_ff


@dataclass(frozen=True)
class Sizes(Widths):
    """Sizes of a GPT, frozen. None means the usual: d_ff 4 d_model, as many key heads as heads, width D / heads.

    biased        of PRODUCTS those that have a bias where `bias` gives them none: ("query", "key", "value") in Qwen 2.
                  `bias` gives one to all but the router and the head
    norms         norms of width d_model in a block: 2; 1 where attention and MLP read the same one (Phi); 4 where what
                  each of them adds is normed, too (Gemma 2 and 3)
    qk_norm       norms of queries and keys, one of QK_NORMS
    sinks         each head has a number that takes a share of its attention (GPT-OSS)
    n_positions   rows of a table of learned positions; None: seq, as in labkit's own GPT
    window        tokens that a query looks back at in `n_windowed` blocks; the others look at all

    `fused_attention=False`: the T x T scores are written to memory, as before FlashAttention (arXiv:2205.14135).

    n_expert    routed experts in the place of a block's MLP, each an MLP of its own; 0: a dense model
    top_k       experts to which the router sends a token
    expert_ff   hidden width of one expert; None: that of the MLP
    n_shared    experts of that width besides, which every token meets
    capacity    an expert takes at most so many times the mean number of tokens; None: all that come
    balance     what keeps the experts' loads alike (labkit.parallel.expert); sizes and laws do not depend on it
    n_dense     the first blocks, which keep a dense MLP of width d_ff
    shared_gate the shared experts' result is weighed by one more product, D numbers (Qwen 2)

    Latent attention (MLA; DeepSeek-AI, arXiv:2405.04434, section 2.1) makes keys and values from one vector of
    `kv_lora` numbers, and queries from one of `q_lora` (None: from the token itself, as in V2-Lite); `rope_width` dims
    of a head carry the position, and all heads share one key for these.

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
    biased: tuple[str, ...] = ()
    norms: int = 2
    qk_norm: str = ""
    sinks: bool = False
    shared_gate: bool = False
    n_positions: int | None = None
    window: int = 0
    n_windowed: int = 0
    name: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        whole = {
            "head_width": 1, "q_lora": 1, "kv_lora": 1, "n_dense": 0, "rope_width": 0, "norms": 1, "n_positions": 1,
            "window": 0, "n_windowed": 0,
        }  # fmt: skip
        check_sizes(
            self, "n_kv_head", whole, ("gated", "bias", "tied"), position=POSITIONS, norm=NORMS, qk_norm=QK_NORMS
        )
        object.__setattr__(self, "biased", tuple(self.biased))  # a row of a data file has a list
        for product in self.biased:
            if product not in PRODUCTS:
                raise ValueError(f"biased has products, some of {', '.join(PRODUCTS)}, got {product!r}")
        if self.norms not in (1, 2, 4):
            raise ValueError(f"a block has norms=1, 2 or 4, got {self.norms}")
        if self.position == "learned" and self.seq > self.places:
            raise ValueError(f"seq={self.seq:,} tokens have no place in n_positions={self.places:,}: a shorter row")
        if self.n_windowed > self.n_layer or bool(self.n_windowed) != bool(self.window):
            raise ValueError(
                f"n_windowed={self.n_windowed} of n_layer={self.n_layer} blocks look at window={self.window} tokens: "
                "set both, or none"
            )
        if self.shared_gate and not self.n_shared:
            raise ValueError("shared_gate weighs shared experts, and n_shared=0: set n_shared too")
        if not self.n_expert and self.n_dense:
            raise ValueError(f"n_dense={self.n_dense} is of models with experts: n_expert=8, say")
        if self.n_dense > self.n_layer:
            raise ValueError(f"n_dense={self.n_dense} of n_layer={self.n_layer} blocks cannot be dense")
        if self.q_lora is not None and self.kv_lora is None:
            raise ValueError(f"q_lora={self.q_lora} is a part of latent attention: set kv_lora too")
        if self.rope_width and self.kv_lora is None:
            raise ValueError(f"rope_width={self.rope_width} is a part of latent attention: set kv_lora too")

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
    def n_mixed(self) -> int:
        """Blocks with experts: all but the first n_dense, or none."""
        return self.n_layer - self.n_dense if self.n_expert else 0

    @property
    def attention_products(self) -> tuple[tuple[int, int], ...]:
        """(in, out) of each matrix of one block's attention."""
        d, a, k = self.d_model, self.n_head * self.width, self.kv_heads * self.width
        if self.kv_lora is None:
            return (d, a), (d, k), (d, k), (a, d)
        queries = self.n_head * (self.width + self.rope_width)
        made = ((d, queries),) if self.q_lora is None else ((d, self.q_lora), (self.q_lora, queries))
        return (*made, (d, self.kv_lora + self.rope_width), (self.kv_lora, 2 * a), (a, d))

    @property
    def attention_names(self) -> tuple[str, ...]:
        """The names of these matrices, in the same order."""
        if self.kv_lora is None:
            return "query", "key", "value", "out"
        return (*("query_in",) * (self.q_lora is not None), "query", "latent", "key_value", "out")

    def has_bias(self, name: str) -> bool:
        """True if the product of this name has a bias: "query", "up", also inside an expert, "experts.3.up"."""
        last = name.rpartition(".")[2]
        return last in self.biased or (self.bias and last not in ("router", "logits"))

    @property
    def places(self) -> int:
        """Rows of the table of learned positions."""
        return self.seq if self.n_positions is None else self.n_positions

    def looked_at(self, seq: int) -> float:
        """Tokens of a row of `seq` that a block's attention looks at, windows and whole rows in the mean: `seq` itself
        where no block has a window, or where the row is no longer than it."""
        if not self.n_windowed or seq <= self.window:
            return seq
        return (self.n_windowed * self.window + (self.n_layer - self.n_windowed) * seq) / self.n_layer

    @property
    def qk_norm_size(self) -> int:
        """Parameters of the norms of queries and keys of one block."""
        return {"": 0, "head": 2, "all": self.n_head + self.kv_heads}[self.qk_norm] * self.width

    @property
    def norm_size(self) -> int:
        """Parameters of one norm: a scale for each dim, and a shift where a LayerNorm has biases."""
        return self.d_model * (0 if self.norm == "bare" else 2 if self.norm == "layer" and self.bias else 1)

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
