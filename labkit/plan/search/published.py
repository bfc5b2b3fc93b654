"""Training runs that others have measured and published, in the planner's own terms, to hold its predictions against.

    runs/playbook.csv      1,631 runs of a 1B and an 8B model on 8 to 512 H100, 1,026 of which ran: chart data of the
                           Ultra-Scale Playbook (Hugging Face, 2025, Apache-2.0)
    runs/foundry.csv       MPT models of 125M to 70B with FSDP on H100 and A100: the benchmark tables of llm-foundry
                           (MosaicML, 2023, Apache-2.0), scripts/train/benchmarking/README.md
    runs/torchtitan.csv    Llama 3.1 with FSDP2, TP, PP and CP on 8 to 512 H100: torchtitan's benchmark of
                           December 2024 (BSD)
    runs/experts.csv       models with experts on 64 to 2,048 H100 and H800: Megatron-LM's README of its experts, the
                           recipes of Megatron-MoE-ModelZoo, the performance summaries of Megatron-Bridge and NeMo
                           AutoModel (NVIDIA, 2024 to 2026), DeepSeek-V3 (arXiv:2412.19437)

What the sources do not say is assumed, here and nowhere else:

    playbook      1F1B, no recomputation, sequence parallelism with tp > 1, bf16 with fp32 masters, gradients added up
                  in fp32; its memory is in GiB, though its column is headed GB (labkit.plan.search.nanotron says why)
    foundry       the "DEFAULT" mixed precision gathers bf16 weights and keeps fp32 masters (amp), "PURE" is bf16
    torchtitan    FSDP2's mixed precision, as foundry's DEFAULT; with float8 the linears of the blocks multiply 8-bit
                  copies, and their weights are gathered in 8 bits; with cp attention goes by the ring
    megatron      ZeRO-1 (ZeRO-3 for Megatron-FSDP) with fp32 masters, routing balanced, gradients added up in fp32 (in
                  bf16 where the recipes of Megatron-Bridge say so). For Mixtral no recomputation, and for both of its
                  speeds the one mapping of which its README tells; where others compute norms and activations again,
                  labkit's "selective". Neighbours along ep have neighbouring ranks there, and in labkit all p stages of
                  a pipeline lie between them: nodes of 8 p devices stand for that, which changes nothing else but
                  messages between stages
    with tp > 1   those runs of megatron cut attention alone along tp. Their ep spans tp: each of its ranks holds whole
                  experts and sends 1/tp of the tokens. labkit cuts experts along tp, too, and deals them out to ep/tp
                  ranks of dp, so that a rank holds as many parameters; but each rank of tp sends all of the tokens, tp
                  times as many. That is predicted, as `differs` says, and nothing makes up for it
    all_to_alls   a run may send a token once to each node (DeepEP) and behind computing ("all_to_alls beside
                  computing"). labkit sends all k copies, and waits for them
    automodel     FSDP2 with weights and gradients in bf16, experts dealt out to all ranks, routing balanced
    gpt-oss       half of its layers attend to no more than the last 128 tokens, as its model card says. All of labkit's
                  layers attend to the whole row
    deepseek      180,000 hours of a device for 1e12 tokens; one row in a micro-batch; 1f1b stands for DualPipe, which
                  hides the all_to_alls; all 8 copies of a token travel, where DeepSeek sends it to 4 nodes at most, and
                  once to each. The ranks as for megatron; the H800's NVLink as section 3.2.2 tells

Fitted to were every fourth run of the playbook and every second one of foundry; the others were held out. Nothing was
fitted to a run with experts.

A run whose rows contradict each other (micro-batches times rows is not the batch) is left out.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import NamedTuple

from labkit.plan.job.recipe import Recipe
from labkit.plan.machine.hardware import Hardware
from labkit.plan.machine.link import Link
from labkit.plan.model.shape import ModelShape
from labkit.plan.partition.layout import Layout

GB, GIB = 1e9, 2**30
PLAYBOOK = MappingProxyType({"1B": (16, 2048, 32, 8192), "8B": (32, 4096, 32, 14336)})
"""Layers, width, heads and hidden width of the playbook's models."""
SICK, LATE_S = 0.035, 0.22
"""Of the playbook's 725 pipelines 304 need 0.2 to 0.3 s more for each message between stages, whatever its size; other
runs of the same layout do not. The share of such runs grows with the nodes n as 1 - (1 - 0.035)^n, from 1 of 27 on one
node to 108 of 110 on 64: as if one node in thirty were sick.

Late runs are those of newer code, too: with 4 stages and more, nearly all runs that hold too little to have kept what
sequence parallelism gathers are late, and nearly none of the others (plan.search.nanotron). With 2 stages most hold
little, and half of them are late, more of them on more nodes."""
TIED_BELOW = 10_000
"""The playbook's models tie their embeddings below this hidden width."""
MPT = MappingProxyType({
    "125m": (12, 768, 12), "350m": (24, 1024, 16), "760m": (24, 1536, 12), "1b": (24, 2048, 16), "3b": (32, 2560, 20),
    "7b": (32, 4096, 32), "13b": (40, 5120, 40), "30b": (48, 7168, 56), "70b": (80, 8192, 64),
})  # fmt: skip
"""Layers, width and heads of the MPT models; their hidden width is four times the width."""


class PublishedRun(NamedTuple):
    """One run: what was trained, how, on what, and what was measured.

    step_s, n_bytes, mfu   seconds of a step, bytes of a GPU, share of the peak; None where they are not published
    ran                    False for a run that crashed or ran out of memory
    lacks                  the part of this run that the planner cannot predict, "" if there is none
    differs                how the layout that is predicted differs from that of the run, "" if it does not
    fitted                 True if the losses of practice were fitted to this run; others were held out
    """

    source: str
    shape: ModelShape
    hardware: Hardware
    layout: Layout
    recipe: Recipe
    step_s: float | None
    n_bytes: float | None
    mfu: float | None
    ran: bool = True
    lacks: str = ""
    fitted: bool = False
    differs: str = ""

    @property
    def group(self) -> tuple[str, str, int]:
        """Runs of one group answer the same question: this model on so many devices, how?"""
        return self.source, self.shape.name, self.layout.size


@cache
def published_runs() -> tuple[PublishedRun, ...]:
    """All runs, source by source."""
    return (*_marked(_playbook(), 4), *_marked(_foundry(), 2), *_torchtitan(), *_with_experts())


def _marked(runs: Iterator[PublishedRun], every: int) -> Iterator[PublishedRun]:
    """The runs, with every so-many-th of them marked as fitted to, the first one too."""
    for index, run in enumerate(runs):
        yield run._replace(fitted=index % every == 0)


def _table(name: str) -> list[dict[str, str]]:
    text = resources.files("labkit.plan.search").joinpath("runs", name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def _playbook() -> Iterator[PublishedRun]:
    h100 = Hardware.preset("h100")
    hardware = h100.changed(practice=replace(h100.practice, sick=SICK, late_s=LATE_S))
    shapes = {}
    for name, (n_layer, d_model, n_head, d_ff) in PLAYBOOK.items():
        shapes[name] = ModelShape.gpt(
            n_layer, d_model, n_head, 131_072, 4096, d_ff=d_ff, gated=True, norm="rms", bias=False, position="rotary",
            tied=d_ff < TIED_BELOW, name=f"playbook-{name.lower()}",
        )  # fmt: skip
    for row in _table("playbook.csv"):
        layout = Layout(int(row["dp"]), int(row["pp"]), int(row["tp"]))
        batch, n_micro = int(row["batch"]), int(row["n_micro"])
        if layout.dp * int(row["rows"]) * n_micro != batch:
            continue
        recipe = Recipe(
            "zero1" if row["zero"] == "1" else "ddp", batch_size=batch, n_micro=n_micro, precision="bf16",
            fp32_gradients=True, sequence_parallel=layout.tp > 1,
        )  # fmt: skip
        ran = bool(row["tokens_s_gpu"])
        yield PublishedRun(
            "playbook", shapes[row["model"]], hardware, layout, recipe,
            batch * 4096 / (float(row["tokens_s_gpu"]) * layout.size) if ran else None,
            float(row["gb"]) * GIB if row["gb"] else None, float(row["mfu"]) / 100 if row["mfu"] else None, ran,
        )  # fmt: skip


def _foundry() -> Iterator[PublishedRun]:
    for row in _table("foundry.csv"):
        n_layer, d_model, n_head = MPT[row["model"]]
        seq, gpus, n_micro = int(row["seq"]), int(row["gpus"]), int(row["n_micro"])
        batch = int(row["rows"]) * n_micro * gpus
        recipe = Recipe(
            "zero3", batch_size=batch, n_micro=n_micro, precision="bf16" if row["pure"] == "1" else "amp",
            recompute="full" if row["checkpointing"] == "1" else "none",
        )  # fmt: skip
        yield PublishedRun(
            "foundry", ModelShape.gpt(n_layer, d_model, n_head, 50_368, seq, bias=False, name=f"mpt-{row['model']}"),
            Hardware.preset(row["device"]), Layout(gpus), recipe,
            batch * seq / (float(row["tokens_s_gpu"]) * gpus), None, float(row["mfu"]) / 100,
        )  # fmt: skip


def _torchtitan() -> Iterator[PublishedRun]:
    # the benchmark's H100 are of 96 GB with HBM2e at 2.4 TB/s and 500 W
    hardware = Hardware.preset("h100").changed(memory_bytes=96 * GB, bytes_per_s=2.4e12)
    for row in _table("torchtitan.csv"):
        name = {"llama3.1-8b": "llama3-8b", "llama3.1-70b": "llama3-70b", "llama3.1-405b": "llama3-405b"}[row["model"]]
        seq, pp = int(row["seq"]), int(row["pp"])
        layout = Layout(int(row["dp_shard"]), pp, int(row["tp"]), int(row["cp"]))
        rows = int(row["local_batch"])
        schedule, float8 = row["schedule"] or "1f1b", row["float8"] == "yes"
        recipe = Recipe(
            "zero3", schedule, batch_size=rows * layout.dp, n_micro=rows if pp > 1 else 1,
            stages_per_rank=2 if schedule == "interleaved" else 1, precision="fp8" if float8 else "amp",
            fp32_gradients=float8, recompute=row["recompute"], sequence_parallel=layout.tp > 1,
            fp8_gathers=float8, reshard=pp == 1,  # its default with a pipeline: no gathers for each micro-batch
        )  # fmt: skip
        yield PublishedRun(
            "torchtitan", ModelShape.preset(name).changed(seq=seq, name=name), hardware, layout, recipe,
            rows * layout.dp * seq / (float(row["tokens_s_gpu"]) * int(row["gpus"])), float(row["GiB"]) * GIB, None,
            True,
        )  # fmt: skip


def _with_experts() -> Iterator[PublishedRun]:
    h100 = Hardware.preset("h100")
    slower = Link("nvlink-h800", h100.intra.alpha_s, 160e9, "arXiv:2412.19437, section 3.2.2; latency as of the H100's")
    devices = {"h100": h100, "h800": h100.changed(name="h800", intra=slower)}
    for row in _table("experts.csv"):
        gpus, pp, tp, batch, seq = (int(row[name]) for name in ("gpus", "pp", "tp", "global_batch", "seq"))
        shape = ModelShape.preset(row["model"]).changed(seq=seq, name=row["model"])
        layout = Layout(gpus // (pp * tp), pp, tp, ep=int(row["ep"]) // tp)
        stages = int(row["stages"]) if int(row["stages"]) * pp <= shape.n_layer else 1
        recipe = Recipe(
            row["strategy"], "interleaved" if stages > 1 else "1f1b", batch,
            batch // layout.dp // int(row["micro_rows"]), stages, recompute=row["recompute"],
            precision=row["precision"], fp32_gradients=row["gradients"] == "fp32", sequence_parallel=tp > 1,
        )  # fmt: skip
        hardware = devices[row["device"]]
        tokens, tflops = batch * seq, row["tflops_gpu"]
        if row["step_s"]:
            step_s = float(row["step_s"])
        elif row["tokens_s_gpu"]:
            step_s = tokens / (float(row["tokens_s_gpu"]) * gpus)
        elif tflops:
            step_s = tokens * shape.flops_per_token() / (float(tflops) * 1e12 * gpus)
        else:
            step_s = tokens / 1e12 * float(row["gpu_hours_per_trillion"]) * 3600 / gpus
        yield PublishedRun(
            row["source"], shape, hardware.changed(node_size=hardware.node_size * pp), layout, recipe, step_s, None,
            float(tflops) * 1e12 / hardware.peak("bf16") if tflops else None,
            differs=" and ".join(_differences(row, stages)),
        )  # fmt: skip


def _differences(row: dict[str, str], stages: int) -> Iterator[str]:
    """What labkit has in the place of a part of the run that it cannot do."""
    if int(row["tp"]) > 1:
        yield f"experts cut along tp in the place of whole ones dealt out to ep={row['ep']} that spans tp={row['tp']}"
    if stages != int(row["stages"]):
        yield (
            f"{stages} stage on a rank for {row['stages']}: {int(row['pp']) * int(row['stages'])} stages have the "
            "embedding and the head as layers of their own, which labkit's have not"
        )
