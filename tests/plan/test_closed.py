"""The tables of what layers save equal what layers hold."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from labkit.plan.closed.table import layer
from labkit.plan.model.layers import profile
from labkit.plan.model.ops import RECOMPUTE, WAYS, Setting
from labkit.plan.model.shape import ModelShape
from labkit.plan.model.tape import ACTIVATIONS

BASE: dict[str, Any] = {"n_layer": 2, "d_model": 64, "n_head": 4, "vocab": 256, "seq": 64}
SHAPES = {
    "gpt": ModelShape(**BASE),
    "llama": ModelShape(**BASE, gated=True, norm="rms", bias=False, position="rotary", n_kv_head=2),
    "plain": ModelShape(**BASE, fused_attention=False),
    "mixture": ModelShape(**BASE, n_expert=16, gated=True, n_shared=2, expert_ff=32, capacity=1.25),
    "latent": ModelShape(**BASE, q_lora=24, kv_lora=16, rope_width=8, position="rotary"),
}
CUTS: tuple[dict[str, Any], ...] = (
    {}, {"tp": 2}, {"tp": 2, "in_sequence": True}, {"cp": 2}, {"cp": 4, "context": "gather"},
    {"cp": 2, "context": "ulysses"}, {"ep": 4},
)  # fmt: skip


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_tables_hold_what_layers_hold(name: str, cut: dict[str, Any]) -> None:
    """Tensor by tensor and to the byte, in every way and with every recomputation."""
    shape, mixed = SHAPES[name], SHAPES[name].n_expert > 0
    if (cut.get("tp") and name == "latent") or ("ep" in cut and not mixed) or ("cp" in cut and mixed):
        pytest.skip("the planner does not cut this so")
    for way in WAYS:
        for recompute in RECOMPUTE:
            for units in ("", "tensor", "nvfp4") if way == "half" else ("",):
                how = {"way": way, "recompute": recompute, "units": units, **cut}
                setting = Setting(2, 64 // cut.get("cp", 1), **how)
                for kind in ("embedding", "block", "head", "loss"):
                    table, taped = layer(shape, kind, setting), profile(shape, kind, setting)
                    assert Counter(table.tensors) == Counter(taped.tensors), (kind, how)
                    assert (table.held, table.result, table.cached) == (
                        taped.held[ACTIVATIONS], taped.result, taped.cached,
                    ), (kind, how)  # fmt: skip
