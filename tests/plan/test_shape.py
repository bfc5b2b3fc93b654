"""Shapes: parameters and flops are those of the model that labkit builds, and those that papers report."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from labkit.plan.model.models import MODELS
from labkit.plan.model.setting import Setting
from labkit.plan.model.shape import ModelShape
from labkit.train.config import GPTConfig
from labkit.train.gpt import GPT
from tests.cases import cases

REPORTED = {
    "gpt2": (124e6, "124M: the released checkpoint"), "gpt2-xl": (1558e6, "1558M: the released checkpoint"),
    "gpt3-175b": (175e9, "arXiv:2005.14165, table 2.1"), "llama-7b": (6.7e9, "arXiv:2302.13971, table 2"),
    "llama-65b": (65.2e9, "arXiv:2302.13971, table 2"), "llama-70b": (69e9, "arXiv:2307.09288: 70B"),
    "llama3-8b": (8.03e9, "arXiv:2407.21783: 8B"), "llama3-405b": (405e9, "arXiv:2407.21783: 405B"),
    "palm-8b": (8.63e9, "arXiv:2204.02311, table 1"), "palm-62b": (62.5e9, "arXiv:2204.02311, table 1"),
    "palm-540b": (540.35e9, "arXiv:2204.02311, table 1"), "megatron-1.7b": (1.65e9, "arXiv:2104.04473, table 1"),
    "megatron-3.6b": (3.6e9, "the same"), "megatron-7.5b": (7.5e9, "the same"), "megatron-18.4b": (18.4e9, "the same"),
    "megatron-39.1b": (39.1e9, "the same"), "megatron-76.1b": (76.1e9, "the same"),
    "megatron-145.6b": (145.6e9, "the same"), "megatron-310.1b": (310.1e9, "the same"),
    "megatron-529.6b": (529.6e9, "the same"), "megatron-1t": (1008e9, "the same"),
    "llama3-70b": (70.6e9, "safetensors of Llama-3.1-70B"), "llama3.2-1b": (1.236e9, "safetensors of Llama-3.2-1B"),
    "llama3.2-3b": (3.213e9, "safetensors of Llama-3.2-3B"),
    "qwen3-0.6b": (0.596e9, "safetensors of Qwen3-0.6B, a tied table once"),
    "qwen3-1.7b": (1.721e9, "safetensors of Qwen3-1.7B, the same"),
    "qwen3-4b": (4.022e9, "safetensors of Qwen3-4B"), "qwen3-8b": (8.191e9, "safetensors of Qwen3-8B"),
    "qwen3-14b": (14.768e9, "safetensors of Qwen3-14B"), "qwen3-32b": (32.762e9, "safetensors of Qwen3-32B"),
    "olmo2-7b": (7.299e9, "safetensors of OLMo-2-1124-7B"), "olmo2-13b": (13.716e9, "safetensors of OLMo-2-1124-13B"),
    "olmo2-32b": (32.234e9, "safetensors of OLMo-2-0325-32B"),
    "gemma3-1b": (302e6 + 698e6, "arXiv:2503.19786, table 1, without the image encoder"),
    "gemma3-4b": (675e6 + 3209e6, "the same"), "gemma3-12b": (1012e6 + 10759e6, "the same"),
    "gemma3-27b": (1416e6 + 25600e6, "the same"),
    "mpt-7b": (6.65e9, "model card of mpt-7b: 6.7B, safetensors 6.65B"), "mpt-30b": (29.95e9, "model card of mpt-30b"),
}  # fmt: skip


@st.composite
def configs(draw) -> GPTConfig:
    """Small GPTs of every kind that labkit builds."""
    head, width = draw(st.integers(1, 3)), 2 * draw(st.integers(1, 4))
    return GPTConfig(
        draw(st.integers(1, 3)), head * width, head, draw(st.integers(1, 40)), draw(st.integers(1, 9)),
        draw(st.sampled_from(["learned", "rotary"])), draw(st.booleans()), 0.0,
        draw(st.none() | st.integers(1, 20)), draw(st.booleans()),
    )  # fmt: skip


@settings(max_examples=60)
@given(configs(), st.integers(1, 9))
def test_parameters_and_flops_are_those_of_the_model_that_labkit_builds(config, seq):
    """Would catch a bias, a norm or a tied weight that is counted twice or not, and a law of flops that differs."""
    shape = ModelShape.of(config)
    with torch.device("meta"):
        model = GPT(config, seed=0)
    assert shape.n_params == model.n_params
    sizes = shape.parameters
    assert sizes["token embedding"] == model.embedding.token.weight.numel()
    assert sizes["mlp"] == sum(p.numel() for block in model.blocks for p in block.mlp.parameters())
    assert sizes["attention"] == sum(p.numel() for block in model.blocks for p in block.attention.parameters())
    weights = sum(part.weight.numel() for part in model.modules() if isinstance(part, nn.Linear))
    attention = 12 * config.n_layer * config.d_model * seq
    assert shape.flops_per_token(seq) == model.flops_per_token(seq) == 6 * weights + attention
    assert config.n_matrices == weights


@cases("name", REPORTED)
def test_presets_have_as_many_parameters_as_their_papers_say(name):
    """Would catch a size that was copied wrong, key heads or a gate that are forgotten."""
    shape = ModelShape.preset(name)
    assert shape.n_params == pytest.approx(REPORTED[name][0], rel=0.011)  # 3.6B has two digits
    assert shape.name == name
    assert shape.source


def test_a_model_is_known_by_the_names_that_people_type():
    """Would catch "llama3.1-8b" refused, and a second name that is another model."""
    for said, name in (
        ("llama3.1-8b", "llama3-8b"), ("Llama-3.1-405B", "llama3-405b"), ("llama-3-70b", "llama3-70b"),
        ("Llama-3.2-1B", "llama3.2-1b"), ("llama-2-7b", "llama2-7b"), ("Qwen-3-0.6B", "qwen3-0.6b"),
        ("olmo-2-13b", "olmo2-13b"), ("gemma-3-27b", "gemma3-27b"), ("llama-70b", "llama-70b"),
    ):  # fmt: skip
        assert ModelShape.preset(said) == ModelShape.preset(name)
        assert ModelShape.preset(said).name == name


def test_every_preset_can_be_built_and_says_where_it_is_written():
    """Would catch a row of the table that no shape accepts."""
    for name in MODELS:
        shape = ModelShape.preset(name.upper())
        assert all(item.source and item.formula for item in shape.parameters.items)
        assert (
            shape.flops().total == shape.flops_per_token() > 6 * (shape.n_active - shape.vocab * shape.d_model) * 0.99
        )


def test_flops_agree_with_the_paper_that_defines_them():
    """Would catch attention counted half, or the embedding's look-up counted as a product.

    arXiv:2104.04473, equation 3: 96 B s l h^2 (1 + s/6h + V/16lh) with every block run forward once more."""
    s = ModelShape.preset("megatron-145.6b")
    h, layers, seq, vocab = s.d_model, s.n_layer, s.seq, s.vocab
    formula = 96 * seq * layers * h**2 * (1 + seq / (6 * h) + vocab / (16 * layers * h))
    assert s.flops(seq, checkpointing=True).total == pytest.approx(formula, rel=1e-9)


def test_mfu_is_the_one_that_palm_reports():
    """Would catch attention left out: 238.3K tokens/s on 6,144 chips of 275 Tflop/s are 46.2% (arXiv:2204.02311)."""
    assert ModelShape.preset("palm-540b").mfu(238.3e3, 6144 * 275e12) == pytest.approx(0.462, abs=0.002)
    with pytest.raises(ValueError, match="peak above zero"):
        ModelShape.preset("gpt2").mfu(1, 0)


@pytest.mark.parametrize("way", ["fp32", "fp64", "half"])
def test_activations_of_a_block_follow_the_law_item_by_item(way):
    """Would catch a saved tensor that is missed or doubled: 8 D + 2 F elements a token, and a few numbers a row.

    (Korthikanti et al., arXiv:2205.05198, section 4.1 has 34 bytes for 16-bit blocks with dropout masks and three
    inputs' worth of fused layers; without dropout, in 16 bits, this block holds 2 (8 + 2 x 4) = 32.)"""
    shape, w = ModelShape.gpt(2, 64, 4, 256, 32), {"fp32": 4, "fp64": 8, "half": 2}[way]
    held = shape.activations(rows=3, way=way)
    tokens, d, f = 3 * 32, 64, 256
    numbers = 4 * tokens * w + 4 * tokens * max(4, w)  # of two norms; of attention, one for each of 4 heads
    assert held.total == tokens * w * (8 * d + 2 * f) + numbers
    assert held["up"] == held["gelu of up"] == tokens * f * w
    assert all(item.formula and item.source for item in held.items)


def test_what_a_block_holds_shrinks_as_tensor_and_sequence_parallelism_say():
    """Would catch a tensor cut that stays whole, or one that is said to be cut and is not."""
    shape = ModelShape.gpt(2, 64, 4, 256, 32)
    whole, cut, both = (shape.activations(2, tp, in_sequence=seq) for tp, seq in ((1, False), (2, False), (2, True)))
    for name in ("query", "up", "gelu of up", "mixed values [B,T,A]"):
        assert whole[name] == 2 * cut[name] == 2 * both[name]
    x = "x, input of the block"
    assert whole[x] == cut[x] == 2 * both[x]
    assert shape.activations(2, checkpointing=True).total == whole[x]


def test_a_block_that_gathers_again_holds_what_the_paper_says():
    """Would catch gathered inputs that stay. Korthikanti et al., arXiv:2205.05198, table 2: 34/t bytes an element of
    [T, B, D], of which 2 are masks of dropouts, and fused attention needs no scores."""
    shape, tp = ModelShape.gpt(2, 4096, 32, 50304, 2048), 8
    held = {
        recompute: shape.activations(2, tp, in_sequence=True, way="half", recompute=recompute).total
        for recompute in ("none", "gathers")
    }
    element = 2 * 2048 * 4096
    assert held["gathers"] == pytest.approx(32 / tp * element, rel=0.01)
    # kept: two inputs of 2 bytes an element, whole; not kept: 1/t of them, of which only the norms' own part stays
    assert held["none"] - held["gathers"] == 2 * 2 * element * (1 - 1 / tp)


def test_plain_attention_holds_its_scores_and_a_fused_one_does_not():
    """Would catch T x T probabilities that are forgotten: 4 heads of 32 x 32 numbers for each of 2 rows."""
    shape = ModelShape.gpt(2, 64, 4, 256, 32)
    plain = shape.changed(fused_attention=False).activations(2)
    assert plain["probabilities [B,h,T,T]"] == 2 * 4 * 32 * 32 * 4
    assert "probabilities [B,h,T,T]" not in shape.activations(2)


BAD = [
    (lambda: ModelShape.preset("llama-71b"), "did you mean .*'llama-70b'"),
    (lambda: ModelShape.preset("zzz"), "there are gpt2"),
    (lambda: ModelShape.gpt(0, 64, 4, 256, 32), "n_layer must be a whole number of at least 1, got 0"),
    (lambda: ModelShape.gpt(2, 64, 5, 256, 32), "d_model=64 cannot be cut into n_head=5"),
    (lambda: ModelShape.gpt(2, 64, 4, 256, 32, n_kv_head=3), "n_kv_head=3"),
    (lambda: ModelShape.gpt(2, 64, 4, 256, 32, tyed=True), "did you mean 'tied'"),
    (lambda: ModelShape.gpt(2, 64, 4, 256, 32, norm="batch"), "one of layer, rms"),
    (lambda: ModelShape.gpt(2, 64, 4, 256, 32).check_cut(tp=3), "n_head=4 has no tp=3 equal parts"),
    (lambda: ModelShape.preset("gpt2").check_cut(tp=2), "vocab=50,257 has no tp=2 equal parts: pad it to 50258"),
    (lambda: ModelShape.gpt(2, 64, 4, 256, 32).check_cut(n_stages=3), "2 blocks cannot fill 3 stages"),
    (lambda: ModelShape.gpt(2, 64, 4, 256, 30).check_cut(tp=4, in_sequence=True), "seq=30 has no tp=4"),
    (lambda: Setting(0, 4), "rows must be at least 1, got 0"),
    (lambda: Setting(1, 4, way="int8"), "got 'int8'"),
]  # fmt: skip


@cases(("make", "said"), BAD)
def test_sizes_that_make_no_sense_are_refused_with_the_numbers(make, said):
    """Would catch a model that nobody can build, and a message that does not help."""
    with pytest.raises(ValueError, match=said):
        make()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_layer": 0}, "n_layer must be a whole number of at least 1, got 0"),
        ({"d_ff": True}, "d_ff must be a whole number of at least 1, got True"),
        ({"top_k": None}, "top_k must be a whole number of at least 1, got None"),
        ({"n_shared": -1}, "n_shared must be a whole number of at least 0, got -1"),
        ({"n_head": 5}, "d_model=64 cannot be cut into n_head=5 heads; n_head could be 1, 2, 4, 8, 16, 32, 64"),
        ({"KEYS": 3}, "n_head=4 query heads cannot share KEYS=3 key heads evenly; KEYS could be 1, 2, 4"),
        ({"n_expert": 2, "top_k": 3}, "a token cannot go to top_k=3 of n_expert=2 experts: lower top_k"),
        ({"n_shared": 1}, "n_shared=1 is of models with experts: n_expert=8, say"),
        ({"capacity": 0}, "capacity is a multiple, above 0, of an expert's mean load, or None, got 0"),
    ],
)
def test_a_config_and_a_shape_refuse_the_same_sizes_with_the_same_words(changes, words):
    """Would catch a check that only one of the two has: a model that is planned and cannot be built, or the reverse."""
    for kind, keys in ((GPTConfig, "kv_heads"), (ModelShape, "n_kv_head")):
        sizes = {"n_layer": 2, "d_model": 64, "n_head": 4, "vocab": 256, "seq": 32, **changes}
        with pytest.raises(ValueError) as refusal:
            kind(**{name.replace("KEYS", keys): size for name, size in sizes.items()})
        assert str(refusal.value) == words.replace("KEYS", keys)


def test_configs_and_shapes_are_values_that_dicts_give_back():
    """Would catch what both share becoming a field: in what is stored, in the order of arguments or in equality."""
    config = GPTConfig(2, 64, 4, 256, 32, kv_heads=2)
    for sizes in (config, ModelShape.of(config)):
        stored = asdict(sizes)
        assert type(sizes)(**stored) == type(sizes)(*stored.values()) == sizes == eval(repr(sizes))
        assert not {"hidden", "expert_hidden"} & stored.keys()
