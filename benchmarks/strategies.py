"""Each mechanism beside torch's own: the same model, the same data, in the same processes, in turn.

    python benchmarks/strategies.py [--json PATH] [--quick] [--device cuda] [--only ddp,zero3]

A GPT of about 10M parameters. Ours and torch's take turns, step by step, so that a machine whose speed drifts slows
both; the ratio is the median over paired steps of (our seconds / torch's seconds), of the slowest rank. Peak memory is
that of one step after two, by labkit's MemoryProbe on both, model and optimizer watched.

    ddp         DistributedDataParallel, AdamW
    zero1       DistributedDataParallel with ZeroRedundancyOptimizer
    zero3       fully_shard on the same units
    tp          parallelize_module, column and row, vocab-parallel loss (loss_parallel)
    1f1b        Schedule1F1B over PipelineStage, two micro-batches a rank
    checkpoint  torch.utils.checkpoint (not reentrant), every block, one process
    scaler      torch.amp.GradScaler around the step of SGD, one process

Overlap: DDP on 4 ranks over links that take about as long as a third of backward. A step as it is, a step whose buckets
all leave after backward, and a step that sends nothing: (second - first) / (second - third) of the communication is
hidden.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
import torch
from rich.console import Console
from rich.table import Table

from labkit import Cluster
from labkit.plan.schedules.schedule import one_f_one_b, simulate
from labkit.train.config import GPTConfig

CONFIG = GPTConfig(n_layer=6, d_model=384, n_head=8, vocab=256, seq=128, tied=False)
ROWS = 2
LR = 1e-3
GOALS = {"ddp": 1.05, "zero1": 1.0, "zero3": 1.0, "tp": 1.0, "1f1b": 1.05, "checkpoint": 1.02, "scaler": 1.0}
Contender = tuple[Callable[[int], Any], list[Any], Any]
"""A step, the modules to watch, the optimizer to watch."""


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, LR)


def model_for(group: Any) -> Any:
    from labkit.train.gpt import GPT

    return GPT(CONFIG, seed=0).to(group.device)


def rows_for(group: Any, number: int, data_parallel: bool, rows: int = ROWS) -> Any:
    from labkit.train.data import batch

    rank, size = (group.rank, group.size) if data_parallel else (0, 1)
    return batch(0, number, rank, size, rows * size, CONFIG.seq, device=group.device)


def ours_dp(kind: str, group: Any) -> Contender:
    from labkit.parallel.ddp import DDP
    from labkit.parallel.zero1 import ZeRO1
    from labkit.parallel.zero3 import ZeRO3
    from labkit.train.gpt import cross_entropy

    model = model_for(group)
    sync = {"ddp": DDP, "zero1": ZeRO1, "zero3": ZeRO3}[kind](model, group, adamw)

    def step(number: int) -> None:
        tokens, targets = rows_for(group, number, True)
        sync.zero_grad()
        cross_entropy(model(tokens), targets).backward()
        sync.finish()
        sync.step()

    return step, [model], sync.optimizer


def torch_dp(kind: str, group: Any) -> Contender:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    from labkit.train.gpt import cross_entropy

    model = model_for(group)
    if kind == "zero3":
        mesh = init_device_mesh(torch.device(group.device).type, (group.size,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        wrapped, optimizer = model, adamw(model.parameters())
    else:
        wrapped = DistributedDataParallel(model)
        sharded = kind == "zero1"
        optimizer = (
            ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=LR)
            if sharded
            else adamw(model.parameters())
        )

    def step(number: int) -> None:
        tokens, targets = rows_for(group, number, True)
        optimizer.zero_grad()
        cross_entropy(wrapped(tokens), targets).backward()
        optimizer.step()

    return step, [model], getattr(optimizer, "optim", optimizer)


def ours_tp(kind: str, group: Any) -> Contender:
    from labkit.parallel.tensor_plan import GPT_PLAN, split
    from labkit.parallel.vocab import vocab_parallel_cross_entropy

    model = split(model_for(group), GPT_PLAN, group)
    optimizer = adamw(model.parameters())

    def step(number: int) -> None:
        tokens, targets = rows_for(group, number, False)
        optimizer.zero_grad()
        vocab_parallel_cross_entropy(model(tokens), targets, group).backward()
        optimizer.step()

    return step, [model], optimizer


def torch_tp(kind: str, group: Any) -> Contender:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        loss_parallel,
        parallelize_module,
    )

    from labkit.train.gpt import cross_entropy

    mesh = init_device_mesh(torch.device(group.device).type, (group.size,))
    model = model_for(group)
    plan: dict[str, Any] = {
        "embedding.token": RowwiseParallel(input_layouts=Replicate()),
        "head.out": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    for i in range(CONFIG.n_layer):
        at = f"blocks.{i}"
        for name in ("query", "key", "value"):
            plan[f"{at}.attention.{name}"] = ColwiseParallel()
        plan[f"{at}.attention"] = PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),), use_local_output=False
        )
        plan[f"{at}.attention.out"] = RowwiseParallel()
        plan[f"{at}.mlp.up"], plan[f"{at}.mlp.down"] = ColwiseParallel(), RowwiseParallel()
    parallelize_module(model, mesh, plan)
    optimizer = adamw(model.parameters())

    def step(number: int) -> None:
        tokens, targets = rows_for(group, number, False)
        optimizer.zero_grad()
        with loss_parallel():
            cross_entropy(model(tokens), targets).backward()
        optimizer.step()

    return step, [model], optimizer


def stage_for(group: Any) -> torch.nn.Module:
    layers = model_for(group).layers
    cuts = [0, *(1 + CONFIG.n_layer * (rank + 1) // group.size for rank in range(group.size - 1)), len(layers)]
    return torch.nn.Sequential(*layers[cuts[group.rank] : cuts[group.rank + 1]])


def ours_pp(kind: str, group: Any) -> Contender:
    from labkit.parallel.pipeline import Pipeline
    from labkit.train.gpt import cross_entropy

    stage, n_micro = stage_for(group), 2 * group.size
    optimizer = adamw(stage.parameters())
    pipeline = Pipeline({group.rank: stage}, one_f_one_b(group.size, n_micro), group, loss=cross_entropy)

    def step(number: int) -> None:
        tokens, targets = rows_for(group, number, False, n_micro)
        optimizer.zero_grad()
        pipeline.step(tokens.chunk(n_micro), targets.chunk(n_micro))
        optimizer.step()

    return step, [stage], optimizer


def torch_pp(kind: str, group: Any) -> Contender:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    from labkit.train.gpt import cross_entropy

    module, n_micro = stage_for(group), 2 * group.size
    optimizer = adamw(module.parameters())
    stage = PipelineStage(module, group.rank, group.size, torch.device(group.device))
    schedule = Schedule1F1B(stage, n_micro, loss_fn=cross_entropy)

    def step(number: int) -> None:
        tokens, targets = rows_for(group, number, False, n_micro)
        optimizer.zero_grad()
        last = group.rank == group.size - 1
        schedule.step(*([tokens] if group.rank == 0 else []), **({"target": targets} if last else {}))
        optimizer.step()

    return step, [module], optimizer


def checkpointed(kind: str, group: Any, theirs: bool) -> Contender:
    import torch.utils.checkpoint

    from labkit.train.checkpoint import checkpoint
    from labkit.train.gpt import cross_entropy

    model = model_for(group)
    optimizer = torch.optim.SGD(model.parameters(), LR)

    def step(number: int) -> None:
        x, targets = rows_for(group, number, False)
        optimizer.zero_grad()
        for layer in model.layers:
            if layer in (model.embedding, model.head):
                x = layer(x)
            elif theirs:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            else:
                x = checkpoint(layer, x)
        cross_entropy(x, targets).backward()
        optimizer.step()

    return step, [model], optimizer


def scaled(kind: str, group: Any, theirs: bool) -> Contender:
    from labkit.train.loss_scale import LossScale, Scaler

    model = model_for(group)
    optimizer = torch.optim.SGD(model.parameters(), LR)
    grads = [torch.randn_like(p) for p in model.parameters()]
    # a scale of 1 leaves the gradients as they are: divided again and again they would become slow, tiny numbers
    kind_of = torch.device(group.device).type
    scaler = torch.amp.GradScaler(kind_of, init_scale=1.0) if theirs else Scaler(LossScale(1.0))
    one = torch.ones((), device=group.device)

    def step(number: int) -> None:
        for _ in range(5):  # so that making gradients anew, which is not the scaler's doing, counts for less
            for p, grad in zip(model.parameters(), grads, strict=True):
                p.grad = grad
            scaler.scale(one)
            scaler.step(optimizer)
            scaler.update()

    return step, [model], optimizer


def pair(kind: str, group: Any) -> tuple[Contender, Contender]:
    """Ours and torch's."""
    if kind in ("ddp", "zero1", "zero3"):
        return ours_dp(kind, group), torch_dp(kind, group)
    if kind == "tp":
        return ours_tp(kind, group), torch_tp(kind, group)
    if kind == "1f1b":
        return ours_pp(kind, group), torch_pp(kind, group)
    build = checkpointed if kind == "checkpoint" else scaled
    return build(kind, group, False), build(kind, group, True)


def race(group: Any, kind: str, repeats: int) -> dict[str, Any]:
    """Seconds of each step of both, peak bytes of both, on this rank."""
    from labkit.probe.memory import MemoryProbe

    contenders = pair(kind, group)
    times: list[list[float]] = [[], []]
    for number in range(repeats + 2):
        for who in (0, 1) if number % 2 else (1, 0):  # nobody is always the first
            group.barrier()
            started = time.perf_counter()
            contenders[who][0](number)
            if torch.device(group.device).type == "cuda":
                torch.cuda.synchronize()
            if number >= 2:
                times[who].append(time.perf_counter() - started)
    peaks = []
    for step, modules, optimizer in contenders:
        probe = MemoryProbe(optimizer=optimizer)
        for module in modules:
            probe.watch(module)
        group.barrier()
        with probe:
            step(repeats + 2)
        peaks.append({"total": probe.peak.total, **dict(probe.peak)})
    return {"times": times, "peaks": peaks}


def measure(kinds: list[str], quick: bool, device: str) -> list[dict[str, Any]]:
    rows = []
    for kind in kinds:
        for n_ranks in (1,) if kind in ("checkpoint", "scaler") else (2, 4):
            repeats = 5 if quick else 13
            with Cluster(n_ranks, device=device, quiet=True, timeout_s=600) as cluster:
                found = [reply.value for reply in cluster.run(race, kind, repeats)]
            slowest = [[max(each["times"][who][k] for each in found) for k in range(repeats)] for who in (0, 1)]
            ratios = sorted(ours / theirs for ours, theirs in zip(*slowest, strict=True))
            rows.append(
                {
                    "kind": kind,
                    "ranks": n_ranks,
                    "repeats": repeats,
                    "ours_s": statistics.median(slowest[0]),
                    "torch_s": statistics.median(slowest[1]),
                    "ratio": statistics.median(ratios),
                    "ratio_quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]],
                    "goal": GOALS[kind],
                    "ours_peak": max((each["peaks"][0] for each in found), key=lambda peak: peak["total"]),
                    "torch_peak": max((each["peaks"][1] for each in found), key=lambda peak: peak["total"]),
                }
            )
            print(f"{kind} {n_ranks}: {rows[-1]['ratio']:.3f}", flush=True)
    return rows


def overlapped(group: Any, repeats: int) -> dict[str, float]:
    """Median seconds of this rank's steps: as they are, with everything sent at the end, with nothing sent."""
    from labkit.parallel.ddp import DDP
    from labkit.train.gpt import cross_entropy

    model = model_for(group)
    sync = DDP(model, group, adamw, bucket_bytes=4 * 2**20)

    def step(how: str, number: int) -> float:
        tokens, targets = rows_for(group, number, True, 8)
        sync.zero_grad()
        group.barrier()
        started = time.perf_counter()
        with contextlib.nullcontext() if how == "overlapped" else sync.accumulate():
            cross_entropy(model(tokens), targets).backward()
        if how != "alone":
            sync.finish()
        return time.perf_counter() - started

    times: dict[str, list[float]] = {"overlapped": [], "at the end": [], "alone": []}
    for number in range(repeats + 1):
        for how in times:
            seconds = step(how, number)
            if number:
                times[how].append(seconds)
    return {how: statistics.median(each) for how, each in times.items()}


def overlap(quick: bool) -> dict[str, float]:
    """Share of DDP's communication that is hidden behind backward, on 4 ranks."""
    from labkit import Links

    links = Links.uniform(4, alpha_s=2e-3, bytes_per_s=1e8)
    with Cluster(4, device="cpu", links=links, quiet=True, timeout_s=600) as cluster:
        found = [reply.value for reply in cluster.run(overlapped, 3 if quick else 7)]
    slowest = {how: max(each[how] for each in found) for how in found[0]}
    sent = slowest["at the end"] - slowest["alone"]
    return {**slowest, "hidden": (slowest["at the end"] - slowest["overlapped"]) / sent}


def simulated() -> float:
    """Seconds to simulate 64 stages and 512 micro-batches."""
    schedule = one_f_one_b(64, 512)
    started = time.perf_counter()
    simulate(schedule)
    return time.perf_counter() - started


def show(rows: list[dict[str, Any]], simulate_s: float, hidden: dict[str, float]) -> None:
    table = Table(title=f"ours / torch's, {sum(p.numel() for p in model_parameters()):,} parameters")
    for name in ("", "ranks", "ours s", "torch s", "time ratio", "quartiles", "goal", "peak ratio"):
        table.add_column(name, justify="right")
    for row in rows:
        low, high = row["ratio_quartiles"]
        table.add_row(
            row["kind"], str(row["ranks"]), f"{row['ours_s']:.3f}", f"{row['torch_s']:.3f}", f"{row['ratio']:.3f}",
            f"{low:.2f}-{high:.2f}", f"{row['goal']:.2f}",
            f"{row['ours_peak']['total'] / row['torch_peak']['total']:.3f}",
        )  # fmt: skip
    Console().print(table)
    told = ", ".join(f"{how} {seconds:.2f} s" for how, seconds in hidden.items() if how != "hidden")
    print(f"DDP hides {hidden['hidden']:.0%} of its communication on 4 ranks (goal 50%): {told}")
    print(f"simulate, 64 stages x 512 micro-batches: {simulate_s:.2f} s (goal 1 s)")


def model_parameters() -> list[torch.Tensor]:
    from labkit.train.gpt import GPT

    return list(GPT(CONFIG, seed=0).parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", default=",".join(GOALS))
    args = parser.parse_args()
    kinds = args.only.split(",")
    rows = measure(kinds, args.quick, args.device)
    simulate_s, hidden = simulated(), overlap(args.quick)
    show(rows, simulate_s, hidden)
    if args.json:
        machine.write(args.json, {"rows": rows, "simulate_s": simulate_s, "overlap": hidden}, quick=args.quick)


if __name__ == "__main__":
    main()
