"""The tables of layers against torch itself: what a rank holds after the forward of each layer, to the byte."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from labkit.assemble import assemble
from labkit.comm.group import Group
from labkit.comm.mesh import Mesh
from labkit.parallel.vocab import vocab_parallel_cross_entropy
from labkit.plan.job.recipe import Recipe
from labkit.plan.job.stages import setting_of
from labkit.plan.model.layers import held, layer
from labkit.plan.model.setting import RECOMPUTE, WAYS, Setting
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout
from labkit.probe.memory import MemoryProbe
from labkit.probe.rehearsal import run_fake
from labkit.train.config import GPTConfig
from labkit.train.gpt import cross_entropy

SIZES: dict[str, Any] = {"n_layer": 2, "d_model": 64, "n_head": 4, "vocab": 256, "seq": 64, "tied": False}
LEARNED, TURNED, BARE = (GPTConfig(**SIZES, **how) for how in ({}, {"position": "rotary"}, {"bias": False}))
MIXED = GPTConfig(**SIZES, n_expert=8)
SHARED = GPTConfig(**SIZES, n_expert=16, n_shared=1, top_k=1, balance="bias")
CASES: tuple[tuple[GPTConfig, Layout, dict[str, Any]], ...] = (
    (LEARNED, Layout(), {}),
    (TURNED, Layout(), {"precision": "amp", "recompute": "selective"}),
    (BARE, Layout(), {"precision": "fp8", "recompute": "full"}),
    (BARE, Layout(), {"precision": "amp", "recompute": "full"}),
    (TURNED, Layout(), {"precision": "bf16", "recompute": "selective"}),
    (LEARNED, Layout(tp=2), {"precision": "amp", "recompute": "full"}),
    (BARE, Layout(tp=2), {"precision": "fp64", "recompute": "selective"}),
    (TURNED, Layout(tp=2), {"precision": "nvfp4"}),
    (LEARNED, Layout(tp=2), {"sequence_parallel": True, "precision": "bf16", "recompute": "gathers"}),
    (TURNED, Layout(tp=2), {"sequence_parallel": True, "precision": "amp", "recompute": "gathers"}),
    (LEARNED, Layout(tp=4), {"sequence_parallel": True, "recompute": "selective"}),
    (BARE, Layout(tp=2), {"sequence_parallel": True, "precision": "fp64"}),
    (LEARNED, Layout(cp=2), {"precision": "amp"}),
    (TURNED, Layout(cp=4), {"context": "gather", "precision": "bf16", "recompute": "selective"}),
    (BARE, Layout(cp=2), {"context": "ulysses", "precision": "fp64", "recompute": "full"}),
    (TURNED, Layout(cp=2), {"context": "ulysses", "precision": "amp"}),
    (replace(TURNED, window=20), Layout(), {"precision": "bf16"}),
    (replace(LEARNED, seq=300, window=140), Layout(), {"precision": "amp"}),
    (replace(LEARNED, seq=300, window=20), Layout(), {}),
    (MIXED, Layout(), {"precision": "bf16"}),
    (SHARED, Layout(), {"precision": "amp", "recompute": "selective"}),
    (SHARED, Layout(4, ep=4), {"recompute": "full"}),
    (MIXED, Layout(4, ep=4), {"precision": "amp", "recompute": "selective"}),
    (SHARED, Layout(2, tp=2, ep=2), {"precision": "bf16", "recompute": "selective"}),
    (MIXED, Layout(2, tp=2, ep=2), {"sequence_parallel": True, "recompute": "gathers"}),
)
"""Each way, recomputation and cut, of models with each kind of position, bias and expert."""


def measured(group: Group, config: GPTConfig, layout: Layout, recipe: Recipe) -> list[int]:
    """Bytes that a rank holds besides its parameters after each layer, and after the loss."""
    step = assemble(config, recipe, Mesh.connect(layout, group))
    tokens = torch.zeros(recipe.batch_size // layout.dp, config.seq // layout.cp, dtype=torch.int64)
    (stage,), bytes_held = step.stages.values(), list[int]()
    with MemoryProbe() as probe:
        x, before = tokens, probe.now
        with stage.autocast():
            for part in stage:
                x = part(x)
                bytes_held.append(sum(probe.now[kind] - before[kind] for kind in ("activations", "other")))
        over_ranks = layout.tp > 1
        x = vocab_parallel_cross_entropy(x, tokens, step.mesh.tp) if over_ranks else cross_entropy(x, tokens)
        bytes_held.append(sum(probe.now[kind] - before[kind] for kind in ("activations", "other")))
    return bytes_held


@pytest.mark.parametrize(
    ("config", "layout", "choices"),
    [pytest.param(*case, marks=pytest.mark.rest if k % 2 else ()) for k, case in enumerate(CASES)],
    ids=str,
)
def test_each_layer_holds_to_the_byte_what_its_table_says(config, layout, choices):
    """Would catch a tensor that is forgotten, one that two rows save, one of the wrong width or cut, copies that
    autocast keeps for longer, and a result of the wrong size.

    Not in the tables: one number that torch's loss keeps, and what a router counts, two numbers an expert and block
    (and the balance loss's gradient, where all else is made again)."""
    recipe = Recipe("ddp", batch_size=2 * layout.dp, **choices)
    real = run_fake(lambda group: measured(group, config, layout, recipe), layout.size).value
    shape, kept, cached = ModelShape.of(config), 0, 0
    setting = setting_of(shape, layout, recipe)
    for k, kind in enumerate(("embedding", "block", "block", "head", "loss")):
        table = layer(shape, kind, setting)
        kept, cached = kept + table.held, 0 if kind == "loss" else cached + table.cached  # autocast is over then
        besides = min(k, 2) * (2 * 8 * config.n_expert + 8) * (config.n_expert > 0) + 8 * (kind == "loss")
        assert 0 <= real[k] - (kept + cached + table.result) <= besides, kind


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("way", WAYS)
def test_what_a_block_holds_is_the_sum_of_its_items(way, recompute):
    """Would catch items of one name that hide each other; latent attention and plain attention are tables, too."""
    latent = {"q_lora": 24, "kv_lora": 16, "rope_width": 8, "norm": "rms"}
    for how in ({}, {"fused_attention": False}, latent, {"n_expert": 16, "gated": True, "n_shared": 1}):
        shape, setting = ModelShape(**SIZES, **how), Setting(2, 64, way=way, recompute=recompute)
        table = layer(shape, "block", setting)
        assert held(shape, setting).total == table.held <= table.forward <= table.again
        assert table.held == table.saved or recompute == "full"
        assert shape.n_layer * sum(size for _, size in table.weights) == shape.n_params - sum(
            size for kind in ("embedding", "head") for _, size in layer(shape, kind, setting).weights
        )
