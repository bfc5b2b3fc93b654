"""ModelShape: the sizes of a GPT, and what follows from them: parameters, flops and activations, item by item.

    L = n_layer  D = d_model  A = heads x width of a head (D, as a rule)  K = key heads x width  F = hidden  V = vocab

    parameters          token V D  [position T D]  + L (attention 2 D A + 2 D K,  mlp 2 D F (gated: 3),  norms 2 D)
                        + last norm D  [head V D, if it is not tied]        and biases, where there are any
    flops of a token    6 a weight of every matrix that it meets (2 forward, 4 backward), and 12 L A T of attention
    activations         (8 D + 2 F) elements a token and block, see labkit.plan.model.layers

A weight costs 2 flops a token: a product and a sum. Backward is twice that, one product for the gradient of its input
and one for its own. Looking up a row of an embedding costs nothing.

With experts (E of hidden width G, of which a token meets k, and s shared ones) the blocks after the first n_dense have

    parameters          router D E,  experts E x 2 D G (gated: 3),  shared experts s x 2 D G (3)
    active ones         the same with k in the place of E: what a token is multiplied with, and what its flops count
    Latent attention has the matrices that `Sizes.attention_products` lists, and a norm for each of its two latents.

A pure value: no torch, nothing is built. `ModelShape.of(config)` takes labkit's own GPTConfig.
Sources: Chowdhery et al. (PaLM), arXiv:2204.02311, appendix B; Kaplan et al., arXiv:2001.08361, section 2.1.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from labkit.plan.breakdown import Breakdown, Item
from labkit.plan.model.hf_config import opened, translated
from labkit.plan.model.layers import held
from labkit.plan.model.models import MODELS, canonical
from labkit.plan.model.setting import Setting
from labkit.plan.model.sizes import Sizes

PALM_B = "arXiv:2204.02311, appendix B"


@dataclass(frozen=True)
class ModelShape(Sizes):
    """The sizes of a GPT, frozen, and what follows from them. Sizes lists the fields, and which values it refuses."""

    def __hash__(self) -> int:
        """That of a few sizes: a look-up is quick, and other differences are for __eq__ to find."""
        return hash((self.n_layer, self.d_model, self.vocab, self.seq))

    @classmethod
    def gpt(cls, n_layer: int, d_model: int, n_head: int, vocab: int, seq: int, **options: Any) -> ModelShape:
        """A GPT of these sizes; `options` are other fields, such as tied=False. ValueError for an unknown field."""
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                raise ValueError(f"a shape has no {name!r}{f'; did you mean {near[0]!r}?' if near else f': {known}'}")
        return cls(n_layer, d_model, n_head, vocab, seq, **options)

    @classmethod
    def preset(cls, name: str) -> ModelShape:
        """A published model: "gpt2", "llama-70b", "llama3.1-8b", "qwen3-32b", "palm-540b", "megatron-1t", ...

        Its own name is that of MODELS, "llama3-8b". ValueError that names the nearest for one that is not there."""
        known = canonical(name)
        sizes: Any = MODELS.get(known)
        if sizes is None:
            near = difflib.get_close_matches(known, MODELS, 3, 0.4)
            raise ValueError(
                f"no model {name!r}; "
                + (f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are {', '.join(MODELS)}")
                + "; any other model is the path of its config.json"
            )
        return cls(name=known, **sizes)

    @classmethod
    def of(cls, config: Any) -> ModelShape:
        """The shape of a GPTConfig, or of anything else with fields of these names; a shape is its own. A mapping is
        read as the config.json of a Hugging Face checkpoint (labkit.plan.model.hf_config).

        ValueError for a config that cannot be read."""
        if isinstance(config, cls):
            return config
        if isinstance(config, Mapping):
            return cls(**translated(config).sizes)
        values = {field.name: getattr(config, field.name) for field in fields(cls) if hasattr(config, field.name)}
        return cls(**values)

    @classmethod
    def read(cls, path: Path | str) -> ModelShape:
        """The shape of a Hugging Face checkpoint, by its folder or its config.json.

        ValueError, with the key, for one that cannot be read."""
        return cls(**opened(Path(path)).sizes)

    def changed(self, **changes: Any) -> ModelShape:
        """The same with other sizes; it is no published model any more."""
        return replace(self, **{"name": "", "source": "", **changes})

    # -- what follows ------------------------------------------------------------------------------------------------

    @property
    def parameters(self) -> Breakdown:
        """Parameters of the whole model, item by item; a tied head is in the token embedding."""
        return self._parameters(self.n_expert)

    @property
    def active(self) -> Breakdown:
        """Parameters that one token meets, item by item: all but the experts to which it is not sent.

        The whole table of token embeddings is in it. Of published counts some leave it out, as a token reads one row
        of it: GPT-OSS and DeepSeek-V3 do, Mixtral and Qwen 3 do not."""
        return self._parameters(self.top_k if self.n_expert else 0)

    def _parameters(self, n_expert: int) -> Breakdown:
        """Parameters, with so many routed experts in each block that has any."""
        n, d, f, v = self.n_layer - self.n_mixed, self.d_model, self.hidden, self.vocab
        mats = 3 if self.gated else 2
        rows = [
            ("token embedding", v * d, "V D"),
            ("position embedding", self.places * d if self.position == "learned" else 0, "T D"),
            ("attention", self.n_layer * self.attention_size, "L (2 D A + 2 D K + biases)"),
            ("mlp", n * self.mlp_size(f), f"L ({mats} D F + biases)"),
            ("norms", (self.norms * self.n_layer + 1) * self.norm_size, f"({self.norms} L + 1) norms"),
            ("head", 0 if self.tied else v * d, "0, tied" if self.tied else "V D"),
        ]
        if self.has_bias("logits"):
            rows[5] = ("head", rows[5][1] + v, f"{rows[5][2]} + V")
        if self.kv_lora is not None:
            queries = "D Q" if self.q_lora is None else "D q + q Q"
            rows[2] = ("attention", rows[2][1], f"L ({queries} + D (c + r) + 2 c A + A D + norms)")
        if self.n_expert:
            m, one = self.n_mixed, self.mlp_size(self.expert_hidden)
            rows[3] = ("mlp", n * self.mlp_size(f), f"{n} dense blocks x ({mats} D F + biases)")
            rows[4:4] = [
                ("router", m * self.router_size, f"{m} blocks x D E{' + biases' * self.has_bias('router')}"),
                ("experts", m * n_expert * one, f"{m} blocks x {n_expert} x ({mats} D G + biases)"),
                ("shared experts", m * (self.n_shared * one + self.shared_gate * d),
                 f"{m} blocks x {self.n_shared} x ({mats} D G + biases){' + D' * self.shared_gate}"),
            ]  # fmt: skip
        where = self.source or "arXiv:2001.08361, table 1"
        return Breakdown(Item(name, value, "parameters", formula, where) for name, value, formula in rows)

    @property
    def n_params(self) -> int:
        """Parameters of the whole model, a tied weight once."""
        return int(self.parameters.total)

    @cached_property
    def n_active(self) -> int:
        """Parameters that one token meets; all of them in a dense model."""
        return int(self.active.total)

    @property
    def attention_size(self) -> int:
        """Parameters of one block's attention, with its biases, the norms inside it, and the heads' sinks."""
        products = zip(self.attention_names, self.attention_products, strict=True)
        latents = (self.q_lora or 0) + (self.kv_lora or 0)
        beside = latents + self.qk_norm_size + self.sinks * self.n_head
        return sum(inside * out + self.has_bias(name) * out for name, (inside, out) in products) + beside

    @property
    def router_size(self) -> int:
        """Parameters of one block's router, with its biases."""
        return (self.d_model + self.has_bias("router")) * self.n_expert

    def mlp_size(self, hidden: int) -> int:
        """Parameters of one MLP of this hidden width, or of one expert, with its biases."""
        mats, into = 3 if self.gated else 2, ("gate", "up") if self.gated else ("up",)
        biases = sum(map(self.has_bias, into)) * hidden + self.has_bias("down") * self.d_model
        return mats * self.d_model * hidden + biases

    @property
    def rest_of_block(self) -> float:
        """Parameters of a block without its routed experts: the mean of all blocks, dense ones too."""
        sizes = self.parameters
        names = ("attention", "mlp", "norms", *(("router", "shared experts") if self.n_expert else ()))
        return sum(sizes[name] for name in names) / self.n_layer

    def flops(self, tokens: int = 1, seq: int | None = None, checkpointing: bool = False) -> Breakdown:
        """Flops of forward and backward for `tokens` tokens in sequences of `seq` (None: the longest).

        Attention counts all T x T products, causal or not, as PaLM does. With `checkpointing` every block is run
        forward once more: what the machine does, and not what MFU counts. Of experts only those count that a token is
        sent to, whatever their load is."""
        n, d, f, t = self.n_layer, self.d_model, self.hidden, self.seq if seq is None else seq
        a, mats, m = self.n_head * self.width, 3 if self.gated else 2, self.n_mixed
        projections = sum(inside * out for inside, out in self.attention_products)
        latent = self.kv_lora is not None
        scores = 2 * a + self.n_head * self.rope_width  # of queries and keys, and of values
        rows = [
            ("attention projections", 6 * n * projections, "6 L (2 D A + 2 D K)" if not latent else "6 L x MLA's"),
            ("attention", round(6 * n * scores * self.looked_at(t)),
             ("12 L A T" if not latent else "6 L h (2 w + r) T") + ", T the mean of windows" * (self.n_windowed > 0)),
            ("mlp", 6 * (n - m) * mats * d * f, f"6 L {mats} D F"),
            ("head", 6 * self.vocab * d, "6 V D"),
        ]  # fmt: skip
        if self.n_expert:
            met = self.top_k + self.n_shared
            rows[3:3] = [
                ("router", 6 * m * d * self.n_expert, f"6 x {m} D E"),
                ("experts", 6 * m * met * mats * d * self.expert_hidden, f"6 x {m} x {met} x {mats} D G"),
            ]
        if checkpointing:
            rows.append(("computed again", sum(value for _, value, _ in rows[:-1]) // 3, "a third of all blocks"))
        return Breakdown(
            Item(name, value * tokens, "flops", f"{tokens:,} tokens x {formula}", PALM_B)
            for name, value, formula in rows
        )

    def flops_per_token(self, seq: int | None = None) -> int:
        """Forward and backward of one token: what MFU divides by."""
        return self._flops_of_longest if seq is None else int(self.flops(1, seq).total)

    @cached_property
    def _flops_of_longest(self) -> int:
        return int(self.flops(1).total)

    def mfu(self, tokens_per_s: float, peak_flops: float, seq: int | None = None) -> float:
        """Model flops utilisation, 0 to 1: the share of the peak that went into flops that the model needs.

        `peak_flops` is that of all devices together. ValueError for a peak that is not above zero."""
        if not peak_flops > 0:
            raise ValueError(f"MFU is a share of a peak above zero, got {peak_flops} flop/s")
        return tokens_per_s * self.flops_per_token(seq) / peak_flops

    def activations(self, rows: int = 1, tp: int = 1, **setting: Any) -> Breakdown:
        """Bytes that autograd holds of one block for `rows` sequences, item by item (see plan.model.setting.Setting).

        `checkpointing=True` is the old name of recompute="full"."""
        if setting.pop("checkpointing", False):
            setting["recompute"] = "full"
        return held(self, Setting(rows, setting.pop("seq", self.seq), tp, **setting))
