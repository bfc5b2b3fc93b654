"""Claims on system design: rules on which strategy suits which size of model, checked with the planner."""

from __future__ import annotations

from collections.abc import Iterable

from labkit.course.claims.finding import Finding, Setting
from labkit.plan.job.recipe import Recipe
from labkit.plan.machine.hardware import Hardware
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout
from labkit.plan.pocket.zero_table import ModelState
from labkit.plan.search.search import HEADROOM, WORDS, Plan, Search
from labkit.plan.step.memory import predict_memory
from labkit.plan.step.time import predict_step


def fastest(model: str, device: str, layouts: Iterable[Layout], batch: int) -> Plan:
    """The planner's fastest plan for a model on one of these layouts, over all strategies, schedules and batches."""
    shape = ModelShape.preset(model)
    shape = shape.changed(vocab=shape.vocab + -shape.vocab % WORDS)
    search = Search(shape, Hardware.preset(device), HEADROOM, "bf16")
    return min((plan for layout in layouts for plan in search.on(layout, batch, "adamw")), key=lambda plan: plan.step_s)


WITH_TP = (Layout(32, 1, 2), Layout(16, 1, 4), Layout(8, 1, 8))
"""64 devices with tensor parallelism over 2, 4 and 8 of them."""


def alone(model: str, device: str) -> float:
    """Seconds of the fastest step of 512 rows without tensor parallelism on 64 devices, over those of the fastest with
    it."""
    return fastest(model, device, (Layout(64),), 512).step_s / fastest(model, device, WITH_TP, 512).step_s


def c91() -> Finding:
    """Plan FSDP with and without tensor parallelism on 64 GPUs, for batches of many rows and of few."""
    few = fastest("megatron-18.4b", "h100", (Layout(64), *WITH_TP), 32)
    many = {
        f"{size} on 64 {device[:4].upper()}s, 512 rows: alone / with TP": alone(f"megatron-{size.lower()}", device)
        for size, device in (("18.4B", "h100"), ("18.4B", "a100-80gb"), ("39.1B", "h100"))
    }
    return Finding.of(
        [
            *(Setting(name, 1.2, ratio, "times as long", rule="at least") for name, ratio in many.items()),
            Setting("18.4B on 64 H100s, 32 rows: runs", "with TP", "with TP" if few.layout.tp > 1 else "alone"),
        ],
        premise="the batch has fewer rows than there are GPUs",
        least_longer=min(many.values()) - 1,
        most_longer=max(many.values()) - 1,
    )


def c92() -> Finding:
    """Divide a device's memory by the bytes of state per parameter under DDP: the largest model, no activations."""
    named = {
        name: Hardware.preset(name.lower()).memory_bytes.value for name in ("A100-40GB", "A100-80GB", "H200", "B200")
    }
    sizes = {**named, "a device of 288 GB": 288e9}
    largest = {name: n_bytes / ModelState(1e9, 1).bytes_per_param(0) for name, n_bytes in sizes.items()}
    return Finding.of(
        [
            Setting(f"{name}: largest model under DDP", 10e9, n_params, "parameters", rule="at least")
            for name, n_params in largest.items()
        ],
        premise="a device has 160 GB, and room for activations on top",
        billions_on_80_gb=largest["A100-80GB"] / 1e9,
        billions_on_141_gb=largest["H200"] / 1e9,
        billions_on_180_gb=largest["B200"] / 1e9,
        billions_on_288_gb=largest["a device of 288 GB"] / 1e9,
    )


def without_offload(model: str, device: str, n_ranks: int) -> str:
    """Say whether a model fits the devices under FSDP with checkpointing and one row per rank: "fits" or not."""
    recipe = Recipe("zero3", batch_size=n_ranks, precision="bf16", recompute="full")
    needs = predict_memory(ModelShape.preset(model), Layout(n_ranks), recipe, 0, "cuda").total
    return "fits" if needs < Hardware.preset(device).memory_bytes.value * (1 - HEADROOM) else "does not fit"


def c93() -> Finding:
    """Plan the memory of one rank, with everything on the device, for models with more than 100 GB of state."""
    no = "does not fit"
    return Finding.of(
        [
            Setting("7B (108 GB) on 8 A100s of 80 GB", no, without_offload("llama-7b", "a100-80gb", 8)),
            Setting("70B (1.1 TB) on 64 A100s of 80 GB", no, without_offload("llama-70b", "a100-80gb", 64)),
            Setting("7B (108 GB) on 2 A100s of 40 GB", no, without_offload("llama-7b", "a100-40gb", 2)),
            Setting("70B (1.1 TB) on 8 A100s of 80 GB", no, without_offload("llama-70b", "a100-80gb", 8)),
        ],
        premise="the state over the number of GPUs is more than one of them holds",
        gb_of_7b=ModelState(ModelShape.preset("llama-7b").n_params, 1).held(0).total / 1e9,
        tb_of_70b=ModelState(ModelShape.preset("llama-70b").n_params, 1).held(0).total / 1e12,
    )


def c94() -> Finding:
    """Plan memory and time of a step of 4 million tokens, and compute the days for the paper's 2 trillion."""
    shape, layout, a100 = ModelShape.preset("llama-70b"), Layout(dp=64), Hardware.preset("a100-80gb")
    recipe = Recipe("zero3", batch_size=1024, n_micro=16, precision="bf16", recompute="full")
    step_s = predict_step(shape, layout, recipe, a100).total
    days = 2e12 / (recipe.batch_size * shape.seq) * step_s / 86_400
    held = predict_memory(shape, layout, recipe, 0, "cuda").total
    return Finding.of(
        [
            Setting("bytes of a GPU, 80 GB at most", 80e9, held, "B", rule="at most", within=0),
            Setting("2 trillion tokens: days, a year at most", 365, days, "days", rule="at most", within=0),
        ],
        premise="the question is whether it fits, not how long it takes",
        step_s=step_s,
        gb_of_a_gpu=held / 1e9,
        years=days / 365.25,
    )
