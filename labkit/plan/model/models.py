"""Models that were published, by their sizes: what `ModelShape.preset` knows. The sizes themselves, where each is
written, and what a shape leaves out of a model stand in models.toml.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

from labkit.plan.model.sizes import NORMS, POSITIONS, QK_NORMS, Sizes
from labkit.plan.tables import Key, Table, built, checked, toml

FILE = Path(__file__).with_suffix(".toml")
SIZES: Mapping[str, Key] = MappingProxyType(
    {
        "n_layer": Key(int, 1, 1000), "d_model": Key(int, 1, 200_000), "n_head": Key(int, 1, 2000),
        "vocab": Key(int, 1, 5_000_000), "seq": Key(int, 1, 20_000_000), "d_ff": Key(int, 1, 1_000_000),
        "n_kv_head": Key(int, 1, 2000), "head_width": Key(int, 1, 4096), "gated": Key(bool), "tied": Key(bool),
        "position": Key(str, among=POSITIONS), "bias": Key(bool), "norm": Key(str, among=NORMS),
        "fused_attention": Key(bool), "n_expert": Key(int, 0, 10_000), "top_k": Key(int, 1, 1000),
        "expert_ff": Key(int, 1, 1_000_000), "n_shared": Key(int, 0, 1000), "n_dense": Key(int, 0, 1000),
        "balance": Key(str, among=("loss", "bias", "none")), "q_lora": Key(int, 1, 100_000),
        "kv_lora": Key(int, 1, 100_000), "rope_width": Key(int, 0, 4096), "biased": Key(list),
        "norms": Key(int, 1, 4), "qk_norm": Key(str, among=QK_NORMS[1:]), "sinks": Key(bool), "shared_gate": Key(bool),
        "n_positions": Key(int, 1, 20_000_000), "window": Key(int, 0, 20_000_000), "n_windowed": Key(int, 0, 1000),
        "source": Key(str),
    }
)  # fmt: skip
"""What a row may say of a model; models.toml says what each key means, and Sizes which of them fit together."""
NEEDED = ("n_layer", "d_model", "n_head", "vocab", "seq", "source")
WHOLE = MappingProxyType({name: key._replace(needed=name in NEEDED) for name, key in SIZES.items()})
FAMILY = MappingProxyType({**SIZES, "style": Key(str), "models": Key(dict, needed=True)})


def read(file: Path = FILE) -> dict[str, Mapping[str, object]]:
    """Sizes and source of each model in a file such as models.toml, by its name, in the order of the file.

    ValueError that names the file, the row and the mend, for a row that cannot be."""
    tables = checked(file.name, toml(file), {"style": Key(dict), "family": Key(dict, needed=True)})
    styles = {
        name: checked(f"{file.name}, [style.{name}]", row, SIZES) for name, row in tables.get("style", {}).items()
    }
    models: dict[str, Mapping[str, object]] = {}
    for name, family in tables["family"].items():
        place = f"{file.name}, [family.{name}]"
        shared = dict(checked(place, family, FAMILY))
        rows, style = shared.pop("models"), shared.pop("style", None)
        if style not in (None, *styles):
            raise ValueError(f"{place}: style = {style!r} must be one of {', '.join(styles)}")
        for model, row in rows.items():
            line = f"{place}, model {model!r}"
            if model in models or model != canonical(model):
                raise ValueError(f"{line} must be a name that no other row has, written as {canonical(model)!r}")
            sizes = checked(line, {**styles.get(style, {}), **shared, **checked(line, row, SIZES)}, WHOLE)
            built(line, Sizes, **sizes)
            models[model] = MappingProxyType(sizes)
    return models


MODELS: Mapping[str, Mapping[str, object]] = Table(cache(read))
"""Sizes of each model, as ModelShape takes them, by its name."""


def canonical(name: str) -> str:
    """The name in MODELS of a model that people write in several ways: `Llama-3.1-8B` and `llama3.1-8b` are `llama3-8b`
    (the paper of Llama 3 describes the models of 3.1), `Qwen-3-8B` is `qwen3-8b`.

    Other names come back in lower case."""
    short = re.sub(r"^(llama|qwen|olmo|gemma)-(\d(?:\.\d)?)-(?=\d)", r"\1\2-", name.lower())
    return short.replace("llama3.1-", "llama3-")
