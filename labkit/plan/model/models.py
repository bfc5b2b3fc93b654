"""Models that were published, by their sizes: what `ModelShape.preset` knows, each with where it is written.

Vocabularies are those that were trained with (padded where the paper says so). The Megatron sizes are the ten rows of
one table, all with a vocabulary of 51,200 and 2,048 tokens; their names are what the table calls them. `seq` is the
length of rows in most of the pretraining, not the longest that the finished model reads.

What a shape leaves out, and how much that is:

    Qwen 3, OLMo 2, Gemma 3   norms of query and key, and further norms around them: below 0.1% of the parameters
    Gemma 3                   five layers of six look at a window of 1,024 tokens; here all look at the whole row, which
                              is too many flops and seconds for long rows. The image encoder (417M) is left out
    MPT                       ALiBi has no parameters: position="none"
    GPT-OSS                   every second layer looks at a window of 128 tokens; a number a head for attention's sink
                              and a bias of the router, below 0.01% of the parameters
    DeepSeek-V3               the module that predicts a second token (11.5B of its own), and one bias for each expert,
                              by which its loads are balanced
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

GPT2 = "Radford et al. 2019, table 2; vocabulary and 1,024 tokens: section 2.3"
GPT3 = "Brown et al., arXiv:2005.14165, table 2.1; vocabulary as GPT-2"
LLAMA1 = "Touvron et al., arXiv:2302.13971, table 2"
LLAMA2 = "Touvron et al., arXiv:2307.09288, section 2.2 and table 1"
LLAMA3 = "Llama team, arXiv:2407.21783, table 3"
LLAMA32 = "Llama 3.2 model card and config.json, Meta 2024; rows as long as those of Llama 3"
QWEN3 = "Qwen team, arXiv:2505.09388, table 1; widths and vocabulary: config.json; 4,096 tokens: section 3.2"
OLMO2 = "OLMo team, arXiv:2501.00656, section 2; sizes and vocabulary: config.json"
GEMMA3 = "Gemma team, arXiv:2503.19786, table 1 and section 2; sizes: config.json"
MIXTRAL = "Jiang et al., arXiv:2401.04088, table 1"
MIXTRAL22 = "config.json of mistralai/Mixtral-8x22B-v0.1, Mistral AI 2024; rows as benchmarks of it have"
QWEN3_EXPERTS = "Qwen team, arXiv:2505.09388, table 2; widths and vocabulary: config.json; 4,096 tokens: section 3.2"
GPT_OSS = "OpenAI, model card of gpt-oss, arXiv:2508.10925; config.json; rows: its initial_context_length"
DEEPSEEK3 = "DeepSeek-AI, arXiv:2412.19437, section 4.2; inference/configs/config_671B.json"
MPT = "MosaicML 2023, model cards and config.json of mpt-7b and mpt-30b"
PALM = "Chowdhery et al., arXiv:2204.02311, table 1 and section 2"
MEGATRON = "Narayanan et al., arXiv:2104.04473, table 1"

_LLAMA = MappingProxyType(
    {"gated": True, "norm": "rms", "bias": False, "position": "rotary", "tied": False}
)  # RMSNorm, SwiGLU, RoPE: arXiv:2302.13971, section 2.2

BEFORE_FLASH = MappingProxyType({"fused_attention": False})
"""Runs of before May 2022, when fused attention was published, wrote the T x T scores to memory."""


def _gpt(n_layer: int, d_model: int, n_head: int, vocab: int, seq: int, source: str) -> Mapping[str, object]:
    sizes = {"n_layer": n_layer, "d_model": d_model, "n_head": n_head, "vocab": vocab, "seq": seq, "source": source}
    return MappingProxyType(sizes)


def _llama(
    n_layer: int, d_model: int, n_head: int, kv: int, d_ff: int, vocab: int, seq: int, source: str
) -> Mapping[str, object]:
    sizes = _gpt(n_layer, d_model, n_head, vocab, seq, source)
    return MappingProxyType({**sizes, **_LLAMA, "n_kv_head": kv, "d_ff": d_ff})


def _qwen3(n_layer: int, d_model: int, n_head: int, d_ff: int, tied: bool) -> Mapping[str, object]:
    # heads are 128 wide whatever d_model is, and all sizes have 8 key heads
    return MappingProxyType(
        {**_llama(n_layer, d_model, n_head, 8, d_ff, 151_936, 4096, QWEN3), "head_width": 128, "tied": tied}
    )


def _experts(base: Mapping[str, object], n_expert: int, top_k: int, **options: object) -> Mapping[str, object]:
    return MappingProxyType({**base, "n_expert": n_expert, "top_k": top_k, **options})


def _gpt_oss(n_layer: int, n_expert: int) -> Mapping[str, object]:
    # heads are 64 wide; attention and experts have biases, the head has none; experts are as wide as the model
    base = _llama(n_layer, 2880, 64, 8, 2880, 201_088, 4096, GPT_OSS)
    return _experts(base, n_expert, 4, head_width=64, bias=True)


def _gemma3(n_layer: int, d_model: int, n_head: int, kv: int, width: int, d_ff: int) -> Mapping[str, object]:
    return MappingProxyType(
        {**_llama(n_layer, d_model, n_head, kv, d_ff, 262_144, 32_768, GEMMA3), "head_width": width, "tied": True}
    )


def _mpt(n_layer: int, d_model: int, n_head: int, seq: int) -> Mapping[str, object]:
    return MappingProxyType({**_gpt(n_layer, d_model, n_head, 50_432, seq, MPT), "bias": False, "position": "none"})


def _palm(n_layer: int, d_model: int, n_head: int) -> Mapping[str, object]:
    # heads are 256 wide whatever d_model is, all share one key and value; "SwiGLU", no biases, tied, RoPE
    options = {"head_width": 256, "n_kv_head": 1, "gated": True, "bias": False, "position": "rotary", "tied": True}
    return MappingProxyType({**_gpt(n_layer, d_model, n_head, 256_000, 2048, PALM), **BEFORE_FLASH, **options})


def _megatron(n_layer: int, d_model: int, n_head: int) -> Mapping[str, object]:
    return MappingProxyType({**_gpt(n_layer, d_model, n_head, 51_200, 2048, MEGATRON), **BEFORE_FLASH})


MODELS: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "gpt2": _gpt(12, 768, 12, 50_257, 1024, GPT2),
        "gpt2-medium": _gpt(24, 1024, 16, 50_257, 1024, GPT2),
        "gpt2-large": _gpt(36, 1280, 20, 50_257, 1024, GPT2),
        "gpt2-xl": _gpt(48, 1600, 25, 50_257, 1024, GPT2),
        "gpt3-6.7b": _gpt(32, 4096, 32, 50_257, 2048, GPT3),
        "gpt3-13b": _gpt(40, 5120, 40, 50_257, 2048, GPT3),  # the table says 5140, which 40 heads of 128 do not make
        "gpt3-175b": _gpt(96, 12288, 96, 50_257, 2048, GPT3),
        "llama-7b": _llama(32, 4096, 32, 32, 11008, 32_000, 2048, LLAMA1),
        "llama-65b": _llama(80, 8192, 64, 64, 22016, 32_000, 2048, LLAMA1),
        "llama2-7b": _llama(32, 4096, 32, 32, 11008, 32_000, 4096, LLAMA2),
        "llama2-70b": _llama(80, 8192, 64, 8, 28672, 32_000, 4096, LLAMA2),
        "llama-70b": _llama(80, 8192, 64, 8, 28672, 32_000, 4096, LLAMA2),
        "llama3-8b": _llama(32, 4096, 32, 8, 14336, 128_256, 8192, LLAMA3),
        "llama3-70b": _llama(80, 8192, 64, 8, 28672, 128_256, 8192, LLAMA3),
        "llama3-405b": _llama(126, 16384, 128, 8, 53248, 128_256, 8192, LLAMA3),
        "llama3.2-1b": MappingProxyType({**_llama(16, 2048, 32, 8, 8192, 128_256, 8192, LLAMA32), "tied": True}),
        "llama3.2-3b": MappingProxyType({**_llama(28, 3072, 24, 8, 8192, 128_256, 8192, LLAMA32), "tied": True}),
        "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, True),
        "qwen3-1.7b": _qwen3(28, 2048, 16, 6144, True),
        "qwen3-4b": _qwen3(36, 2560, 32, 9728, True),
        "qwen3-8b": _qwen3(36, 4096, 32, 12288, False),
        "qwen3-14b": _qwen3(40, 5120, 40, 17408, False),
        "qwen3-32b": _qwen3(64, 5120, 64, 25600, False),
        "olmo2-7b": _llama(32, 4096, 32, 32, 11008, 100_352, 4096, OLMO2),
        "olmo2-13b": _llama(40, 5120, 40, 40, 13824, 100_352, 4096, OLMO2),
        "olmo2-32b": _llama(64, 5120, 40, 8, 27648, 100_352, 4096, OLMO2),
        "gemma3-1b": _gemma3(26, 1152, 4, 1, 256, 6912),
        "gemma3-4b": _gemma3(34, 2560, 8, 4, 256, 10240),
        "gemma3-12b": _gemma3(48, 3840, 16, 8, 256, 15360),
        "gemma3-27b": _gemma3(62, 5376, 32, 16, 128, 21504),
        "mixtral-8x7b": _experts(_llama(32, 4096, 32, 8, 14336, 32_000, 32_768, MIXTRAL), 8, 2),
        "mixtral-8x22b": _experts(_llama(56, 6144, 48, 8, 16384, 32_768, 4096, MIXTRAL22), 8, 2),
        "qwen3-30b-a3b": _experts(
            _llama(48, 2048, 32, 4, 6144, 151_936, 4096, QWEN3_EXPERTS), 128, 8, expert_ff=768, head_width=128
        ),
        "qwen3-235b-a22b": _experts(
            _llama(94, 4096, 64, 4, 12288, 151_936, 4096, QWEN3_EXPERTS), 128, 8, expert_ff=1536, head_width=128
        ),
        "gpt-oss-20b": _gpt_oss(24, 32),
        "gpt-oss-120b": _gpt_oss(36, 128),
        "deepseek-v3": _experts(
            _llama(61, 7168, 128, 128, 18432, 129_280, 4096, DEEPSEEK3),
            256,
            8,
            expert_ff=2048,
            n_shared=1,
            n_dense=3,
            balance="bias",  # and a balance loss of each sequence, 10,000 times weaker (arXiv:2412.19437, 2.1.2)
            head_width=128,
            q_lora=1536,
            kv_lora=512,
            rope_width=64,
        ),
        "mpt-7b": _mpt(32, 4096, 32, 2048),
        "mpt-30b": _mpt(48, 7168, 64, 8192),
        "palm-8b": _palm(32, 4096, 16),
        "palm-62b": _palm(64, 8192, 32),
        "palm-540b": _palm(118, 18432, 48),
        "megatron-1.7b": _megatron(24, 2304, 24),
        "megatron-3.6b": _megatron(30, 3072, 32),
        "megatron-7.5b": _megatron(36, 4096, 32),
        "megatron-18.4b": _megatron(40, 6144, 48),
        "megatron-39.1b": _megatron(48, 8192, 64),
        "megatron-76.1b": _megatron(60, 10240, 80),
        "megatron-145.6b": _megatron(80, 12288, 96),
        "megatron-310.1b": _megatron(96, 16384, 128),
        "megatron-529.6b": _megatron(105, 20480, 128),
        "megatron-1t": _megatron(128, 25600, 160),
    }
)


def canonical(name: str) -> str:
    """The name in MODELS of a model that people write in several ways: `Llama-3.1-8B` and `llama3.1-8b` are `llama3-8b`
    (the paper of Llama 3 describes the models of 3.1), `Qwen-3-8B` is `qwen3-8b`.

    Other names come back in lower case."""
    short = re.sub(r"^(llama|qwen|olmo|gemma)-(\d(?:\.\d)?)-(?=\d)", r"\1\2-", name.lower())
    return short.replace("llama3.1-", "llama3-")
