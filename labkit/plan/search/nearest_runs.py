"""What others have reached with a model and devices like these: the published runs that are nearest to a question.

    distance    |log of the ratio of parameters| + half |log of the ratio of devices| + half |log of the ratio of tokens
                of a row| + 2 for another family of devices
    families    A100; H100 and H200; B200; the smaller cards of Ada (L4, L40S, RTX 4090); each other one by itself

A model with experts stands beside models with experts alone, and a dense one beside dense ones: experts reach less of
the peak, since what is sent to them and back is waited for.

Of runs that share model, device, number of devices and tokens of a row only the best counts: the others say how not to
do it. Runs in fp8 are told of questions in fp8 alone: all MFU is of the peak of bf16, and they reach more of it.

Further runs are those of papers. Megatron-LM's table counts recomputation as useful work, as its head says; three
quarters of it are the flops of the model, and these are what stands here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from types import MappingProxyType
from typing import NamedTuple

from labkit.plan.machine.hardware import Hardware
from labkit.plan.model.shape import ModelShape
from labkit.plan.search.published import PublishedRun, published_runs

MEGATRON = "Megatron-LM, arXiv:2104.04473, table 1"
LLAMA3 = "Llama 3, arXiv:2407.21783, table 4"
NAMES = MappingProxyType({
    "foundry": "llm-foundry", "playbook": "Ultra-Scale Playbook", "torchtitan": "torchtitan",
    "megatron": "Megatron-LM", "automodel": "NeMo AutoModel", "deepseek": "DeepSeek-AI",
})  # fmt: skip
FAMILIES = MappingProxyType(
    {
        "a100": "A100",
        "h100": "Hopper",
        "h200": "Hopper",
        "h800": "Hopper",
        "l4": "Ada",
        "l40s": "Ada",
        "rtx-4090": "Ada",
    }
)
"""Devices that reach about the same share of their peaks, by the beginning of their names."""
FURTHER = (
    ("megatron-1.7b", "a100-80gb", 32, 2048, 0.75 * 0.44, MEGATRON),
    ("megatron-3.6b", "a100-80gb", 64, 2048, 0.75 * 0.44, MEGATRON),
    ("megatron-7.5b", "a100-80gb", 128, 2048, 0.75 * 0.46, MEGATRON),
    ("megatron-18.4b", "a100-80gb", 256, 2048, 0.75 * 0.43, MEGATRON),
    ("megatron-39.1b", "a100-80gb", 512, 2048, 0.75 * 0.44, MEGATRON),
    ("megatron-76.1b", "a100-80gb", 1024, 2048, 0.75 * 0.45, MEGATRON),
    ("megatron-145.6b", "a100-80gb", 1536, 2048, 0.75 * 0.47, MEGATRON),
    ("megatron-310.1b", "a100-80gb", 1920, 2048, 0.75 * 0.50, MEGATRON),
    ("megatron-529.6b", "a100-80gb", 2520, 2048, 0.75 * 0.52, MEGATRON),
    ("megatron-1t", "a100-80gb", 3072, 2048, 0.75 * 0.52, MEGATRON),
    ("llama3-405b", "h100", 8192, 8192, 0.43, LLAMA3),
    ("llama3-405b", "h100", 16384, 8192, 0.41, LLAMA3),
    ("llama3-405b", "h100", 16384, 131_072, 0.38, LLAMA3),
    ("palm-540b", "tpu-v4", 6144, 2048, 0.462, "PaLM, arXiv:2204.02311, section 4.1"),
)
"""Model, device, number of devices, tokens of a row, MFU and source of further runs."""
CLOSE = 4
"""Numbers of devices, and of tokens of a row, within this factor of each other are told as one range."""


class Best(NamedTuple):
    """The best MFU of one source with one model on so many devices, with rows of `seq` tokens."""

    source: str
    model: str
    n_params: int
    device: str
    n_ranks: int
    seq: int
    mfu: float
    experts: bool


class Reached(NamedTuple):
    """What one source reached with one model on one kind of device: its `runs` that are close to each other."""

    runs: tuple[Best, ...]
    distance: float

    def __str__(self) -> str:
        """`40 to 46% MFU (llm-foundry, mpt-7b on 8 to 64 h100, rows of 2,048 tokens)`"""
        run = self.runs[0]
        share = _range([round(100 * best.mfu) for best in self.runs])
        n, seq = _range([best.n_ranks for best in self.runs]), _range([best.seq for best in self.runs])
        return f"{share}% MFU ({run.source}, {run.model} on {n} {run.device}, rows of {seq} tokens)"


def _range(values: list[int]) -> str:
    low, high = f"{min(values):,}", f"{max(values):,}"
    return low if low == high else f"{low} to {high}"


def near(
    shape: ModelShape, hardware: Hardware, n_ranks: int, count: int = 1, eight_bits: bool = False
) -> list[Reached]:
    """The `count` nearest of what was published, nearest first: of each source, model and device the run that is
    nearest in devices and in tokens of a row, and those within a factor of CLOSE of the question in both. With
    `eight_bits` of runs in fp8 alone, otherwise of all others; of models with experts alone if `shape` has some.

    ValueError for counts below 1."""
    if n_ranks < 1 or count < 1:
        raise ValueError(f"n_ranks and count are whole numbers of at least 1, got {n_ranks} and {count}")
    groups: dict[tuple[str, str, str], list[Best]] = {}
    for best in (best for best in _all(eight_bits) if best.experts == bool(shape.n_expert)):
        groups.setdefault((best.source, best.model, best.device), []).append(best)

    def away(best: Best) -> tuple[float, float]:
        return abs(math.log(best.n_ranks / n_ranks)), abs(math.log(best.seq / shape.seq))

    reached = []
    for members in groups.values():
        nearest = min(members, key=lambda best: sum(away(best)))
        close = tuple(best for best in members if max(away(best)) <= math.log(CLOSE)) or (nearest,)
        distance = abs(math.log(nearest.n_params / shape.n_active)) + sum(away(nearest)) / 2
        reached.append(Reached(close, distance + 2 * (family(nearest.device) != family(hardware.name))))
    return sorted(reached, key=lambda group: group.distance)[:count]


def told(shape: ModelShape, hardware: Hardware, n_ranks: int, eight_bits: bool = False) -> str:
    """One line: `published near this: 40 to 46% MFU (llm-foundry, mpt-7b on 8 to 64 h100, rows of 2,048 tokens)`.

    Further away than a model of 4 times the size, or another family of devices, is not near: then it says so."""
    (nearest,) = near(shape, hardware, n_ranks, 1, eight_bits)
    far = nearest.distance > math.log(4)
    words = "nothing near this is published; nearest" if far else "published near this"
    return f"{words}{', in fp8' * eight_bits}: {nearest}"


def family(device: str) -> str:
    """The family of a device by its name; of one that is not in FAMILIES, its own name."""
    names = sorted((name for name in FAMILIES if device.startswith(name)), key=len)
    return FAMILIES[names[-1]] if names else device


@cache
def _all(eight_bits: bool) -> tuple[Best, ...]:
    """The best run of each source, model, device, number of devices and tokens of a row, in fp8 or not."""
    groups: dict[tuple[str, str, str, int, int], Best] = {}
    runs = [run for run in published_runs() if run.recipe.eight_bits == eight_bits]
    for best in (*_measured(runs), *(() if eight_bits else _further())):
        key = best.source, best.model, best.device, best.n_ranks, best.seq
        if key not in groups or groups[key].mfu < best.mfu:
            groups[key] = best
    return tuple(groups.values())


def _measured(runs: Iterable[PublishedRun]) -> Iterable[Best]:
    for run in runs:
        if not run.ran or run.step_s is None or run.lacks:  # an axis that a layout lacks has devices, too
            continue
        n, shape, hardware = run.layout.size, run.shape, run.hardware
        speed = run.recipe.batch_size * shape.seq / run.step_s
        mfu = run.mfu or shape.mfu(speed, n * hardware.peak("bf16"))
        yield Best(NAMES.get(run.source, run.source), shape.name, shape.n_active, hardware.name, n, shape.seq, mfu,
                   bool(shape.n_expert))  # fmt: skip


def _further() -> Iterable[Best]:
    for model, device, n, seq, mfu, source in FURTHER:
        yield Best(source, model, ModelShape.preset(model).n_params, device, n, seq, mfu, experts=False)
