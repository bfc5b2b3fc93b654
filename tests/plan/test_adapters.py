"""LoRA by arithmetic, held against real layers and a real probe."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from labkit import GPT, GPTConfig, LoRALinear, MemoryProbe, ModelShape, inject_lora
from labkit.plan.machine.hardware import Hardware
from labkit.plan.model.setting import Setting
from labkit.plan.step.adapters import (
    LINEARS,
    TARGETS,
    Adapter,
    FrozenBench,
    adapter_memory,
    adapter_numel,
    adapter_step,
    adapters,
    held_elements,
    linears,
    lora_memory,
    trainable_share,
)
from labkit.plan.step.compute_time import OpSeconds
from labkit.train.checkpoint import checkpoint
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


# -- a step on a GPU ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("sizes", [(6, 64, 128, 32), (4, 64, 2048, 32)])
def test_the_highest_moment_is_that_of_a_real_step_in_bf16(sizes, again):
    """Would catch gradients of frozen weights, blocks that are held whole with checkpointing, and a loss left out.

    The first model peaks in its last block, the second in its loss."""
    n_layer, width, vocab, seq = sizes
    config, rows = GPTConfig(n_layer, width, 4, vocab, seq, tied=False), 4
    model = GPT(config, seed=0)
    inject_lora(model, [f"blocks.*.{name}" for name in LINEARS], 4)
    model = model.to(torch.bfloat16)
    for block in model.blocks if again else ():
        block.forward = partial(checkpoint, block.forward)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    tokens = torch.zeros(rows, seq, dtype=torch.long)
    with MemoryProbe(model, optimizer) as probe:
        cross_entropy(model(tokens), tokens).backward()
    law = adapter_memory(ModelShape.of(config), Adapter("lora", 4), rows, again)
    real = probe.peak["activations"] + probe.peak["other"]
    assert law["activations"] + law["other"] == pytest.approx(real, rel=0.03)


def test_seven_billion_in_four_bits_fit_where_bf16_does_not():
    """Would catch a head in 4 bits, checkpointing that changes the weights, and linears that are never unpacked."""
    shape = ModelShape.preset("llama-7b")
    memory = {(kind, again): adapter_memory(shape, Adapter(kind, 16), 1, again)
              for kind in ("lora", "qlora") for again in (False, True)}  # fmt: skip
    a = Adapter().numel(shape)
    assert memory["qlora", True]["parameters"] == memory["qlora", False]["parameters"]
    assert memory["qlora", True]["parameters"] - 4 * a == pytest.approx(3.87e9, rel=0.002)
    assert memory["lora", True]["parameters"] - 4 * a == 2 * shape.n_params
    assert memory["qlora", True].total < 8e9 < memory["lora", True].total < 16e9
    short = shape.changed(seq=8, vocab=256)  # a block is the peak
    unpacked = adapter_memory(short, Adapter("qlora"))["other"] - adapter_memory(short, Adapter("lora"))["other"]
    assert unpacked == 2 * 4096 * 11008


def test_a_frozen_step_computes_two_thirds_and_unpacks_every_linear_for_every_use():
    """Would catch gradients of frozen weights that cost time, and dequantisation that is paid once a step."""
    shape, h100 = ModelShape.preset("llama-7b"), Hardware.preset("h100")
    setting = Setting(4, shape.seq, way="half")
    full = OpSeconds(shape, setting, "bf16", h100).time("head")
    frozen = FrozenBench(shape, setting, Adapter(), h100).time("head")
    assert frozen.forward == full.forward
    assert full.backward - frozen.backward == pytest.approx(h100.op_s(
        2.0 * 4 * shape.seq * 4096 * 32_000 / h100.practice.share(4096, 32_000), 0, "bf16"))  # fmt: skip
    six = sum(shape.flops()[name] for name in ("attention projections", "mlp", "head"))
    assert Adapter().flops_per_token(shape) == pytest.approx(
        six * 2 / 3 + shape.flops()["attention"] + 6 * Adapter().numel(shape)
    )
    lora, qlora, again = (
        adapter_step(shape, Adapter(kind), h100, 4, 2, twice)
        for kind, twice in (("lora", False), ("qlora", False), ("qlora", True))
    )
    assert lora["dequantise"] == 0 < qlora["dequantise"]
    assert again["dequantise"] == pytest.approx(1.5 * qlora["dequantise"])
    assert lora["compute"] == qlora["compute"] < again["compute"]
    assert adapter_step(shape, Adapter(), h100, n_ranks=8)["dp"] > adapter_step(shape, Adapter(), h100)["dp"] == 0


def test_an_unknown_adapter_is_refused():
    """Would catch a KeyError."""
    with pytest.raises(ValueError, match="an adapter is one of lora, qlora, got 'dora'"):
        Adapter("dora")
    with pytest.raises(ValueError, match="takes a rank of 1 to 4096, got 0"):
        adapter_memory(ModelShape.preset("llama-7b"), Adapter(rank=0))
