"""What GPUs compute, how fast, and in how much memory: the parts of gpu.py that are numbers.

products     Tflop/s of square products in fp32, tf32, fp16, bf16 and fp8, beside the data sheet
roofline     the ops of a GPT's forward, in bf16: seconds, and what the measured speeds predict
memory       MemoryProbe's live bytes beside the allocator's, by precision and recomputation
strategies   1, 2 and 4 ranks that share the GPU: loss beside one process in float64 on the CPU, peak memory beside
             the prediction, seconds a step
offload      bytes a second between host and device, pinned and not
torch        labkit's mechanisms beside torch's own (strategies.py), one rank
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from labkit import Cluster, WorkerError
from labkit.plan.job.recipe import Recipe
from labkit.plan.partition.layout import Layout
from labkit.train.config import GPTConfig

SMALL = GPTConfig(n_layer=2, d_model=64, n_head=4, vocab=128, seq=32, tied=False)
LARGE = GPTConfig(n_layer=12, d_model=1024, n_head=16, vocab=32768, seq=1024)
Row = dict[str, Any]

LAYOUTS = {
    "ddp": (Layout(2), Recipe("ddp", batch_size=8)),
    "zero1": (Layout(2), Recipe("zero1", batch_size=8)),
    "zero2": (Layout(4), Recipe("zero2", batch_size=8)),
    "zero3": (Layout(4), Recipe("zero3", batch_size=8)),
    "zero3, kept whole": (Layout(2), Recipe("zero3", batch_size=8, reshard=False)),
    "hsdp": (Layout(4), Recipe("zero3", batch_size=8, shard_ranks=2)),
    "zero3, offloaded": (Layout(2), Recipe("zero3", batch_size=8, offload=True)),
    "tp": (Layout(tp=2), Recipe(batch_size=8)),
    "sp": (Layout(tp=2), Recipe(batch_size=8, sequence_parallel=True)),
    "pp": (Layout(pp=2), Recipe(batch_size=8, n_micro=4)),
    "dp x pp": (Layout(dp=2, pp=2), Recipe("zero1", batch_size=8, n_micro=2)),
    "pp x tp": (Layout(pp=2, tp=2), Recipe(batch_size=8, n_micro=2)),
    "one rank": (Layout(), Recipe(batch_size=8)),
    "one rank, recomputed": (Layout(), Recipe(batch_size=8, recompute="full")),
    "one rank, bf16": (Layout(), Recipe(batch_size=8, precision="bf16")),
    "one rank, amp": (Layout(), Recipe(batch_size=8, precision="amp")),
    "one rank, fp16": (Layout(), Recipe(batch_size=8, precision="fp16")),
    "one rank, fp8": (Layout(), Recipe(batch_size=8, precision="fp8")),
    "zero3, bf16": (Layout(2), Recipe("zero3", batch_size=8, precision="bf16")),
}
"""Every strategy at 1, 2 or 4 ranks, every precision."""
LOSS_ERROR = {"fp32": 2e-4, "bf16": 2e-2, "amp": 2e-2, "fp16": 5e-3, "fp8": 8e-2}
"""How far a loss of about 5 may be from that of float64 after three steps: roundings of the products, 2^-11 in tf32 or
2^-9 in bf16 and 2^-4 in fp8, of which those of many terms cancel."""


# What the ranks run


def seconds_of(op: Callable[[], object], device: str, repeats: int) -> float:
    """Median seconds of an op, the device's work included."""
    on_gpu = torch.device(device).type == "cuda"
    times = []
    for attempt in range(repeats + 2):
        if on_gpu:
            torch.cuda.synchronize()
        started = time.perf_counter()
        op()
        if on_gpu:
            torch.cuda.synchronize()
        if attempt >= 2:
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def products(device: str, quick: bool) -> list[Row]:
    """Rates of [n, n] x [n, n] products."""
    from labkit.train.formats import E4M3
    from labkit.train.fp8 import eight_bits, emulated, of_codes

    rows, sheet = [], sheet_of(device)
    kinds = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}
    if torch.device(device).type == "cuda":
        kinds["tf32"] = torch.float32
    for size in (128, 256) if quick else (1024, 2048, 4096, 8192):
        for kind, dtype in kinds.items():
            torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
            a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
            op: Callable[[], object] = lambda a=a, b=b: a @ b  # noqa: E731 - one of two
            if kind == "fp8":
                (left, one), (right, other) = eight_bits(a, E4M3), eight_bits(b, E4M3)
                op = lambda: of_codes(left, one, right, other, None, torch.bfloat16)  # noqa: E731, B023
            rate = 2 * size**3 / seconds_of(op, device, 3 if quick else 20)
            peak = sheet.peak(kind) if sheet is not None and kind in {item.name for item in sheet.flops} else None
            row = {"product": kind, "size": size, "Tflop/s": rate / 1e12, "of the sheet": peak and rate / peak}
            rows.append(row | ({"note": emulated(a.device)} if kind == "fp8" and emulated(a.device) else {}))
    torch.backends.cuda.matmul.allow_tf32 = False
    return rows


def sheet_of(device: str) -> Any:
    """The data sheet of this GPU, if labkit has one."""
    from labkit.plan.machine.devices import row_of
    from labkit.plan.machine.hardware import Hardware

    if torch.device(device).type != "cuda":
        return None
    known = row_of(torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory)
    return None if known is None else Hardware.preset(known)


def roofline(device: str, quick: bool) -> list[Row]:
    """The ops of one block and of the head, beside what the speeds measured here predict."""
    from labkit.plan.model.shape import ModelShape
    from labkit.plan.step.roofline import operations, setting_in
    from labkit.probe.machine import measure_hardware

    config = SMALL if quick else LARGE
    with Cluster(1, device=device, quiet=True, timeout_s=300) as alone:
        here = alone.run(measure_hardware, 256 if quick else 4096)[0].value
    t, d, v, h = 8 * config.seq, config.d_model, config.vocab, config.n_head

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    x, wide, up, head, norm = numbers(t, d), numbers(t, 4 * d), numbers(4 * d, d), numbers(v, d), numbers(d)
    q, k, values = (numbers(8, h, config.seq, d // h) for _ in range(3))
    F = torch.nn.functional
    ops: dict[str, Callable[[], object]] = {
        "norm": lambda: F.layer_norm(x, (d,), norm, norm),
        "query": lambda: x @ up[:d].T,
        "attention": lambda: F.scaled_dot_product_attention(q, k, values, is_causal=True),
        "residual sum": lambda: x + x,
        "up": lambda: x @ up.T,
        "gelu": lambda: F.gelu(wide),
        "down": lambda: wide @ up,
        "logits": lambda: x @ head.T,
    }
    shape = ModelShape.of(config)
    laws = {op.name: op for op in operations(shape, setting_in(shape, "bf16", 8))}
    rows = []
    for name, op in ops.items():
        law, measured = laws[name], seconds_of(op, device, 3 if quick else 20)
        predicted = law.seconds(here, "bf16")
        rows.append(
            {"op": name, "flop/byte": law.intensity, "bound by": law.bound(here, "bf16"),
             "predicted us": predicted * 1e6, "measured us": measured * 1e6,
             "measured / predicted": measured / predicted}
        )  # fmt: skip
    return rows


def memory(device: str, quick: bool) -> list[Row]:
    """The peak of a step: MemoryProbe's, and what the allocator gained."""
    config = SMALL if quick else GPTConfig(n_layer=8, d_model=768, n_head=12, vocab=16384, seq=512)
    rows = []
    with Cluster(1, device=device, quiet=True, timeout_s=120) as cluster:
        for precision, recompute in (("fp32", "none"), ("fp32", "full"), ("bf16", "none"), ("amp", "selective")):
            recipe = Recipe(batch_size=8, precision=precision, recompute=recompute)
            seen = cluster.run(remembered, config, recipe)[0].value
            rows.append({"precision": precision, "recompute": recompute, **seen})
    return rows


def remembered(group: Any, config: GPTConfig, recipe: Recipe) -> Row:
    """Bytes that a third step adds at its peak, and leaves, by the probe and by the allocator (of a GPU)."""
    from labkit.probe.memory import MemoryProbe

    step, tokens = step_of(config, recipe, Layout(), group)
    for number in range(2):  # libraries take their workspace at the first call
        step(tokens, tokens, number)
    kind = torch.device(group.device).type
    start = torch.cuda.memory_allocated() if kind == "cuda" else 0
    if kind == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with MemoryProbe(step.stages[0], step.syncs[0].optimizer, device=kind) as probe:
        before = probe.now.total
        step(tokens, tokens, 2)
        left, peak = probe.now.total - before, probe.peak.total - before
        stats = probe.allocator
    seen: Row = {"probe's peak MB": peak / 1e6}
    if stats is not None:
        gained = stats.peak_allocated_bytes - start
        seen |= {"allocator's peak MB": gained / 1e6, "probe / allocator": peak / gained}
        seen["left, difference in bytes"] = left - (stats.allocated_bytes - start)
    return seen


def step_of(config: GPTConfig, recipe: Recipe, layout: Layout, group: Any) -> Any:
    """An assembled step and this rank's rows."""
    from labkit.assemble import assemble
    from labkit.comm.mesh import Mesh
    from labkit.train.data import batch

    mesh = Mesh.connect(layout, group)
    tokens = batch(0, 0, mesh.dp.rank, mesh.dp.size, recipe.batch_size, config.seq, device=group.device)[0]
    return assemble(config, recipe, mesh), tokens % config.vocab


def trained(group: Any, config: GPTConfig, recipe: Recipe, layout: Layout, repeats: int) -> Row:
    """Losses of three steps, bytes at the peak of another one, seconds of more."""
    from labkit.probe.memory import MemoryProbe

    step, tokens = step_of(config, recipe, layout, group)
    losses = [step(tokens, tokens, number) for number in range(3)]
    probe = MemoryProbe(device=torch.device(group.device).type)
    for stage, sync in step.syncs.items():
        probe.watch(step.stages[stage], sync.optimizer)
    group.barrier()
    with probe:
        step(tokens, tokens, 3)
    group.barrier()
    took = seconds_of(lambda: step(tokens, tokens, 4), group.device, repeats)
    return {"losses": losses, "peak": probe.peak.total, "seconds": took}


def strategies(device: str, quick: bool) -> list[Row]:
    """Every strategy and precision, all ranks on one device."""
    from labkit.plan.step.memory import predict_memory

    with Cluster(1, device="cpu", quiet=True) as alone:
        exact = alone.run(trained, SMALL, Recipe(batch_size=8, precision="fp64"), Layout(), 1)[0].value["losses"]
    where = "cuda:0" if torch.device(device).type == "cuda" else device
    rows = []
    for size in (1, 2, 4):
        with Cluster(size, device=where, quiet=True, timeout_s=120) as cluster:
            for name, (layout, recipe) in LAYOUTS.items():
                if layout.size != size:
                    continue
                try:
                    replies = [reply.value for reply in cluster.run(trained, SMALL, recipe, layout, 3)]
                except WorkerError as error:  # the others have their turn
                    rows.append({"strategy": name, "ranks": size, "precision": recipe.precision, "error": str(error)})
                    continue
                kind = torch.device(device).type
                laws = [predict_memory(SMALL, layout, recipe, rank, device=kind).total for rank in range(size)]
                off = max(abs(a - b) for reply in replies for a, b in zip(reply["losses"], exact, strict=True))
                fits = [reply["peak"] / law for reply, law in zip(replies, laws, strict=True)]
                rows.append(
                    {"strategy": name, "ranks": size, "precision": recipe.precision, "loss": replies[0]["losses"][-1],
                     "off from float64": off, "allowed": LOSS_ERROR[recipe.precision],
                     "peak / predicted": max(fits, key=lambda fit: abs(fit - 1)),
                     "ms a step": max(reply["seconds"] for reply in replies) * 1e3}
                )  # fmt: skip
    return rows


def offload(device: str, quick: bool) -> list[Row]:
    """GB/s between host and device."""
    n_bytes, rows = (2**22 if quick else 2**28), []
    there = torch.empty(n_bytes, dtype=torch.uint8, device=device)
    for pinned in (False, True) if torch.device(device).type == "cuda" else (False,):
        here = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=pinned)
        for name, op in (("to the device", lambda here=here: there.copy_(here)), ("to the host", lambda here=here: here.copy_(there))):  # fmt: skip  # noqa: E501
            rate = n_bytes / seconds_of(op, device, 5)
            rows.append({"copy": name, "host memory": "pinned" if pinned else "pageable", "GB/s": rate / 1e9})
    return rows


def beside_torch(device: str, quick: bool) -> list[Row]:
    """strategies.py's contests that need one rank."""
    from strategies import measure

    rows = measure(["checkpoint", "scaler"], True, device)
    return [{name: row[name] for name in ("kind", "ranks", "ours_s", "torch_s", "ratio", "goal")} for row in rows]


NUMBERS: dict[str, Callable[[str, bool], list[Row]]] = {
    "products": products, "roofline": roofline, "memory": memory, "strategies": strategies, "offload": offload,
    "torch": beside_torch,
}  # fmt: skip
