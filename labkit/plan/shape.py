"""ModelShape: the sizes of a GPT, and what follows from them: parameters, flops and activations, item by item.

    L = n_layer  D = d_model  A = heads x width of a head (D, as a rule)  K = key heads x width  F = hidden  V = vocab

    parameters          token V D  [position T D]  + L (attention 2 D A + 2 D K,  mlp 2 D F (gated: 3),  norms 2 D)
                        + last norm D  [head V D, if it is not tied]        and biases, where there are any
    flops of a token    6 a weight of every matrix that it meets (2 forward, 4 backward), and 12 L A T of attention
    activations         (8 D + 2 F) elements a token and block, see labkit.plan.layers

A pure value: no torch, nothing is built. `ModelShape.of(config)` takes labkit's own GPTConfig.
Source: Chowdhery et al. (PaLM), arXiv:2204.02311, appendix B; Kaplan et al., arXiv:2001.08361, section 2.1.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields, replace
from typing import Any

from labkit.plan.breakdown import Breakdown, Item
from labkit.plan.models import MODELS

POSITIONS = ("learned", "rotary", "none")
NORMS = ("layer", "rms")
PALM_B = "arXiv:2204.02311, appendix B"


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a GPT, frozen. What is None is the usual: d_ff 4 d_model, as many key heads as heads, width D / heads.

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

    @classmethod
    def gpt(cls, n_layer: int, d_model: int, n_head: int, vocab: int, seq: int, **more: Any) -> ModelShape:
        """A GPT of these sizes; `more` are other fields, such as tied=False. ValueError for a field there is not."""
        known = [each.name for each in fields(cls)]
        for name in more:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                raise ValueError(f"a shape has no {name!r}{f'; did you mean {near[0]!r}?' if near else f': {known}'}")
        return cls(n_layer, d_model, n_head, vocab, seq, **more)

    @classmethod
    def preset(cls, name: str) -> ModelShape:
        """A published model: "gpt2", "llama-70b", "gpt3-175b", "llama3-405b", "palm-540b", "megatron-1t", ...

        ValueError that names the nearest for one that is not there."""
        sizes: Any = MODELS.get(name.lower())
        if sizes is None:
            near = difflib.get_close_matches(name.lower(), MODELS, 3, 0.4)
            raise ValueError(
                f"no model {name!r}; "
                + (f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are {', '.join(MODELS)}")
            )
        return cls(name=name.lower(), **sizes)

    @classmethod
    def of(cls, config: Any) -> ModelShape:
        """The shape of a GPTConfig, or of anything else with fields of these names; a shape is its own."""
        if isinstance(config, cls):
            return config
        given = {each.name: getattr(config, each.name) for each in fields(cls) if hasattr(config, each.name)}
        return cls(**given)

    def changed(self, **changes: Any) -> ModelShape:
        """The same with other sizes; it is no published model any more."""
        return replace(self, **{"name": "", "source": "", **changes})

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

    # -- what follows ------------------------------------------------------------------------------------------------

    @property
    def parameters(self) -> Breakdown:
        """Parameters of the whole model, item by item; a tied head is in the token embedding."""
        n, d, f, v = self.n_layer, self.d_model, self.hidden, self.vocab
        a, k, b = self.n_head * self.width, self.kv_heads * self.width, int(self.bias)
        mats = 3 if self.gated else 2
        rows = [
            ("token embedding", v * d, "V D"),
            ("position embedding", self.seq * d if self.position == "learned" else 0, "T D"),
            ("attention", n * (2 * d * a + 2 * d * k + b * (a + 2 * k + d)), "L (2 D A + 2 D K + biases)"),
            ("mlp", n * (mats * d * f + b * ((mats - 1) * f + d)), f"L ({mats} D F + biases)"),
            ("norms", (2 * n + 1) * self.norm_size, "(2 L + 1) norms"),
            ("head", 0 if self.tied else v * d, "0, tied" if self.tied else "V D"),
        ]
        where = self.source or "arXiv:2001.08361, table 1"
        return Breakdown(Item(name, value, "parameters", formula, where) for name, value, formula in rows)

    @property
    def n_params(self) -> int:
        """Parameters of the whole model, a tied weight once."""
        return int(self.parameters.total)

    def flops(self, tokens: int = 1, seq: int | None = None, checkpointing: bool = False) -> Breakdown:
        """Flops of forward and backward for `tokens` tokens in sequences of `seq` (None: the longest).

        Attention counts all T x T products, causal or not, as PaLM does. With `checkpointing` every block is run
        forward once more: what the machine does, and not what MFU counts."""
        n, d, f, t = self.n_layer, self.d_model, self.hidden, self.seq if seq is None else seq
        a, k = self.n_head * self.width, self.kv_heads * self.width
        mats = 3 if self.gated else 2
        rows = [
            ("attention projections", 6 * n * (2 * d * a + 2 * d * k), "6 L (2 D A + 2 D K)"),
            ("attention", 12 * n * a * t, "12 L A T"),
            ("mlp", 6 * n * mats * d * f, f"6 L {mats} D F"),
            ("head", 6 * self.vocab * d, "6 V D"),
        ]
        if checkpointing:
            rows.append(("computed again", sum(value for _, value, _ in rows[:3]) // 3, "a third of all blocks"))
        return Breakdown(
            Item(name, value * tokens, "flops", f"{tokens:,} tokens x {formula}", PALM_B)
            for name, value, formula in rows
        )

    def flops_per_token(self, seq: int | None = None) -> int:
        """Forward and backward of one token: what MFU divides by."""
        return int(self.flops(1, seq).total)

    def mfu(self, tokens_per_s: float, peak_flops: float, seq: int | None = None) -> float:
        """Model flops utilisation, 0 to 1: the share of the peak that went into flops that the model needs.

        `peak_flops` is that of all devices together. ValueError for a peak that is not above zero."""
        if not peak_flops > 0:
            raise ValueError(f"MFU is a share of a peak above zero, got {peak_flops} flop/s")
        return tokens_per_s * self.flops_per_token(seq) / peak_flops

    def activations(self, rows: int = 1, tp: int = 1, **setting: Any) -> Breakdown:
        """Bytes that autograd holds of one block for `rows` sequences, item by item (see labkit.plan.ops.Setting)."""
        from labkit.plan.layers import Setting, held

        return held(self, Setting(rows, setting.pop("seq", self.seq), tp, **setting))

    def check_cut(self, tp: int = 1, n_stages: int = 1, in_sequence: bool = False) -> None:
        """ValueError, with the numbers, if `tp` ranks or `n_stages` stages cannot share the model evenly."""
        for what, number in (("n_head", self.n_head), ("the hidden width", self.hidden), ("vocab", self.vocab)):
            if number % tp:
                mend = f": pad it to {number + -number % tp}" if what == "vocab" else ""
                raise ValueError(f"{what}={number:,} has no tp={tp} equal parts{mend}")
        if self.kv_heads % tp and tp % self.kv_heads:
            raise ValueError(f"n_kv_head={self.kv_heads} cannot be cut or copied evenly for tp={tp}")
        if in_sequence and self.seq % tp:
            raise ValueError(f"seq={self.seq} has no tp={tp} equal parts, which sequence parallelism needs")
        if n_stages > self.n_layer:
            raise ValueError(f"{self.n_layer} blocks cannot fill {n_stages} stages: n_stages={self.n_layer} at most")
