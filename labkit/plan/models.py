"""Models that were published, by their sizes: what `ModelShape.preset` knows, each with where it is written.

Vocabularies are those that were trained with (padded where the paper says so). The Megatron sizes are the ten rows of
one table, all with a vocabulary of 51,200 and 2,048 tokens; their names are what the table calls them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

GPT2 = "Radford et al. 2019, table 2; vocabulary and 1,024 tokens: section 2.3"
GPT3 = "Brown et al., arXiv:2005.14165, table 2.1; vocabulary as GPT-2"
LLAMA1 = "Touvron et al., arXiv:2302.13971, table 2"
LLAMA2 = "Touvron et al., arXiv:2307.09288, section 2.2 and table 1"
LLAMA3 = "Llama team, arXiv:2407.21783, table 3"
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


def _palm(n_layer: int, d_model: int, n_head: int) -> Mapping[str, object]:
    # heads are 256 wide whatever d_model is, all share one key and value; "SwiGLU", no biases, tied, RoPE
    more = {"head_width": 256, "n_kv_head": 1, "gated": True, "bias": False, "position": "rotary", "tied": True}
    return MappingProxyType({**_gpt(n_layer, d_model, n_head, 256_000, 2048, PALM), **BEFORE_FLASH, **more})


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
