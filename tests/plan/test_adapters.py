"""LoRA by arithmetic, held against real layers and a real probe."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from labkit import GPT, GPTConfig, LoRALinear, MemoryProbe, ModelShape, inject_lora
from labkit.plan.adapters import (
    LINEARS,
    TARGETS,
    adapter_numel,
    adapters,
    held_elements,
    linears,
    lora_memory,
    trainable_share,
)
from labkit.train.gpt import cross_entropy

SMALL = GPTConfig(n_layer=3, d_model=32, n_head=2, vocab=64, seq=16)
FLAT = GPTConfig(n_layer=1, d_model=32, n_head=4, vocab=48, seq=8, d_ff=80, tied=False)


def test_rank_8_of_4096_is_65_536_numbers_256_times_fewer():
    """Would catch r times I alone, and the product of both."""
    assert adapter_numel(4096, 4096, 8) == 65_536 == 4096 * 4096 // 256
    layer = LoRALinear(nn.Linear(24, 40), 3)
    assert adapter_numel(24, 40, 3) == layer.A.numel() + layer.B.numel()


@pytest.mark.parametrize("rank", [0, 41, 2.0, True, -1])
def test_a_rank_that_the_weight_cannot_have_is_refused(rank):
    """Would catch a negative count."""
    with pytest.raises(ValueError, match="takes a rank of 1 to 40"):
        adapter_numel(40, 64, rank)


@pytest.mark.parametrize("config", [SMALL, FLAT])
@pytest.mark.parametrize("targets", [*TARGETS.values(), *((name,) for name in LINEARS)])
def test_numbers_that_train_are_those_of_an_injected_model(config, targets):
    """Would catch biases that are counted, and linears of the head."""
    model = GPT(config, seed=0)
    inject_lora(model, [f"blocks.*.{name}" for name in targets], 4)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    shape = ModelShape.of(config)
    assert adapters(shape, targets, 4).total == trained
    assert trainable_share(shape, targets, 4) == trained / shape.n_params


@pytest.mark.parametrize("config", [SMALL, FLAT])
@pytest.mark.parametrize("targets", [None, *TARGETS.values(), *((name,) for name in LINEARS), ("key", "down")])
def test_bytes_by_kind_are_those_of_a_real_step(config, targets):
    """Would catch inputs that a frozen linear is said to keep, and those that an adapter needs."""
    model, rows = GPT(config, seed=0), 3
    if targets:
        inject_lora(model, [f"blocks.*.{name}" for name in targets], 4)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    tokens = torch.zeros(rows, config.seq, dtype=torch.long)
    with MemoryProbe(model, optimizer) as probe:
        loss = cross_entropy(model(tokens), tokens)
        forward = probe.now
        loss.backward()
        after = probe.now
        optimizer.step()
        stepped = probe.now
    law = lora_memory(ModelShape.of(config), targets, 4, rows)
    assert after["parameters"] == law["parameters"]
    assert after["gradients"] == law["gradients"]
    trained = [p for p in model.parameters() if p.requires_grad]
    assert stepped["optimizer"] == law["optimizer"] + 4 * len(trained)
    shared = 8 * config.seq  # numbers of the positions
    assert 0 <= forward["activations"] - law["activations"] <= shared + 8


def test_precision_changes_what_is_frozen_and_what_is_held_and_not_what_trains():
    """Would catch adapters in 4 bits, embeddings and a head in 4 bits, and full fine-tuning that gets smaller with the
    frozen weights it has not."""
    shape, few = ModelShape.preset("llama-7b"), TARGETS["query, value"]
    found = {name: lora_memory(shape, few, 8, 1, name) for name in ("fp32", "bf16", "4 bits")}
    a = adapters(shape, few, 8).total
    inside = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
    frozen = {"fp32": 4 * shape.n_params, "bf16": 2 * shape.n_params}
    frozen["4 bits"] = 4.127 / 8 * inside + 2 * (shape.n_params - inside)
    for name, n_bytes in frozen.items():
        assert found[name]["parameters"] == pytest.approx(n_bytes + 4 * a)
        assert (found[name]["gradients"], found[name]["optimizer"]) == (4 * a, 8 * a)
    assert found["bf16"]["activations"] * 2 == found["fp32"]["activations"] == found["4 bits"]["activations"] * 2
    full = lora_memory(shape, None, precision="4 bits")
    assert full.total - full["activations"] == 16 * shape.n_params


def test_all_linears_hold_the_activations_of_full_fine_tuning_and_few_hold_less():
    """Would catch the common claim that LoRA shrinks activations whatever its targets."""
    shape = ModelShape.preset("gpt2")
    full = held_elements(shape, None, 8, 1)
    assert held_elements(shape, TARGETS["all linears"], 8, 1) == pytest.approx(full, rel=0.02)
    assert held_elements(shape, TARGETS["all linears"], 64, 1) > full
    assert held_elements(shape, TARGETS["query, value"], 8, 1) < 0.85 * full


def test_a_gated_mlp_brings_its_gate():
    """Would catch a third of a Llama's MLP left out."""
    shape = ModelShape.preset("llama3-8b")
    assert linears(shape)["gate"] == (4096, 14336)
    assert linears(shape)["key"] == (4096, 1024)
    assert adapters(shape, ["up"], 8)["gate"] == 32 * 8 * (4096 + 14336)


@pytest.mark.parametrize("targets", [[], ["qkv"], ["query", "head"]])
def test_targets_that_are_not_there_are_named(targets):
    """Would catch a share of nothing."""
    with pytest.raises(ValueError, match="targets are some of query, key, value, out, up, down"):
        adapters(ModelShape.preset("gpt2"), targets, 8)


def test_an_unknown_precision_is_refused():
    """Would catch a KeyError."""
    with pytest.raises(ValueError, match="precision is one of fp32, bf16, 4 bits, got 'int8'"):
        lora_memory(ModelShape.preset("gpt2"), None, precision="int8")
