"""How long a rehearsal takes, and torch's own MemTracker beside it.

    python -m benchmarks.rehearsal [--json PATH] [--quick]

Three measurements, each of a step with AdamW on fake tensors:

    7B      GPT of llama2-7b's size, ZeRO-3 on 8 ranks                      goal: under 6 s
    70B     GPT of llama-70b's size, tp 8 x pp 4 x dp 8, 8 micro-batches     goal: under 30 s
    race    one model, fully sharded over 64 ranks: labkit's rehearsal, and torch's MemTracker over `fully_shard` with
            torch's fake process group; seconds (both contenders take turns) and the peak that each names

The race is fair in what is simulated (the same sizes, AdamW, two steps, the second measured) and not in what is
watched: MemTracker tells bytes by kind and module; a rehearsal tells these, the ledger and the flops. The two programs
shard alike but hold different things in flight, so their peaks are near each other and not equal.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.machine import write
from labkit.plan.job.recipe import Recipe
from labkit.plan.partition.layout import Layout
from labkit.rehearsal import rehearse
from labkit.train.config import GPTConfig
from labkit.train.gpt import GPT, cross_entropy

RACE = GPTConfig(n_layer=8, d_model=2048, n_head=16, vocab=32_000, seq=1024, position="rotary", tied=False)
WORLD = 64
GOALS = (
    ("7B", "llama2-7b", Layout(dp=8), Recipe("zero3", batch_size=8), 6.0),
    ("70B", "llama-70b", Layout(dp=8, pp=4, tp=8), Recipe("ddp", batch_size=64, n_micro=8), 30.0),
)


def timed(name: str, preset: str, layout: Layout, recipe: Recipe, goal_s: float, repeats: int) -> dict[str, Any]:
    """Seconds of whole rehearsals, the first included, and what was found beside the law."""
    seconds = []
    for _ in range(repeats):
        gc.collect()
        began, cpu = time.perf_counter(), time.process_time()
        found = rehearse(preset, layout, recipe)
        seconds.append((time.perf_counter() - began, time.process_time() - cpu))
    return {
        "name": name,
        "layout": str(layout),
        "recipe": str(recipe),
        "seconds": statistics.median(wall for wall, _ in seconds),
        "first_seconds": seconds[0][0],
        "cpu_seconds": statistics.median(cpu for _, cpu in seconds),
        "goal_s": goal_s,
        "peak_bytes": found.peak,
        "predicted_bytes": found.against.total.predicted,
        "sent_bytes": found.ledger.sent_bytes(),
        "flops": found.flops.total,
    }


def tracked() -> tuple[float, int]:
    """Seconds and peak bytes of torch's way: `fully_shard` in a fake world, the second step under MemTracker."""
    began = time.perf_counter()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    try:
        mesh = init_device_mesh("cpu", (WORLD,))
        with FakeTensorMode():
            model: nn.Module = GPT(RACE, seed=0)
            for layer in model.layers:  # type: ignore[union-attr]
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            optimizer = torch.optim.AdamW(model.parameters())
            tokens = torch.zeros(1, RACE.seq, dtype=torch.int64)
            tracker = MemTracker()
            tracker.track_external(model, optimizer)
            with tracker:
                for number in range(2):
                    cross_entropy(model(tokens), tokens).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if number == 0:
                        tracker.reset_mod_stats()
            peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    finally:
        dist.destroy_process_group()
    return time.perf_counter() - began, int(peak)


def race(repeats: int) -> dict[str, Any]:
    """Both ways in turn."""
    ours, theirs = [], []
    for _ in range(repeats):
        gc.collect()
        found = rehearse(RACE, Layout(dp=WORLD), Recipe("zero3", batch_size=WORLD))
        ours.append((found.seconds, found.peak))
        gc.collect()
        theirs.append(tracked())
    mine, other = (statistics.median(seconds for seconds, _ in each) for each in (ours, theirs))
    return {
        "name": "race",
        "parameters": RACE.n_matrices,
        "n_ranks": WORLD,
        "seconds": {"rehearsal": mine, "MemTracker": other},
        "ratio": statistics.median(b[0] / a[0] for a, b in zip(ours, theirs, strict=True)),
        "peak_bytes": {"rehearsal": ours[-1][1], "MemTracker": theirs[-1][1]},
        "peak_ratio": ours[-1][1] / theirs[-1][1],
    }


def main() -> None:
    """Measure, show, and write down."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", default="")
    parser.add_argument("--quick", action="store_true", help="once each")
    arguments = parser.parse_args()
    repeats = 1 if arguments.quick else 3
    rows: list[dict[str, Any]] = []
    for goal in GOALS:
        rows.append(timed(*goal, repeats))
        print(
            f"{rows[-1]['name']:>4}: {rows[-1]['seconds']:.1f} s ({rows[-1]['cpu_seconds']:.1f} s of CPU), goal "
            f"{rows[-1]['goal_s']:g} s; peak {rows[-1]['peak_bytes'] / 2**30:.2f} GiB, predicted "
            f"{rows[-1]['predicted_bytes'] / 2**30:.2f} GiB"
        )
    rows.append(race(repeats))
    last = rows[-1]
    print(
        f"race: rehearsal {last['seconds']['rehearsal']:.1f} s, MemTracker {last['seconds']['MemTracker']:.1f} s: "
        f"{last['ratio']:.1f} times as long; peaks {last['peak_bytes']['rehearsal'] / 2**30:.3f} and "
        f"{last['peak_bytes']['MemTracker'] / 2**30:.3f} GiB"
    )
    if arguments.json:
        write(arguments.json, rows, quick=arguments.quick)


if __name__ == "__main__":
    main()
