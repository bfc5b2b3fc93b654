"""A model by its config.json: as many parameters as the published checkpoint, and words for what cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from labkit.plan.model.hf_config import FAMILIES, USUAL_ROW, is_path, opened, read, translated
from labkit.plan.model.setting import Setting
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.stage import stage_of
from labkit.plan.tables import toml

PUBLISHED = toml(Path(__file__).parent / "published_models.toml")
QWEN, MIXTRAL, LITE = (PUBLISHED[name]["config"] for name in ("Qwen2.5-7B", "Mixtral-8x7B", "DeepSeek-V2-Lite"))
ENCODER = 416_866_032 + 1152 * 2560 + 1152
"""Parameters of google/gemma-3-4b that are not its language model's: SigLIP, and the way from it to the model."""
GEMMA = PUBLISHED["gemma-2-9b"]["config"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_has_as_many_parameters_as_its_checkpoint_to_the_unit(name):
    """Would catch a bias, a norm, a tied table or a projection of a family that is not counted, or counted twice: by
    the law of parameters, or by the layers of which memory is the sum."""
    config = translated(PUBLISHED[name]["config"], name=name)
    shape = ModelShape(**config.sizes)
    assert shape.n_params + config.buffers == PUBLISHED[name]["parameters"], dict(shape.parameters)
    stage = stage_of(shape, Setting(1, shape.seq), shape.n_layer, True, True, shape.n_dense, shape.tied)
    assert stage.numel == shape.n_params


def test_the_table_has_each_family_that_counts_for_itself():
    """Would catch a family whose counts no published model holds. OLMo 3 has the weights of OLMo 2, and Gemma 3 below
    an encoder those of Gemma 3."""
    assert set(FAMILIES) - {row["config"]["model_type"] for row in PUBLISHED.values()} == {"olmo3", "gemma3"}


@pytest.mark.parametrize("name", ["Qwen2.5-7B", "gemma-2-9b", "phi-2", "gpt-oss-20b", "Qwen1.5-MoE-A2.7B"])
def test_ranks_of_tp_have_all_parameters_between_them(name):
    """Would catch a bias or a norm that tensor parallelism loses, or cuts where each rank has a copy."""
    shape = ModelShape.of(PUBLISHED[name]["config"])
    shape = shape.changed(vocab=shape.vocab + shape.vocab % 2)
    whole, half = (
        stage_of(shape, Setting(1, shape.seq, tp), shape.n_layer, True, True, 0, shape.tied) for tp in (1, 2)
    )
    assert len(whole.weights) == len(half.weights)
    assert all(2 * part in (size, 2 * size) for part, size in zip(
        sorted(half.weights), sorted(whole.weights), strict=True) for part, size in [(part[1], size[1])])  # fmt: skip
    assert whole.numel / 2 < half.numel < whole.numel / 2 * 1.01


def test_rows_are_as_long_as_is_usual_and_windows_shorten_attention_alone():
    """Would catch rows of 131,072 tokens where nobody asked for them, and a window that counts where rows are shorter
    than it, or that takes no flops off where they are longer."""
    config, shape = translated(QWEN), ModelShape.of(QWEN)
    assert (config.longest, shape.seq, shape.n_windowed) == (131_072, USUAL_ROW, 0)
    gemma = ModelShape.of(GEMMA)
    assert (gemma.window, gemma.n_windowed, gemma.n_layer) == (4096, 21, 42)
    short, long = (gemma.flops(1, seq)["attention"] / gemma.changed(window=0, n_windowed=0).flops(1, seq)["attention"]
                   for seq in (4096, 16_384))  # fmt: skip
    assert (short, long) == (1, (1 + 1 / 4) / 2)
    assert translated(GEMMA | {"layer_types": ["sliding_attention"] * 40 + ["full_attention"] * 2}).sizes[
        "n_windowed"] == 40  # fmt: skip


def test_positions_that_are_learned_are_as_many_as_the_table_has_whatever_a_row_has():
    """Would catch a GPT-2 that has fewer parameters because rows are shorter, and rows beyond its table."""
    shape = ModelShape.of(PUBLISHED["gpt2"]["config"])
    assert shape.changed(seq=256).n_params == shape.n_params
    with pytest.raises(ValueError, match="seq=2,048 tokens have no place in n_positions=1,024"):
        shape.changed(seq=2048)


def test_a_model_that_also_sees_is_planned_without_its_eyes_and_says_so():
    """Would catch sizes of the outer config, or of no config, and an encoder that is left out without a word."""
    inner = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    config = translated({"model_type": "gemma3", "text_config": inner, "vision_config": {"hidden_size": 1152}})
    assert ModelShape(**config.sizes).n_params == 4_300_079_472 - ENCODER
    assert "the encoder of images is left out, parameters and seconds" in config.notes


def test_a_folder_and_a_file_are_the_same_model_by_the_folder_s_name(tmp_path):
    """Would catch a folder that is taken for the name of a published model, and a name of another one's."""
    folder = tmp_path / "My-Qwen"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN))
    assert opened(folder) == opened(folder / "config.json")
    assert ModelShape.read(folder).name == "My-Qwen"
    assert [is_path(words) for words in (f"{folder}", "none/there.json", "llama-7b")] == [True, True, False]


@pytest.mark.parametrize(("config", "message"), [
    ([], "config.json holds list"), ({}, "lacks model_type; there are llama"),
    (QWEN | {"model_type": "qwen4"}, "'qwen4'; did you mean 'qwen3'"),
    ({**QWEN, "hidden_size": None, "hiden_size": 4}, "lacks 'hidden_size'.*did you mean 'hiden_size'"),
    (QWEN | {"num_hidden_layers": "28"}, "num_hidden_layers = '28' must be a whole number"),
    (QWEN | {"tie_word_embeddings": 1}, "tie_word_embeddings = 1 must be true or false"),
    (QWEN | {"num_attention_heads": 27}, "config.json: d_model=3584 cannot be cut into n_head=27"),
    (LITE | {"moe_layer_freq": 2}, "moe_layer_freq = 2, and labkit plans for moe_layer_freq = 1 alone"),
    (LITE | {"v_head_dim": 64}, "v_head_dim = 64 and qk_nope_head_dim = 128 are two widths"),
    ({**PUBLISHED["Qwen3-30B-A3B"]["config"], "mlp_only_layers": [3]}, r"mlp_only_layers = \[3\] are blocks without"),
    ({"model_type": "gemma3"}, "lacks 'text_config'"),
])  # fmt: skip
def test_a_config_that_cannot_be_planned_for_is_refused_by_its_key(config, message):
    """Would catch a wrong count in silence, and a TypeError in place of a sentence."""
    with pytest.raises(ValueError, match=message):
        ModelShape.of(config) if isinstance(config, dict) else translated(config)


@pytest.mark.parametrize(("text", "message"), [
    (None, "is not there: give a config.json"), ("{", "is no JSON"),
])  # fmt: skip
def test_a_file_that_is_none_is_refused_by_its_name(tmp_path, text, message):
    """Would catch a traceback for a path with a slip, and for a file that was cut off."""
    file = tmp_path / "config.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=message):
        opened(file)


@pytest.mark.parametrize(("old", "new", "message"), [
    ("n_layer =", "n_layers =", "no size is called 'n_layers'; did you mean 'n_layer'"),
    ('style = "gpt"', 'style = "bert"', "style = 'bert' must be one of llama, gpt"),
    ("every = 0", "each = 0", "window has every, first, switch"),
])  # fmt: skip
def test_a_family_that_cannot_be_is_refused_by_file_and_row(tmp_path, old, new, message):
    """Would catch a slip in the data file that loses a size of a whole family in silence."""
    file = tmp_path / "families.toml"
    text = (Path(__file__).parents[2] / "labkit/plan/model/hf_config.toml").read_text()
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=message):
        read(file)
